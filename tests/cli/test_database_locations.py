"""Locations of databases on the command line: no password is shown, and no folder takes the name of a URL."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import traceback
from contextlib import closing
from pathlib import Path

import pytest
from answers import Run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import autotile

SECRET = "s3cr3t"

LOCATIONS = [
    f"postgresql://u:{SECRET}@h/d",
    f"postgresql://u@h/d?Password={SECRET}",
    f"postgresql://u@h/d?sslpassword={SECRET}&passfile=/me/.pgpass",
    f"postgresql://u:%73{SECRET}@h/d",
    f"postgresql+nosuch://u:{SECRET}@h/d",
    f"postgresql://u:{SECRET}",
    f"postgresql:/u:{SECRET}@h",
    f"postgres//u:{SECRET}@h/d",
    f"postgres:{SECRET}@h/d",
    f"u:{SECRET}@h/d?x=.json",
    f"http://u:{SECRET}@h/winners.json",
    f"postgresql://u@h/d;password={SECRET}",
    f"postgresql://u@h/d?sslmode=disable;password={SECRET}",
    f"postgresql://u@h/d#password={SECRET}",
    f"postgresql://u@h/d;pass%77ord={SECRET}",
    f"Server=h;User Id=u;Password={SECRET}",
    f"@:{SECRET}@h",
    "sqlite:team.db",
    "~no-such-user/team.db",
]


READABLE = LOCATIONS[:4]
"""Those that are understood, and so can be shown without their password."""


@pytest.fixture(params=LOCATIONS)
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A location that cannot be opened, in an empty current folder that stays empty."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return str(request.param)


@pytest.mark.parametrize(
    "words",
    [
        ["db", "diff", "{}", "{}"],
        ["db", "merge", "{}", "-o", "team.db"],
        ["db", "merge", "{}", "-o", "{}"],
        ["list", "--db", "{}"],
        ["space", "{}"],
        ["db", "check", "--db", "{}"],
        ["tune", "{scale}", "n=4096", "--replay={recording}", "--db", "{}"],
        ["tune", "{scale}", "n=4096", "{}"],
        ["best", "{scale}", "n=4096", "--db", "{}"],
    ],
    ids=" ".join,
)
def test_an_error_shows_no_password_and_leaves_nothing(
    run: Run, location: str, words: list[str], scale_toml: Path, recording: Path
) -> None:
    given = [word.format(location, scale=scale_toml, recording=recording) for word in words]
    answer = run(*given, "--json")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert json.loads(answer.out)["error"]["message"] in answer.err
    assert SECRET not in answer.out + answer.err
    assert list(Path.cwd().iterdir()) == []


def test_the_path_of_a_database_shows_no_password(run: Run, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(location=_MISSPELT)
@example(location=f"sqlite:///team.db@:{SECRET}?@h")
def test_no_misspelling_shows_the_password(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, location: str
) -> None:
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


@pytest.mark.parametrize(
    "words", [["list"], ["best", "sgemm_2d", "M=1", "N=1", "K=1"], ["trials", "sgemm_2d"]], ids=" ".join
)
def test_a_silent_server_is_said_to_be_waited_for_and_is_given_up_soon(words: list[str]) -> None:
    pytest.importorskip("psycopg")
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as listening:
        url = f"postgresql://me:{SECRET}@127.0.0.1:{listening.getsockname()[1]}/tune"
        command = [sys.executable, "-m", "autotile", *words]
        with subprocess.Popen(
            command, env={**os.environ, "AUTOTILE_DB": url}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            first = process.stderr.readline()
            assert process.poll() is None  # it is said while it waits
            out, rest = process.communicate(timeout=60)
    seconds = re.match(r"waiting for up to (\d+) s for the database .*@127\.0\.0\.1", first)
    assert seconds is not None
    assert int(seconds[1]) <= 5
    assert process.returncode == 2
    assert "the server does not answer" in rest
    assert SECRET not in out + first + rest


@pytest.fixture
def folder_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("loop.db").symlink_to("loop.db")
    Path("unreadable.db").touch(mode=0)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("x" * 5000, "File name too long"),
        ("y" * 300, "File name too long"),
        ("a/" * 3000, "File name too long"),
        ("folder", "is a folder"),
        ("/dev/null", "is not a regular file"),
        ("loop.db", "Too many levels of symbolic links"),
        ("unreadable.db", "cannot read the database"),
        ("a\0b", "is not the path of a database"),
    ],
    ids=["long", "long name", "long folders", "folder", "device", "loop", "unreadable", "NUL"],
)
@pytest.mark.usefixtures("folder_of_faults")
@pytest.mark.parametrize("command", [["list"], ["best", "sgemm_2d", "M=1", "N=1", "K=1"], ["db", "check"], ["tune"]])
def test_what_cannot_be_a_database_is_refused_in_words(
    run: Run, tune: Run, path: str, words: str, command: list[str]
) -> None:
    if path == "unreadable.db" and os.access(path, os.R_OK):
        pytest.skip("root may read every file")
    answer = tune("--db", path, "--json") if command == ["tune"] else run(*command, "--db", path, "--json")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert words in answer.err
    assert len(answer.err) < 500
    assert answer.document["error"]["message"] in answer.err
