"""Deletion of old trials while sessions store and claim: it goes in batches, and keeps what serving needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, select, update
from stored_runs import add_trial, add_trials, begin, end_run, measured, start_run

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, Trial
from autotile.database import care
from autotile.database.care import Criteria, check_database, clean_database
from autotile.database.database import Database
from autotile.database.engine import CLAIMS, RUNS, STUDIES, TRIALS
from autotile.database.keys import TuningKey
from autotile.database.runs import RunRecord
from autotile.database.winners import CHECKS

TOMORROW = Criteria(before=datetime.now(UTC) + timedelta(days=1))


def add_study(database: Database, key: TuningKey, trials: int) -> int:
    """Store a finished run with a winner and a refused configuration; return the id of the study."""
    study, run = begin(database, key)
    add_trials(database, study, run, [measured({"BM": number}, 10.0 + number) for number in range(trials)])
    add_trial(database, study, run, measured({"BM": 3}, 11.0), phase="final", rank=1)
    add_trial(database, study, run, measured({"BM": 4}, 12.0), phase="final", rank=2)
    add_trial(database, study, run, Trial({"BM": 0}, Outcome.WRONG_RESULT, "y[1] is 0"), phase="final")
    end_run(database, run)
    return study


def test_winners_and_verdicts_stay_and_sessions_go_on_between_batches(
    shared: Database, location: str, key: TuningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(care, "_CHUNK", 10)
    study = add_study(shared, key, 40)
    running = start_run(shared, study, sampler="random")
    neighbour = shared.study(replace(key, kernel="other"), None)
    its_run = start_run(shared, neighbour, sampler="random")
    with Database.open(location) as session:
        begin, stored = shared.writing, []

        @contextmanager
        def writing() -> Iterator[Connection]:
            stored.append(add_trial(session, study, running, measured({"BM": 100 + len(stored)}, 50.0)))
            with begin() as connection:
                yield connection
                if shared.path is None:  # the locks of a batch keep no one else out
                    add_trial(session, neighbour, its_run, measured({"BM": len(stored)}, 50.0))

        monkeypatch.setattr(shared, "writing", writing)
        (cleaned,) = clean_database(shared, None, TOMORROW, dry_run=False)
    assert (cleaned.deleted, cleaned.total, cleaned.emptied) == (41, 43, False)
    assert len(stored) == 6
    left = shared.stored_trials(study)
    assert [(one.trial.config, one.rank) for one in left[:2]] == [({"BM": 3}, 1), ({"BM": 0}, None)]
    assert [one.trial_id for one in left[2:]] == stored
    assert [best.trial.config for best in shared.best(study_id=study)] == [{"BM": 3}]
    checks = shared.read(CHECKS, kernel=key.kernel, dtype=key.dtype)
    assert [(check.config, check.passed) for check in checks] == [('{"BM":0}', False)]
    assert check_database(shared).ok


def test_a_session_that_holds_a_claim_keeps_its_trials_however_old_it_is(
    shared: Database, key: TuningKey, device: DeviceProperties
) -> None:
    record = RunRecord(shared, key, device)
    record.start(sampler="random", seed=0, settings={}, driver="", host="", gates={}, shares=True)
    record.add(measured({"BM": 1}, 10.0))
    everything = replace(TOMORROW, winners=True)
    with shared.writing() as connection:
        connection.execute(update(RUNS).values(started_at="2026-01-01T00:00:00.000000+00:00"))
    assert record.claim({"BM": 2}).is_ours
    assert clean_database(shared, None, everything, dry_run=False) == []
    with shared.writing() as connection:
        connection.execute(update(CLAIMS).values(expires_at=0.0))
    (cleaned,) = clean_database(shared, None, everything, dry_run=False)
    assert cleaned.emptied
    with shared.reading() as connection:
        assert not any(connection.execute(select(table)).all() for table in (STUDIES, RUNS, TRIALS, CLAIMS))
    record._end_claims()
    record._release()


def test_a_run_just_begun_keeps_its_trials_and_its_study(shared: Database, key: TuningKey) -> None:
    study, run = begin(shared, key)
    everything = replace(TOMORROW, winners=True)
    assert clean_database(shared, None, replace(everything, keep_gpus=("another",)), dry_run=False) == []
    assert [one.run_id for one in shared.runs(study)] == [run]  # which has no trial yet
    add_trial(shared, study, run, measured({"BM": 1}, 10.0))
    assert clean_database(shared, None, everything, dry_run=False) == []
    assert len(shared.trials(study)) == 1
    with shared.writing() as connection:  # a killed run of long ago is not going on
        connection.execute(update(RUNS).values(started_at="2026-01-01T00:00:00.000000+00:00"))
    (cleaned,) = clean_database(shared, None, everything, dry_run=False)
    assert (cleaned.deleted, cleaned.emptied) == (1, True)


def test_a_run_that_ended_is_cleaned_however_young_it_is(shared: Database, key: TuningKey) -> None:
    study = shared.study(key, None)
    ended, going, begun = (start_run(shared, study, sampler="random") for _ in range(3))
    for number, run in enumerate((ended, going)):
        add_trial(shared, study, run, measured({"BM": number}, 10.0))
    end_run(shared, ended)
    clean_database(shared, None, replace(TOMORROW, winners=True), dry_run=False)
    assert [one.run_id for one in shared.stored_trials(study)] == [going]
    assert [one.run_id for one in shared.runs(study)] == [going, begun]


def test_interrupted_it_leaves_a_whole_database_and_is_repeated(
    shared: Database, key: TuningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = add_study(shared, key, 40)
    with monkeypatch.context() as patch:
        patch.setattr(care, "_CHUNK", 10)
        kept, calls = care._kept, []

        def interrupt(*given: Any) -> set[int]:
            calls.append(given)
            if len(calls) == 4:  # the first is that of the selection
                raise KeyboardInterrupt
            return kept(*given)

        patch.setattr(care, "_kept", interrupt)
        with pytest.raises(KeyboardInterrupt):
            clean_database(shared, None, TOMORROW, dry_run=False)
    assert check_database(shared).ok
    assert len(shared.trials(study)) == 23
    (cleaned,) = clean_database(shared, None, TOMORROW, dry_run=False)
    assert (cleaned.deleted, cleaned.total) == (21, 23)
