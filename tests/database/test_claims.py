"""Claims of configurations among sessions, and deletion of old trials while sessions store and claim."""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, Select, func, select, text, update
from stored_runs import add_trial, add_trials, begin, change, end_run, measured, start_run
from waiting import wait_until

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.database import care, runs
from autotile.database.care import check_database, clean_database
from autotile.database.database import Database
from autotile.database.engine import CLAIMS, RUNS, STUDIES, TRIALS
from autotile.database.keys import TuningKey
from autotile.database.runs import RunRecord
from autotile.database.winners import CHECKS

CONFIGS: list[Config] = [{"BM": number} for number in range(40)]


def record_of(location: str, key: TuningKey, device: DeviceProperties, *, shares: bool = True) -> RunRecord:
    record = RunRecord(Database.open(location), key, device)
    record.start(sampler="random", shares=shares)
    return record


@pytest.fixture
def session(location, fresh_key, device):
    opened: list[RunRecord] = []

    def start() -> RunRecord:
        opened.append(record_of(location, fresh_key, device))
        return opened[-1]

    yield start
    for record in opened:
        record._end_claims()
        record._release()
        record._database.close()


def test_one_session_at_a_time_tries_a_configuration_unless_it_does_not_share(session, location, fresh_key, device):
    first, second = session(), session()
    assert first.claim({"BM": 1})[0]
    assert (second.claim({"BM": 1}), second.others, second.take_news()) == ([False], 1, [])
    assert first.claim({"BM": 1})[0]  # again
    trial = measured({"BM": 1}, 10.0)
    first.add(trial)
    assert (second.claim({"BM": 1}), second.others, second.take_news()) == ([False], 0, [trial])
    assert (second.claim({"BM": 2}), second.take_news()) == ([True], [])
    assert session().claim({"BM": 1})[0]  # earlier trials do not count: it leaves out what it need not repeat
    alone = record_of(location, fresh_key, device, shares=False)
    assert alone.claim({"BM": 1}, {"BM": 3}) == [True, True]
    assert second.claim({"BM": 3})[0]
    alone._database.close()


def test_several_are_claimed_and_stored_at_once(session):
    first, second = session(), session()
    assert first.claim({"BM": 1}, {"BM": 2}, {"BM": 3}) == [True, True, True]
    first.add(measured({"BM": 1}, 10.0), measured({"BM": 3}, 12.0))
    assert second.claim({"BM": 1}, {"BM": 2}, {"BM": 4}, {"BM": 5}) == [False, False, True, True]
    assert second.others == 1
    assert [trial.config for trial in second.take_news()] == [{"BM": 1}, {"BM": 3}]
    third = session()
    assert third.claim({"BM": 4}, {"BM": 6}) == [False, True]


def test_claims_made_together_share_the_room(session):
    first, second = session(), session()
    assert first.claim({"BM": 1}, room=8)[0]
    claimed = second.claim(*CONFIGS[2:8], room=4)  # one of which is the first one's
    assert claimed == [True, True, True, False, False, False]
    first.add(measured({"BM": 1}, 10.0))
    assert first.claim(*CONFIGS[8:12], room=7) == [True] * 4  # 3 of the 7 are the second's
    assert second.claim({"BM": 5}, room=1) == [False]  # which the first one's trial has taken


def run_out(record: RunRecord) -> Select[tuple[int]]:
    """Let the leases of a session run out; return a query for the number of those that it has not renewed."""
    of_study = CLAIMS.c.study_id == record.study_id
    change(record._database, update(CLAIMS).where(of_study).values(expires_at=0.0))
    return select(func.count()).where(of_study, CLAIMS.c.expires_at == 0.0)


def test_a_lease_that_runs_out_is_inherited(session):
    first, second, third = session(), session(), session()
    first.claim({"BM": 1})
    first.claim({"BM": 2})
    run_out(first)
    assert second.claim({"BM": 2})[0]
    assert (second.inherit(), second.others) == ([config_key({"BM": 1})], 0)
    assert (third.inherit(), third.others) == ([], 2)
    first.add(measured({"BM": 1}, 10.0))  # too late: it is not stored, and not tried twice
    trial = measured({"BM": 1}, 11.0)
    second.add(trial)
    assert (third.claim({"BM": 1}), third.take_news()) == ([False], [trial])


