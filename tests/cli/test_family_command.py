"""``autotile tune`` of a range of sizes, and ``autotile list --families``, by replay."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotile.api import tuning
from autotile.core.model import Measurement, Outcome, Trial, config_key
from autotile.exchange.recording import read_recording, write_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import read_settings


@pytest.fixture
def tune_family(run, scale_toml, recording, monkeypatch):
    """Tune a family of the tiny kernel; one of its problems is recorded."""
    settings = replace(read_settings(), recording_folders=(Path(recording).parent,))
    monkeypatch.setattr(tuning, "read_settings", lambda: settings)
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
        header = replace(found.header, key=replace(found.header.key, sizes=sizes))
        write_recording(Path(recording).with_name(f"{n}.npz"), header, trials)


def test_points_and_configurations_are_limited(tune_family):
    found = tune_family("--points", "1", "--max-configs", "1", "--json").document
    assert len(found["rule"]["configs"]) == 1


class TestTuning:
    def test_a_person_reads_points_rule_and_losses(self, tune_family):
        answer = tune_family()
        assert answer.code == 0
        assert "scale n=1000..2000000 float32 on NVIDIA H200 (replayed)" in answer.out
        assert "loss when left out" in answer.out
        assert "n=1048576" in answer.out
        assert "#0    THREADS=256 WORK=4" in answer.out
        assert "0.0 % on average at the points" in answer.out
        assert "tuning point 1 of 1: scale n=1048576 float32" in answer.err

    def test_json_is_the_whole_of_standard_output(self, tune_family, scale_toml):
        found = tune_family("--json").document
        assert (found["kernel"], found["family"], found["dtype"]) == ("scale", "n=1000..2000000", "float32")
        assert found["loss"] == {"mean": 0.0, "worst": 0.0, "worst_at": {"n": 1048576}}
        assert found["held_out_loss"] is None  # a single point
        assert found["rule"]["tree"]["serve"][0] == 0  # the others are for sizes where it breaks a rule
        assert found["rule"]["configs"][0]["config"] == {"THREADS": 256, "WORK": 4}
        assert found["call"] == f'kernel = autotile.get_best_kernel("{scale_toml}", n=2000000)'

    def test_it_is_listed_until_the_kernel_changes(self, tune_family, run, scale_toml, helpful, monkeypatch):
        assert "no family is tuned yet" in run("list", "--families").out
        tune_family()
        monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
        (listed,) = run("list", "scale", "--families", "--json").document
        assert (listed["family"], listed["in_force"]) == ("n=1000..2000000", True)
        assert listed["judgement"]["upper"] < 1
        assert "rule  alignment of n" in run("list", "--families").out
        assert "in force  yes" in run("list", "--families").out
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text().replace("factor * x[i]", "x[i] * factor"))
        assert "no: the kernel has changed since" in run("list", "--families").out

    def test_best_says_the_family(self, tune_family, run, scale_toml, helpful):
        answer = tune_family()
        assert "in force  yes: at 12 held-out points it took 0." in answer.out
        assert f'serve it  kernel = autotile.get_best_kernel("{scale_toml}", n=2000000)' in answer.out
        answer = run("best", scale_toml, "n=5001", "--json").document
        assert answer["tier"] == "family"
        assert answer["config"] == {"THREADS": 64, "WORK": 1}
        assert "A rule chose it for the family n=1000..2000000" in answer["explain"]
        assert "times as long as serving without it on average, at most 0." in answer["explain"]

    def test_a_rule_of_one_point_is_not_put_in_force_and_everything_says_so(
        self, tune_family, run, scale_toml, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
        said = "no: 0 held-out points are too few to judge it, at least 5 are needed"
        answer = tune_family()
        assert f"in force  {said}" in answer.out
        assert "serve it" not in answer.out
        document = tune_family("--json").document
        assert document["in_force"] is False
        assert document["judgement"] == {"points": 0, "ratio": 1.0, "upper": None}
        best = run("best", scale_toml, "n=900000", "--json").document
        assert best["tier"] != "family"
        assert "A rule was learned for the family n=1000..2000000, but is not in force: 0 held-out" in best["explain"]
        assert best["unapplied"] in best["explain"]
        assert f"in force  {said}" in run("list", "--families").out
        (listed,) = run("list", "scale", "--families", "--json").document
        assert listed["in_force"] is False
        assert run("report", "scale", "-o", tmp_path / "page.html").code == 0
        assert "The rule is not in force: 0 held-out points" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("n=9..1",), "the range n=9..1 is empty"),
        (("n=many..2",), "n=many..2 cannot be read"),
        (("m=1..2",), "has no size 'm'"),
        (("n=1..9", "--misses"), "--misses takes its sizes from the database"),
        (("n=1..9", "--points", "0"), "--points"),
        (("n=9", "--points", "3"), "--points and --max-configs are of families of sizes"),
        (("n=9", "--max-configs", "3"), "--points and --max-configs are of families of sizes"),
        (("n=1..9", "--objective", "registers"), "--objective is of one session"),
        (("n=1..9", "--verify-problem", "n=7"), "--verify-problem is of one session"),
        (("n=1..9", "--ask-tell"), "--ask-tell is of one session"),
        (("n=1..9", "--replay=x.npz"), "leave the file's name out"),
        (("n=1..9", "--replay"), "is recorded of scale as it is now; recorded are: none"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(run, scale_toml, words, said):
    answer = run("tune", scale_toml, *words)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_a_family_needs_a_kernel(run):
    run("tune").is_refused("KERNEL")


def test_lists_are_named_one_at_a_time(run):
    assert "lists of their own" in run("list", "--families", "--recordings").err
