"""Locations of databases on the command line: no password is shown, and no folder takes the name of a URL."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    "sqlite:team.db",
    "~no-such-user/team.db",
]


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
    assert answer.code == (0 if location.startswith(("postgresql://u@", "postgresql://u:")) and "@" in location else 2)
    assert run("db", "path", "--db", location).code == 2