@pytest.mark.parametrize("location", ["postgresql"], indirect=True)
def test_a_trial_that_another_session_stores_during_a_look_is_news_or_still_tried(session, monkeypatch):
    """Else a session that waits for the others would end without it."""
    first, second = session(), session()
    first.claim({"BM": 1})
    insert, trial, together = runs.insert_trials, measured({"BM": 1}, 10.0), threading.Barrier(2, timeout=60)

    def insert_late(*given: Any) -> None:
        insert(*given)
        together.wait()  # for the second one's claims
        together.wait()  # for its look

    def look(connection: Connection) -> None:
        RunRecord._look(second, connection)
        together.wait()
        storing.join()

    monkeypatch.setattr(runs, "insert_trials", insert_late)
    storing = threading.Thread(target=first.add, args=(trial,))
    storing.start()
    together.wait()
    with monkeypatch.context() as patch:
        patch.setattr(second, "_look", look)
        assert (second.inherit(), second.others) == ([], 1)
    assert (second.inherit(), second.take_news()) == ([], [trial])


def test_leases_are_renewed(session, monkeypatch):
    assert runs._RENEWALS >= 2  # so that the first may be late
    monkeypatch.setattr(runs, "_RENEWALS", 1e4)
    first, second = session(), session()
    first.claim({"BM": 1})
    left = run_out(first)

    def are_renewed() -> bool:
        with first._database.reading() as connection:  # a file is seen as it was at the beginning of a transaction
            return not connection.execute(left).scalar_one()

    wait_until(are_renewed)
    assert not second.claim({"BM": 1})[0]
    first._end_claims()
    assert second.claim({"BM": 1})[0]


@pytest.mark.parametrize("location", ["postgresql"], indirect=True)
def test_no_renewal_changes_claims_while_another_transaction_does(session, location, monkeypatch):
    monkeypatch.setattr(runs, "_RENEWALS", 1e5)  # one a millisecond
    record = session()
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with Database.open(location) as database, database.writing() as transaction:
        record._settle(transaction, [config_key({"BM": 1})])
        renewal = threading.Thread(target=record._renew)
        renewal.start()
        try:
            with database.reading() as connection:
                wait_until(lambda: connection.execute(waiting).scalar())
        finally:
            record._ended.set()
    renewal.join()


@pytest.mark.skipif("AUTOTILE_TEST_POSTGRESQL" in os.environ, reason="stops the server")
@pytest.mark.parametrize("location", ["postgresql"], indirect=True)
def test_a_claim_that_another_session_has_met_outlives_a_crash_of_the_server(session, postgresql):
    """Else what both sessions leave to each other is tried by none."""
    first, second = session(), session()
    assert first.claim({"BM": 1})[0]
    assert not second.claim({"BM": 1})[0]
    postgresql.stop(signal.SIGQUIT)
    postgresql.start()
    assert (second.inherit(), second.others) == ([], 1)


def claim_and_die(location: str, key: TuningKey, device: DeviceProperties, *numbers: int) -> None:
    """Claim configurations in a process that ends without giving them back."""

    def die() -> None:
        record = record_of(location, key, device)
        for number in numbers:
            record.claim({"BM": number})
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=die)
    child.start()
    child.join()


def test_the_claims_of_a_dead_process_do_not_wait_and_those_of_the_living_count(session, location, fresh_key, device):
    first = session()
    claim_and_die(location, fresh_key, device, 1, 2)
    assert first.claim({"BM": 1})[0]
    assert first.inherit() == [config_key({"BM": 2})]
    claim_and_die(location, fresh_key, device, 3)
    with Database.open(location) as database, database.writing() as connection:
        assert runs.forget_dead(connection, database.find_study(fresh_key) or 0) == 2  # those of the first


def test_many_sessions_try_each_configuration_once(session, location, fresh_key, device):
    tried: list[str] = []

    def work(record: RunRecord) -> None:
        for config in CONFIGS:
            if record.claim(config)[0]:
                tried.append(config_key(config))
                record.add(measured(config, 10.0))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, [session() for _ in range(4)]))
    assert Counter(tried) == Counter(map(config_key, CONFIGS))
    with Database.open(location) as database:
        trials = database.trials(database.find_study(fresh_key) or 0)
        assert Counter(config_key(trial.config) for trial in trials) == Counter(tried)


@pytest.mark.parametrize("owner", ["", "1 2 3", "x", "1 1 5 elsewhere"])
def test_an_owner_elsewhere_is_not_known_to_be_gone(owner):
    assert not runs.is_gone(owner)


