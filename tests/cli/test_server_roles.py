"""Roles on a PostgreSQL server: a reader serves and writes nothing; no output has a password."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import Run
from postgresql_server import PostgresqlServer
from sqlalchemy import create_engine, text

import autotile
from autotile.database import engine
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.errors import DatabaseError, InputError
from autotile.settings import worker_environment

PAGE = Path(__file__).parents[2] / "docs" / "database.md"
ROLES = ("autotile_owner", "autotile_tuner", "autotile_reader")


@pytest.fixture(scope="module")
def roles(postgresql: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """The server with the roles that the guide's SQL creates, in a database of its own."""
    postgresql.execute("CREATE DATABASE team")
    (block,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    statements = re.sub(r"--.*", "", block).replace("'...'", f"'{postgresql.password}'").split(";")
    postgresql.execute(*filter(str.strip, statements), database="team")
    yield postgresql
    postgresql.execute("DROP DATABASE team WITH (FORCE)", *(f"DROP ROLE {role}" for role in ROLES))


@pytest.fixture
def url(roles: PostgresqlServer, tune: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that returns the URL of a role; the owner has created the tables, and the tuner has tuned."""
    monkeypatch.setenv("PGPASSWORD", roles.password)

    def of_role(name: str) -> str:
        return roles.url(f"autotile_{name}", "team", has_password=False)

    Database.open(of_role("owner")).close()
    answer = tune(f"--db={of_role('tuner')}", "--trials=6", "--json")
    assert (answer.code, roles.password in answer.out + answer.err) == (0, False), answer
    return of_role


def test_a_reader_serves_and_writes_nothing(
    roles: PostgresqlServer, url: Any, run: Run, scale_toml: Path, tmp_path: Path
) -> None:
    reader, start = url("reader"), len(roles.log())
    for words in (
        ("best", scale_toml, "n=1048576"),
        ("list",),
        ("trials", "scale"),
        ("report", "-o", tmp_path / "report.html"),
        ("list", "--misses"),
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
    roles: PostgresqlServer, url: Any, run: Run, tune: Run
) -> None:
    for words in (
        ("tune", "matmul_naive", "M=64", "N=64", "K=64", "--replay", f"--db={url('reader')}"),
        ("db", "clean", "--older-than", "0d", f"--db={url('reader')}"),
        ("list", f"--db={roles.url('nobody_here', 'team', has_password=False)}"),
        ("list", f"--db={roles.url('autotile_reader', 'no_such_database', has_password=False)}"),
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
            config.set_main_option("script_location", str(engine._MIGRATIONS))
            command.stamp(config, "0006", purge=True)
            for index in ("trials_of_run", "trials_of_finals"):
                connection.execute(text(f"DROP INDEX {index}"))
            connection.execute(text("CREATE INDEX trials_by_run ON trials (run_id)"))
            connection.execute(text("DROP TABLE claims"))
            connection.execute(text("ALTER TABLE trials DROP COLUMN gpu"))
        with plain.begin() as holder:
            holder.execute(text("LOCK TABLE trials IN ACCESS SHARE MODE"))
            with pytest.raises(DatabaseError, match="held a lock for too long"):
                Database.open(server_url, server_timeout_s=0.5)
        with plain.connect() as connection:
            assert engine.schema_revision(connection, server_url) == "0006"
        plain.dispose()
    with Database.open(server_url) as database:
        assert check_database(database).ok
        assert check_database(database).revision == engine.SCHEMA_REVISION


@pytest.mark.parametrize("option", [("--db", "{}"), ("--db={}",), ("-o", "{}")], ids=" ".join)
@pytest.mark.parametrize("query", ["", "?password=s3cret", "?sslpassword=s3cret"])
def test_a_password_on_the_command_line_is_refused(run: Run, option: tuple[str, ...], query: str) -> None:
    url = f"postgresql://me{'' if query else ':s3cret'}@127.0.0.1:1/name{query}"
    answer = run("db", "merge", "a.db", *(word.format(url) for word in option), "--json")
    assert answer.code == 2
    for alternative in ("~/.pgpass", "PGPASSWORD", "AUTOTILE_DB", "config.toml"):
        assert alternative in answer.document["error"]["message"]
    assert "s3cret" not in answer.out + answer.err


FORMS = [("--db", "{}"), ("--db={}",), ("-o", "{}"), ("-o{}",), ("-o={}",)]


@pytest.mark.parametrize("option", FORMS, ids=" ".join)
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me@127.0.0.1:1/name",
        "postgresql://me@[::1]:1/name",
        "postgresql://me@[::1]:1,[::2]:2/name",
        "postgresql://me@/name?host=127.0.0.1:1&host=127.0.0.1:2",
        "postgresql://me@127.0.0.1/name?passfile=/home/me/.pgpass",
    ],
)
def test_a_url_without_a_password_is_not_refused(run: Run, option: tuple[str, ...], url: str) -> None:
    answer = run("db", "merge", "a.db", *(word.format(url) for word in option), "--json")
    assert "password on the command line" not in answer.out


@pytest.mark.parametrize("option", FORMS, ids=" ".join)
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:12345/x@127.0.0.1:1/name",
        "postgresql://me:1@127.0.0.1:1/name",
        "postgresql://me@[::1]:1:s@127.0.0.1/name",
        "password=s",
        "host=h;Password=s",
    ],
)
def test_what_may_be_a_password_is_refused(run: Run, option: tuple[str, ...], url: str) -> None:
    answer = run("db", "merge", "a.db", *(word.format(url) for word in option), "--json")
    assert "password on the command line" in answer.document["error"]["message"]


def test_no_process_of_a_session_shows_the_password(
    roles: PostgresqlServer, server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTILE_DB", server_url)
    monkeypatch.setenv("PGPASSWORD", roles.password)
    monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path / "cache"))  # so that a worker has something to compile
    monkeypatch.setenv("AUTOTILE_TEST_OF", str(tmp_path))
    words = [sys.executable, "-m", "autotile", "tune", "sgemm_2d", "M=1024", "N=1024", "K=1024", "--replay"]
    shown: dict[int, str] = {}
    with subprocess.Popen([*words, "--trials=2", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as session:
        while session.poll() is None:
            shown |= _shown_by_children(f"AUTOTILE_TEST_OF={tmp_path}\0", session.pid)
            assert roles.password not in _read(session.pid, "cmdline")
            time.sleep(0.005)
        output = str(session.communicate())
    assert session.returncode == 0, output
    assert roles.password not in output
    assert any("autotile.workers." in text for text in shown.values())
    assert not [text for text in shown.values() if roles.password in text]


def _shown_by_children(mark: str, session: int) -> dict[int, str]:
    """Return the arguments of each process of a session, and the environment of those that are autotile's workers."""
    found: dict[int, str] = {}
    for process in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
        arguments, environment = _read(process, "cmdline"), _read(process, "environ")  # in this order: a program begins
        if mark in environment and process != session:
            found[process] = arguments + (environment if "autotile.workers." in arguments else "")
    return found


def _read(process: int, name: str) -> str:
    try:
        return (Path("/proc") / str(process) / name).read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def test_workers_inherit_no_password(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("AUTOTILE_DB", "postgresql://me:s3cret@host/name")
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    assert "s3cret" not in str(worker_environment())
    offered: list[dict[str, str]] = []

    def refuse(*_: Any, **__: Any) -> None:
        offered.append(dict(os.environ))
        raise InputError("no scheduler")

    monkeypatch.setattr("autotile.tuning.cluster.connection.check_scheduler", refuse)
    assert run("worker", "tcp://127.0.0.1:1").code == 2
    assert len(offered) == 1
    assert "s3cret" not in str(offered)
