"""``autotile tune`` of a kernel, a family and an operation, by replay; ``--ask-tell`` and ``--try``."""

import ast
import csv
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from stored_runs import record_miss
from typer.testing import CliRunner

import autotile
from autotile.api import targets, tuning
from autotile.api.targets import read_duration, read_share
from autotile.cli.application import app
from autotile.cli.ask_tell import MAX_LINE_BYTES
from autotile.cli.derivation import fill_in_replay
from autotile.cli.progress import TuneProgress
from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Problem, Trial, config_key
from autotile.database.database import Database
from autotile.errors import InputError, WorkerError
from autotile.exchange.recording import read_recording, write_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import child_environment, read_settings
from autotile.tuning.progress_state import Progress
from autotile.tuning.result import TuneResult

SIZES = "n=1048576"


class TestReplay:
    def test_json_is_the_whole_of_standard_output(self, tune, scale_toml):
        answer = tune("--json")
        found = answer.document
        assert answer.code == 0
        assert (found["kernel"], found["problem"], found["dtype"]) == ("scale", {"n": 1048576}, "float32")
        assert found["device"] == {"name": "NVIDIA H200", "source": "replayed"}
        assert found["space"] == {"combinations": 12, "valid": 12}
        assert found["outcomes"]["ok"] + found["outcomes"]["pruned"] == 11
        assert (found["outcomes"]["wrong_result"], set(found["outcomes"])) == (1, set(Outcome))
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
        assert "front of" not in answer.out
        assert "kernel = autotile.get_best_kernel(" in answer.out
        assert "searching: " in answer.err
        assert "replayed from measurements recorded on NVIDIA H200" in answer.err

    def test_the_same_command_resumes(self, tune):
        assert tune("--trials", "5", "--json").document["resumed"] == 0
        again = tune("--json").document
        assert (again["resumed"], sum(again["outcomes"].values())) == (5, 12)
        assert tune("--trials", "5", "--fresh", "--json").document["resumed"] == 0

    def test_a_configuration_counts_once_after_several_sessions(self, tune, run, tmp_path, scale_toml):
        problem = [scale_toml, "n=1048576"]
        first = tune("--trials", "12", "--json").document
        before = run("trials", *problem, "--json").document
        for more in ((), ("--fresh",)):
            last = tune("--trials", "12", *more, "--json").document
        found = run("trials", *problem, "--json").document
        count = len(found)
        assert count == len({str(sorted(one["config"].items())) for one in found}) == len(before)
        assert found[0]["config"] == last["winner"]["config"] == first["winner"]["config"]
        assert (found[0]["phase"], found[0]["rank"]) == ("final", 1)
        assert found[0]["run"] > before[0]["run"]
        (study,) = run("list", "--json").document
        assert (study["runs"], study["trials"]) == (3, count)
        assert (study["trials"], study["ok"]) == (sum(last["outcomes"].values()), last["outcomes"]["ok"])
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
        # of which the winner alone may be left
        assert run("db", "clean", "--keep-gpu", "a100").code == 0
        (left,) = run("trials", scale_toml, "--json").document
        (study,) = run("list", "--json").document
        assert (left["rank"], study["trials"], study["ok"]) == (1, 1, 1)
        assert run("report", scale_toml, "-o", tmp_path / "r.html").code == 0
        exported = run("export", scale_toml, "n=1048576", "--format", "t4", "-o", tmp_path / "t4.json", "--json")
        assert exported.document["configurations"] == 1

    def test_the_document_says_what_matters_and_why_the_search_ended_and_that_no_further_problem_is_run(self, tune):
        found = tune("--until", "1%", "--json").document
        assert found["stopped"] == {"rule": "space", "expected_gain": None, "more_trials": None}
        assert found["importance"] == []
        assert found["insight"] == "11 times are too few to tell what matters: 30 are needed"
        found = tune("--trials", "2", "--json", "--verify-problem", "n=64").document
        assert any("nothing runs at the problems" in notice for notice in found["notices"])

    def test_a_strategy_of_kernel_tuner_is_repeatable_and_resumes(self, tune, tmp_path):
        words = ("--sampler", "kernel-tuner:pso", "--seed", "3", "--trials", "12", "--json")
        first, again = (tune(*words, "--db", tmp_path / name).document for name in ("one.db", "other.db"))
        assert first["winner"]["config"] == again["winner"]["config"] == {"THREADS": 256, "WORK": 4}
        assert first["outcomes"] == again["outcomes"]
        assert tune(*words, "--db", tmp_path / "one.db").document["resumed"] == 12


