"""Observe a tuning process from outside: its trials, and the children that it leaves behind."""

import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from autotile.core.model import Trial, config_key

PATIENCE_S = 30.0


def count_configs(trials: list[Trial]) -> Counter[str]:
    """Return the number of trials of each configuration."""
    return Counter(config_key(trial.config) for trial in trials)


def wait_for_trials(location: Path, count: int) -> int:
    """Wait until the database holds ``count`` trials; return their number."""
    for _ in range(int(PATIENCE_S / 0.01)):
        time.sleep(0.01)
        try:
            connection = sqlite3.connect(f"file:{location}?mode=ro", uri=True)
            try:
                (found,) = connection.execute("SELECT count(*) FROM trials").fetchone()
            finally:
                connection.close()
        except sqlite3.OperationalError:  # not created yet
            continue
        if found >= count:
            return int(found)
    pytest.fail(f"no {count} trials within {PATIENCE_S} s")


def wait_until_gone(mark: str) -> None:
    """Wait until no worker process with a mark is left."""
    for _ in range(int(PATIENCE_S / 0.05)):
        left = workers_with(mark)
        if not left:
            return
        time.sleep(0.05)
    pytest.fail(f"workers outlived their parent: {left}")


def workers_with(mark: str) -> list[int]:
    """Return the worker processes with a mark in their environment or status."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            text = (folder / "environ").read_bytes() + (folder / "status").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if b"autotile.workers." in command and mark.encode() in text:
            found.append(int(folder.name))
    return found
