"""Verification of stored and of served results by replay, and the judgement of a candidate with a fake GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from gpu_calls import GivenGpu, raced
from judges import BEST as WINNER
from judges import DEFAULT, by_threads, failed, failing_if, timed
from msgspec.structs import replace
from sqlalchemy import update
from stored_runs import change, record_miss

from autotile.api import targets
from autotile.api.verification import verify
from autotile.core.model import Config, Measurement, Outcome, Resources, Trial, config_key
from autotile.cuda.compiler import CachedCubin, CompiledFunction, CompileJob
from autotile.database.engine import MISSES, STUDIES
from autotile.errors import InputError
from autotile.kernel.library import load_kernel, make_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving import dispatcher
from autotile.serving.dispatcher import find_best_kernel, forget_served
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import assess_misses
from autotile.tuning.session import Pipeline
from autotile.tuning.start import find_served
from autotile.tuning.verifying import confirm_agreement, judge_on
from autotile.workers.compile_pool import Compiled
from autotile.workers.jobs import Candidate, Check, Race, Reading
from autotile.workers.sanitizer import Finding

SIZE, ASKED = 4096, 8192
SECOND = {"THREADS": 256, "WORK": 2}


@pytest.fixture
def again(bench):
    """Verify by replay of a recording made from a function of the configuration."""

    def run(judge, *arguments, at=SIZE, **named):
        options = TuneOptions(replay=bench.record(judge, n=at), workers=1)
        return verify(bench.kernel.spec.source, *arguments, options=options, **named)

    return run


def kernel_for(bench: Any, n: int = SIZE) -> Any:
    forget_served()
    return find_best_kernel(str(bench.kernel.spec.source), None, None, read_settings().database, {"n": n})


def served(bench: Any, n: int = SIZE) -> tuple[str, Config]:
    kernel = kernel_for(bench, n)
    return kernel.tier, kernel.config


def wrong_if(faulty: Config) -> Callable[[Config], Trial]:
    return failing_if(lambda config: config == faulty, Outcome.WRONG_RESULT, "y[7] is 1, expected 2")


all_wrong = partial(failed, outcome=Outcome.WRONG_RESULT, reason="y[7] is 1")


@pytest.fixture
def tuned(bench, database):
    """Tune by replay; ``nvrtc`` replaces the version of the compiler."""

    def tune(nvrtc=""):
        bench.tune(bench.record())
        if nvrtc:
            key = replace(bench.key(), nvrtc_version=nvrtc, source="replayed")
            change(database, update(STUDIES).values(nvrtc_version=nvrtc, digest=key.digest))

    return tune


def test_what_is_still_best_is_confirmed(bench, tuned, again):
    tuned()
    result = again(by_threads)
    (row,) = result.problems
    assert repr(result) == "<VerifyResult: 1 problem on NVIDIA H200 (replayed): 1 confirmed>"
    assert "<td>scale n=4096 float32</td><td>confirmed</td>" in result._repr_html_()
    assert (row.verdict, row.before, row.after, row.aged) == ("confirmed", WINNER, WINNER, ())
    assert row.speedup.value > 1
    retimed = [trial.config for trial in bench.stored("final")][-4:]
    assert {config_key(config) for config in retimed} == {
        config_key(config) for config in (WINNER, SECOND, DEFAULT, {"THREADS": 256, "WORK": 1})
    }
    bench.tune(bench.record(n=2048), n=2048)
    for one in (again(by_threads, {"n": 4096}), again(by_threads, n=4096)):  # not the other problem
        assert [dict(row.problem.sizes) for row in one.problems] == [{"n": 4096}]


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        (lambda config: timed(config, 1.0 if config == SECOND else 10.0), ("replaced", "")),
        (wrong_if(WINNER), ("demoted", "wrong_result: y[7] is 1, expected 2")),
    ],
    ids=["another is faster", "the winner is wrong"],
)
def test_what_is_best_now_is_served(bench, tuned, again, judge, expected):
    tuned()
    (row,) = again(judge).problems
    assert (row.before, row.after, (row.verdict, row.reason)) == (WINNER, SECOND, expected)
    assert kernel_for(bench).config == SECOND


def test_another_compiler_marks_a_result_as_aged_until_it_is_verified(bench, tuned, again):
    tuned(nvrtc="12.0")
    kernel = kernel_for(bench)
    assert (kernel.tier, kernel.config) == ("nearest", WINNER)
    assert "It has aged (NVRTC 12.0, now" in kernel.explain()
    assert "`autotile verify scale` measures it again" in kernel.explain()
    (row,) = again(by_threads, aged=True).problems
    assert row.verdict == "confirmed"
    assert row.aged[0].startswith("NVRTC 12.0, now")
    kernel = kernel_for(bench)
    assert (kernel.tier, kernel.config, kernel.choice.aged) == ("exact", WINNER, ())
    nothing = again(by_threads, aged=True)
    assert nothing.problems == ()
    assert "nothing to verify" in repr(nothing)


@pytest.mark.parametrize("nvrtc", ["", "12.0"])
def test_where_all_are_wrong_nothing_of_them_is_served(bench, tuned, again, nvrtc):
    """Not even results of another compiler version, as the installed one would compile them."""
    tuned(nvrtc)
    (row,) = again(all_wrong).problems
    assert (row.verdict, row.before) == ("demoted", WINNER)
    assert kernel_for(bench).config not in (WINNER, SECOND)


def test_what_cannot_be_verified(bench, tuned, again, monkeypatch):
    with pytest.raises(InputError, match="give one of them"):
        again(by_threads, aged=True, served=True)
    with pytest.raises(InputError, match="scale is not tuned, so there is nothing to verify"):
        again(by_threads)
    tuned()
    with pytest.raises(InputError, match="scale n=8 float32 is not tuned"):
        again(by_threads, {"n": 8})
    with pytest.raises(InputError, match="n is given twice"):
        again(by_threads, {"n": 4096}, n=4096)
    monkeypatch.setattr("autotile.api.verification.device_count", lambda: 0)
    with pytest.raises(InputError, match="there is no CUDA device here"):
        verify(bench.kernel.spec.source)


@pytest.fixture
def check(bench, again, database):
    """Tune for one size, miss another, and verify what is served there by replay of a function of the configuration."""
    bench.tune(bench.record())
    record_miss(database, bench.problem(ASKED), bench.device.name, "nearest", 3)
    return partial(again, at=ASKED, served=True)


def test_what_is_correct_there_is_confirmed_once_and_still_counts_as_not_tuned(bench, check, database):
    (row,) = check(by_threads).problems
    assert (row.verdict, row.before, row.after, row.reason) == ("confirmed", WINNER, WINNER, "")
    assert row.before_measurement is None
    assert row.after_measurement.time_us == by_threads(WINNER).time_us
    assert row.speedup.value > 1
    assert served(bench, ASKED) == ("nearest", WINNER)
    assert check(by_threads).problems == ()
    (missed,) = assess_misses(database, bench.kernel.spec.source)
    assert not missed.tuned
    assert bench.tune(bench.record(n=ASKED), n=ASKED).winner.config == WINNER
    assert kernel_for(bench, ASKED).tier == "exact"


def test_what_is_wrong_there_is_not_served_for_it_until_a_tuning_measures_it(bench, check):
    first, second = check(wrong_if(WINNER)).problems
    assert (first.verdict, first.before, first.after) == ("demoted", WINNER, DEFAULT)
    assert (second.verdict, second.before, second.after) == ("confirmed", DEFAULT, DEFAULT)
    assert first.reason == "wrong_result: y[7] is 1, expected 2"
    assert served(bench, ASKED) == ("default", DEFAULT)
    assert served(bench) == ("exact", WINNER)
    bench.tune(bench.record(n=ASKED), n=ASKED)
    assert served(bench, ASKED) == ("exact", WINNER)


def test_a_default_that_is_wrong_is_reported_and_stays_the_last_resort(bench, check):
    rows = check(all_wrong).problems
    assert [row.verdict for row in rows] == ["demoted", "failed"]
    assert kernel_for(bench, ASKED).config == DEFAULT


def test_what_cannot_run_there_gets_no_verdict_and_given_sizes_are_verified_without_a_miss(bench, check, database):
    options = TuneOptions(replay=bench.record(configs=[DEFAULT], n=ASKED), workers=1)
    (row,) = verify(bench.kernel.spec.source, options=options, served=True).problems
    assert row.verdict == "failed"
    assert kernel_for(bench, ASKED).config == WINNER
    change(database, MISSES.delete())
    assert check(by_threads).problems == ()
    (row,) = check(by_threads, {"n": ASKED}).problems
    assert row.verdict == "confirmed"


class TestTuningAProblemThatWasServed:
    def test_what_was_served_is_tried_right_after_the_default_whatever_is_served_by_now(self, bench, database):
        chosen = {"THREADS": 64, "WORK": 2}
        bench.tune(bench.record(), served=chosen, trials=4, sampler="random", finals=0)
        assert [trial.config for trial in bench.stored()][:2] == [DEFAULT, chosen]
        (study,) = database.studies()
        assert find_served(database, study.study_id, TuneOptions(served=WINNER)) == chosen
        assert find_served(database, study.study_id, TuneOptions(served=WINNER, fresh=True)) == WINNER
        assert find_served(database, study.study_id + 1, TuneOptions(served=WINNER)) == WINNER

    @pytest.mark.parametrize(
        ("tier", "options", "expected"),
        [
            ("nearest", {}, WINNER),
            ("default", {}, None),
            *(("nearest", options, None) for options in ({"fresh": True}, {"transfer": False}, {"only": (DEFAULT,)})),
        ],
    )
    def test_the_call_finds_it_unless_earlier_results_are_excluded(self, bench, monkeypatch, tier, options, expected):
        monkeypatch.setattr(targets, "device_count", lambda: 1)
        monkeypatch.setattr(targets, "check_gpu", lambda _: None)
        monkeypatch.setattr(dispatcher, "find_best_result", lambda *_: SimpleNamespace(tier=tier, config=WINNER))
        monkeypatch.setattr(import_module("autotile.tuning.session"), "tune", tune := Mock())
        targets.tune_problem(bench.kernel, bench.problem(), TuneOptions(**options))
        assert tune.call_args.args[3].served == expected


def compiled(folder: Path, job: CompileJob) -> Future[Compiled]:
    """Compile; the cubin of a source has a name of its own, and one with an error does not compile."""
    future: Future[Compiled] = Future()
    path = folder / ("candidate.cubin" if "rewritten" in job.source else "winner.cubin")
    path.touch()
    if "error" in job.source:
        future.set_result(Compiled(None, 0.1, Outcome.COMPILE_FAILED, "line 1: error"))
    else:
        functions = {"scale": CompiledFunction("scale", Resources(32, 0, 0, 0, 0))}
        future.set_result(Compiled(CachedCubin(path, path.name, functions), 0.1))
    return future


class Device(GivenGpu):
    """Backend in which the candidate does as the test says, and the winner runs in 10 us."""

    sanitizer = property(lambda self: self)

    def __init__(self, device: Any, **candidate: Any) -> None:
        super().__init__(device)
        self.candidate = candidate
        self.confirmed = 0
        self.log: list[str] = []

    def wait(self) -> None:
        self.log.append("wait")

    def time(self, candidate: Candidate, limit_us: float | None) -> Reading:
        assert limit_us is None, "neither is pruned"
        name = Path(candidate.cubin_path).stem
        outcome = self.candidate.get(f"{name}_outcome", Outcome.OK)
        time = Measurement(10.0, 9.9, 10.1) if outcome is Outcome.OK else None
        return Reading(outcome, "" if time else "y[3] is 0", "measure" if time else "verify", time)

    def race(self, job: Race) -> list[Reading]:
        self.log.append("race")
        names = [Path(one.candidate.cubin_path).stem for one in job.entries if one.candidate is not None]
        assert names == ["candidate", "winner"]
        if self.candidate.get("race_breaks"):
            return []
        outcome = self.candidate.get("timed", Outcome.OK)
        rounds = job.rounds if outcome is not Outcome.CRASHED else 0  # it cannot be loaded
        times_us = [self.candidate.get("time_us", 5.0) + index / 1000 for index in range(rounds)]
        theirs = self.candidate.get("winner_timed", Outcome.OK)
        winners = [10.0 + index / 1000 for index in range(job.rounds if theirs is Outcome.OK else 0)]
        return [raced(times_us, outcome, "" if outcome is Outcome.OK else "stale"), raced(winners, theirs, "no memory")]

    def check(self, job: Check) -> Reading:
        self.log.append("check with second inputs" if job.seed else "check")
        (entry,), repeats = job.entries, job.repeats
        if Path(entry.candidate.cubin_path).stem == "winner":
            self.confirmed += 1
            agrees = self.confirmed >= self.candidate.get("agree_after", 2)
            return Reading(Outcome.OK if agrees else Outcome.WRONG_RESULT, "", telemetry={"repeats": repeats})
        if self.candidate.get("repeated") is not None:
            return Reading(self.candidate["repeated"], "sometimes, in repeat 3 of 75", "verify")
        return Reading(Outcome.OK, stage="verify", telemetry={"repeats": repeats})

    def check_all(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
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
        pool = SimpleNamespace(submit=partial(compiled, tmp_path))
        ours, theirs = (Pipeline(each, problem, backend, pool) for each in (rewritten, kernel))
        if confirming:
            confirm_agreement(theirs, confirming)
        return judge_on((ours, theirs), (DEFAULT, DEFAULT), 0), backend.log

    return judge


OUT_OF_BOUNDS = Finding("memcheck", "failed", "out of bounds")


class TestVerdict:
    @pytest.mark.parametrize(
        ("time_us", "verdict", "ratio"), [(5.0, "faster", 2.0), (10.0, "equal", 1.0), (20.0, "slower", 0.5)]
    )
    def test_a_right_candidate_is_compared_by_the_interval(self, judged, time_us, verdict, ratio):
        found, log = judged(time_us=time_us)
        assert (found.verdict, found.repeats, found.sanitized) == (verdict, 75, ())
        assert found.speedup.value == pytest.approx(ratio, rel=0.01)
        assert found.speedup.low < found.speedup.value < found.speedup.high
        assert found.candidate.time_us == pytest.approx(time_us, rel=0.01)
        assert log == ["wait", "race", "check with second inputs"]

    def test_the_tools_that_found_nothing_are_named_and_without_a_race_a_candidate_is_right_or_wrong(self, judged):
        unchecked = Finding("racecheck", "unchecked", "too slow")
        found, _ = judged(findings=[Finding("memcheck", "passed"), unchecked])
        assert found.sanitized == ("memcheck",)
        assert found.notices == ("1 of the sanitizer's checks was not made; too slow",)
        found, _ = judged(race_breaks=True)
        assert (found.verdict, found.speedup) == ("right", None)
        assert "the race broke" in found.notices[0]

    @pytest.mark.parametrize(
        ("candidate", "outcome", "reason"),
        [
            ({"candidate_outcome": Outcome.WRONG_RESULT}, Outcome.WRONG_RESULT, "y[3] is 0"),
            ({"candidate_outcome": Outcome.CRASHED}, Outcome.CRASHED, "y[3] is 0"),
            ({"timed": Outcome.WRONG_RESULT}, Outcome.WRONG_RESULT, "stale"),
            ({"timed": Outcome.CRASHED}, Outcome.CRASHED, "stale"),
            ({"repeated": Outcome.WRONG_RESULT}, Outcome.WRONG_RESULT, "sometimes, in repeat 3 of 75"),
            ({"source": "// rewritten error\n"}, Outcome.COMPILE_FAILED, "line 1: error"),
            ({"findings": [OUT_OF_BOUNDS]}, Outcome.OUT_OF_BOUNDS, "memcheck: out of bounds"),
        ],
    )
    def test_a_wrong_candidate_has_an_outcome_and_a_reason(self, judged, candidate, outcome, reason):
        found, _ = judged(**candidate)
        assert (found.verdict, found.candidate.outcome, found.speedup) == ("wrong", outcome, None)
        assert reason in found.candidate.reason

    def test_a_winner_that_fails_is_said(self, judged):
        found, log = judged(winner_outcome=Outcome.WRONG_RESULT)
        assert (found.verdict, found.repeats) == ("right", 75)
        assert "the winner does not run now, so there is no ratio: wrong_result: y[3] is 0" in found.notices
        assert "race" not in log
        found, log = judged(winner_timed=Outcome.CRASHED)
        assert (found.verdict, found.speedup) == ("right", None)
        assert "the winner failed before the race, so there is no ratio: crashed: no memory" in found.notices
        assert "race" in log


OWN = [{"THREADS": threads, "WORK": 1} for threads in (128, 32, 64)]


def test_without_a_reference_a_kernel_is_run_until_two_configurations_agree_and_judges_nothing_if_none_do(judged):
    found, log = judged(confirming=OWN, agree_after=2)
    assert found.verdict == "faster"
    assert log.index("race") > log.index("check with second inputs")
    assert log.count("check with second inputs") == 3  # two of the kernel, one of the candidate
    with pytest.raises(InputError, match="no two of its configurations agree"):
        judged(confirming=OWN, agree_after=9)
