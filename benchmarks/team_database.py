"""Fill databases with many trials of real size, and time look-ups, stores and deletions on them.

    python benchmarks/team_database.py --json benchmarks/results/team_database.json
    python benchmarks/team_database.py --trials 1000000 --first-in-line   # as root, on a machine that is busy

PostgreSQL is a server of its own, from Debian's package, which flushes each commit. Each study has 1,000 trials, and
100 studies are of one kernel. One study is stored trial by trial, and the database copies its rows for the others.
Times are medians and 99th percentiles in microseconds. Look-ups: ``study``, the id of a key; ``best``, the best result
of a study, parsed; ``exact``, the winner of a key, parsed; ``kernel``, the winners of all 100 problems of a kernel,
from which the nearest is chosen; ``checks`` and ``changes``, what a serving program reads besides; ``list_kernel`` and
``list_all``, what ``autotile list`` reads. Writes: ``store``, one committed trial; ``claim``, a claim and the trial
that ends it; ``prune_s``, deletion of the trials of a kernel but for its winners.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from sqlalchemy import select, text

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Problem, Resources, Trial
from autotile.database.care import clean_database
from autotile.database.database import Database
from autotile.database.engine import RUNS, STUDIES, TRIALS
from autotile.database.keys import TuningKey
from autotile.database.runs import RunRecord
from autotile.database.winners import CHANGES, CHECKS, WINNER, WINNERS

# the server is part of the tests; replace this script's folder, which comes first in the path
sys.path[0] = str(Path(__file__).parents[1] / "tests")

from postgresql_server import programs_folder, running_server  # noqa: E402

STUDY_TRIALS = 1000
FINALISTS = 13
KERNEL_STUDIES = 100
BATCH_STUDIES = 100
SERVER_SETTINGS = ("shared_buffers=2GB", "max_wal_size=8GB", "maintenance_work_mem=1GB")
SLOW_REPEATS = 5


def trial(number: int) -> Trial:
    """Return a trial with made-up times, of the size of those of a GEMM on a GPU; each third one failed."""
    names = ("BM", "BN", "BK", "TM", "TN", "LANES_X", "VEC", "STAGES", "PAD", "UNROLL")
    config = {name: 2 ** (place % 6) for place, name in enumerate(names)} | {"MIN_BLOCKS": number}
    if number % 3 == 2:
        return Trial(config, Outcome.RESOURCE_EXCEEDED, "99,328 bytes of shared memory, at most 49,152", "compile")
    time_us = 3000.0 + (number * 7919) % STUDY_TRIALS
    samples = tuple(round(time_us * (1 + place / 10000), 4) for place in range(15))
    return Trial(
        config=config,
        outcome=Outcome.OK,
        stage="measure",
        geometry=LaunchGeometry((32, 32, 1), (256, 1, 1), 0),
        resources=Resources(127, 0, 0, 0, 16640),
        occupancy=Occupancy(
            2, 16, 0.25, ("registers",), {"threads": 8, "registers": 2, "shared_memory": 13, "blocks": 32}
        ),
        measurement=Measurement(time_us, 0.99 * time_us, 1.01 * time_us, samples, "cold"),
        cubin_hash=f"{number:064x}",
        seconds={"compile": 0.26793, "load": 0.00101, "verify": 0.01234, "measure": 0.05012},
        telemetry={
            "max_error": 1.52587890625e-05,
            "reference_us": 3127.264,
            "output_digest": f"{number:032x}-{number:032x}",
            "sm_clock_mhz": 1980,
            "power_w": 512.5,
            "temperature_c": 45,
            "throttle_reasons": 0,
            "gpu_scale": 0.99321,
        },
        gpu="GPU-4f3b6c1e-2a1d-4c55-9f6e-0d7a4b8e9c10",
    )


def key_of(number: int, device: DeviceProperties) -> TuningKey:
    """Return the key of a study."""
    problem = Problem(f"kernel_{number // KERNEL_STUDIES}", {"M": number + 1, "N": 4096, "K": 4096}, "float32")
    return TuningKey.for_device(
        problem,
        device,
        template_hash=f"{number // KERNEL_STUDIES:064x}",
        space_hash="5" * 64,
        options=(),
        nvrtc_version="13.0",
        l2_mode="cold",
    )


def fill(database: Database, trials: int) -> list[TuningKey]:
    """Store the studies with their trials, and return their keys."""
    device = device_profile("h200")
    keys = [key_of(number, device) for number in range(max(1, trials // STUDY_TRIALS))]
    searched = [trial(number) for number in range(STUDY_TRIALS - FINALISTS - 1)]
    finalists = sorted((one for one in searched if one.measurement), key=lambda one: one.cost)[:FINALISTS]
    refused = replace(searched[-1], outcome=Outcome.WRONG_RESULT, reason="C[17] is 0, expected 1", measurement=None)
    record = RunRecord(database, keys[0], device)
    first = record.study_id
    record.start(sampler="tpe", seed=1, settings={"trials": STUDY_TRIALS}, driver="", host="", gates={})
    with record:
        record.add(*searched)
        for rank, one in enumerate(finalists, 1):
            record.add(one, phase="final", rank=rank)
        record.add(refused, phase="final")
        record.end({"winner": "made up"})
    with database.writing() as connection:
        study_row = dict(connection.execute(select(STUDIES)).mappings().one())
        run_row = dict(connection.execute(select(RUNS)).mappings().one())
        others = [
            {**study_row, **key.to_json(), "id": first + number, "digest": key.digest}
            for number, key in enumerate(keys)
            if number
        ]
        if others:
            connection.execute(STUDIES.insert(), others)
            connection.execute(RUNS.insert(), [run_row | {"id": one["id"], "study_id": one["id"]} for one in others])
    copy_trials(database, first, len(keys))
    settle(database)
    return keys


def settle(database: Database) -> None:
    """Leave the database as it is after a while: with statistics, and its log written into its tables."""
    if database.path is not None:
        with closing(sqlite3.connect(database.path, isolation_level=None)) as connection:
            for statement in ("ANALYZE", "PRAGMA wal_checkpoint(TRUNCATE)"):
                connection.execute(statement)
        return
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as server:
        for table in ("studies", "runs"):
            server.execute(text(f"SELECT setval('{table}_id_seq', (SELECT max(id) FROM {table}))"))
        for statement in ("SET statement_timeout = 0", "VACUUM ANALYZE", "CHECKPOINT"):
            server.execute(text(statement))
        server.invalidate()  # with its setting


def copy_trials(database: Database, first: int, studies: int) -> None:
    """Copy the trials of the first study for the others, in the database itself."""
    names = [column.name for column in TRIALS.c if column.name not in ("id", "study_id", "run_id")]
    copied = ", ".join(f"trials.{name}" for name in names)
    statement = text(
        f"INSERT INTO trials (study_id, run_id, {', '.join(names)}) SELECT studies.id, studies.id, {copied} "
        "FROM studies CROSS JOIN trials WHERE trials.study_id = :first AND studies.id > :after "
        "AND studies.id <= :until ORDER BY studies.id, trials.id"
    )
    for after in range(first, first + studies, BATCH_STUDIES):
        with database.writing() as connection:
            if database.path is None:  # the rows that foreign keys name are there
                connection.execute(text("SET LOCAL session_replication_role = replica"))
            connection.execute(statement, {"first": first, "after": after, "until": after + BATCH_STUDIES})


def timed(action: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Return the median and the 99th percentile of an action's times, in microseconds."""
    times = []
    for number in range(-1, repeats):  # the first is not counted
        start = time.perf_counter()
        action(number)
        times.append(1e6 * (time.perf_counter() - start))
    return {"median_us": round(float(np.median(times[1:])), 1), "p99_us": round(float(np.percentile(times[1:], 99)), 1)}


