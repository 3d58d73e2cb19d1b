"""Counts of misses, written with the standard library alone: as `Database` writes them, or not at all."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from autotile.core.model import Problem
from autotile.database import fast_access
from autotile.database.database import Database
from autotile.database.fast_access import Miss, add_misses_fast
from autotile.database.structure import VERSION_TABLE

FIRST = Problem("sgemm", {"M": 1, "N": 2}, "float32")
SECOND = Problem("sgemm", {"M": 3, "N": 2}, "float32")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    Database.open(path).close()
    return path


def add(path: Path, *misses: Miss, timeout_s: float = 0.05) -> bool:
    return add_misses_fast(path, misses or [Miss(FIRST, "H200", "nearest", 1)], timeout_s=timeout_s)


def counts(path: Path) -> list[tuple[Problem, str, str, int]]:
    with Database.open(path) as database:
        return [(miss.problem, miss.gpu_name, miss.tier, miss.count) for miss in database.misses()]


def test_it_adds_to_what_the_database_has_counted(path: Path) -> None:
    with Database.open(path) as database:
        database.record_miss(FIRST, "H200", "nearest", 5)
        before = database.misses()[0].last_at
    other_order = Problem("sgemm", {"N": 2, "M": 1}, "float32")
    assert add(path, Miss(other_order, "H200", "nearest", 2), Miss(SECOND, "H200", "default", 3))
    assert counts(path) == [(FIRST, "H200", "nearest", 7), (SECOND, "H200", "default", 3)]
    with Database.open(path) as database:
        database.record_miss(SECOND, "H200", "default", 1)
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
    monkeypatch.setattr(fast_access, "network_file_system", lambda _: "nfs4")
    assert add(path) is written
    monkeypatch.undo()
    assert len(counts(path)) == written
