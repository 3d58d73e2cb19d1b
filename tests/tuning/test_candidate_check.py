"""The judgement of a candidate, with a fake compiler and a fake GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest
from gpu_calls import raced

from autotile.core.model import Measurement, Outcome, Resources
from autotile.cuda.compiler import CachedCubin, CompiledFunction
from autotile.errors import InputError
from autotile.kernel.library import load_kernel, make_kernel
from autotile.kernel.problem import resolve_problem
from autotile.tuning.session import Pipeline
from autotile.tuning.verifying import confirm_agreement, judge_on
from autotile.workers.compile_pool import Compiled
from autotile.workers.jobs import Candidate, Check, Race, Reading
from autotile.workers.sanitizer import Finding, ToolResult

CONFIG = {"THREADS": 128, "WORK": 1}


class Pool:
    """Compile pool; the cubin of a source has a name of its own, and one with an error does not compile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, make_job: Any) -> Future[Compiled]:
        job, future = make_job(), Future()
        path = self.folder / ("candidate.cubin" if "rewritten" in job.source else "winner.cubin")
        path.touch()
        if "error" in job.source:
            future.set_result(Compiled(None, 0.1, Outcome.COMPILE_FAILED, "line 1: error"))
        else:
            functions = {"scale": CompiledFunction("scale", Resources(32, 0, 0, 0, 0))}
            future.set_result(Compiled(CachedCubin(path, path.name, functions), 0.1))
        return future


class Device:
    """Backend in which the candidate does as the test says, and the winner runs in 10 us."""

    source: Literal["cuda", "replayed"] = "cuda"
    race_breaks = False
    gpu_count = 1

    def __init__(self, device: Any, **candidate: Any) -> None:
        self.device = device
        self.candidate = candidate
        self.queue: list[Candidate] = []
        self.confirmed = 0
        self.log: list[str] = []

    def wait(self) -> None:
        self.log.append("wait")

    def submit(self, candidate: Candidate, limit_us: float | None = None) -> None:
        assert limit_us is None, "neither is pruned"
        self.queue.append(candidate)

    def result(self) -> tuple[Candidate, Reading]:
        candidate = self.queue.pop(0)
        name = Path(candidate.cubin_path).stem
        outcome = self.candidate.get(f"{name}_outcome", Outcome.OK)
        time = Measurement(10.0, 9.9, 10.1) if outcome is Outcome.OK else None
        evaluation = Reading(outcome, "" if time else "y[3] is 0", "measure" if time else "verify", time)
        return candidate, evaluation

    def race(self, job: Race) -> list[Reading] | None:
        self.log.append("race")
        names = [Path(one.candidate.cubin_path).stem for one in job.entries if one.candidate is not None]
        assert names == ["candidate", "winner"]
        if self.candidate.get("race_breaks"):
            return None
        outcome = self.candidate.get("timed", Outcome.OK)
        times_us = [self.candidate.get("time_us", 5.0) + index / 1000 for index in range(job.rounds)]
        winners = [10.0 + index / 1000 for index in range(job.rounds)]
        return [raced(times_us, outcome, "" if outcome is Outcome.OK else "stale"), raced(winners)]

    def check(self, job: Check) -> Reading:
        self.log.append("check with second inputs" if job.seed else "check")
        (entry,), repeats = job.entries, job.repeats
        assert entry.candidate is not None
        if Path(entry.candidate.cubin_path).stem == "winner":
            self.confirmed += 1
            agrees = self.confirmed >= self.candidate.get("agree_after", 2)
            return Reading(Outcome.OK if agrees else Outcome.WRONG_RESULT, "", telemetry={"repeats": repeats})
        if self.candidate.get("repeated") is not None:
            return Reading(self.candidate["repeated"], "sometimes, in repeat 3 of 75", "verify")
        return Reading(Outcome.OK, stage="verify", telemetry={"repeats": repeats})

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        return [list(self.candidate.get("findings", ())) for _ in candidates]