def test_the_line_that_serves_shows_no_password():
    problem = Problem("scale", {"n": 4096}, "float32")
    masked = 'kernel = autotile.get_best_kernel("scale", n=4096, database="postgresql+psycopg://me:***@host/tuning")'
    for url in ("postgresql://me:secret@host/tuning", "postgresql://me@host/tuning?password=secret"):
        assert targets.serving_call("scale", problem, dtype=None, database=url) == masked
    assert targets.serving_call("scale", problem, dtype=None, database="team.db").endswith('database="team.db")')


def test_an_error_that_is_not_the_users_is_1(run, scale_toml, monkeypatch):
    def broken(*_: object, **__: object) -> TuneResult:
        raise WorkerError("five workers died")

    monkeypatch.setattr(import_module("autotile.tuning.session"), "tune", broken)
    answer = run("tune", scale_toml, "n=4096")
    assert (answer.code, answer.out) == (1, "")
    assert "five workers died" in answer.err


def test_misses_have_sizes_in_the_kernels_own_order_and_there_may_be_none(run):
    assert run("tune", "--misses", "--json").document == run("list", "--misses", "--json").document == []
    result = run("tune", "--misses")
    assert "no missed problem is left to tune" in result.err
    assert "result    0 problems, in " in result.out
    assert "speed-up" not in result.out
    assert "no misses are stored" in run("list", "--misses").out
    sizes = {"M": 512, "N": 256, "K": 128}
    with Database.open(read_settings().database) as database:
        record_miss(database, Problem("sgemm_2d", sizes, "float32"), "NVIDIA H200", "nearest")
        record_miss(database, Problem("gone", sizes, "float32"), "NVIDIA H200", "nearest")
    by_kernel = {row["kernel"]: list(row["problem"]) for row in run("list", "--misses", "--json").document}
    assert by_kernel == {"sgemm_2d": ["M", "N", "K"], "gone": ["K", "M", "N"]}
    assert "M=512 N=256 K=128 float32" in run("list", "--misses").out


def test_what_was_asked_for_is_tuned_once(run, recording, scale_toml, monkeypatch):
    """Programs asked for the recorded problem twice before it was tuned, and for another one once."""
    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    with Database.open(read_settings().database) as database:
        for n, times in ((1048576, 2), (2048, 1)):
            record_miss(database, Problem("scale", {"n": n}, "float32"), "NVIDIA H200", "default", times)
    run("best", "scale", "n=4096", "--device", "h200")  # looking is not counted
    run("best", "scale", "n=4096", "--device", "rtx-3090", "--json")
    rows = run("list", "--misses", "--json").document
    assert [(row["problem"]["n"], row["count"]) for row in rows] == [(1048576, 2), (2048, 1)]
    assert "NVIDIA H200" in run("list", "--misses").out
    assert run("list", "--misses", scale_toml, "--json").document == rows
    assert run("list", "--misses", "sgemm_2d", "--json").document == []
    assert run("list", "--misses", "nosuch").code == 2
    assert autotile.tune_misses("sgemm_2d").entries == ()
    answer = run("tune", "--misses", f"--replay={recording}", "--json")
    assert [found["problem"] for found in answer.document] == [{"n": 1048576}]
    assert answer.document[0]["winner"]["config"] == {"THREADS": 256, "WORK": 4}
    assert "n=2048 float32 is left out" in answer.err
    assert "1048576 float32: 2 calls not served exactly" in answer.err
    assert answer.code == 1
    answer = run("tune", "--misses", "scale", f"--replay={recording}")
    assert "1048576 float32: 2 calls" not in answer.err
    assert "1 problem: 1 failed" in answer.out  # the other one
    tuned = autotile.tune_misses(scale_toml, replay=recording)
    assert repr(tuned).startswith("<PlanResult: plan misses: 1 problem: 1 failed, in ")
    assert "expected scale n=2048 float32" in tuned.entries[0].reason


