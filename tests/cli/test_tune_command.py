import csv
import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from stored_runs import record_miss

from autotile.api import targets, tuning
from autotile.api.targets import read_duration, read_share
from autotile.cli.progress import TuneProgress
from autotile.cli.words import fill_in_replay
from autotile.core.device import device_profile
from autotile.core.model import Outcome, Problem
from autotile.database.database import Database
from autotile.errors import InputError, WorkerError
from autotile.exchange.recording import read_recording_header
from autotile.settings import read_settings
from autotile.tuning.progress_state import Progress
from autotile.tuning.result import Recorded, TuneResult

SIZES = "n=1048576"


class TestReplay:
    def test_json_is_the_whole_of_standard_output(self, tune, scale_toml):
        answer = tune("--json")
        found = answer.document
        assert answer.code == 0
        assert found["kernel"] == "scale"
        assert found["problem"] == {"n": 1048576}
        assert found["dtype"] == "float32"
        assert found["device"] == {"name": "NVIDIA H200", "source": "replayed"}
        assert found["space"] == {"combinations": 12, "valid": 12}
        assert found["outcomes"]["ok"] + found["outcomes"]["pruned"] == 11
        assert found["outcomes"]["wrong_result"] == 1
        assert set(found["outcomes"]) == set(Outcome)
        assert found["winner"]["config"] == {"THREADS": 256, "WORK": 4}
        low, high = found["winner"]["interval_us"]
        assert low <= found["winner"]["time_us"] <= high
        assert found["winner"]["gflops_per_s"] == pytest.approx(1048576 / found["winner"]["time_us"] / 1e3)
        assert found["default"]["config"] == {"THREADS": 128, "WORK": 1}
        low, high = found["speedup"]["interval"]
        assert low <= found["speedup"]["ratio"] <= high
        assert found["speedup"]["ratio"] == pytest.approx(found["default"]["time_us"] / found["winner"]["time_us"])
        assert found["call"] == f'kernel = autotile.get_best_kernel("{scale_toml}", n=1048576)'
        assert found["seconds"] > 0

    def test_a_person_reads_winner_gates_and_the_line_that_serves_it(self, tune):
        answer = tune()
        assert answer.code == 0
        assert "scale n=1048576 float32 on NVIDIA H200 (replayed)" in answer.out
        assert "THREADS=256 WORK=4" in answer.out
        assert "12 combinations -> 12 valid -> 12 tried: " in answer.out
        assert "over the default, 95 % interval" in answer.out
        assert "of bandwidth)" in answer.out
        assert "kernel = autotile.get_best_kernel(" in answer.out
        assert "searching: " in answer.err
        assert "replayed from measurements recorded on NVIDIA H200" in answer.err

    def test_the_same_command_resumes(self, tune):
        assert tune("--trials", "5", "--json").document["resumed"] == 0
        again = tune("--json").document
        assert again["resumed"] == 5
        assert sum(again["outcomes"].values()) == 12

    def test_the_list_counts_as_tune_does(self, tune, run):
        tune("--trials", "12")
        outcomes = tune("--trials", "12", "--json").document["outcomes"]
        (study,) = run("list", "--json").document
        assert (study["trials"], study["ok"]) == (sum(outcomes.values()), outcomes["ok"])

    @pytest.mark.parametrize("more", [(), ("--fresh",)], ids=["resumed", "fresh"])
    def test_a_configuration_counts_once_after_several_sessions(self, tune, run, tmp_path, scale_toml, more):
        problem = [scale_toml, "n=1048576"]
        first = tune("--trials", "12", "--json").document
        before = run("trials", *problem, "--json").document
        for _ in range(2):
            last = tune("--trials", "12", *more, "--json").document
        found = run("trials", *problem, "--json").document
        count = len(found)
        assert count == len({str(sorted(one["config"].items())) for one in found}) == len(before)
        assert found[0]["config"] == last["winner"]["config"] == first["winner"]["config"]
        assert (found[0]["phase"], found[0]["rank"]) == ("final", 1)
        assert found[0]["run"] > before[0]["run"]
        (study,) = run("list", "--json").document
        assert (study["runs"], study["trials"]) == (3, count)
        assert study["ok"] == len(run("trials", *problem, "--outcome", "ok", "--json").document)
        assert run("trials", *problem, "--csv", tmp_path / "t.csv").code == 0
        assert len(list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))) == count

        def rows_of(path):
            with closing(sqlite3.connect(path)) as stored:
                return stored.execute("SELECT count(*) FROM trials").fetchone()[0]

        for form, counted in {
            "t4": lambda path: len(json.loads(path.read_text())["results"]),
            "kernel-tuner": lambda path: len(json.loads(path.read_text())["cache"]),
            "optuna": rows_of,
        }.items():
            path = tmp_path / f"{form}.out"
            assert run("export", *problem, "--format", form, "-o", path, "--json").document["configurations"] == count
            assert counted(path) == count
        assert run("report", scale_toml, "-o", tmp_path / "r.html").code == 0
        assert f"{count} configurations tried in 3 sessions" in (tmp_path / "r.html").read_text()
        assert rows_of(run("db", "path").out.strip()) >= count + 3 * 2  # nothing is lost

    def test_the_winner_alone_is_listed_shown_and_exported(self, tune, run, tmp_path, scale_toml):
        tune("--trials", "12")
        assert run("db", "clean", "--keep-gpu", "a100").code == 0
        (left,) = run("trials", scale_toml, "--json").document
        (study,) = run("list", "--json").document
        assert (left["rank"], study["trials"], study["ok"]) == (1, 1, 1)
        assert run("report", scale_toml, "-o", tmp_path / "r.html").code == 0
        exported = run("export", scale_toml, "n=1048576", "--format", "t4", "-o", tmp_path / "t4.json", "--json")
        assert exported.document["configurations"] == 1

    def test_the_document_says_what_matters_and_why_the_search_ended(self, tune):
        found = tune("--until", "1%", "--json").document
        assert found["stopped"] == {"rule": "space", "expected_gain": None, "more_trials": None}
        assert found["importance"] == []
        assert found["insight"] == "11 times are too few to tell what matters: 30 are needed"

    def test_fresh_measures_again(self, tune):
        tune("--trials", "5")
        assert tune("--trials", "5", "--fresh", "--json").document["resumed"] == 0

    @pytest.mark.parametrize("sampler", ["random", "tpe", "brute-force"])
    def test_samplers(self, tune, sampler):
        found = tune("--sampler", sampler, "--trials", "12", "--json").document
        assert found["winner"]["config"] == {"THREADS": 256, "WORK": 4}

    def test_a_strategy_of_kernel_tuner_is_repeatable_and_resumes(self, tune, tmp_path):
        words = ("--sampler", "kernel-tuner:pso", "--seed", "3", "--trials", "12", "--json")
        first = tune(*words).document
        again = tune(*words, "--db", tmp_path / "other.db").document
        assert first["winner"]["config"] == again["winner"]["config"] == {"THREADS": 256, "WORK": 4}
        assert first["outcomes"] == again["outcomes"]
        assert tune(*words).document["resumed"] == 12

    def test_a_strategy_that_kernel_tuner_lacks_is_refused(self, tune):
        refused = tune("--sampler", "kernel-tuner:psoo")
        assert refused.code == 2
        assert "did you mean 'kernel-tuner:pso'?" in refused.err

    def test_what_is_tuned_is_served(self, tune, run, scale_toml):
        tune()
        found = run("best", scale_toml, "n=1048576", "--device", "h200", "--json").document
        assert found["tier"] == "exact"
        assert found["config"] == {"THREADS": 256, "WORK": 4}
        assert found["source"] == "replayed"