@pytest.fixture
def judged(scale_toml, tmp_path, device):
    def judge(source="// rewritten\n", confirming=(), **candidate):
        kernel = load_kernel(scale_toml)
        path = tmp_path / "rewritten.cu"
        path.write_text(source + kernel.source)
        rewritten = make_kernel(kernel.spec, path)
        problem = resolve_problem(kernel.spec, {"n": 4096})
        backend = Device(device, **candidate)
        ours, theirs = (Pipeline(each, problem, backend, Pool(tmp_path)) for each in (rewritten, kernel))
        if confirming:
            confirm_agreement(theirs, backend, confirming)
        return judge_on(backend, problem, (ours, theirs), (CONFIG, CONFIG), 0), backend.log

    return judge


class TestVerdict:
    @pytest.mark.parametrize(
        ("time_us", "verdict", "ratio"), [(5.0, "faster", 2.0), (10.0, "equal", 1.0), (20.0, "slower", 0.5)]
    )
    def test_a_right_candidate_is_compared_by_the_interval(self, judged, time_us, verdict, ratio):
        found, log = judged(time_us=time_us)
        assert found.verdict == verdict
        assert found.speedup.value == pytest.approx(ratio, rel=0.01)
        assert found.speedup.low < found.speedup.value < found.speedup.high
        assert found.candidate.time_us == pytest.approx(time_us, rel=0.01)
        assert found.repeats == 75
        assert found.sanitized == ()
        assert log == ["wait", "race", "check with second inputs"]

    def test_the_tools_that_found_nothing_are_named(self, judged):
        unchecked = Finding("racecheck", ToolResult.UNCHECKED, "too slow")
        found, _ = judged(findings=[Finding("memcheck", ToolResult.PASSED), unchecked])
        assert found.sanitized == ("memcheck",)
        assert found.notices == ("1 of the sanitizer's checks were not made; too slow",)

    @pytest.mark.parametrize(
        ("candidate", "outcome", "reason"),
        [
            ({"candidate_outcome": Outcome.WRONG_RESULT}, Outcome.WRONG_RESULT, "y[3] is 0"),
            ({"candidate_outcome": Outcome.CRASHED}, Outcome.CRASHED, "y[3] is 0"),
            ({"timed": Outcome.WRONG_RESULT}, Outcome.WRONG_RESULT, "stale"),
            ({"repeated": Outcome.WRONG_RESULT}, Outcome.WRONG_RESULT, "sometimes, in repeat 3 of 75"),
            ({"source": "// rewritten error\n"}, Outcome.COMPILE_FAILED, "line 1: error"),
            (
                {"findings": [Finding("memcheck", ToolResult.FAILED, "out of bounds")]},
                Outcome.OUT_OF_BOUNDS,
                "memcheck: out of bounds",
            ),
        ],
    )
    def test_a_wrong_candidate_has_an_outcome_and_a_reason(self, judged, candidate, outcome, reason):
        found, _ = judged(**candidate)
        assert found.verdict == "wrong"
        assert found.candidate.outcome is outcome
        assert reason in found.candidate.reason
        assert found.speedup is None

    def test_without_a_race_a_candidate_is_right_or_wrong(self, judged):
        found, _ = judged(race_breaks=True)
        assert (found.verdict, found.speedup) == ("right", None)
        assert "the race broke" in found.notices[0]

    def test_a_winner_that_fails_is_said(self, judged):
        found, log = judged(winner_outcome=Outcome.WRONG_RESULT)
        assert found.verdict == "right"
        assert found.repeats == 75
        assert "the winner does not run now, so there is no ratio: wrong_result: y[3] is 0" in found.notices
        assert "race" not in log


OWN = [{"THREADS": threads, "WORK": 1} for threads in (128, 32, 64)]


class TestWithoutAReference:
    def test_the_kernel_is_run_until_two_configurations_agree(self, judged):
        found, log = judged(confirming=OWN, agree_after=2)
        assert found.verdict == "faster"
        assert log.index("race") > log.index("check with second inputs")
        assert log.count("check with second inputs") == 3  # two of the kernel, one of the candidate

    def test_a_kernel_that_never_agrees_judges_nothing(self, judged):
        with pytest.raises(InputError, match="no two of its configurations agree"):
            judged(confirming=OWN, agree_after=9)
