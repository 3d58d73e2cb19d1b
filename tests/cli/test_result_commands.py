"""Commands that list, serve, check, export, import and report what is stored, and mark what was replayed."""

import csv
import html
import io
import json
import re
import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from answers import Run
from report_studies import Session, store_session
from stored_runs import DEFAULT, FAST, SLOW, record_miss

import autotile
from autotile.core.device import device_profile
from autotile.core.model import Outcome, Problem, Trial
from autotile.database.database import Database
from autotile.exchange.recording import read_recording_header
from autotile.serving.choice import Choice, Contender, explain
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import missed_problems


def test_without_a_database_nothing_is_an_answer_and_the_default_is_served(run, tmp_path, scale_toml, monkeypatch):
    assert run("list", "--json").document == []
    assert run("trials", scale_toml, "--json").document == []
    assert "nothing is tuned yet" in run("list").out
    assert run("db", "check", "--json").document["exists"] is False
    run("list", "nosuch").is_refused("nosuch")
    answer = run("best", scale_toml, "n=4096", "--device", "h200", "--json")
    found = answer.document
    assert (answer.code, found["tier"], found["time_us"]) == (0, "default", None)
    assert (found["config"], found["device"]["name"]) == ({"THREADS": 128, "WORK": 1}, "NVIDIA H200")
    assert "Nothing is tuned" in found["explain"]
    assert "tier" in run("best", scale_toml, "n=4096", "--device", "h200").out
    assert run("db", "path").out == f"{tmp_path / 'tuning.db'}\n"
    assert run("db", "path", "--json").document == {"database": str(tmp_path / "tuning.db")}
    assert not (tmp_path / "tuning.db").exists()
    monkeypatch.setenv("AUTOTILE_DB", "postgresql://me:secret@host/tuning")
    assert run("db", "path").out == "postgresql+psycopg://me:***@host/tuning\n"


