"""Statements that are text store the same as SQLAlchemy's own do, or nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stored_runs import start_run

from autotile.core.model import Outcome, Trial
from autotile.database.database import Database, insert_trials, trial_row
from autotile.database.engine import TRIALS, now_text
from autotile.database.keys import TuningKey
from autotile.errors import DatabaseError


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "tuning.db") as opened:
        yield opened


@pytest.fixture
def run(database: Database, key: TuningKey) -> dict[str, int]:
    study = database.study(key, None)
    return {"study_id": study, "run_id": start_run(database, study, sampler="random", seed=0)}


def rows_of(run: dict[str, int], *trials: Trial) -> list[dict[str, Any]]:
    created = now_text()
    return [{**run, "phase": "search", "rank": None, "created_at": created, **trial_row(trial)} for trial in trials]


def test_a_file_holds_the_same_by_either_way(
    database: Database, run: dict[str, int], measured: Callable[..., Trial]
) -> None:
    trials = [
        measured({"BM": 1, "LAYOUT": "größer", "FLAG": True}, 10.0),
        Trial(
            {"BM": 2}, Outcome.COMPILE_FAILED, reason="line 1\n\tµ \x00", stage="compile", telemetry={"x": float("inf")}
        ),
    ]
    rows = rows_of(run, *trials)
    with closing(database.connect()) as held, database.writing(held) as connection:
        insert_trials(connection, rows)
    with database.writing() as connection:
        connection.execute(TRIALS.insert(), rows)
    path = database.path
    assert path is not None
    with closing(sqlite3.connect(path)) as connection:
        stored = [row[1:] for row in connection.execute("SELECT * FROM trials ORDER BY id")]
    assert stored[:2] == stored[2:]
    assert len(stored) == 4


def test_nothing_of_a_transaction_that_fails_is_stored(
    database: Database, run: dict[str, int], measured: Callable[..., Trial]
) -> None:
    rows = rows_of(run, measured({"BM": 1}, 10.0))
    with closing(database.connect()) as held:
        with pytest.raises(DatabaseError, match="NOT NULL"), database.writing(held) as connection:
            insert_trials(connection, [*rows, {**rows[0], "outcome": None}])
        with database.writing(held) as connection:  # the connection is as good as before
            insert_trials(connection, rows)
    assert len(database.trials(run["study_id"])) == 1