def test_the_line_that_serves_shows_no_password():
    problem = Problem("scale", {"n": 4096}, "float32")
    for url in ("postgresql://me:secret@host/tuning", "postgresql://me@host/tuning?password=secret"):
        call = targets.serving_call("scale", problem, dtype=None, database=url)
        assert call == (
            'kernel = autotile.get_best_kernel("scale", n=4096, database="postgresql+psycopg://me:***@host/tuning")'
        )
    assert targets.serving_call("scale", problem, dtype=None, database="team.db").endswith('database="team.db")')


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["n=abc"], "n is 'abc'"),
            (["n="], "expected NAME=VALUE"),
            (["=3"], "expected NAME=VALUE"),
            (["n"], "expected NAME=VALUE"),
            (["n=-4"], "expected a whole number from 1 to 2147483647"),
            (["n=0"], "size n is 0, expected 1 to 2147483647"),
            (["n=1.5"], "expected a whole number from 1 to 2147483647"),
            (["n=" + "9" * 5000], "expected a whole number from 1 to 2147483647"),
            (["n=٣"], "expected a whole number from 1 to 2147483647"),
            (["n=4", "n=5"], "given twice"),
            (["n=999999999999"], "expected 1 to"),
            (["m=4"], "has no size 'm'"),
            ([], "no recording of scale n=4096"),
            (["n=4096", "--dtype", "float99"], "float99"),
            (["n=4096", "--budget", "soon"], "budget of 'soon'"),
            (["n=4096", "--until", "soon"], "gain of 'soon'"),
            (["n=4096", "--until", "0"], "expected a percentage such as 1% or 0.01"),
            (["n=4096", "--until", "1"], "expected a percentage such as 1% or 0.01"),
            (["n=4096", "--until", "100%"], "expected a percentage such as 1% or 0.01"),
            (["n=4096", "--until", "-1%"], "expected a percentage such as 1% or 0.01"),
            (["n=4096", "--until", "1%", "--sampler", "tpe"], "'tpe' does not: choose auto or feasible"),
            (["n=4096", "--trials", "0"], "--trials"),
            (["n=4096", "--l2", "warm"], "--l2"),
            (["n=4096", "--nonsense"], "--nonsense"),
            (["n=4096", "--replay=missing.npz"], "missing.npz"),
            (["n=2048", "--replay"], "no recording"),
        ],
    )
    def test_bad_input_is_a_message_and_2(self, run, scale_toml, words, said):
        answer = run("tune", scale_toml, *words)
        assert answer.code == 2
        assert said in answer.err
        assert answer.out == ""

    def test_a_misspelt_kernel_is_told_the_near_one(self, run):
        run("tune", "sgem_2d", "M=1").is_refused("sgemm_2d")

    def test_json_of_an_error(self, run):
        answer = run("tune", "nosuch", "--json")
        assert answer.code == 2
        assert answer.document["error"]["kind"] == "UnknownKernelError"
        assert answer.document["error"]["message"] in answer.err

    def test_a_problem_beyond_any_memory(self, run):
        sizes = [f"{name}=2147483647" for name in "MNK"]
        answer = run("tune", "matmul_naive", *sizes, "--replay")
        assert answer.code == 2
        assert "no recording" in answer.err or "GiB" in answer.err

    def test_recording_needs_a_gpu(self, run, scale_toml, monkeypatch):
        monkeypatch.setattr("autotile.api.targets.device_count", lambda: 0)
        answer = run("export", "--format", "recording", "--measure", scale_toml, "n=4096", "--json")
        assert answer.code == 2
        assert "no CUDA device 0 on this machine" in answer.document["error"]["message"]

    def test_an_interrupted_recording_is_130_and_one_document(self, run, scale_toml, recording, monkeypatch):
        header = read_recording_header(recording)
        monkeypatch.setattr("autotile.api.targets.device_count", lambda: 1)
        monkeypatch.setattr("autotile.tuning.session.record", lambda *_, **__: Recorded(None, header, 7, 1.0))
        answer = run("export", "--format", "recording", "--measure", scale_toml, "n=1048576", "--json")
        assert answer.code == 130
        assert "7 configurations measured; the same command goes on" in answer.document["error"]["message"]

    def test_no_kernel(self, run):
        answer = run("tune", "--json")
        assert answer.code == 2
        assert "KERNEL" in answer.document["error"]["message"]

    def test_an_error_that_is_not_the_users_is_1(self, run, scale_toml, monkeypatch):
        def broken(*_: object, **__: object) -> TuneResult:
            raise WorkerError("five workers died")

        monkeypatch.setattr("autotile.tuning.session.tune", broken)
        answer = run("tune", scale_toml, "n=4096")
        assert (answer.code, answer.out) == (1, "")
        assert "five workers died" in answer.err

    def test_a_recording_of_other_sizes(self, run, scale_toml, recording):
        run("tune", scale_toml, "n=4096", f"--replay={recording}").is_refused("n=1048576")