@pytest.mark.usefixtures("tuned")
class TestWithResults:
    def test_list(self, run):
        (study,) = run("list", "--json").document
        assert (study["kernel"], study["problem"], study["trials"]) == ("scale", {"n": 1048576}, 12)
        assert study["device"] == {"name": "NVIDIA H200", "source": "replayed"}
        assert study["best"]["config"] == {"THREADS": 256, "WORK": 4}
        assert "NVIDIA H200 (replayed)" in run("list", "scale").out
        assert run("list", "sgemm_2d", "--json").document == []
        assert "nothing is tuned yet of sgemm_2d in" in run("list", "sgemm_2d").out

    def test_trials_are_fastest_first_and_of_an_outcome_a_size_and_a_number(self, run):
        rows = run("trials", "scale", "--json").document
        times = [row["time_us"] for row in rows]
        measured = [time for time in times if time is not None]
        assert (measured, times[len(measured) :]) == (sorted(measured), [None] * (len(times) - len(measured)))
        assert all(row["source"] == "replayed" for row in rows)
        (wrong,) = run("trials", "scale", "--outcome", "wrong_result", "--json").document
        assert (wrong["reason"], wrong["config"]) == ("y[3] is 0, expected 1", {"THREADS": 32, "WORK": 4})
        assert len(run("trials", "scale", "n=1048576", "--limit", "2", "--json").document) == 2
        assert run("trials", "scale", "n=1", "--json").document == []
        assert "THREADS=32 WORK=4" in run("trials", "scale", "--outcome", "wrong_result").out

    def test_trials_as_csv_where_it_can_be_written(self, run, tmp_path):
        answer = run("trials", "scale", "--csv", "-")
        rows = list(csv.DictReader(io.StringIO(answer.out)))
        listed = run("trials", "scale", "--json").document
        assert [(row["outcome"], row["time_us"]) for row in rows] == [
            (entry["outcome"], "" if entry["time_us"] is None else str(entry["time_us"])) for entry in listed
        ]
        assert {row["param.THREADS"] for row in rows} == {str(entry["config"]["THREADS"]) for entry in listed}
        path = tmp_path / "trials.csv"
        written = run("trials", "scale", "--csv", path)
        assert (written.code, written.out) == (0, "")
        assert f"wrote {len(rows)} trials to {path}" in written.err
        assert path.read_text() == answer.out
        for words, said in (
            (["--csv", "-", "--json"], "both write to standard output"),
            (["--parquet", "-"], "name a file"),
            (["--csv", "/"], "names a folder"),
            (["--csv", "/no/such/folder/x.csv"], "there is no folder '/no/such/folder'"),
            (["--csv", path, "--parquet", path], "reads or writes it already"),
        ):
            answer = run("trials", "scale", *words)
            assert answer.code != 0
            assert said in answer.err
            assert answer.err.count("\n") == 1

    def test_trials_as_parquet(self, run, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet", reason="the extra autotile[parquet] is not installed")
        path = tmp_path / "trials.parquet"
        listed = run("trials", "scale", "--parquet", path, "--json").document
        assert parquet.read_table(path)["param.THREADS"].to_pylist() == [e["config"]["THREADS"] for e in listed]

    def test_best_on_the_recorded_gpu_and_on_another_one_which_is_not_called_replayed(self, run, scale_toml):
        found = run("best", scale_toml, "n=1000000", "--device", "h200", "--json").document
        assert (found["tier"], found["config"]) == ("nearest", {"THREADS": 256, "WORK": 4})
        words = ["best", scale_toml, "n=1048576", "--device", "rtx-3090"]
        found = run(*words, "--json").document
        assert (found["tier"], found["tuned_on"]) == ("transferred", "NVIDIA H200")
        lines = run(*words).out.splitlines()
        assert lines[0] == "scale n=1048576 float32 on NVIDIA GeForce RTX 3090"
        (time,) = [line for line in lines if line.startswith("time there")]
        assert "us on NVIDIA H200 (replayed) (95 % interval" in time
        found = run("best", scale_toml, "n=1048576", "--device", "h200", "--json").document
        assert (found["tier"], found["config"], found["source"]) == ("exact", {"THREADS": 256, "WORK": 4}, "replayed")
        lines = run("best", scale_toml, "n=1048576", "--device", "h200").out.splitlines()
        assert lines[0] == "scale n=1048576 float32 on NVIDIA H200 (replayed)"
        assert all(line == line.rstrip() for line in lines)

    def test_check_finds_lost_rows(self, run, tmp_path):
        answer = run("db", "check", "--json")
        assert (answer.code, answer.document["ok"], answer.document["rows"]["studies"]) == (0, True, 1)
        assert "whole" in run("db", "check").out
        with closing(sqlite3.connect(tmp_path / "tuning.db")) as connection, connection:
            connection.execute("PRAGMA foreign_keys=OFF")
            connection.execute("DELETE FROM studies")
        answer = run("db", "check", "--json")
        assert answer.code == 1
        assert answer.document["problems"]

    def test_another_database(self, run, tmp_path):
        missing = tmp_path / "other.db"
        for words in (["list"], ["list", "--misses"], ["trials", "matmul_naive"], ["db", "check"]):
            run(*words, "--db", missing).is_refused(f"there is no database {missing}; check its path")
        Database.open(missing).close()
        assert run("list", "--db", missing, "--json").document == []


@pytest.mark.usefixtures("tuned")
class TestExchange:
    def test_kernel_tuner_there_and_back_and_nothing_else(self, run, scale_toml, tmp_path):
        path = tmp_path / "cache.json"
        scale_toml.write_text(scale_toml.read_text().replace("128, 256]", "128]"))  # since it was tuned
        done = run("export", scale_toml, "n=1048576", "--format", "kernel-tuner", "-o", path, "--json").document
        assert (done["configurations"], len(json.loads(path.read_text())["cache"])) == (12, 12)
        words = ("import", path, "n=1048576", "--db", tmp_path / "other.db", "--json")
        first, again = (run(*words).document for _ in range(2))
        assert (first["configurations"], first["study"], first["database"]) == (12, 1, str(tmp_path / "other.db"))
        assert first["device"] == done["device"] == "NVIDIA H200 (replayed)"
        assert (again["configurations"], again["note"]) == (0, "12 of the file's 12 were imported before")
        (study,) = run("list", "--db", tmp_path / "other.db", "--json").document
        assert study["best"]["config"] == {"THREADS": 256, "WORK": 4}

        made = run("import", path, "n=1048576", "-o", tmp_path / "made.npz", "--json").document
        assert made["recording"] == str(tmp_path / "made.npz")
        assert read_recording_header(tmp_path / "made.npz").problem.sizes == {"n": 1048576}
        run("import", path, "n=1048576", "-o", path).is_refused("the command reads or writes it already")
        run("import", path, "n=0").is_refused("size n is 0")
        run("import", path, "n=8").is_refused("the problem size 1048576, which n=8 contradicts")
        run("import", path, "--dtype", "float31").is_refused("no dtype 'float31'")
        path.write_text("{}")
        run("import", path, "n=1").is_refused("cache file of Kernel Tuner")
        run("import", tmp_path / "missing.json", "n=1").is_refused("missing.json")

    def test_t4_of_one_gpu_and_of_the_present_version(self, run, scale_toml, tmp_path):
        path = tmp_path / "t4.json"
        words = ("export", scale_toml, "n=1048576", "-o", path, "--device")
        run(*words, "nosuch").is_refused("no GPU profile is named")
        run(*words, "7").is_refused("no CUDA device 7")
        assert not path.exists()
        assert (run(*words, "h200").code, json.loads(path.read_text())["schema_version"]) == (0, "1.0.0")
        cache = ("export", scale_toml, "n=1048576", "--format", "kernel-tuner", "-o", tmp_path / "cache.json")
        assert [run(*command).code for command in (cache, ("import", tmp_path / "cache.json", "n=1048576"))] == [0, 0]
        read = run("import", path, "--db", tmp_path / "other.db", "--json").document
        assert (read["format"], read["kernel"], read["problem"]) == ("t4", "scale", {"n": 1048576})
        done = run(*words, "h200", "--json").document  # not what was imported since
        assert (done["study"], "note" in done) == (1, False)
        code = scale_toml.with_suffix(".cu")
        code.write_text(code.read_text().replace("factor * x[i]", "x[i] * factor"))
        note = "another version of the kernel was tuned; of the present one nothing is"
        assert run(*words, "h200", "--json").document["note"] == note

    def test_a_database_is_left_as_it_is_and_a_study_of_optuna_is_added_once(self, run, scale_toml, tmp_path):
        path = Path(read_settings().database)
        before = path.read_bytes()
        for form in ("t4", "kernel-tuner", "optuna"):
            run("export", scale_toml, "n=1048576", "--format", form, "-o", path).is_refused("is a database")
            assert path.read_bytes() == before
        command = ("export", scale_toml, "n=1048576", "--format", "optuna", "-o", tmp_path / "study.db")
        assert run(*command).code == 0
        run(*command).is_refused("holds a study named")


H200 = "NVIDIA H200"


@pytest.fixture
def study(book, scale_toml, monkeypatch):
    """Store a study: its winner first, every configuration with its time."""
    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    return book("tuning.db").rank


def miss(n: int, tier: str, count: int, gpu: str = H200, kernel: str = "scale") -> None:
    with Database.open(read_settings().database) as database:
        record_miss(database, Problem(kernel, {"n": n}, "float32"), gpu, tier, count)


def only_row(run: Run) -> dict[str, Any]:
    (row,) = run("list", "--misses", "--json").document
    return row


def test_misses_of_the_default_cost_as_elsewhere_on_this_gpu(study, run):
    """Half as slow again at one tuned problem and as fast at another: a quarter lost, of a time that grows with n."""
    study(1024, (FAST, 10.0), (DEFAULT, 15.0))
    study(2048, (DEFAULT, 20.0), (SLOW, 21.0))
    miss(8192, "default", 1000)
    row = only_row(run)
    assert (row["call_us"], row["lost_s"]) == (pytest.approx(80.0 * 1.25), pytest.approx(1000 * 80.0 * 0.25 * 1e-6))
    assert (row["measured"], row["tuned"], row["count"]) == (False, False, 1000)
    assert "about 20 ms" in run("list", "--misses").out


def test_misses_of_the_nearest_cost_as_where_each_tuned_problem_is_left_out(study, run):
    study(1024, (FAST, 10.0), (SLOW, 11.0))
    study(2048, (SLOW, 20.0), (FAST, 26.0))
    miss(4096, "nearest", 10)
    assert only_row(run)["lost_s"] == pytest.approx(10 * 40.0 * ((0.1 + 0.3) / 2) * 1e-6)


def test_misses_of_another_gpus_configuration(study, run):
    study(1024, (FAST, 10.0), (SLOW, 14.0))
    study(2048, (SLOW, 30.0), gpu="a100")
    miss(2048, "transferred", 100)
    assert only_row(run)["lost_s"] == pytest.approx(100 * 20.0 * 0.4 * 1e-6)


def test_a_miss_that_was_tuned_since_is_known_unless_the_winner_fails_in_a_later_search(study, run):
    study(1024, (FAST, 10.0), (DEFAULT, 12.0))
    miss(1024, "default", 50)
    row = only_row(run)
    assert (row["measured"], row["tuned"], row["lost_s"]) == (True, True, pytest.approx(50 * 2.0 * 1e-6))
    assert "tuned" in run("list", "--misses").out
    with Database.open(read_settings().database) as database:
        database.add_run(1, [Trial(FAST, Outcome.CRASHED)], sampler="random")
    assert (only_row(run)["call_us"], only_row(run)["tuned"]) == (None, True)


def test_no_cost_of_a_miss_is_made_up_where_too_little_is_tuned(study, run):
    study(1024, (FAST, 10.0))  # the default was not measured, and no other problem is tuned
    study(1024, (FAST, 10.0), (DEFAULT, 99.0), template_hash="0" * 64)
    for n, tier in ((4096, "default"), (2048, "nearest"), (512, "transferred"), (256, "family")):
        miss(n, tier, 3)
    miss(64, "default", 1, gpu="NVIDIA A100-SXM4-80GB")
    miss(32, "default", 1, kernel="gone")
    assert {(row["call_us"], row["lost_s"]) for row in run("list", "--misses", "--json").document} == {(None, None)}


def test_the_costliest_misses_come_first_and_are_tuned_first(study, run, scale_toml):
    study(1024, (FAST, 10.0), (DEFAULT, 15.0))
    miss(2048, "default", 100)
    miss(65536, "default", 10)
    miss(4096, "default", 1)
    miss(2048, "nearest", 5)
    order = [row["problem"]["n"] for row in run("list", "--misses", "--json").document]
    assert order[:3] == [65536, 2048, 4096]
    options = TuneOptions(replay="auto")
    waiting = missed_problems(None, options)
    assert [(one.problem.sizes["n"], count) for one, count, _ in waiting] == [(65536, 10), (2048, 105), (4096, 1)]
    assert {one.asked_as for one, *_ in waiting} == {"scale"}
    assert {one.asked_as for one, *_ in missed_problems(str(scale_toml), options)} == {str(scale_toml)}


RECORDING = Path(__file__).parents[2] / "recordings" / "matmul_tiled-nvidia-h200-2048x2048x2048-float32.npz"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("command") / "session.db"
    store_session(path, Session(trials=40))
    return path


def test_a_page_of_a_problem(run, stored, tmp_path):
    page = tmp_path / "page.html"
    answer = run("report", "sgemm_2d", "M=4096", f"--db={stored}", "-o", page, "--json")
    assert (answer.code, answer.document["studies"], answer.document["trials"]) == (0, 1, 40)
    assert answer.document["size_bytes"] == page.stat().st_size < 15_000_000
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_what_cannot_be_reported_is_told_in_one_line(run, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["sgemm_3d"], "no kernel named 'sgemm_3d'; did you mean sgemm_2d"),
        (["sgemm_2d", "M=7"], "has no trials of sgemm_2d M=7; it has sgemm_2d M=4096 N=4096 K=4096 float32"),
        (["sgemm_2d", "Q=1"], "sgemm_2d has no size 'Q'; its sizes are M, N, K"),
        (["sgemm_2d", "matmul_tiled"], "'matmul_tiled' is another"),
        (["M=4096"], "stands before any kernel"),
        (["sgemm_2d", "--fail-if-slower", "5%"], "give them as A.db B.db"),
        (["missing.npz"], "there is no recording missing.npz"),
        ([RECORDING, "M=4"], "SIZE=N selects problems of one database; leave it out to show a recording"),
        (["sgemm_2d", "-o", "/proc/none/x.html"], "cannot write /proc/none/x.html"),
    ):
        answer = run("report", *words, f"--db={stored}")
        answer.is_refused(message)
        assert len(answer.err.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []


def test_a_report_without_a_whole_database_or_plotly_is_refused_in_one_line(run, stored, tmp_path, monkeypatch):
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


N = "n=1048576"
TIME = re.compile(r"\d (us|\N{MICRO SIGN}s)\b")
MARK = "replayed"


@pytest.mark.usefixtures("recording", "tuned")
def test_commands_mark_replayed_times(run, scale_toml, tmp_path, monkeypatch):
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


def test_a_plan_marks_replayed_times(run, scale_toml, recording, tmp_path):
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
def test_pages_mark_replayed_times(run, scale_toml, tmp_path, monkeypatch):
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


def test_contenders_of_an_operation_are_marked_as_replayed():
    measured = (Contender("first", {}, 10.0, source="replayed"), Contender("second", {}, 11.0))
    choice = Choice("exact", {}, contenders=measured)
    text = explain(Problem("op", {"n": 1}, "float32"), device_profile("h200"), choice)
    assert "first 10.00 us replayed; second 11.00 us measured" in text
    assert json.dumps(measured[0].to_json()["source"]) == '"replayed"'
