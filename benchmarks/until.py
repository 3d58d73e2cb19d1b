"""Stopping point of a search with ``--until``: trials used, and loss against the fastest configuration.

    python benchmarks/until.py [--seeds 10] [--limit 300] [--output until.json]

Replays the search, one measurement at a time, on the recordings that ship with autotile. Each search runs to the limit
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
from provenance import provenance

from autotile.core.model import Measurement, Outcome, Trial
from autotile.exchange.recording import Recording, read_recording
from autotile.kernel.library import load_kernel
from autotile.search.search import Search
from autotile.space.search_space import feasible_space

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
GAINS = (0.01, 0.02, 0.05)


def main() -> None:
    """Search every recording with every seed, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=int, default=300, help="maximum trials per search")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    paths = sorted(RECORDINGS.glob("*.npz"))
    jobs = [(path, seed) for path in paths for seed in range(arguments.seeds)]
    with get_context("fork").Pool() as pool:
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
    recording = read_recording(path)
    header = recording.header
    assert header.device is not None
    spec = load_kernel(header.problem.kernel).spec
    space = feasible_space(spec, header.problem.sizes, header.device, header.problem.dtype)
    recorded = np.zeros(len(space), dtype=np.bool_)
    rows = [space.row_of(recording.config(number)) for number in range(len(recording))]
    recorded[[row for row in rows if row is not None]] = True
    times_us = np.where(recording.ok, recording.columns["time_us"], np.inf)
    fastest_us = min(float(time) for row, time in zip(rows, times_us, strict=True) if row is not None)
    searching = Search(space, "feasible", seed, first=[spec.default], available=recorded)
    best_us, ended = np.inf, {}
    for trial in range(1, min(limit, int(recorded.sum())) + 1):
        proposal = searching.propose()
        if proposal is None:
            break
        row, config = proposal
        result = as_trial(recording, config)
        searching.tell(row, result)
        best_us = min(best_us, result.time_us or np.inf)
        gain = searching.expected_gain
        for wanted in GAINS:
            if wanted not in ended and gain is not None and gain < wanted:
                ended[wanted] = trial, best_us / fastest_us - 1
        if len(ended) == len(GAINS):
            break
    return {gain: ended.get(gain, (trial, best_us / fastest_us - 1)) for gain in GAINS}


def as_trial(recording: Recording, config: Any) -> Trial:
    """Return the recorded trial of a configuration."""
    found = recording.lookup(config)
    assert found is not None
    measured = found.measurement if found.outcome is Outcome.OK else None
    return Trial(config, found.outcome, found.reason, found.stage, measurement=measured and Measurement(
        measured.time_us, measured.low_us, measured.high_us
    ))  # fmt: skip


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