class TestMisses:
    @pytest.fixture
    def missed(self, scale_toml, monkeypatch):
        """A database in which programs asked for the recorded problem twice before it was tuned, another one once."""
        monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
        with Database.open(read_settings().database) as database:
            for n, times in ((1048576, 2), (2048, 1)):
                record_miss(database, Problem("scale", {"n": n}, "float32"), "NVIDIA H200", "default", times)

    @pytest.mark.usefixtures("missed")
    def test_what_was_asked_for_is_tuned(self, run, recording):
        rows = run("list", "--misses", "--json").document
        assert [(row["problem"]["n"], row["count"]) for row in rows] == [(1048576, 2), (2048, 1)]
        assert "NVIDIA H200" in run("list", "--misses").out
        answer = run("tune", "--misses", f"--replay={recording}", "--json")
        assert [found["problem"] for found in answer.document] == [{"n": 1048576}]
        assert answer.document[0]["winner"]["config"] == {"THREADS": 256, "WORK": 4}
        assert "n=2048 float32 is left out" in answer.err
        assert answer.code == 1

    @pytest.mark.usefixtures("missed")
    def test_the_option_of_tune_is_the_same_command(self, run, recording):
        answer = run("tune", "scale", "--misses", f"--replay={recording}")
        assert "1048576 float32: 2 calls not served exactly" in answer.err
        assert "2 problems: 1 tuned, 1 failed" in answer.out
        assert answer.code == 1

    @pytest.mark.usefixtures("missed")
    def test_what_is_tuned_since_is_not_tuned_again(self, run, tune, recording):
        tune()
        answer = run("tune", "--misses", "scale", f"--replay={recording}")
        assert "1048576 float32: 2 calls" not in answer.err
        assert "1 problem: 1 failed" in answer.out  # the other one

    def test_sizes_are_in_the_kernels_own_order(self, run):
        sizes = {"M": 512, "N": 256, "K": 128}
        with Database.open(read_settings().database) as database:
            record_miss(database, Problem("sgemm_2d", sizes, "float32"), "NVIDIA H200", "nearest")
            record_miss(database, Problem("gone", sizes, "float32"), "NVIDIA H200", "nearest")
        by_kernel = {row["kernel"]: list(row["problem"]) for row in run("list", "--misses", "--json").document}
        assert by_kernel == {"sgemm_2d": ["M", "N", "K"], "gone": ["K", "M", "N"]}
        assert "M=512 N=256 K=128 float32" in run("list", "--misses").out

    @pytest.mark.usefixtures("missed")
    def test_misses_of_one_kernel(self, run, scale_toml):
        assert len(run("list", "--misses", scale_toml, "--json").document) == 2
        assert run("list", "--misses", "sgemm_2d", "--json").document == []
        assert run("list", "--misses", "nosuch").code == 2

    @pytest.mark.usefixtures("missed")
    def test_looking_is_not_counted(self, run):
        run("best", "scale", "n=4096", "--device", "h200")
        run("best", "scale", "n=4096", "--device", "rtx-3090", "--json")
        assert 4096 not in [row["problem"]["n"] for row in run("list", "--misses", "--json").document]

    def test_no_misses(self, run):
        assert run("tune", "--misses", "--json").document == []
        assert "no missed problem is left to tune" in run("tune", "--misses").err
        assert run("list", "--misses", "--json").document == []
        assert "no misses are stored" in run("list", "--misses").out

    def test_sizes_are_not_given(self, run):
        assert run("tune", "scale", "n=4", "--misses").code == 2
        assert run("list", "--families", "--recordings").code == 2