def look_up(database: Database, keys: list[TuningKey], repeats: int) -> dict[str, Any]:
    """Return the times of look-ups in a database that is open for reading."""
    picked = [keys[number] for number in np.random.default_rng(0).integers(0, len(keys), repeats)]
    studies = [database.find_study(key) for key in picked]
    kernels = [key.kernel for key in picked]
    return {
        "study": timed(lambda number: database.find_study(picked[number]), repeats),
        "best": timed(lambda number: database.best(study_id=studies[number]), repeats),
        "exact": timed(lambda number: database.read(WINNER, digest=picked[number].digest), repeats),
        "kernel": timed(lambda number: database.read(WINNERS, kernel=kernels[number], dtype="float32"), SLOW_REPEATS),
        "checks": timed(lambda number: database.read(CHECKS, kernel=kernels[number], dtype="float32"), SLOW_REPEATS),
        "changes": timed(lambda _: database.read(CHANGES), SLOW_REPEATS),
        "list_kernel": timed(lambda number: database.studies(kernels[number]), SLOW_REPEATS),
        "list_all": timed(lambda _: database.studies(), 1),
    }


def write(database: Database, keys: list[TuningKey], repeats: int) -> dict[str, Any]:
    """Return the times of stores, claims and a deletion."""
    fresh = [trial(STUDY_TRIALS + number) for number in range(2 * repeats + 2)]
    record = RunRecord(database, keys[0], device_profile("h200"))
    record.start(sampler="random", seed=0, settings={}, driver="", host="", gates={}, shares=True)

    def claim(number: int) -> None:
        one = fresh[repeats + number + 2]
        assert all(record.claim(one.config))
        record.add(one)

    with record:
        found: dict[str, Any] = {
            "store": timed(lambda number: record.add(fresh[number + 1]), repeats),
            "claim": timed(claim, repeats),
        }
    start = time.perf_counter()
    pruned = clean_database(database, keys[-1].kernel, before=datetime.now(UTC))
    return found | {"prune_s": round(time.perf_counter() - start, 3), "pruned": sum(one.deleted for one in pruned)}


