"""Stopping point of a search with ``--until``: trials used, and loss against the fastest configuration.

    python benchmarks/until.py [--seeds 10] [--limit 300] [--processes N] [--output until.json]

Replays the search, as a session asks it, on the recordings that ship with autotile. Each search runs to the limit
once; the trial at which each gain would have stopped it follows from the expected gain after each trial.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from compiled import KERNEL, bench_of
from provenance import provenance
from search_methods import session

from autotile.search.samplers import DEFAULT, lookahead_of
from autotile.search.search import Search, Shortlist

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
GAINS = (0.01, 0.02, 0.05)


def main() -> None:
    """Search every recording with every seed, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=int, default=300, help="maximum trials per search")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    paths = sorted(RECORDINGS.glob(f"{KERNEL}-*.npz"))
    jobs = [(path, seed) for path in paths for seed in range(arguments.seeds)]
    with get_context("fork").Pool(arguments.processes) as pool:
        searches = pool.starmap(partial(search, limit=arguments.limit), jobs)
    rows = [summary(gain, [ended[gain] for ended in searches]) for gain in GAINS]
    print("gain   trials, median (min to max)   loss, mean (max)   within the gain")
    for row in rows:
        trials, loss = row["trials"], row["loss"]
        print(f"{row['gain']:.0%}   {trials}   {loss}   {row['within']:.0%}")
    if arguments.output:
        report = {**provenance(), "recordings": len(paths), "seeds": arguments.seeds, "limit": arguments.limit}
        arguments.output.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


def search(path: Path, seed: int, limit: int) -> dict[float, tuple[int, float]]:
    """Return, for each gain, the trials until the search would have stopped and its loss against the fastest."""
    bench = bench_of(path)
    lookahead = lookahead_of(DEFAULT, workers=1)
    shortlist = Shortlist(Search(bench.space, DEFAULT, seed, ahead=lookahead.compiling), lookahead)
    times_us: list[float] = []
    ended: dict[float, tuple[int, float]] = {}
    for _, trial in session(shortlist, bench.trial):
        times_us.append(trial.time_us or np.inf)
        expected = shortlist.expected_gain
        for gain in GAINS:
            if gain not in ended and expected is not None and expected < gain:
                ended[gain] = len(times_us), 1 / bench.reached(times_us)[-1] - 1
        if len(times_us) >= limit or len(ended) == len(GAINS):
            break
    return {gain: ended.get(gain, (len(times_us), 1 / bench.reached(times_us)[-1] - 1)) for gain in GAINS}


def summary(gain: float, ended: list[tuple[int, float]]) -> dict[str, Any]:
    """Return the figures of one gain over all searches."""
    trials, losses = (np.array(column) for column in zip(*ended, strict=True))
    return {
        "gain": gain,
        "trials": [float(np.median(trials)), int(trials.min()), int(trials.max())],
        "loss": [round(float(losses.mean()), 4), round(float(losses.max()), 4)],
        "within": round(float((losses <= gain).mean()), 4),
    }


if __name__ == "__main__":
    main()