class TestDevice:
    """``--device`` is the index or the name of a GPU of this machine."""

    @pytest.fixture
    def used(self, monkeypatch):
        """Two GPUs, an H100 and an A100; each session adds the index of the one that it would run on."""
        gpus = [replace(device_profile(name), source="cuda") for name in ("h100", "a100")]
        monkeypatch.setattr("autotile.api.targets.device_count", lambda: len(gpus))
        monkeypatch.setattr("autotile.api.targets.live_device", lambda index: gpus[index])
        indices: list[int] = []

        def session(_kernel, _problem, _settings, options, *_, **__):
            indices.append(options.device_index)
            raise WorkerError("no GPU at all")

        monkeypatch.setattr(targets, "served_so_far", lambda *_: None)
        monkeypatch.setattr("autotile.tuning.session.tune", session)
        monkeypatch.setattr("autotile.tuning.session.record", session)
        return indices

    @pytest.mark.parametrize(
        ("device", "index"), [("0", 0), ("1", 1), ("a100", 1), ("NVIDIA A100-SXM4-80GB", 1), ("H100", 0)]
    )
    def test_an_index_or_a_name(self, run, scale_toml, used, device, index):
        for command in (["tune"], ["export", "--format", "recording", "--measure"]):
            answer = run(*command, scale_toml, SIZES, "--device", device)
            assert "no GPU at all" in answer.err
        assert used == [index, index]

    @pytest.mark.parametrize("command", ["tune", "export --format recording --measure"])
    @pytest.mark.parametrize("device", ["h200", "2", "-1", "", "9" * 5000])
    @pytest.mark.usefixtures("used")
    def test_any_other_is_refused(self, run, scale_toml, command, device):
        run(*command.split(), scale_toml, SIZES, "--device", device).is_refused("CUDA device")


