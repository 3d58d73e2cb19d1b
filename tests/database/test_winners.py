"""What is served: its JSON, and its queries, run on a file without an SQL engine as `Database` runs them, or not."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON
from stored_runs import add_trial, end_run, record_miss, start_run

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.documents import convert
from autotile.core.model import Measurement, Outcome, Problem, Resources, Trial, config_key
from autotile.database import winners
from autotile.database.database import Database
from autotile.database.engine import METADATA
from autotile.database.keys import TuningKey
from autotile.database.winners import (
    ADD_MISSES,
    CHECKS,
    JSON_COLUMNS,
    RESOURCE_COLUMNS,
    RULE_COLUMNS,
    VERSION_TABLE,
    WINNER_COLUMNS,
    WINNERS,
    Winner,
    WinnerDocument,
    miss_row,
    read_file,
    write_file,
)

SELECTED = {**WINNER_COLUMNS, "families": RULE_COLUMNS}


@pytest.fixture
def winner(key: TuningKey, device: DeviceProperties) -> Winner:
    tuned_at = datetime(2026, 5, 1, 12, 30, 15, tzinfo=UTC)
    return Winner(key, device, {"b": 2, "a": True}, Resources(24, 0, 8, 16, 32), Measurement(2.5, 2.4, 2.75), tuned_at)


@pytest.mark.parametrize(
    "changes", [{}, {"device": None, "resources": None, "measurement": None}, {"shipped": True}], ids=str
)
def test_a_winner_survives_json(winner: Winner, changes: dict[str, object]) -> None:
    expected = replace(winner, **changes)  # type: ignore[arg-type]
    assert convert(expected.to_json(), WinnerDocument).winner() == expected
    assert list(expected.to_json()) == ["key", "device", "config", "resources", "measurement", "tuned_at", "shipped"]


@pytest.mark.parametrize("table", SELECTED)
def test_the_columns_are_those_of_the_schema(table: str) -> None:
    columns = METADATA.tables[table].c
    assert set(SELECTED[table]) <= set(columns.keys())
    assert JSON_COLUMNS & set(SELECTED[table]) == {n for n in SELECTED[table] if isinstance(columns[n].type, JSON)}


def test_no_two_columns_of_a_winner_have_one_name() -> None:
    names = [name for columns in WINNER_COLUMNS.values() for name in columns]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("driver", "expected"), [("", "13.0"), ("13.0", "13.0"), ("14.2", "14.2")])
def test_the_driver_is_that_of_the_run(winner: Winner, device: DeviceProperties, driver: str, expected: str) -> None:
    row = {
        **winner.key.to_json(),
        "config": winner.config,
        **dict.fromkeys([*RESOURCE_COLUMNS, "time_us", "low_us", "high_us", "l2"]),
        "created_at": winner.tuned_at.isoformat(),
        "driver": driver,
    }
    found = Winner.from_row(row, replace(device, driver="13.0"))
    assert found.device == replace(device, driver=expected)
    assert (found.key, found.resources, found.measurement) == (winner.key, None, None)
    assert Winner.from_row(row, None).device is None


def _fill(path: Path, key: TuningKey) -> None:
    with Database.open(path) as database:
        study = database.study(key, device_profile("h200"))
        run = start_run(database, study, sampler="random", seed=0, driver="99.9")
        trial = Trial(
            {"b": 2, "a": True},
            Outcome.OK,
            resources=Resources(32, 8, 4, 16, 1024),
            measurement=Measurement(10.0, 9.5, 10.5, (10.0, 10.25)),
        )
        add_trial(database, study, run, trial, phase="final", rank=1)
        end_run(database, run)


def test_it_returns_what_the_database_returns(tmp_path: Path, key: TuningKey) -> None:
    path = tmp_path / "autotile.db"
    _fill(path, key)
    with Database.open(path) as database:
        expected = [best.winner for best in database.best(key.kernel, dtype=key.dtype)]
    found = read_file(str(path), WINNERS, kernel=key.kernel, dtype=key.dtype)
    assert found == expected
    assert [winner.device.driver for winner in found if winner.device] == ["99.9"]
    assert list(found[0].config) == ["b", "a"]
    assert read_file(str(path), WINNERS, kernel="another", dtype=key.dtype) == []


def test_verdicts_on_unranked_configurations(tmp_path: Path, key: TuningKey) -> None:
    path, config = tmp_path / "tuning.db", {"b": 2, "a": True}
    _fill(path, key)
    with Database.open(path) as database:
        study = database.study(key, None)
        run = start_run(database, study, sampler="verify")
        for outcome in (Outcome.WRONG_RESULT, Outcome.OK):
            add_trial(database, study, run, Trial(config, outcome), phase="final")
        stored = database.read(CHECKS, kernel=key.kernel, dtype=key.dtype)
    assert [check.passed for check in stored] == [False, True]
    assert {check.config for check in stored} == {config_key(config)}
    assert all(check.key == key for check in stored)
    assert read_file(str(path), CHECKS, kernel=key.kernel, dtype=key.dtype) == stored
    assert read_file(str(path), CHECKS, kernel=key.kernel, dtype="float64") == []


def test_no_database(tmp_path: Path) -> None:
    assert read_file(str(tmp_path / "absent.db"), WINNERS, kernel="k", dtype="float32") == []
    assert not (tmp_path / "absent.db").exists()


def test_every_other_case_is_left_to_the_database(tmp_path: Path, key: TuningKey) -> None:
    newer, other, damaged = tmp_path / "newer.db", tmp_path / "other.db", tmp_path / "damaged.db"
    _fill(newer, key)
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.commit()
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.commit()
    damaged.write_bytes(b"SQLite format 3\0" + bytes(5000))
    for place in (newer, other, damaged, tmp_path):
        assert read_file(str(place), WINNERS, kernel=key.kernel, dtype=key.dtype) is None
    assert read_file("postgresql://host/name", WINNERS, kernel=key.kernel, dtype=key.dtype) is None


FIRST = Problem("sgemm", {"M": 1, "N": 2}, "float32")
SECOND = Problem("sgemm", {"M": 3, "N": 2}, "float32")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    Database.open(path).close()
    return path


def add(path: Path, *misses: dict[str, Any], timeout_s: float = 0.05) -> bool:
    rows = [*misses] or [miss_row(FIRST, "H200", "nearest", 1)]
    return write_file(path, ADD_MISSES, rows, timeout_s=timeout_s)


def counts(path: Path) -> list[tuple[Problem, str, str, int]]:
    with Database.open(path) as database:
        return [(miss.problem, miss.gpu_name, miss.tier, miss.count) for miss in database.misses()]


def test_it_adds_to_what_the_database_has_counted(path: Path) -> None:
    with Database.open(path) as database:
        record_miss(database, FIRST, "H200", "nearest", 5)
        before = database.misses()[0].last_at
    other_order = Problem("sgemm", {"N": 2, "M": 1}, "float32")
    assert add(path, miss_row(other_order, "H200", "nearest", 2), miss_row(SECOND, "H200", "default", 3))
    assert counts(path) == [(FIRST, "H200", "nearest", 7), (SECOND, "H200", "default", 3)]
    with Database.open(path) as database:
        record_miss(database, SECOND, "H200", "default", 1)
        assert [miss.count for miss in database.misses()] == [7, 4]
        assert all(miss.last_at > before for miss in database.misses())


def test_no_file_is_made(tmp_path: Path) -> None:
    assert not add(tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_database_of_autotile_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough for SQLite to read its header: " + 100 * "x")
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE misses (count)")
    for name in ("text", "other.db"):
        before = (tmp_path / name).read_bytes()
        assert not add(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("revision", ["0002", "9999", None])
def test_another_schema_is_left_alone(path: Path, revision: str | None) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"DELETE FROM {VERSION_TABLE}")
        if revision is not None:
            connection.execute(f"INSERT INTO {VERSION_TABLE} VALUES (?)", (revision,))
    assert not add(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM misses").fetchone() == (0,)


def test_a_locked_database_is_given_up_fast(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        start_s = time.monotonic()
        assert not add(path)
        assert time.monotonic() - start_s < 1.0
        other.execute("ROLLBACK")
    assert add(path)


@pytest.mark.parametrize(("journal", "written"), [("WAL", False), ("DELETE", True)])
def test_a_log_on_a_network_file_system_is_left_to_the_engine(
    path: Path, monkeypatch: pytest.MonkeyPatch, journal: str, written: bool
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={journal}")
    monkeypatch.setattr(winners, "network_file_system", lambda _: "nfs4")
    assert add(path) is written
    monkeypatch.undo()
    assert len(counts(path)) == written
