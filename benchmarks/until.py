"""Where a search ends by itself and with ``--until``: trials used, and what ending lost.

    python benchmarks/until.py [--data FOLDER ...] [--seeds 10] [--limit 600] [--processes N] [--output until.json]

Replays the search, as a session asks it, on the recordings of ``sgemm_2d`` that ship with autotile and on the recorded
spaces of each folder (``hub_spaces.py`` makes some). Each search runs to the limit once; the trial at which each rule
would have ended it follows from the expected gain after each trial. The loss is against the fastest configuration of
the space, and against what the same search found until the limit.
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
from compiled import KERNEL
from provenance import provenance
from search_methods import RecordedSpace, replayed

from autotile.search.samplers import DEFAULT
from autotile.tuning.progress_state import SETTLED_GAIN

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
GAINS = (None, 0.01, 0.02, 0.05)
"""Gains of ``--until``; None for a search that ends by itself."""


def main() -> None:
    """Search every space with every seed, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="folders of recorded spaces")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=int, default=600, help="maximum trials per search")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    folders = {"recordings": sorted(RECORDINGS.glob(f"{KERNEL}-*.npz"))}
    folders |= {folder.name: sorted(folder.glob("*.npz")) for folder in arguments.data}
    jobs = [(path, seed) for paths in folders.values() for path in paths for seed in range(arguments.seeds)]
    with get_context("fork").Pool(arguments.processes) as pool:
        found = dict(zip(jobs, pool.starmap(partial(search, limit=arguments.limit), jobs, chunksize=1), strict=True))
    rows = []
    print("spaces      gain    trials, median (min to max)   loss, mean (max)   lost by ending   within the gain")
    for folder, paths in folders.items():
        for gain in GAINS:
            row = summary(gain, [found[path, seed][gain] for path in paths for seed in range(arguments.seeds)])
            rows.append({"spaces": folder, **row})
            print(folder, *row.values(), sep="   ")
    if arguments.output:
        report = {**provenance(), "seeds": arguments.seeds, "limit": arguments.limit}
        report["spaces"] = {folder: [path.stem for path in paths] for folder, paths in folders.items()}
        arguments.output.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


def search(path: Path, seed: int, limit: int) -> dict[float | None, tuple[int, float, float]]:
    """Return, for each gain, the trials until the search would have ended, its loss, and what it lost by ending."""
    recorded = RecordedSpace.read(path)
    shortlist, trials = replayed(DEFAULT, recorded, seed)
    best_ms, count = np.inf, 0
    ended: dict[float | None, tuple[int, float]] = {}
    for count, (row, _) in enumerate(trials, 1):
        best_ms = np.fmin(best_ms, recorded.times_ms[row])
        expected = shortlist.expected_gain
        for gain in GAINS:
            if gain not in ended and expected is not None and expected < (gain or SETTLED_GAIN):
                ended[gain] = count, best_ms
        if count >= limit:
            break
    stops = {gain: ended.get(gain, (count, best_ms)) for gain in GAINS}
    return {
        gain: (stop, found_ms / recorded.best_ms - 1, found_ms / best_ms - 1)
        for gain, (stop, found_ms) in stops.items()
    }


def summary(gain: float | None, ended: list[tuple[int, float, float]]) -> dict[str, Any]:
    """Return the figures of one gain over all searches."""
    trials, losses, lost = (np.array(column) for column in zip(*ended, strict=True))
    return {
        "gain": gain,
        "trials": [float(np.median(trials)), int(trials.min()), int(trials.max())],
        "loss": [round(float(losses.mean()), 4), round(float(losses.max()), 4)],
        "lost": [round(float(lost.mean()), 4), round(float(lost.max()), 4)],
        "within": round(float((losses <= (gain or SETTLED_GAIN)).mean()), 4),
    }


if __name__ == "__main__":
    main()