def test_a_run_without_a_winner_is_1(run, scale_toml, recording, monkeypatch):
    tune = tuning.sessions.tune
    without = {"winner": None, "default": None, "speedup": None, "ties": (), "outcomes": {Outcome.CRASHED: 12}}
    monkeypatch.setattr("autotile.tuning.session.tune", lambda *given: replace(tune(*given), **without))
    answer = run("tune", scale_toml, SIZES, f"--replay={recording}", "--json")
    assert answer.code == 1
    assert answer.document["winner"] is None
    assert answer.document["outcomes"]["ok"] == 0
    assert "no configuration ran" in run("tune", scale_toml, SIZES, f"--replay={recording}").out


def test_an_interrupt_says_what_is_saved_and_is_130(run, scale_toml, recording, monkeypatch):
    def interrupting(self: TuneProgress, progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TuneProgress, "__call__", interrupting)
    answer = run("tune", scale_toml, SIZES, f"--replay={recording}", "--json")
    assert answer.code == 130
    assert answer.document["interrupted"] is True
    assert "interrupted: 3 trials saved" in answer.err
    assert len(run("trials", "scale", "--json").document) == 3


@pytest.mark.parametrize(
    ("words", "full"),
    [
        (["k", "n=1", "--replay"], ["k", "n=1", "--replay=auto"]),
        (["--replay", "k", "n=1"], ["--replay=auto", "k", "n=1"]),
        (["--replay", "mine.toml", "n=1"], ["--replay=auto", "mine.toml", "n=1"]),
        (["k", "--replay", "a/b.npz", "n=1"], ["k", "--replay", "a/b.npz", "n=1"]),
        (["k", "--replay", "a/folder", "n=1"], ["k", "--replay", "a/folder", "n=1"]),
        (["--replay", "a/mine.toml", "n=1"], ["--replay=auto", "a/mine.toml", "n=1"]),
        (["k", "--replay=a/b.npz"], ["k", "--replay=a/b.npz"]),
        (["k", "--replay", "--json"], ["k", "--replay=auto", "--json"]),
        ([], []),
    ],
)
def test_replay_may_stand_alone(words, full):
    assert fill_in_replay(words) == full


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("90", 90), ("5m", 300), ("1h", 3600), ("1h30m", 5400), ("0.5s", 0.5)]
)
def test_durations(text, seconds):
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.01", 0.01), ("0.5 %", 0.005), (".5%", 0.005), ("25%", 0.25), (" 2% ", 0.02)]
)
def test_shares(text, share):
    assert read_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "0", "0%", "1", "100%", "-1%", "1e-2", "nan", "1,5%", "1%%", "\u0661%"])
def test_no_shares(text):
    with pytest.raises(InputError, match="expected a percentage such as"):
        read_share(text)


@pytest.mark.parametrize("text", ["", "0", "-5", "5 minutes", "s", "1d", "nan", "inf"])
def test_no_durations(text):
    with pytest.raises(InputError, match="expected a duration such as"):
        read_duration(text)


class TestFurtherProblems:
    def test_one_must_name_a_size(self, tune):
        tune("--verify-problem", ",").is_refused("names no size")

    def test_replay_says_that_they_are_not_run(self, tune):
        answer = tune("--trials", "2", "--json", "--verify-problem", "n=64")
        assert answer.code == 0
        assert any("nothing runs at the problems" in notice for notice in answer.document["notices"])
