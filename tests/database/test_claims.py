"""Claims of configurations: one session at a time tries each, and what a dead one was trying is inherited."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text
from stored_runs import measured

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, config_key
from autotile.database import runs
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.database.runs import RunRecord

CONFIGS: list[Config] = [{"BM": number} for number in range(40)]
Open = Callable[[], RunRecord]


def record_of(location: str, key: TuningKey, device: DeviceProperties) -> RunRecord:
    record = RunRecord(Database.open(location), key, device)
    record.start(sampler="random", seed=0, settings={}, driver="", host="", gates={}, shares=True)
    return record


@pytest.fixture
def session(location: str, fresh_key: TuningKey, device: DeviceProperties) -> Iterator[Open]:
    """Return a function that starts a session on the study."""
    opened: list[RunRecord] = []

    def start() -> RunRecord:
        opened.append(record_of(location, fresh_key, device))
        return opened[-1]

    yield start
    for record in opened:
        record._end_claims()
        record._release()
        record._database.close()


def test_one_session_at_a_time_tries_a_configuration(session: Open) -> None:
    first, second = session(), session()
    assert first.claim({"BM": 1}).is_ours
    refused = second.claim({"BM": 1})
    assert (refused.is_ours, refused.others, list(refused.news)) == (False, 1, [])
    assert first.claim({"BM": 1}).is_ours  # again
    trial = measured({"BM": 1}, 10.0)
    first.add(trial)
    after = second.claim({"BM": 1})
    assert (after.is_ours, after.others, list(after.news)) == (False, 0, [trial])
    other = second.claim({"BM": 2})
    assert (other.is_ours, list(other.news)) == (True, [])


def test_several_are_claimed_and_stored_at_once(session: Open) -> None:
    first, second = session(), session()
    assert first.claim({"BM": 1}, {"BM": 2}, {"BM": 3}).ours == (True, True, True)
    first.add(measured({"BM": 1}, 10.0), measured({"BM": 3}, 12.0))
    after = second.claim({"BM": 1}, {"BM": 2}, {"BM": 4}, {"BM": 5})
    assert (after.ours, after.others) == ((False, False, True, True), 1)
    assert [trial.config for trial in after.news] == [{"BM": 1}, {"BM": 3}]
    third = session()
    assert third.claim({"BM": 4}, {"BM": 6}).ours == (False, True)


def test_claims_made_together_share_the_room(session: Open) -> None:
    first, second = session(), session()
    assert first.claim({"BM": 1}, room=8).is_ours
    claimed = second.claim(*CONFIGS[2:8], room=4)  # one of which is the first one's
    assert claimed.ours == (True, True, True, False, False, False)
    first.add(measured({"BM": 1}, 10.0))
    assert first.claim(*CONFIGS[8:12], room=7).ours == (True,) * 4  # 3 of the 7 are the second's
    assert second.claim({"BM": 5}, room=1).ours == (False,)  # which the first one's trial has taken


def test_earlier_trials_do_not_count(session: Open) -> None:
    first = session()
    first.claim({"BM": 1})
    first.add(measured({"BM": 1}, 10.0))
    assert session().claim({"BM": 1}).is_ours  # which leaves out what it need not repeat by itself


def test_a_lease_that_runs_out_is_inherited(session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LEASE_S", 0.05)
    monkeypatch.setattr(runs, "_RENEWALS", 1e-3)
    first, second, third = session(), session(), session()
    first.claim({"BM": 1})
    first.claim({"BM": 2})
    time.sleep(0.1)
    monkeypatch.setattr(runs, "LEASE_S", 60.0)
    assert second.claim({"BM": 2}).is_ours
    keys, state = second.inherit()
    assert (keys, state.others) == ([config_key({"BM": 1})], 0)
    assert third.inherit()[0] == []
    assert third.inherit()[1].others == 2
    first.add(measured({"BM": 1}, 10.0))  # too late: it is not stored, and not tried twice
    trial = measured({"BM": 1}, 11.0)
    second.add(trial)
    assert list(third.claim({"BM": 1}).news) == [trial]


def test_leases_are_renewed(session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LEASE_S", 0.4)
    first, second = session(), session()
    first.claim({"BM": 1})
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        assert not second.claim({"BM": 1}).is_ours
        time.sleep(0.05)
    first._end_claims()
    assert second.claim({"BM": 1}).is_ours


@pytest.mark.parametrize("location", ["postgresql"], indirect=True)
def test_no_renewal_changes_claims_while_another_transaction_does(
    session: Open, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_RENEWALS", 1e5)  # one a millisecond
    record = session()
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with Database.open(location) as database, database.writing() as transaction:
        record._settle(transaction, [config_key({"BM": 1})])
        renewal = threading.Thread(target=record._renew)
        renewal.start()
        try:
            deadline = time.monotonic() + 30
            with database.reading() as connection:
                while not connection.execute(waiting).scalar():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        finally:
            record._ended.set()
    renewal.join()


def test_the_claims_of_a_dead_process_do_not_wait_for_their_lease(
    session: Open, location: str, fresh_key: TuningKey, device: DeviceProperties
) -> None:
    def die() -> None:
        record = record_of(location, fresh_key, device)
        for number in (1, 2):
            record.claim({"BM": number})
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=die)
    first = session()
    child.start()
    child.join()
    assert first.claim({"BM": 1}).is_ours
    assert first.inherit()[0] == [config_key({"BM": 2})]


def test_a_new_session_forgets_the_dead_and_counts_the_living(
    session: Open, location: str, fresh_key: TuningKey, device: DeviceProperties
) -> None:
    def die() -> None:
        record_of(location, fresh_key, device).claim({"BM": 1})
        os._exit(0)

    first = session()
    first.claim({"BM": 5})
    child = multiprocessing.get_context("fork").Process(target=die)
    child.start()
    child.join()
    with Database.open(location) as database, database.writing() as connection:
        study = database.find_study(fresh_key)
        assert study is not None
        assert runs.forget_dead(connection, study) == 1


def test_many_sessions_try_each_configuration_once(
    session: Open, location: str, fresh_key: TuningKey, device: DeviceProperties
) -> None:
    tried: list[str] = []

    def work(record: RunRecord) -> None:
        for config in CONFIGS:
            if record.claim(config).is_ours:
                tried.append(config_key(config))
                record.add(measured(config, 10.0))

    threads = [threading.Thread(target=work, args=(session(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(tried) == Counter(map(config_key, CONFIGS))
    with Database.open(location) as database:
        study = database.find_study(fresh_key)
        assert study is not None
        assert Counter(config_key(trial.config) for trial in database.trials(study)) == Counter(tried)


def test_a_session_without_sharing_claims_nothing(
    location: str, fresh_key: TuningKey, device: DeviceProperties, session: Open
) -> None:
    record = RunRecord(Database.open(location), fresh_key, device)
    record.start(sampler="random", seed=0, settings={}, driver="", host="", gates={})
    other = session()
    assert other.claim({"BM": 1}).is_ours
    assert record.claim({"BM": 1}).is_ours
    record._database.close()


@pytest.mark.parametrize("owner", ["", "1 2 3", "x", "1 1 5 elsewhere"])
def test_an_owner_elsewhere_is_not_known_to_be_gone(owner: str) -> None:
    assert not runs.is_gone(owner)