def test_a_device_is_the_index_or_the_name_of_a_gpu_of_this_machine(run, scale_toml, monkeypatch):
    """Two GPUs, an H100 and an A100; each session adds the index of the one that it would run on."""
    gpus = [structs.replace(device_profile(name), source="cuda") for name in ("h100", "a100")]
    monkeypatch.setattr("autotile.api.targets.device_count", lambda: len(gpus))
    monkeypatch.setattr("autotile.api.targets.live_device", lambda index: gpus[index])
    used: list[int] = []

    def session(_kernel, _problem, _settings, options, *_, **__):
        used.append(options.device_index)
        raise WorkerError("no GPU at all")

    monkeypatch.setattr(targets, "served_so_far", lambda *_: None)
    for name in ("tune", "record"):
        monkeypatch.setattr(import_module("autotile.tuning.session"), name, session)
    for command in (["tune"], ["export", "--format", "recording", "--measure"]):
        for device in ("0", "1", "a100", "NVIDIA A100-SXM4-80GB", "H100"):
            assert "no GPU at all" in run(*command, scale_toml, SIZES, "--device", device).err
        assert used[-5:] == [0, 1, 1, 1, 0]
        for device in ("h200", "2", "-1", "", "9" * 5000):
            run(*command, scale_toml, SIZES, "--device", device).is_refused("CUDA device")


def test_a_run_without_a_winner_is_1(run, scale_toml, recording, monkeypatch):
    tune = tuning.sessions.tune
    without = {"winner": None, "default": None, "speedup": None, "ties": (), "outcomes": {Outcome.CRASHED: 12}}
    monkeypatch.setattr(tuning.sessions, "tune", lambda *given, **lane: replace(tune(*given, **lane), **without))
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
    assert "the same command goes on from there" in answer.err
    assert len(run("trials", "scale", "--json").document) == 3
    answer = run("tune", scale_toml, SIZES, f"--replay={recording}", "--fresh")
    assert "interrupted: 3 trials saved" in answer.err
    assert "the same command begins anew" in answer.err


def test_without_finals_what_earlier_ones_chose_is_said_to_be_served(tune, run, scale_toml):
    assert "is still what is served" not in tune("--trials", "1").out
    served = run("best", scale_toml, SIZES, "--json").document["config"]
    answer = tune("--finals", "0", "--json")
    assert answer.document["winner"]["config"] != served
    (said,) = [text for text in answer.document["notices"] if "is still what is served" in text]
    assert all(f"{name}={value}" in said for name, value in served.items())


def test_replay_may_stand_alone():
    for words, full in (
        ("k n=1 --replay", "k n=1 --replay=auto"),
        ("--replay k n=1", "--replay=auto k n=1"),
        ("--replay mine.toml n=1", "--replay=auto mine.toml n=1"),
        ("k --replay a/b.npz n=1", "k --replay a/b.npz n=1"),
        ("k --replay a/folder n=1", "k --replay a/folder n=1"),
        ("--replay a/mine.toml n=1", "--replay=auto a/mine.toml n=1"),
        ("k --replay=a/b.npz", "k --replay=a/b.npz"),
        ("k --replay --json", "k --replay=auto --json"),
        ("", ""),
    ):
        assert fill_in_replay(words.split()) == full.split()


