"""Names and reasons of any characters in tables and in JSON, and rows that cannot be used, on the command line."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from answers import Run
from stored_runs import add_trial, record_miss, start_run

from autotile.core.model import Outcome, Trial
from autotile.core.text import shown_text
from autotile.database.database import Database
from autotile.database.keys import TuningKey

ODD = "a\nb\x1b[31m\x1b]0;t\x07\u202ec\u2066\u200b\r\x9b31m\u2028"
"""A line break, sequences of a terminal, directions, an invisible character, and a break of Unicode."""


def is_plain(text: str) -> bool:
    return all(one == "\n" or unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for one in text)


@pytest.fixture
def odd(tmp_path: Path, key: TuningKey) -> Path:
    odd_key = replace(key, kernel=ODD, gpu_name=f"GPU {ODD}", sizes={f"N{ODD}": 7}, nvrtc_version=ODD)
    with Database.open(tmp_path / "tuning.db") as database:
        study = database.study(odd_key, None)
        run = start_run(database, study, sampler=ODD, host=ODD)
        trial = Trial({f"BM{ODD}": ODD}, Outcome.COMPILE_FAILED, f"#error {ODD}", "compile")
        add_trial(database, study, run, trial)
        add_trial(database, study, run, replace(trial, reason="\x1b[2J first\nsecond"))
        record_miss(database, odd_key.problem, odd_key.gpu_name, "default")
    return tmp_path / "tuning.db"


@pytest.mark.parametrize("command", [["list"], ["trials", ODD], ["list", "--misses"], ["db", "check"]])
def test_a_table_is_not_broken_and_the_terminal_sees_no_control(run: Run, odd: Path, command: list[str]) -> None:
    answer = run(*command)
    assert is_plain(answer.out)
    assert is_plain(answer.err)
    assert "\\x1b" in answer.out or command == ["db", "check"]
    document = run(*command, "--json").out
    assert document.isascii()
    assert json.loads(document) is not None


def test_a_row_of_a_table_is_one_line(run: Run, odd: Path) -> None:
    lines = run("list").out.rstrip("\n").split("\n")
    assert len(lines) == 3
    assert len({len(line) for line in lines[:1]}) == 1


def test_what_is_escaped() -> None:
    assert shown_text("a\nb\t\x1b[0m") == "a b \\x1b[0m"
    assert shown_text("a  \r\n  b\tc") == "a b c"
    assert shown_text("a\r\nb\tc\x00", lines=True) == "a\nb   c\\x00"
    assert shown_text("a\rb", lines=True) == "a\\rb"
    assert shown_text("\u202e\ud800\u2028\xa0") == "\\u202e\\ud800\\u2028\\xa0"
    assert shown_text("Größe \u03bcs \u4e2d \U0001f600 x=1") == "Größe \u03bcs \u4e2d \U0001f600 x=1"
    assert is_plain(shown_text("".join(map(chr, range(0x3000)))))


def test_bad_rows_are_remarked_once_and_listed(run: Run, odd: Path) -> None:
    with sqlite3.connect(odd) as connection:
        connection.execute("UPDATE trials SET config = '[' WHERE id = 1")
    answer = run("trials", ODD, "--json")
    assert [trial["trial"] for trial in answer.document] == [2]
    assert answer.err.count("trials 1: config: expected object") == 1
    found = run("db", "check", "--json")
    assert found.code == 1
    assert found.document["bad_rows"] == [
        {"table": "trials", "id": 1, "field": "config", "reason": "expected object, got something that is not JSON"}
    ]
    shown = run("db", "check")
    assert (shown.code, "-o NEW.db" in shown.out) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ["--no-such", "--json"],
        ["best", "--json"],
        ["db", "check", "--db", "/", "--json"],
        ["list", os.fsdecode(b"\xff"), "--json"],
        ["import", "/dev/null", "--json"],
    ],
)
def test_an_error_is_one_document(tmp_path: Path, odd: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "autotile", *words]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "AUTOTILE_DB": str(odd)})
    document = json.loads(done.stdout.decode("ascii"), parse_constant=pytest.fail)
    assert set(document["error"]) >= {"kind", "message"}
    assert b"Traceback" not in done.stderr
    assert done.returncode in (1, 2)
