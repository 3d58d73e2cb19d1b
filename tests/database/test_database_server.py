"""What a file and a PostgreSQL server do alike, and what only a server can do."""

import os
from collections.abc import Callable, Iterator

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


def test_trials_come_back_and_the_finals_decide(
    shared: Database, location: str, fresh_key: TuningKey, device: DeviceProperties, measured: Callable[..., Trial]
) -> None:
    study = shared.study(fresh_key, device)
    assert shared.study(fresh_key, device) == study
    run = start_run(shared, study, sampler="tpe", seed=2**40)
    fast, winner = measured({"BM": 64, "WIDE": True, "KIND": "float4"}, 10.0), measured({"BM": 32}, 11.0)
    add_trials(shared, study, run, [fast])
    add_trial(shared, study, run, winner, phase="final", rank=1)
    assert shared.trials(study) == [fast, winner]
    assert list(shared.trials(study)[0].config) == ["BM", "WIDE", "KIND"]
    assert [best.trial for best in shared.best(study_id=study)] == [fast]
    end_run(shared, run, {"winner": "BM=32"})
    assert [best.trial for best in shared.best(study_id=study)] == [winner]
    assert [summary.best_time_us for summary in shared.studies() if summary.study_id == study] == [11.0]
    reader = Database.open_readonly(location)
    assert reader is not None
    with reader:
        assert reader.find_study(fresh_key) == study


def test_a_reason_that_no_database_takes_is_stored_all_the_same(
    shared: Database, fresh_key: TuningKey, failed: Callable[..., Trial]
) -> None:
    study = shared.study(fresh_key, None)
    run = start_run(shared, study, sampler="tpe")
    add_trial(shared, study, run, failed({"BM": 1}, "compile_failed", "error:\0 bad byte \udcff"))
    assert shared.trials(study)[0].reason == "error: bad byte ?"


def test_misses_are_counted_a_problem_a_gpu_and_a_tier(shared: Database) -> None:
    kernel = os.urandom(8).hex()
    first, second = (Problem(kernel, {"M": m, "N": 2}, "float32") for m in (1, 3))
    shared.record_miss(second, "H200", "default")
    for sizes in ({"M": 1, "N": 2}, {"N": 2, "M": 1}):
        shared.record_miss(Problem(kernel, sizes, "float32"), "H200", "nearest")
    shared.record_miss(first, "H200", "nearest", count=5)
    misses = shared.misses(kernel)
    assert [(miss.problem, miss.tier, miss.count) for miss in misses] == [(first, "nearest", 7), (second, "default", 1)]
    assert shared.misses("other") == []


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


def test_the_check_is_whole_and_errors_hide_the_password(server: Database, measured: Callable[..., Trial]) -> None:
    assert check_database(server).ok
    with pytest.raises(DatabaseError, match="foreign key constraint"):
        add_trial(server, 2**30, 2**30, measured({"BM": 1}, 1.0))
    with pytest.raises(DatabaseError) as caught:
        Database.open("postgresql://user:secret@127.0.0.1:1/name")
    assert "secret" not in str(caught.value)
