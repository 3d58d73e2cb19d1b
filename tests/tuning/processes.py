"""Look at a tuning process from outside: its trials, and the children it leaves."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from autotile.core.model import Trial, config_key

PATIENCE_S = 30.0


def count_configs(trials: list[Trial]) -> Counter[str]:
    """How often each configuration was tried."""
    return Counter(config_key(trial.config) for trial in trials)


def wait_for_trials(location: Path, count: int) -> int:
    """Look into the database from outside until so many trials are in it."""
    for _ in range(int(PATIENCE_S / 0.01)):
        time.sleep(0.01)
        try:
            connection = sqlite3.connect(f"file:{location}?mode=ro", uri=True)
            try:
                (found,) = connection.execute("SELECT count(*) FROM trials").fetchone()
            finally:
                connection.close()
        except sqlite3.OperationalError:  # not made yet
            continue
        if found >= count:
            return int(found)
    pytest.fail(f"no {count} trials within {PATIENCE_S} s")


def wait_until_gone(mark: str) -> None:
    """Wait until no worker process has a mark any more."""
    for _ in range(int(PATIENCE_S / 0.05)):
        left = workers_with(mark)
        if not left:
            return
        time.sleep(0.05)
    pytest.fail(f"workers outlived their parent: {left}")


def workers_with(mark: str) -> list[int]:
    """Worker processes with a mark in their environment or status."""
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
