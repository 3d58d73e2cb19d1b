"""``autotile report``: pages, and errors of one line that say what to do."""

import html
import re
import shlex
import sys
from pathlib import Path

import pytest
from report_studies import Session, store_session

RECORDING = Path(__file__).parents[2] / "recordings" / "matmul_tiled-nvidia-h200-2048x2048x2048-float32.npz"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("command") / "session.db"
    store_session(path, Session(trials=40))
    return path


def test_a_page_of_a_problem(run, stored, tmp_path):
    page = tmp_path / "page.html"
    answer = run("report", "sgemm_2d", "M=4096", f"--db={stored}", "-o", page, "--json")
    assert answer.code == 0
    assert answer.document["studies"] == 1
    assert answer.document["trials"] == 40
    assert answer.document["size_bytes"] == page.stat().st_size < 15_000_000
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_what_cannot_be_shown_is_told_in_one_line(run, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["sgemm_3d"], "no kernel named 'sgemm_3d'; did you mean sgemm_2d"),
        (["sgemm_2d", "M=7"], "has no trials of sgemm_2d M=7; it has sgemm_2d M=4096 N=4096 K=4096 float32"),
        (["sgemm_2d", "Q=1"], "sgemm_2d has no size 'Q'; its sizes are M, N, K"),
        (["sgemm_2d", "matmul_tiled"], "'matmul_tiled' is another"),
        (["M=4096"], "stands before any kernel"),
        (["sgemm_2d", "--fail-if-slower", "5%"], "give them as A.db B.db"),
        (["missing.npz"], "there is no recording missing.npz"),
        (["sgemm_2d", "-o", "/nonexistent/x.html"], "cannot write /nonexistent/x.html"),
    ):
        answer = run("report", *words, f"--db={stored}")
        answer.is_refused(message)
        assert len(answer.err.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []


def test_without_a_whole_database_or_plotly_one_line_says_so(run, stored, tmp_path, monkeypatch):
    run("report", "sgemm_2d", f"--db={tmp_path / 'none.db'}").is_refused("there is no database")
    (tmp_path / "damaged.db").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    answer = run("report", "sgemm_2d", f"--db={tmp_path / 'damaged.db'}")
    answer.is_refused()
    assert len(answer.err.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "plotly", None)
    answer = run("report", "sgemm_2d", f"--db={stored}", "-o", tmp_path / "x.html")
    assert answer.code == 1
    assert "pip install 'autotile[report]'" in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not (tmp_path / "x.html").exists()


def test_a_page_of_a_recording_in_a_folder_does_not_say_that_it_is_served(run, tmp_path):
    """Nothing of it is in the database; the page states the command that stores its winner, and that one works."""
    answer = run("report", RECORDING, "-o", tmp_path)
    assert answer.code == 0
    assert str(tmp_path / "report.html") in answer.out.replace("\n", "")
    assert "72 trials" in answer.out
    page = tmp_path.joinpath("report.html").read_text().partition('type="application/json"')[0]
    assert "Serve it" not in page
    assert "get_best_kernel" not in page
    (command,) = re.findall(r"A recording is not served; <code>autotile (.*?)</code> stores its winner", page)
    words = shlex.split(html.unescape(command))
    assert words[-2:] == ["--replay", str(RECORDING)]
    stored = tmp_path / "tuning.db"
    assert run(*words, "--trials", "2", "--finals", "0", f"--db={stored}").code == 0
    assert run("report", "matmul_tiled", f"--db={stored}", "-o", tmp_path / "s.html").code == 0
    assert "Serve it" in tmp_path.joinpath("s.html").read_text()