def bytes_stored(database: Database) -> int:
    """Return the size of the database."""
    if database.path is not None:
        return sum(file.stat().st_size for file in database.path.parent.glob(f"{database.path.name}*"))
    with database.reading() as connection:
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())


@contextmanager
def first_in_line(database: Database, *, wanted: bool) -> Iterator[None]:
    """Let other programs of a busy machine wait for this process, and for the server's process of its connection."""
    if not wanted:
        yield
        return
    processes = [0]
    if database.path is None:
        with database.reading() as connection:
            processes.append(int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one()))
    for process in processes:
        os.sched_setscheduler(process, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        for process in processes:
            os.sched_setscheduler(process, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def empty_database(kind: str) -> Iterator[str]:
    """Make an empty database, which is removed at the end; yield its location."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder) / "team.db")
        return
    programs = programs_folder()
    if programs is None:
        raise SystemExit("PostgreSQL is not installed (Debian's package postgresql)")
    with running_server(programs, SERVER_SETTINGS) as server:
        yield server.new_database()


def main() -> None:
    """Fill, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--kinds", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--first-in-line", action="store_true", help="real-time priority for look-ups (as root)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    document: dict[str, Any] = {**provenance(), "study_trials": STUDY_TRIALS, "kernel_studies": KERNEL_STUDIES}
    for kind in options.kinds:
        document[kind] = []
        for trials in options.trials:
            with empty_database(kind) as location, Database.open(location) as database:
                start = time.perf_counter()
                keys = fill(database, trials)
                row = {
                    "trials": trials,
                    "first_in_line": options.first_in_line,
                    "fill_s": round(time.perf_counter() - start, 1),
                }
                row |= {"bytes": bytes_stored(database)}
                print(f"{kind}: {trials:,} trials are stored", file=sys.stderr, flush=True)
                reader = Database.open_readonly(location)
                assert reader is not None
                with reader, first_in_line(reader, wanted=options.first_in_line):
                    row |= look_up(reader, keys, options.repeats)
                row |= write(database, keys, options.repeats)
            document[kind].append(row)
            print(kind, json.dumps(row, indent=1), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
