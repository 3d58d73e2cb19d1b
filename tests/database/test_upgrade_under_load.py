"""Upgrades of a database that others use: a second program that upgrades, readers, writers, and an older program."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from stored_runs import add_trial, begin, measured

from autotile.database import engine
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.database.winners import SCHEMA_REVISION, VERSION_TABLE
from autotile.errors import DatabaseError

UPGRADE = """
import sys
from alembic import op
from autotile.database.care import check_database
from autotile.database.database import Database

drop_index = op.drop_index
def pause(*given):
    print("half way", flush=True)
    sys.stdin.readline()
    drop_index(*given)
op.drop_index = pause

print("opening", flush=True)
with Database.open(sys.argv[1]) as database:
    print(check_database(database).revision, flush=True)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("server_url")) if request.param == "postgresql" else str(tmp_path / "team.db")


def make_older(database: Database) -> None:
    """Give a database the schema of revision 0007."""
    with database.writing() as connection:
        for index in ("trials_of_run", "trials_of_finals"):
            connection.execute(text(f"DROP INDEX {index}"))
        connection.execute(text("CREATE INDEX trials_by_run ON trials (run_id)"))
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0007'"))


def start(location: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", UPGRADE, location]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_upgrades_another_waits_a_reader_reads_and_a_writer_goes_on(
    location: str, key: TuningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Database.open(location) as older:
        study, run = begin(older, key)
        add_trial(older, study, run, measured({"BM": 1}, 10.0))
        make_older(older)
        first = start(location)
        assert first.stdout is not None
        assert [first.stdout.readline() for _ in range(2)] == ["opening\n", "half way\n"]
        second = start(location)
        assert second.stdout is not None
        assert second.stdout.readline() == "opening\n"
        writing = threading.Thread(target=add_trial, args=(older, study, run, measured({"BM": 2}, 9.0)))
        writing.start()
        assert [best.trial.config for best in older.best(study_id=study)] == [{"BM": 1}]
        assert older.winner(key) is not None
        writing.join(0.1)
        assert writing.is_alive()
        assert first.communicate("go\n", timeout=60)[0] == f"{SCHEMA_REVISION}\n"
        assert second.communicate("go\n", timeout=60)[0] == f"{SCHEMA_REVISION}\n"
        writing.join(60)
        assert [best.trial.config for best in older.best(study_id=study)] == [{"BM": 2}]
        monkeypatch.setattr(engine, "SCHEMA_REVISION", "0007")
        for open_database in (Database.open, Database.open_readonly):
            with pytest.raises(DatabaseError, match=r"written by a newer autotile.*pip install --upgrade autotile"):
                open_database(location)


def test_a_long_upgrade_is_not_ended_and_waits_no_longer_for_locks_than_others(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Database.open(server_url) as database:
        make_older(database)
    found = []

    def migrate(connection: object, run: Callable[..., None] = engine._migrate) -> None:
        run(connection)
        names = ("statement_timeout", "lock_timeout")
        found.extend(connection.execute(text(f"SHOW {name}")).scalar_one() for name in names)  # type: ignore[attr-defined]

    monkeypatch.setattr(engine, "_migrate", migrate)
    Database.open(server_url).close()
    assert found == ["10min", "30s"]
