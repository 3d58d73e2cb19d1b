"""Trials come back as they were stored, by either way of storing them, or nothing of a transaction is there."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_runs import add_trial, add_trials, begin, measured, start_run

from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial, config_key
from autotile.database.database import Database, insert_trials, trial_row
from autotile.database.engine import TRIALS, now_text
from autotile.database.keys import TuningKey
from autotile.errors import DatabaseError

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
NUMBERS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(0.0, 1e18)
TIMES = st.floats(1e-6, 1e15)
TRIPLES = st.tuples(*[st.integers(1, 2**31 - 1)] * 3)
VALUES = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), TEXT)
MEASUREMENTS = st.builds(
    Measurement, TIMES, FLOATS, FLOATS, st.lists(FLOATS, max_size=5).map(tuple), st.sampled_from(["cold", "hot"])
)
OCCUPANCIES = st.builds(
    Occupancy,
    NUMBERS,
    NUMBERS,
    st.floats(0.0, 1.0),
    st.lists(TEXT, max_size=2).map(tuple),
    st.dictionaries(TEXT, NUMBERS, max_size=3),
)
EXAMPLES = st.builds(
    Trial,
    config=st.dictionaries(TEXT, VALUES, max_size=4),
    outcome=st.sampled_from(Outcome),
    reason=TEXT,
    stage=TEXT,
    geometry=st.none() | st.builds(LaunchGeometry, TRIPLES, TRIPLES, NUMBERS),
    resources=st.none() | st.builds(Resources, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    occupancy=st.none() | OCCUPANCIES,
    measurement=st.none() | MEASUREMENTS,
    cubin_hash=TEXT,
    source=st.sampled_from(["cuda", "replayed"]),
    seconds=st.dictionaries(TEXT, FLOATS, max_size=2),
    telemetry=st.dictionaries(TEXT, st.one_of(FLOATS, NUMBERS, TEXT), max_size=2),
)


@settings(max_examples=25, deadline=None)
@given(trials=st.lists(EXAMPLES, min_size=1, max_size=8))
def test_a_trial_comes_back_as_it_was_stored(trials: list[Trial]) -> None:
    key = TuningKey("k", "", "", (), "float32", {"N": 1}, "GPU", "9.0", 1, 1, "13.0", "cold")
    with TemporaryDirectory() as folder, Database.open(Path(folder) / "tuning.db") as database:
        study, run = begin(database, key)
        for trial in trials:
            add_trial(database, study, run, trial)
        add_trials(database, study, run, trials)
        back = database.trials(study)
        assert back == trials + trials
        for trial, stored in zip(trials, back, strict=False):
            assert list(stored.config) == list(trial.config)
            assert config_key(stored.config) == config_key(trial.config)
            assert [type(value) for value in stored.config.values()] == [type(value) for value in trial.config.values()]


@pytest.fixture
def run(database: Database, key: TuningKey) -> dict[str, int]:
    study = database.study(key, None)
    return {"study_id": study, "run_id": start_run(database, study, sampler="random", seed=0)}


def rows_of(run: dict[str, int], *trials: Trial) -> list[dict[str, Any]]:
    created = now_text()
    return [{**run, "phase": "search", "rank": None, "created_at": created, **trial_row(trial)} for trial in trials]


def test_a_file_holds_the_same_by_either_way(database: Database, run: dict[str, int]) -> None:
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


def test_nothing_of_a_transaction_that_fails_is_stored(database: Database, run: dict[str, int]) -> None:
    rows = rows_of(run, measured({"BM": 1}, 10.0))
    with closing(database.connect()) as held:
        with pytest.raises(DatabaseError, match="NOT NULL"), database.writing(held) as connection:
            insert_trials(connection, [*rows, {**rows[0], "outcome": None}])
        with database.writing(held) as connection:  # the connection is as good as before
            insert_trials(connection, rows)
    assert len(database.trials(run["study_id"])) == 1
