"""``autotile verify``: what it prints, and its exit codes."""

from __future__ import annotations

import pytest

import autotile
from autotile.api import verification
from autotile.api.verification import judge
from autotile.core.model import Measurement, Outcome, Trial
from autotile.core.statistics import Interval
from autotile.tuning.verifying import CandidateCheck

CONFIG = {"THREADS": 128, "WORK": 1}
TIME = Measurement(5.0, 4.9, 5.1)


def trial(outcome=Outcome.OK, reason=""):
    return Trial(CONFIG, outcome, reason, "finals", measurement=TIME if outcome is Outcome.OK else None)


@pytest.fixture
def answer(monkeypatch, run, scale_toml, tmp_path, device):
    """Run the command on a machine whose GPU comes to a given judgement."""
    (tmp_path / "mine.cu").write_text("// rewritten")

    def command(*words, candidate=None, speedup=None, notices=()):
        asked = {}

        def judge(kernel, rewritten, problem, **given):
            asked.update(given, problem=problem, source=rewritten.source)
            return CandidateCheck(problem, device, candidate or trial(), trial(), speedup, 75, notices)

        monkeypatch.setattr(verification, "judge", judge)
        found = run("verify", tmp_path / "mine.cu", "n=1000", "--like", scale_toml, *words)
        return found, asked

    return command


class TestExitCodes:
    def test_of_a_right_and_of_a_wrong_candidate(self, answer):
        for speedup, code, verdict in (
            (Interval(1.2, 1.1, 1.3), 0, "faster"),
            (Interval(0.99, 0.98, 1.01), 0, "equal"),
            (Interval(0.9, 0.8, 0.95), 3, "slower"),
            (None, 0, "right"),
        ):
            found, _ = answer("--json", speedup=speedup)
            assert (found.code, found.document["verdict"], found.document["right"]) == (code, verdict, True)
            assert (found.document["candidate"]["time_us"], found.document["winner"]["tier"]) == (5.0, "default")
            if speedup is not None:
                assert found.document["speedup"] == {"ratio": speedup.value, "interval": [speedup.low, speedup.high]}
        found, _ = answer("--json", candidate=trial(Outcome.OUT_OF_BOUNDS, "wrote 1 word outside y"))
        assert (found.code, found.document["verdict"]) == (1, "wrong")
        candidate = found.document["candidate"]
        assert (candidate["outcome"], candidate["reason"]) == ("out_of_bounds", "wrote 1 word outside y")

    @pytest.mark.usefixtures("recording")
    def test_of_bad_input_and_without_a_gpu(self, answer, run, scale_toml, tmp_path, monkeypatch):
        for words, message in (
            (("--config", "THREAD=1"), "'THREAD' is not a parameter of scale"),
            (("--config", "THREADS"), "expected NAME=VALUE"),
            (("--verify-problem", "m=3"), "scale has no size 'm'"),
        ):
            answer(*words)[0].is_refused(message)
        monkeypatch.setattr(verification, "judge", judge)
        monkeypatch.setenv("AUTOTILE_RECORDINGS", str(tmp_path))
        found = run("verify", scale_toml.with_suffix(".cu"), "--like", scale_toml)
        found.is_refused()
        assert "no CUDA device" in found.err or "must run on a GPU" in found.err


def test_what_is_asked_for_reaches_the_judge(answer):
    words = ("--config", "WORK=4", "--verify-problem", "n=7", "--sanitize", "--l2", "hot")
    _, asked = answer(*words)
    assert asked["configs"] == ({"THREADS": 128, "WORK": 4}, CONFIG)
    assert asked["problem"].sizes == {"n": 1000}
    assert asked["source"] == "// rewritten"
    assert asked["options"].verify_sizes == ({"n": 7},)
    assert (asked["options"].sanitize, asked["options"].l2) == (True, "hot")


def test_a_person_reads_the_verdict_first(answer):
    found, _ = answer(speedup=Interval(1.2, 1.1, 1.3), notices=("no second inputs",))
    assert "verdict    right and faster than the winner: 1.200x, 95 % interval 1.100x to 1.300x" in found.out
    assert "verified   75 times, two launches each" in found.out
    assert "no second inputs" in found.err


def test_a_kernel_from_python_is_judged_too(monkeypatch, scale_toml, tmp_path, device):
    (tmp_path / "mine.cu").write_text("// rewritten")
    monkeypatch.setattr(
        verification, "judge", lambda _, __, problem, **___: CandidateCheck(problem, device, trial(), trial(), None, 75)
    )
    found = autotile.check(tmp_path / "mine.cu", autotile.kernel(scale_toml.with_suffix(".cu"), "scale", **SCALE))
    assert found.verdict == "right"
    assert repr(found).endswith("for scale n=4096 float32 on NVIDIA H200 (profile): right, 5.000 us>")


SCALE = {
    "sizes": {"n": 4096},
    "parameters": {"THREADS": [32, 64, 128], "WORK": [1, 2, 4]},
    "arguments": [
        autotile.Buffer("float32", "n"),
        autotile.Buffer("float32", "n", "out"),
        autotile.Scalar("int32", "n"),
        autotile.Scalar("float32", 2.0),
    ],
    "launch": ("THREADS", "ceil_div(n, THREADS * WORK)"),
    "reference": "factor * x",
}
