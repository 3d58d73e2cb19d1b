"""Every output with a time that was replayed from a recording says so."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from answers import Run

import autotile
from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.database.database import Database
from autotile.serving.choice import Choice, Contender, explain

N = "n=1048576"
TIME = re.compile(r"\d (us|\N{MICRO SIGN}s)\b")
MARK = "replayed"


@pytest.mark.usefixtures("recording", "tuned")
def test_of_a_command(run: Run, scale_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with autotile.session(scale_toml, n=1048576, db="other.db", replay="scale.npz") as other:
        other.evaluate([{"THREADS": 64, "WORK": 1}, {"THREADS": 128, "WORK": 2}])
    for words in (
        ["best", scale_toml, N, "--device", "h200"],
        ["best", scale_toml, "n=1000000", "--device", "h200"],
        ["trials", scale_toml],
        ["list"],
        ["db", "diff", "tuning.db", "other.db"],
        ["report", "tuning.db", "other.db"],
        ["db", "merge", "tuning.db", "other.db", "-o", "merged.db"],
    ):
        answer = run(*words)
        assert answer.code == 0
        assert TIME.search(answer.out) is None or MARK in answer.out, words


def test_of_a_plan(run: Run, scale_toml: Path, recording: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[[tune]]\nkernel = "{scale_toml}"\nsizes = {{ n = [1048576, 77] }}\ntrials = 3\n')
    answer = run("tune", "--plan", plan, "--replay", recording, "--db", tmp_path / "other.db")
    assert answer.code == 1
    for line in (*answer.out.splitlines(), *answer.err.splitlines()):
        assert not TIME.search(line) or MARK in line, line
    assert re.search(r"tuned +[\d.]+ us \(replayed\)", answer.out)
    assert "NVIDIA H200 (replayed)" in answer.out
    result = autotile.tune_plan(plan, replay=recording)
    assert " us (replayed)</td>" in result._repr_html_()
    assert result.entries[0].device_label == "NVIDIA H200 (replayed)"
    assert (result.entries[1].device_label, result.entries[1].time_text) == ("-", "-")


@pytest.mark.usefixtures("tuned")
def test_of_pages_and_lists(run: Run, scale_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty.db"
    Database.open(empty).close()
    answer = run("report", "tuning.db", empty, "-o", "page.html")
    (row,) = [line for line in answer.out.splitlines() if line.startswith("scale")]
    assert "NVIDIA H200 (replayed)" in answer.out
    assert TIME.search(row)
    page = html.unescape(Path("page.html").read_text())
    only = page[page.index('id="only-a"') :]
    assert "<td>NVIDIA H200 (replayed)</td>" in only[: only.index("</section>")]
    assert run("report", scale_toml, "-o", tmp_path / "r.html").code == 0
    page = html.unescape((tmp_path / "r.html").read_text())
    assert f'kernel = autotile.get_best_kernel("{scale_toml}", n=1048576, dtype="float32")' in page
    facts = page[page.index('class="facts"') : page.index("</dl>")]
    times = re.findall(r"[\d.,]+ \N{MICRO SIGN}s\)( \(replayed\))?", facts)
    assert times == [" (replayed)"] * 2  # winner and default
    trials = autotile.trials(scale_toml)
    rows = re.findall("<tr>.*?</tr>", trials._repr_html_())[1:]
    assert len(rows) == len(trials.trials)
    assert all(MARK in row for row in rows if TIME.search(row))


def test_contenders_of_an_operation() -> None:
    measured = (Contender("first", {}, 10.0, source="replayed"), Contender("second", {}, 11.0))
    choice = Choice("exact", {}, contenders=measured)
    text = explain(Problem("op", {"n": 1}, "float32"), device_profile("h200"), choice)
    assert "first 10 us replayed; second 11 us measured" in text
    assert json.dumps(measured[0].to_json()["source"]) == '"replayed"'
