"""Roles on a PostgreSQL server: a reader serves and writes nothing; no output has a password."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from postgresql_server import PostgresqlServer
from sqlalchemy import create_engine, text

import autotile
from autotile.database import upgrade
from autotile.database.database import Database
from autotile.errors import DatabaseError
from autotile.settings import worker_environment

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
ROLES = ("autotile_owner", "autotile_tuner", "autotile_reader")


@pytest.fixture(scope="module")
def roles(postgresql: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """The server with the roles that the guide's SQL creates, in a database of its own."""
    postgresql.execute("CREATE DATABASE team")
    (block,) = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    statements = re.sub(r"--.*", "", block).replace("'...'", f"'{postgresql.password}'").split(";")
    postgresql.execute(*filter(str.strip, statements), database="team")
    yield postgresql
    postgresql.execute("DROP DATABASE team WITH (FORCE)", *(f"DROP ROLE {role}" for role in ROLES))


@pytest.fixture
def url(roles: PostgresqlServer, tune: Any) -> Callable[[str], str]:
    """Return a function that returns the URL of a role; the owner has created the tables, and the tuner has tuned."""

    def of_role(name: str) -> str:
        return roles.url(f"autotile_{name}", "team")

    Database.open(of_role("owner")).close()
    answer = tune(f"--db={of_role('tuner')}", "--trials=6", "--json")
    assert (answer.code, roles.password in answer.out + answer.err) == (0, False), answer
    return of_role


def test_a_reader_serves_and_writes_nothing(
    roles: PostgresqlServer, url: Any, run: Any, scale_toml: Path, tmp_path: Path
) -> None:
    reader, start = url("reader"), len(roles.log())
    for words in (
        ("best", scale_toml, "n=1048576"),
        ("list",),
        ("trials", "scale"),
        ("plot", "scale", "n=1048576"),
        ("report", "-o", tmp_path / "report.html"),
        ("misses",),
        ("db", "check"),
        ("db", "path"),
    ):
        for flags in ((), ("--json",)):
            answer = run(*words, f"--db={reader}", *flags)
            assert answer.code == 0, (words, answer)
            assert roles.password not in answer.out + answer.err, words
    assert roles.password not in (tmp_path / "report.html").read_text()
    assert "ERROR" not in roles.log()[start:]
    kernel = autotile.get_best_kernel(scale_toml, n=1048576, device="h200", database=reader)
    assert (kernel.choice.tier, roles.password in kernel.explain()) == ("exact", False)


def test_what_a_role_may_not_do_is_said_without_its_password(
    roles: PostgresqlServer, url: Any, run: Any, tune: Any
) -> None:
    for words in (
        ("tune", "matmul_naive", "M=64", "N=64", "K=64", "--replay", f"--db={url('reader')}"),
        ("clean", "--older-than", "0d", f"--db={url('reader')}"),
        ("list", f"--db={roles.url('nobody_here', 'team')}"),
        ("list", f"--db={roles.url('autotile_reader', 'no_such_database')}"),
        ("list", f"--db={url('reader')}&bad=option"),
        ("list", f"--db={url('reader')}?bad=option"),
    ):
        for flags in ((), ("--json",)):
            answer = run(*words, *flags)
            assert answer.code != 0, (words, answer)
            assert roles.password not in answer.out + answer.err
    refused = tune(f"--db={url('reader')}")
    assert "reading needs SELECT" in refused.err.replace("\n", " ")


def test_an_upgrade_that_gets_no_lock_changes_nothing_and_says_why(server_url: str) -> None:
    with Database.open(server_url) as database:
        plain = create_engine(database._location.reveal())  # type: ignore[union-attr]
        with plain.begin() as connection:  # back to the schema before the newest
            from alembic import command
            from alembic.config import Config

            config = Config(attributes={"connection": connection})
            config.set_main_option("script_location", str(upgrade._MIGRATIONS))
            command.stamp(config, "0006", purge=True)
            connection.execute(text("DROP TABLE claims"))
            connection.execute(text("ALTER TABLE trials DROP COLUMN gpu"))
        with plain.begin() as holder:
            holder.execute(text("LOCK TABLE trials IN ACCESS SHARE MODE"))
            with pytest.raises(DatabaseError, match="held a lock for too long"):
                Database.open(server_url, server_timeout_s=0.5)
        with plain.connect() as connection:
            assert upgrade.schema_revision(connection, server_url) == "0006"
        plain.dispose()
    with Database.open(server_url) as database:
        assert database.check().ok
        assert database.check().revision == upgrade.SCHEMA_REVISION


def test_workers_inherit_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTILE_DB", "postgresql://me:s3cret@host/name")
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    assert "s3cret" not in str(worker_environment())
