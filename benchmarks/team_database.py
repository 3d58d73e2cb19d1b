"""Fill a database with many trials, and time what a served look-up and a session's store take on it.

    python benchmarks/team_database.py --trials 1000000
    python benchmarks/team_database.py --trials 10000000 --db postgresql://owner@host/empty_database --json team.json

The trials are spread over studies of 1,000 each. ``best_query`` is the query of a study's best trial, ``best_result``
that of `Database.best` with the row parsed, ``store`` one committed trial. Times are medians and 99th percentiles in
microseconds; ``plan`` is the query plan.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sqlalchemy import func, insert, select, text

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Problem, Trial
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.database.rows import trial_row
from autotile.database.schema import TRIALS, now_text

STUDY_TRIALS = 1000
BATCH_STUDIES = 20


def trial(number: int) -> Trial:
    """Return a measured trial of a made-up configuration."""
    time_us = 100.0 + (number * 7919) % STUDY_TRIALS
    measured = Measurement(time_us, 0.99 * time_us, 1.01 * time_us, (time_us,) * 7)
    return Trial({"BM": number, "BN": 64}, Outcome.OK, "", "measure", measurement=measured)


def fill(database: Database, trials: int) -> list[int]:
    """Store studies with their trials, and return the studies' ids."""
    device = device_profile("h200")
    rows = [trial_row(trial(number)) for number in range(STUDY_TRIALS)]
    studies: list[int] = []
    batch: list[dict[str, object]] = []
    for number in range(max(1, trials // STUDY_TRIALS)):
        problem = Problem("made_up", {"M": number + 1}, "float32")
        key = TuningKey.for_device(
            problem, device, template_hash="t", space_hash="s", options=(), nvrtc_version="13.0", l2_mode="cold"
        )
        study = database.study(key, device)
        run = database.start_run(study, sampler="random")
        position = {"study_id": study, "run_id": run, "phase": "search", "rank": None, "created_at": now_text()}
        batch += [position | row for row in rows]
        studies.append(study)
        if len(batch) >= BATCH_STUDIES * STUDY_TRIALS:
            store(database, batch)
            batch = []
    store(database, batch)
    with database.writing() as connection:
        connection.execute(text("ANALYZE"))
    return studies


def store(database: Database, rows: list[dict[str, object]]) -> None:
    """Insert rows of trials in one transaction, many to a statement."""
    if rows:
        with database.writing() as connection:
            connection.execute(insert(TRIALS), rows)


def timed(action: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Return the median and the 99th percentile of an action's times, in microseconds."""
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        action(number)
        times.append(1e6 * (time.perf_counter() - start))
    return {"median_us": float(np.median(times)), "p99_us": float(np.percentile(times, 99))}


def plan(database: Database, study: int) -> list[str]:
    """Return the query plan of a study's best result."""
    words = "EXPLAIN QUERY PLAN" if database.path is not None else "EXPLAIN"
    query = text(f"{words} SELECT trial_id FROM best WHERE study_id = :study")
    with database.reading() as connection:
        return [str(row[-1]) for row in connection.execute(query, {"study": study})]


def main() -> None:
    """Fill, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--db", help="an empty database; a temporary SQLite file unless given")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Database.open(options.db or Path(folder) / "team.db") as database:
        start = time.perf_counter()
        studies = fill(database, options.trials)
        fill_s = time.perf_counter() - start
        picked = np.random.default_rng(0).choice(studies, options.repeats)
        run = database.start_run(studies[0], sampler="random")
        view = text("SELECT trial_id FROM best WHERE study_id = :study")

        def look_up(number: int) -> object:
            with database.reading() as connection:
                return connection.execute(view, {"study": int(picked[number])}).all()

        with database.reading() as connection:
            stored = connection.execute(select(func.count()).select_from(TRIALS)).scalar_one()
        found = {
            "trials": stored,
            "studies": len(studies),
            "fill_s": fill_s,
            "best_query": timed(look_up, options.repeats),
            "best_result": timed(lambda number: database.best(study_id=int(picked[number])), options.repeats),
            "store": timed(lambda number: database.add_trial(studies[0], run, trial(number)), options.repeats),
            "plan": plan(database, studies[len(studies) // 2]),
        }
    document = json.dumps(found, indent=2)
    print(document)
    if options.json is not None:
        options.json.write_text(document + "\n")


if __name__ == "__main__":
    main()