TOMORROW: Any = {"before": datetime.now(UTC) + timedelta(days=1)}
EVERYTHING: Any = {**TOMORROW, "winners": True}


def add_study(database: Database, key: TuningKey, trials: int) -> int:
    """Store a finished run with a winner and a refused configuration; return the id of the study."""
    study, run = begin(database, key)
    add_trials(database, study, run, [measured({"BM": number}, 10.0 + number) for number in range(trials)])
    for rank in (1, 2):
        add_trial(database, study, run, measured({"BM": 2 + rank}, 10.0 + rank), phase="final", rank=rank)
    add_trial(database, study, run, Trial({"BM": 0}, Outcome.WRONG_RESULT, "y[1] is 0"), phase="final")
    end_run(database, run)
    return study


def test_winners_and_verdicts_stay_and_sessions_go_on_between_batches(shared, location, key, monkeypatch):
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
        (cleaned,) = clean_database(shared, None, **TOMORROW)
    assert (cleaned.deleted, cleaned.total, cleaned.emptied) == (41, 43, False)
    assert len(stored) == 6
    left = shared.stored_trials(study)
    assert [(one.trial.config, one.rank) for one in left[:2]] == [({"BM": 3}, 1), ({"BM": 0}, None)]
    assert [one.trial_id for one in left[2:]] == stored
    assert [best.trial.config for best in shared.best(study_id=study)] == [{"BM": 3}]
    checks = shared.read(CHECKS, kernel=key.kernel, dtype=key.dtype)
    assert [(config, passed) for _, config, passed in checks] == [('{"BM":0}', False)]
    assert check_database(shared).ok


def test_a_session_that_holds_a_claim_keeps_its_trials_however_old_it_is(shared, key, device):
    record = RunRecord(shared, key, device)
    record.start(sampler="random", shares=True)
    record.add(measured({"BM": 1}, 10.0))
    change(shared, update(RUNS).values(started_at="2026-01-01T00:00:00.000000+00:00"))
    assert record.claim({"BM": 2})[0]
    assert clean_database(shared, None, **EVERYTHING) == []
    change(shared, update(CLAIMS).values(expires_at=0.0))
    (cleaned,) = clean_database(shared, None, **EVERYTHING)
    assert cleaned.emptied
    with shared.reading() as connection:
        assert not any(connection.execute(select(table)).all() for table in (STUDIES, RUNS, TRIALS, CLAIMS))
    record._end_claims()
    record._release()


def test_a_run_whose_end_is_interrupted_ends_with_its_summary(shared, key, device, monkeypatch):
    with suppress(KeyboardInterrupt), RunRecord(shared, key, device) as record, monkeypatch.context() as patch:
        record.start(sampler="random")
        patch.setattr(runs, "finish_run", lambda *given: signal.raise_signal(signal.SIGINT))
        record.end({"trials": 7})
    assert [(run.summary, run.ended_at is None) for run in shared.runs(1)] == [({"trials": 7}, False)]


def test_a_run_just_begun_keeps_its_trials_and_its_study_but_one_that_ended_none(shared, key):
    study, run = begin(shared, key)
    assert clean_database(shared, None, **EVERYTHING, keep_gpus=("another",)) == []
    assert [one.run_id for one in shared.runs(study)] == [run]  # which has no trial yet
    ended = start_run(shared, study, sampler="random")
    for number, one in enumerate((ended, run)):
        add_trial(shared, study, one, measured({"BM": number}, 10.0))
    end_run(shared, ended)
    clean_database(shared, None, **EVERYTHING)
    assert [one.run_id for one in shared.stored_trials(study)] == [run]
    assert [one.run_id for one in shared.runs(study)] == [run]
    change(shared, update(RUNS).values(started_at="2026-01-01T00:00:00.000000+00:00"))  # killed long ago
    (cleaned,) = clean_database(shared, None, **EVERYTHING)
    assert (cleaned.deleted, cleaned.emptied) == (1, True)


def test_interrupted_it_leaves_a_whole_database_and_is_repeated(shared, key, monkeypatch):
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
            clean_database(shared, None, **TOMORROW)
    assert check_database(shared).ok
    assert len(shared.trials(study)) == 23
    (cleaned,) = clean_database(shared, None, **TOMORROW)
    assert (cleaned.deleted, cleaned.total) == (21, 23)
