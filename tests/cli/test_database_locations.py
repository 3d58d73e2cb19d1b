"""Locations of databases on the command line: no password is shown, and no folder takes the name of a URL."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
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
        ["diff", "{}", "{}"],
        ["merge", "{}", "-o", "team.db"],
        ["merge", "{}", "-o", "{}"],
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
    run: Callable[..., Any], location: str, words: list[str], scale_toml: Path, recording: Path
) -> None:
    given = [word.format(location, scale=scale_toml, recording=recording) for word in words]
    answer = run(*given, "--json")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert json.loads(answer.out)["error"]["message"] in answer.err
    assert SECRET not in answer.out + answer.err
    assert list(Path.cwd().iterdir()) == []


def test_the_path_of_a_database_shows_no_password(
    run: Callable[..., Any], location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_no_misspelling_shows_the_password(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, location: str
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