def test_durations():
    durations = {"90s": 90, "90": 90, "5m": 300, "1h": 3600, "1h30m": 5400, "0.5s": 0.5}
    assert {text: read_duration(text) for text in durations} == durations
    for text in ("", "0", "-5", "5 minutes", "s", "1d", "nan", "inf", "9" * 400, 10**400):
        with pytest.raises(InputError, match="expected a duration such as"):
            read_duration(text)


def test_shares():
    shares = {"1%": 0.01, "0.01": 0.01, "0.5 %": 0.005, ".5%": 0.005, "25%": 0.25, " 2% ": 0.02}
    assert {text: read_share(text) for text in shares} == pytest.approx(shares)
    for text in ("", "%", "0", "0%", "1", "100%", "-1%", "1e-2", "nan", "1,5%", "1%%", "\u0661%"):
        with pytest.raises(InputError, match="expected a percentage such as"):
            read_share(text)


def test_the_front_is_in_the_document_and_a_table_but_nothing_of_time_alone(tune):
    for words in (["--objective", "registers"], ["--objective", "time,registers"], ["--objective=registers,time"]):
        found = tune("--json", *words).document
        assert found["objectives"] == ["time", "registers"]
        assert found["front"][0]["config"] == found["winner"]["config"] == {"THREADS": 256, "WORK": 4}
        assert all(entry.keys() == {"config", "time_us", "registers"} for entry in found["front"])
        registers = [entry["registers"] for entry in found["front"]]
        assert registers == sorted(registers, reverse=True)
    answer = tune("--objective", "time", "--objective", "registers")
    assert answer.code == 0
    assert "front of time and registers: " in answer.out
    assert any(line.split()[0] == "winner" and "THREADS=256 WORK=4" in line for line in answer.out.splitlines() if line)
    assert {"front", "objectives"}.isdisjoint(tune("--json", "--objective", "time").document)


def test_a_measured_value_of_letters_alone_is_an_objective(tune):
    winner = tune("--json", "--objective", "occupancy", "--maximize").document["winner"]
    assert winner["scores"] == {"objective": winner["occupancy"]}


def test_time_by_name_takes_the_place_of_the_objective_of_the_file(run, scale_toml, recording):
    scale_toml.write_text(scale_toml.read_text() + '\n[objective]\nvalue = "time_us"\nmaximize = true\n')
    command = ("tune", scale_toml, SIZES, f"--replay={recording}", "--json")
    slowest, fastest = (run(*command, *more).document["winner"] for more in ([], ["--objective", "time"]))
    assert slowest["time_us"] > fastest["time_us"]
    assert "only an expression is maximised" in run(*command, "--objective", "time", "--maximize").err


