"""The same guarantees on a PostgreSQL server."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from sqlalchemy import text
from stored_runs import add_trial, add_trials, end_run, start_run

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem, Trial
from autotile.database import engine
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.errors import DatabaseError


@pytest.fixture
def server(server_url: str) -> Iterator[Database]:
    with Database.open(server_url) as database:
        yield database


@pytest.fixture
def fresh_key(key: TuningKey) -> TuningKey:
    return replace(key, template_hash=os.urandom(8).hex())


def test_trials_come_back_and_the_finals_decide(
    server: Database,
    server_url: str,
    fresh_key: TuningKey,
    device: DeviceProperties,
    measured: Callable[..., Trial],
) -> None:
    study = server.study(fresh_key, device)
    assert server.study(fresh_key, device) == study
    run = start_run(server, study, sampler="tpe", seed=2**40)
    fast, winner = measured({"BM": 64, "WIDE": True, "KIND": "float4"}, 10.0), measured({"BM": 32}, 11.0)
    add_trials(server, study, run, [fast])
    add_trial(server, study, run, winner, phase="final", rank=1)
    assert server.trials(study) == [fast, winner]
    assert list(server.trials(study)[0].config) == ["BM", "WIDE", "KIND"]
    assert [best.trial for best in server.best(study_id=study)] == [fast]
    end_run(server, run, {"winner": "BM=32"})
    assert [best.trial for best in server.best(study_id=study)] == [winner]
    assert [summary.best_time_us for summary in server.studies() if summary.study_id == study] == [11.0]
    reader = Database.open_readonly(server_url)
    assert reader is not None
    with reader:
        assert reader.find_study(fresh_key) == study


def test_a_reason_with_a_nul_byte_is_stored(
    server: Database, fresh_key: TuningKey, failed: Callable[..., Trial]
) -> None:
    study = server.study(fresh_key, None)
    run = start_run(server, study, sampler="tpe")
    add_trial(server, study, run, failed({"BM": 1}, "compile_failed", "error:\0 bad byte \udcff"))
    assert server.trials(study)[0].reason == "error: bad byte ?"


def test_a_connection_that_the_server_closed_is_replaced(
    server: Database, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_connections() -> None:
        server.find_study(fresh)
        with Database.open(server_url) as other, other.reading() as connection:
            where = "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            connection.execute(text(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity {where}"))

    fresh = TuningKey("k", "", "", (), "float32", {"N": 1}, "GPU", "9.0", 1, 1, "13.0", "cold")
    monkeypatch.setattr(engine, "_IDLE_S", -1.0)
    end_connections()
    assert server.find_study(fresh) is None
    monkeypatch.setattr(engine, "_IDLE_S", 60.0)  # it was used just now, and is not checked
    end_connections()
    with pytest.raises(engine.LostServerError):
        server.find_study(fresh)
    assert server.find_study(fresh) is None


def test_misses_are_counted(server: Database) -> None:
    problem = Problem(os.urandom(8).hex(), {"N": 1}, "float32")
    server.record_miss(problem, "H200", "default")
    server.record_miss(problem, "H200", "default", count=3)
    assert [(miss.problem, miss.count) for miss in server.misses(problem.kernel)] == [(problem, 4)]


def test_the_check_is_whole_and_errors_hide_the_password(server: Database, measured: Callable[..., Trial]) -> None:
    assert check_database(server).ok
    with pytest.raises(DatabaseError, match="foreign key constraint"):
        add_trial(server, 2**30, 2**30, measured({"BM": 1}, 1.0))
    with pytest.raises(DatabaseError) as caught:
        Database.open("postgresql://user:secret@127.0.0.1:1/name")
    assert "secret" not in str(caught.value)
