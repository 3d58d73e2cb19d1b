"""Locations of databases and roles on a server: no password is shown, no folder takes the name of a URL."""

import os
import re
import socket
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from faults.traces import processes
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from stored_runs import change

import autotile
from autotile.database import engine
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.errors import DatabaseError, InputError
from autotile.settings import worker_environment

SECRET = "s3cr3t"

LOCATIONS = [
    f"postgresql://u:{SECRET}@h/d",
    f"postgresql://u@h/d?Password={SECRET}",
    f"postgresql://u@h/d?sslpassword={SECRET}&passfile=/me/.pgpass",
    f"postgresql://u:%73{SECRET}@h/d",
    f"postgresql+nosuch://u:{SECRET}@h/d",
    f"postgresql://u:{SECRET}",
    f"postgres:{SECRET}@h/d",
    f"u:{SECRET}@h/d?x=.json",
    f"http://u:{SECRET}@h/winners.json",
    f"postgresql://u@h/d;password={SECRET}",
    f"Server=h;User Id=u;Password={SECRET}",
    "sqlite:team.db",
    "~no-such-user/team.db",
]


READABLE = LOCATIONS[:4]
"""Those that are understood, and so can be shown without their password."""


@pytest.fixture(params=LOCATIONS)
def location(request, tmp_path, monkeypatch):
    """A location that cannot be opened, in an empty current folder that stays empty."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return str(request.param)


def test_an_error_shows_no_password_and_leaves_nothing(run, location, scale_toml, recording, monkeypatch):
    for words in (
        ("db", "diff", location, location),
        ("db", "merge", location, "-o", "team.db"),
        ("db", "merge", location, "-o", location),
        ("list", "--db", location),
        ("space", location),
        ("db", "check", "--db", location),
        ("tune", scale_toml, "n=4096", f"--replay={recording}", "--db", location),
        ("tune", scale_toml, "n=4096", location),
        ("best", scale_toml, "n=4096", "--db", location),
    ):
        answer = run(*words, "--json")
        answer.is_refused()
        assert answer.err.count("\n") == 1, answer
        assert SECRET not in answer.out + answer.err
        assert list(Path.cwd().iterdir()) == []
    monkeypatch.setenv("AUTOTILE_DB", location)
    answer = run("db", "path")
    assert SECRET not in answer.out + answer.err
    assert answer.code == (0 if location in READABLE else 2)
    assert run("db", "path", "--db", location).code == 2


_SEPARATORS = st.sampled_from([";", "#", "&", "?", ":", "@", "/", "//", "=", " ", ",", "%3B", "%3D", "%40", "%23"])
_KEYS = st.sampled_from(["password", "Password", "pass%77ord", "%70wd", "PWD", "sslpassword", "passwd"])
_STARTS = st.sampled_from(
    [
        *("postgresql://u@h/d", "postgresql://h", "postgresql://u@h/d?sslmode=disable", "postgresql+psycopg2://"),
        *("Server=h;User Id=u", "host=h user=u", "jdbc:postgresql://h/d", "sqlite:///team.db", "mysql://u@h/d"),
        *("postgres:", "h/d", ""),
    ]
)
_MISSPELT = st.one_of(
    st.builds("{}{}{}={}".format, _STARTS, _SEPARATORS, _KEYS, st.just(SECRET)),
    st.builds("{}{}{}{}={}@h".format, _STARTS, _SEPARATORS, _SEPARATORS, _KEYS, st.just(SECRET)),
    st.builds("{}{}:{}@h{}d".format, _STARTS, _SEPARATORS, st.just(SECRET), _SEPARATORS),
    st.builds("{}@:{}{}@h".format, _STARTS, st.just(SECRET), _SEPARATORS),
).filter(lambda location: not location.startswith("/"))  # a folder may be named "password=1"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(location=_MISSPELT)
@example(location=f"sqlite:///team.db@:{SECRET}?@h")
def test_no_misspelling_shows_the_password(run, monkeypatch, tmp_path, location):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    monkeypatch.setenv("AUTOTILE_DB", location)
    answers = [
        *(run(*words) for words in (["db", "path"], ["list", "--json"], ["best", "sgemm_2d", "M=1", "N=1", "K=1"])),
        *(run(*words) for words in (["list", "--db", location], ["space", location], ["trials", "x", location])),
    ]
    for answer in answers:
        assert SECRET not in answer.out + answer.err
    try:
        shown = autotile.db_path(location)
    except autotile.AutotileError as error:
        shown = str(error)
    assert SECRET not in shown
    for database in (location, Path(location)):
        with pytest.raises(autotile.AutotileError) as caught:
            autotile.best("sgemm_2d", {"M": 1, "N": 1, "K": 1}, database=database)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_silent_server_is_said_to_be_waited_for_and_is_given_up_soon(monkeypatch):
    pytest.importorskip("psycopg")

    def run_to_the_end(words: str) -> None:
        command = [sys.executable, "-m", "autotile", *words.split()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            first = process.stderr.readline()
            assert process.poll() is None  # it is said while it waits
            out, rest = process.communicate(timeout=60)
        seconds = re.match(r"waiting for up to (\d+) s for the database .*@127\.0\.0\.1", first)
        assert int(seconds[1]) <= 5
        assert process.returncode == 2
        assert "the server does not answer" in rest
        assert SECRET not in out + first + rest

    commands = ("list", "best sgemm_2d M=1 N=1 K=1", "trials sgemm_2d")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening, ThreadPoolExecutor() as side_by_side:
        monkeypatch.setenv("AUTOTILE_DB", f"postgresql://me:{SECRET}@127.0.0.1:{listening.getsockname()[1]}/tune")
        list(side_by_side.map(run_to_the_end, commands))


def test_what_cannot_be_a_database_is_refused_in_words(run, tune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("loop.db").symlink_to("loop.db")
    Path("unreadable.db").touch(mode=0)
    best = partial(run, "best", "sgemm_2d", "M=1", "N=1", "K=1")
    for path, words in (
        *((long, "File name too long") for long in ("x" * 5000, "y" * 300, "z" * 250, "a/" * 3000)),
        ("folder", "is a folder"),
        ("/dev/null", "is not a regular file"),
        ("loop.db", "Too many levels of symbolic links"),
        ("unreadable.db", "cannot read the database"),
        ("a\0b", "is not the path of a database"),
    ):
        if path == "unreadable.db" and os.access(path, os.R_OK):
            continue  # root may read every file
        for command in (partial(run, "list"), best, partial(run, "db", "check"), tune):
            answer = command("--db", path, "--json")
            answer.is_refused(words)
            assert answer.err.count("\n") == 1
            assert len(answer.err) < 500


PAGE = Path(__file__).parents[2] / "docs" / "database.md"
ROLES = ("autotile_owner", "autotile_tuner", "autotile_reader")


@pytest.fixture(scope="module")
def roles(postgresql):
    """The server with the roles that the guide's SQL creates, in a database of its own."""
    postgresql.execute("CREATE DATABASE team")
    (block,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    statements = re.sub(r"--.*", "", block).replace("'...'", f"'{postgresql.password}'").split(";")
    postgresql.execute(*filter(str.strip, statements), database="team")
    yield postgresql
    postgresql.execute("DROP DATABASE team WITH (FORCE)", *(f"DROP ROLE {role}" for role in ROLES))


@pytest.fixture
def url(roles, tune, monkeypatch):
    """Return a function that returns the URL of a role; the owner has created the tables, and the tuner has tuned."""
    monkeypatch.setenv("PGPASSWORD", roles.password)

    def of_role(name: str) -> str:
        return roles.url(f"autotile_{name}", "team", has_password=False)

    Database.open(of_role("owner")).close()
    answer = tune(f"--db={of_role('tuner')}", "--trials=6", "--json")
    assert (answer.code, roles.password in answer.out + answer.err) == (0, False), answer
    return of_role


def test_a_reader_serves_and_writes_nothing(roles, url, run, scale_toml, tmp_path):
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


def test_what_a_role_may_not_do_is_said_without_its_password(roles, url, run, tune):
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


def test_an_upgrade_that_gets_no_lock_changes_nothing_and_says_why(server_url):
    with Database.open(server_url) as database:
        change(
            database,  # back to the schema before the newest
            *("DROP INDEX trials_of_run", "DROP INDEX trials_of_finals"),
            "CREATE INDEX trials_by_run ON trials (run_id)",
            f"UPDATE {engine.VERSION_TABLE} SET version_num = '0007'",
        )
        with database.writing() as holder:
            holder.execute(text("LOCK TABLE trials IN ACCESS SHARE MODE"))
            with pytest.raises(DatabaseError, match="held a lock for too long"):
                Database.open(server_url, server_timeout_s=0.5)
        with database.reading() as connection:
            assert engine.schema_revision(connection, server_url) == "0007"
    with Database.open(server_url) as database:
        found = check_database(database)
        assert (found.ok, found.revision) == (True, engine.SCHEMA_REVISION)


WITHOUT_PASSWORD = (
    *("postgresql://me@127.0.0.1:1/name", "postgresql://me@[::1]:1/name", "postgresql://me@[::1]:1,[::2]:2/name"),
    "postgresql://me@/name?host=127.0.0.1:1&host=127.0.0.1:2",
    "postgresql://me@127.0.0.1/name?passfile=/home/me/.pgpass",
)
WITH_PASSWORD = (
    "postgresql://me:s3cret@127.0.0.1:1/name",
    *(f"postgresql://me@127.0.0.1:1/name?{key}=s3cret" for key in ("password", "sslpassword")),
    *("postgresql://me:12345/x@127.0.0.1:1/name", "postgresql://me:1@127.0.0.1:1/name"),
    *("postgresql://me@[::1]:1:s@127.0.0.1/name", "password=s", "host=h;Password=s"),
)


@pytest.mark.parametrize("url", [*WITHOUT_PASSWORD, *WITH_PASSWORD])
def test_what_may_hold_a_password_is_refused_on_the_command_line(run, url):
    may_hold_one = url in WITH_PASSWORD
    for option in (("--db", url), (f"--db={url}",), ("-o", url), (f"-o{url}",), (f"-o={url}",)):
        answer = run("db", "merge", "a.db", *option, "--json")
        answer.is_refused(*("~/.pgpass", "PGPASSWORD", "AUTOTILE_DB", "config.toml") if may_hold_one else ())
        assert ("password on the command line" in answer.err) == may_hold_one
        assert "s3cret" not in answer.out + answer.err


def test_no_process_of_a_session_shows_the_password(roles, server_url, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTILE_DB", server_url)
    monkeypatch.setenv("PGPASSWORD", roles.password)
    monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path / "cache"))  # so that a worker has something to compile
    monkeypatch.setenv("AUTOTILE_TEST_OF", str(tmp_path))
    words = [sys.executable, "-m", "autotile", "tune", "sgemm_2d", "M=1024", "N=1024", "K=1024", "--replay"]
    shown: set[str] = set()
    with subprocess.Popen([*words, "--trials=2", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as session:
        while session.poll() is None:
            shown |= _shown_by(f"AUTOTILE_TEST_OF={tmp_path}\0")
            time.sleep(0.02)
        output = str(session.communicate())
    assert session.returncode == 0, output
    assert roles.password not in output
    assert any("autotile.workers." in text for text in shown)
    assert not [text for text in shown if roles.password in text]


def _shown_by(mark: str) -> set[str]:
    """Return the arguments of each process of a session, and the environment of those that are autotile's workers."""
    own = ((arguments, environment) for _, _, arguments, environment in processes() if mark in environment)
    return {arguments + (environment if "autotile.workers." in arguments else "") for arguments, environment in own}


def test_workers_inherit_no_password(monkeypatch, run):
    monkeypatch.setenv("AUTOTILE_DB", "postgresql://me:s3cret@host/name")
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    assert "s3cret" not in str(worker_environment())
    offered: list[dict[str, str]] = []

    def refuse(*_: Any, **__: Any) -> None:
        offered.append(dict(os.environ))
        raise InputError("no scheduler")

    monkeypatch.setattr(import_module("autotile.tuning.cluster.worker"), "check_scheduler", refuse)
    assert run("worker", "tcp://127.0.0.1:1").code == 2
    assert len(offered) == 1
    assert "s3cret" not in str(offered)