def test_a_winner_by_the_objective_is_not_said_to_be_faster(tune, run, tmp_path):
    answer = tune("--objective", "1e3 * WORK / time_us ** 0.1")
    (line,) = [line for line in answer.out.splitlines() if "the default, 95 % interval" in line]
    assert line.startswith("objective ")
    assert "x better than the default" in line
    assert run("report", "-o", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "better by the objective than the default" in page
    assert "the winner is better, times" in page
    assert "faster than the default" not in page


@pytest.fixture
def tune_family(run, scale_toml, own_recordings):
    """Tune a family of the tiny kernel; one of its problems is recorded."""
    return lambda *words: run("tune", scale_toml, "n=1000..2000000", "--replay", *words)


@pytest.fixture
def helpful(scale_toml, recording):
    """Recordings of a family whose rule helps: odd and even sizes lie side by side, and have other winners."""
    found = read_recording(Path(recording))
    spec = load_kernel(str(scale_toml)).spec
    Path(recording).unlink()
    for n in sorted(n + odd for n in (4096, 8192, 20_000, 40_000, 65_536, 1_048_576) for odd in (0, 1)):
        times = {config_key({"THREADS": 64, "WORK": 1}): 10.0, config_key({"THREADS": 256, "WORK": 4}): 40.0}
        even = {key: 50.0 - time for key, time in times.items()}
        trials = []
        for config in (found.config(row) for row in range(len(found))):
            time_us = (times if n % 2 else even).get(config_key(config), 20.0 + config["WORK"])
            measurement = Measurement(time_us, 0.99 * time_us, 1.01 * time_us)
            trials.append(Trial(config, Outcome.OK, "", "measure", measurement=measurement))
        sizes = resolve_problem(spec, {"n": n}).sizes
        header = replace(found.header, key=structs.replace(found.header.key, sizes=sizes))
        write_recording(Path(recording).with_name(f"{n}.npz"), header, trials)


def test_a_rule_in_force_is_served_until_the_kernel_changes(tune_family, run, scale_toml, helpful, monkeypatch):
    assert "no family is tuned yet" in run("list", "--families").out
    answer = tune_family()
    assert "in force  yes: at 12 held-out points it took 0." in answer.out
    assert f'serve it  kernel = autotile.get_best_kernel("{scale_toml}", n=2000000)' in answer.out
    best = run("best", scale_toml, "n=5001", "--json").document
    assert (best["tier"], best["config"]) == ("family", {"THREADS": 64, "WORK": 1})
    assert "A rule chose it for the family n=1000..2000000" in best["explain"]
    assert "times as long as serving without it on average, at most 0." in best["explain"]
    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    (listed,) = run("list", "scale", "--families", "--json").document
    assert (listed["family"], listed["in_force"]) == ("n=1000..2000000", True)
    assert listed["judgement"]["upper"] < 1
    assert "rule  alignment of n" in run("list", "--families").out
    assert "in force  yes" in run("list", "--families").out
    template = scale_toml.with_suffix(".cu")
    template.write_text(template.read_text().replace("factor * x[i]", "x[i] * factor"))
    assert "no: the kernel has changed since" in run("list", "--families").out


def test_a_rule_of_one_point_is_not_in_force_and_all_say_so(tune_family, run, scale_toml, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    said = "no: 0 held-out points are too few to judge it, at least 5 are needed"
    answer = tune_family()
    assert answer.code == 0
    for words in (
        "scale n=1000..2000000 float32 on NVIDIA H200 (replayed)",
        "loss when left out",
        "n=1048576",
        "#0    THREADS=256 WORK=4",
        "0.0 % on average at the points",
        f"in force  {said}",
    ):
        assert words in answer.out
    assert "serve it" not in answer.out
    assert "tuning point 1 of 1: scale n=1048576 float32" in answer.err
    found = tune_family("--json").document
    assert (found["kernel"], found["family"], found["dtype"]) == ("scale", "n=1000..2000000", "float32")
    assert found["loss"] == {"mean": 0.0, "worst": 0.0, "worst_at": {"n": 1048576}}
    assert found["held_out_loss"] is None  # a single point
    assert found["rule"]["tree"]["serve"][0] == 0  # the others are for sizes where it breaks a rule
    assert found["rule"]["configs"][0]["config"] == {"THREADS": 256, "WORK": 4}
    assert found["call"] == f'kernel = autotile.get_best_kernel("{scale_toml}", n=2000000)'
    assert found["in_force"] is False
    assert found["judgement"] == {"points": 0, "ratio": 1.0, "upper": None}
    best = run("best", scale_toml, "n=900000", "--json").document
    assert best["tier"] != "family"
    assert "A rule was learned for the family n=1000..2000000, but is not in force: 0 held-out" in best["explain"]
    assert best["unapplied"] in best["explain"]
    assert f"in force  {said}" in run("list", "--families").out
    (listed,) = run("list", "scale", "--families", "--json").document
    assert listed["in_force"] is False
    assert run("report", "scale", "-o", tmp_path / "page.html").code == 0
    assert "The rule is not in force: 0 held-out points" in (tmp_path / "page.html").read_text()
    limited = tune_family("--points", "1", "--max-configs", "1", "--json").document
    assert len(limited["rule"]["configs"]) == 1


PRODUCT = {"M": 2048, "N": 2048, "K": 2048}
FLAGS = {"BATCH": 1, "TRANS_A": 0, "TRANS_B": 0, "OUT_FP32": 0}


@pytest.fixture
def tune_matmul(run, only_kernel):
    only_kernel("matmul_tiled")
    sizes = [f"{name}={value}" for name, value in PRODUCT.items()]
    return lambda *words: run("tune", "matmul", *sizes, "--replay", "--trials", "3", "--finals", "2", *words)


def arguments_of(line: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the call in a line of Python ``kernel = autotile.get_best_kernel(...)``."""
    (statement,) = ast.parse(line).body
    call = statement.value
    assert (ast.unparse(statement.targets[0]), ast.unparse(call.func)) == ("kernel", "autotile.get_best_kernel")
    named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    return [ast.literal_eval(one) for one in call.args], named


def test_the_line_that_serves_it_serves_the_winner(tune_matmul, tmp_path):
    answer = tune_matmul("--dtype", "float32", "--db", tmp_path / "team.db")
    assert answer.code == 0
    (line,) = (one.removeprefix("serve it").strip() for one in answer.out.splitlines() if one.startswith("serve it  "))
    given, named = arguments_of(line)
    chosen = {"dtype": "float32", "database": str(tmp_path / "team.db")}
    assert (given, named) == (["matmul"], {**PRODUCT, **FLAGS, **chosen})
    kernel = autotile.get_best_kernel(*given, **named, device="NVIDIA H200", library=False)
    assert (kernel.kernel, kernel.tier, kernel.source) == ("matmul_tiled", "exact", "replayed")
    assert f"matmul_tiled {' '.join(f'{name}={value}' for name, value in kernel.config.items())}" in answer.out


def test_conditions_are_in_the_line_only_if_they_were_given(tune_matmul):
    document = tune_matmul("--dtype", "float32", "EMULATE=0", "--json").document
    given, named = arguments_of(document["call"])
    assert (given, named) == (["matmul"], {**PRODUCT, **FLAGS, "EMULATE": 0, "dtype": "float32"})
    assert autotile.get_best_kernel(*given, **named, device="NVIDIA H200", library=False).tier == "exact"


@pytest.fixture
def converse(scale_toml, recording):
    """Send lines; return the exit code and the answers."""

    def send(*lines):
        sent = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        words = ["tune", str(scale_toml), "n=1048576", f"--replay={recording}", "--ask-tell"]
        result = CliRunner().invoke(app, words, input=sent, prog_name="autotile", catch_exceptions=False)
        return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]

    return send


class TestProtocol:
    def test_the_first_line_describes_the_session_and_the_last_is_the_result(self, converse):
        code, (ready, result) = converse()
        assert code == 0
        assert ready["ready"]["parameters"] == {"THREADS": [32, 64, 128, 256], "WORK": [1, 2, 4]}
        assert ready["ready"]["default"] == {"THREADS": 128, "WORK": 1}
        assert ready["ready"]["space"] == {"combinations": 12, "valid": 12}
        assert "replayed from measurements recorded on NVIDIA H200" in ready["ready"]["notices"][0]
        assert result["result"]["winner"]["config"] == {"THREADS": 128, "WORK": 1}
        assert "autotile.get_best_kernel(" in result["result"]["call"]

    def test_each_request_has_one_answer(self, converse):
        evaluated = [{"THREADS": 256, "WORK": 4}, {"THREADS": 48}]
        code, answers = converse(
            {"id": "a", "ask": 2},
            {"evaluate": evaluated},
            {"id": 7, "tell": [{"config": {"WORK": 2}, "time_us": 3}, {"config": {"THREADS": 32}, "time_us": None}]},
            {"finish": True},
            {"ask": 1},
        )
        assert code == 0
        _, asked, trials, told, result = answers
        assert (asked["id"], len(asked["asked"])) == ("a", 2)
        assert "id" not in trials
        assert [trial["outcome"] for trial in trials["trials"]] == ["ok", "infeasible"]
        assert trials["trials"][0]["time_us"] == pytest.approx(1000 / 256 + 0.5)
        assert told == {"id": 7, "told": 2}
        assert result["result"]["winner"]["config"] == {"THREADS": 256, "WORK": 4}

    def test_a_bad_line_is_an_error_and_the_session_goes_on(self, converse):
        cases = [
            (b"nonsense\n", "DataError", "JSON is malformed"),
            (b"\xff\xfe\n", "DataError", "malformed"),
            (b"[" * 5000 + b"\n", "DataError", ""),
            (b'{"evaluate": ["' + b"x" * MAX_LINE_BYTES + b'"]}\n', "DataError", "more than 1048576 bytes"),
            ({"ask": 1, "finish": True}, "DataError", "got ask and finish"),
            ({"id": 1}, "DataError", "got none"),
            ({"finish": False}, "DataError", "got none"),
            ({"ask": "two"}, "DataError", "ask"),
            ({"asks": 2}, "DataError", "unknown field asks"),
            ({"ask": 0}, "InputError", "n is 0"),
            ({"evaluate": [{"THREAD": 1}]}, "ConfigError", "did you mean 'THREADS'"),
            ({"evaluate": [{}] * 1001}, "InputError", "at most 1000"),
            ({"tell": [{"config": {"THREADS": 48}, "time_us": 1}]}, "InputError", "not in the space"),
            ({"tell": [{"config": {}, "time_us": 1}, {"config": {}, "time_us": -1}]}, "InputError", "positive number"),
        ]
        numbered = {"id": 3, "ask": "two"}
        code, answers = converse(*(line for line, _, _ in cases), numbered, b'{"ask": 1}')  # a last line needs no end
        assert code == 0
        _, *errors, last, asked, _ = answers
        for (line, kind, message), found in zip(cases, errors, strict=True):
            assert found["error"]["kind"] == kind, line
            assert message.lower() in found["error"]["message"].lower()
        assert (last["id"], asked["asked"]) == (3, [{"THREADS": 128, "WORK": 1}])

    def test_a_program_that_stops_reading_loses_nothing(self, run, scale_toml, recording):
        words = ["tune", str(scale_toml), "n=1048576", f"--replay={recording}", "--ask-tell"]
        process = subprocess.Popen(
            [sys.executable, "-m", "autotile", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
        assert b'"ready"' in process.stdout.readline()
        process.stdout.close()
        _, errors = process.communicate(b'{"evaluate": [{"THREADS": 256, "WORK": 4}]}\n', timeout=120)
        assert b"Traceback" not in errors
        assert process.returncode == 0
        served = run("best", scale_toml, "n=1048576", "--device=h200", "--json")
        assert served.document["config"] == {"THREADS": 256, "WORK": 4}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=7), inner, max_size=3),
    max_leaves=6,
)
requests = st.dictionaries(st.sampled_from(["ask", "evaluate", "tell", "id", "x"]), values, max_size=3)


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=8, max_size=30))
def test_any_objects_are_answered(converse, sent):
    code, answers = converse(*sent)
    assert code == 0
    assert len(answers) == len(sent) + 2
    assert "result" in answers[-1]


def test_named_configurations_are_tried_and_shown(tune):
    answer = tune("--try", "THREADS=32,WORK=4", "--try", "WORK=2", "--trials", "6", "--json")
    assert [one["outcome"] for one in answer.document["tried"]] == ["wrong_result", "ok"]
    assert answer.document["tried"][1]["config"] == {"THREADS": 128, "WORK": 2}
    shown = tune("--try", "WORK=2", "--trials", "6")
    assert "tried" in shown.out
    assert "THREADS=128 WORK=2: 8.8" in shown.out
