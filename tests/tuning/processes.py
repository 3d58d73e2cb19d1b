"""Observe a tuning process from outside: its trials, and the children that it leaves behind."""

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from endurance.progress_marks import environment_of
from faults.traces import processes
from interrupts import heeded_interrupts
from waiting import PATIENCE_S, wait_until

from autotile.core.model import Trial, config_key
from autotile.database.care import check_database
from autotile.database.database import Database


def count_configs(trials: list[Trial]) -> Counter[str]:
    return Counter(config_key(trial.config) for trial in trials)


def wait_for_trials(location: Path, count: int) -> int:
    """Wait until the database, which may not exist yet, holds ``count`` trials; return their number."""
    found = 0

    def has_trials() -> bool:
        nonlocal found
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(f"file:{location}?mode=ro", uri=True)) as opened,
        ):
            (found,) = opened.execute("SELECT count(*) FROM trials").fetchone()
        return found >= count

    wait_until(has_trials)
    return found


def workers_with(mark: str = "", parent: int | None = None) -> list[int]:
    """Return the worker processes with a mark in their environment, and of a parent if one is given."""
    workers = (found for found in processes() if "autotile.workers." in found[2])
    return [pid for pid, above, _, environment in workers if mark in environment and parent in (None, above)]


def check_signal(words: Sequence[str], location: Path, number: signal.Signals, **variables: object) -> None:
    """Send a signal to a tune: it ends without a traceback, leaves no worker, and has kept each trial that ended."""
    command = [sys.executable, "-m", "autotile", "tune", *words]
    environment = environment_of(location, **variables)
    with heeded_interrupts(), subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE) as process:
        seen = wait_for_trials(location, 5)
        process.send_signal(number)
        errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert "Traceback" not in errors
    wait_until(lambda: not workers_with(f"AUTOTILE_TEST_OF={location}"))
    with Database.open(location) as database:
        assert check_database(database).ok
        kept = database.trials(1, phase="search")
        # after Ctrl-C the best trials are still raced, after a killing signal they are not
        assert bool(database.trials(1, phase="final")) is (number is signal.SIGINT)
    assert len(kept) >= seen
    assert set(count_configs(kept).values()) == {1}
