"""The progress of a session: its trials, the rules that end it, Ctrl-C, the time that is left, and its load."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges import DEFAULT, failed, timed
from processes import wait_until

from autotile.core.model import Config, Measurement, Outcome, Trial
from autotile.core.timeline import Pace
from autotile.errors import InputError
from autotile.search import search
from autotile.space.search_space import feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import (
    Load,
    StoppingRules,
    StopRequest,
    TimeLeft,
    TrialLog,
    check_kernel_failure,
    check_until,
    measure_load,
)
from autotile.workers.compile_pool import CompilePool

MANY = {
    "THREADS = [32, 64, 128, 256]": f"THREADS = {list(range(32, 1025, 32))}",
    "WORK = [1, 2, 4]": "WORK = [1, 2, 3, 4, 5, 6]",
}


def smooth(config: Config) -> Trial:
    """Return a time with a single minimum over both parameters, 192 configurations, at `LEAST`."""
    away = abs(np.log2(int(config["THREADS"]) / 512)) + abs(int(config["WORK"]) - 4)
    time_us = float(100 * 1.2**away)
    return replace(timed(config, time_us), measurement=Measurement(time_us, 0.999 * time_us, 1.001 * time_us))


LEAST = {"THREADS": 512, "WORK": 4}


@pytest.mark.usefixtures("compiled_once")
class TestSession:
    def test_whichever_rule_holds_first_ends_it_and_only_a_smaller_gain_goes_further(self, rewrite, monkeypatch):
        monkeypatch.setattr(search, "_EXPECTED_PROPOSALS", 64)  # not to try most of so small a space
        bench = rewrite(MANY)
        recording = bench.record(smooth)
        result = bench.tune(recording, until=0.01, trials=8)
        assert (result.stopped.rule, result.outcomes.total()) == ("trials", 8)
        assert bench.tune(recording, until=0.01, budget_s=0.0).stopped.rule == "budget"
        few = bench.tune(recording, until=0.05).outcomes.total()
        first = bench.tune(recording, until=0.01)
        assert (first.stopped.rule, first.winner.config) == ("until", LEAST)
        assert 0 <= first.stopped.expected_gain < 0.01
        assert 16 < len(bench.stored()) < 100
        again = bench.tune(recording, until=0.01)
        gain = again.stopped.expected_gain
        assert again.to_json()["stopped"] == {"rule": "until", "expected_gain": gain, "more_trials": 128}
        assert gain == pytest.approx(first.stopped.expected_gain)
        assert len(bench.stored()) == again.resumed == first.outcomes.total()
        assert bench.tune(recording, until=1e-4).outcomes.total() > few

    def test_a_search_that_expects_nothing_ends_before_its_limits(self, rewrite):
        bench = rewrite({**MANY, "WORK = [1, 2, 4]": f"WORK = {list(range(1, 25))}"})
        recording = bench.record(smooth)
        result = bench.tune(recording, trials=150, budget_s=600.0)
        assert (result.stopped.rule, result.winner.config) == ("settled", LEAST)
        assert 50 <= result.outcomes.total() < 150
        assert 0 <= result.stopped.expected_gain < 5e-3
        again = bench.tune(recording, trials=150)
        assert (again.stopped.rule, again.outcomes.total()) == ("settled", result.outcomes.total())
        more = result.outcomes.total() + 4
        spent = bench.tune(recording, trials=more, spend=True)
        assert (spent.stopped.rule, spent.outcomes.total()) == ("trials", more)


def rules_of(options: TuneOptions, log: Any = ()) -> StoppingRules:
    return StoppingRules(options, log, lambda: 0.0, StopRequest())


class TestRule:
    @pytest.mark.parametrize(
        ("options", "gain", "rule"),
        [
            *(({"until": 0.01}, gain, rule) for gain, rule in ((None, None), (0.02, None), (0.01, None))),
            ({"until": 0.01}, 0.0099, "until"),
            ({}, 4.9e-3, "settled"),
            ({}, 5.1e-3, None),
            ({}, None, None),
            ({"budget_s": 60.0}, 0.0, "settled"),
            ({"spend": True}, 0.0, None),
            ({"spend": True, "until": 0.01}, 0.0, "until"),
            ({"until": 1e-4}, 1e-3, None),
        ],
    )
    def test_less_is_expected_than_is_asked_for(self, options, gain, rule):
        rules = rules_of(TuneOptions(**options))
        rules.expected_gain = gain
        assert getattr(rules.stopped, "rule", None) == rule
        assert (rules.room == 0) is (rule is not None)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            *(
                ({"until": 0.01, "sampler": sampler}, f"'{sampler}' does not: choose auto or feasible")
                for sampler in ("tpe", "random", "brute-force", "gp", "cmaes", "nsga2")
            ),
            *(({"until": gain}, "expected more than 0 and less than 1") for gain in (0.0, -0.1, 1.0, float("nan"))),
            ({"until": 0.01, "objectives": ("time", "registers")}, "several objectives"),
        ],
    )
    def test_a_gain_that_cannot_be_applied_is_refused(self, options, expected):
        with pytest.raises(InputError, match=expected):
            check_until(TuneOptions(**options))


def test_trials_that_run_take_up_room(space):
    """They are not in the log yet; on several GPUs many run at once."""
    log = TrialLog(space, [Trial(space.config(row), Outcome.CRASHED) for row in range(3)])
    rules = rules_of(TuneOptions(trials=10), log)
    for running, room, rule in ((0, 7, None), (5, 2, None), (7, 0, "trials")):
        rules.running = running
        assert (rules.room, getattr(rules.stopped, "rule", None)) == (room, rule)


BAD, WRONG, DEAD = Outcome.COMPILE_FAILED, Outcome.WRONG_RESULT, Outcome.CRASHED


@pytest.fixture
def space(bench):
    return feasible_space(bench.kernel.spec, bench.kernel.spec.at({"n": 4096}), bench.device)


def make(threads: int, work: int, time_us: float, outcome: Outcome = Outcome.OK) -> Trial:
    return timed({"THREADS": threads, "WORK": work}, time_us, outcome)


def test_sums_follow_every_trial_and_the_newest_earlier_one(space):
    log = TrialLog(space, [])
    assert (len(log), log.best, log.resumed) == (0, None, 0)
    for trial in (
        make(128, 1, 9.0),
        make(64, 1, 8.0),
        make(32, 1, 5.0, Outcome.PRUNED),
        failed({"THREADS": 32, "WORK": 2}, Outcome.COMPILE_FAILED, stage="compile"),
        failed({"THREADS": 32, "WORK": 4}, Outcome.RESOURCE_EXCEEDED, stage="resources"),
    ):
        log.add(trial)
    assert (log.best, log.outcomes[Outcome.OK]) == (make(64, 1, 8.0), 2)
    assert log.outcomes.total() == len(log) == len(log.trials) == 5
    rejected = {"compile_rejected": 1, "resources_rejected": 1, "same_code": 0}
    assert log.gates == {"combinations": 12, "rules": 12, "limits": 12, **rejected, "launched": 3}
    log.outcomes.clear()  # what it gives away is not its own
    log.trials.clear()
    assert log.outcomes.total() == len(log.trials) == 5
    # of earlier trials, the newest of the space counts
    trials = [make(128, 1, 5.0), make(64, 1, 7.0), make(128, 1, 9.0)]
    log = TrialLog(space, [*trials, make(512, 1, 1.0), Trial({"OTHER": 1}, Outcome.OK)])
    assert (log.resumed, log.best) == (2, make(64, 1, 7.0))
    assert log.find({"WORK": 1, "THREADS": 128}).time_us == 9.0


@pytest.mark.parametrize(
    ("outcomes", "default_tried", "max_trials", "at_fault"),
    [
        ({BAD: 7}, True, 100, False),
        ({BAD: 8}, True, 100, True),
        ({WRONG: 8}, True, 100, True),
        ({DEAD: 8}, True, 100, False),
        ({BAD: 8, WRONG: 1}, True, 100, False),
        ({BAD: 100, Outcome.OK: 1}, True, 100, False),
        ({BAD: 3}, True, 3, True),
        ({BAD: 8}, False, 100, False),
        ({BAD: 100}, False, 100, True),
    ],
)
def test_a_failure_of_the_kernel_itself(outcomes, default_tried, max_trials, at_fault):
    outcome = next(iter(outcomes))
    last = Trial({"TILE": 2}, outcome, "the last reason")
    default = Trial({"TILE": 1}, outcome, "the default's reason") if default_tried else None
    failure = "compiles" if outcome is BAD else "agrees with the reference"
    named = "TILE=1: the default's reason" if default_tried else "TILE=2: the last reason"
    said = f"^scale.toml: no candidate {failure}.* {named}$"
    with pytest.raises(InputError, match=said) if at_fault else nullcontext():
        check_kernel_failure("scale.toml", outcomes, last, default, max_trials)


REPLAYED = Trial({"BM": 1}, Outcome.OK, source="replayed", measurement=Measurement(10.0, 9.0, 11.0))


def pace_of(ends_s: list[float]) -> float:
    pace = Pace()
    for end_s in ends_s:
        pace.add(end_s)
    return pace.mean_s


def left_after(ends_s: list[float], valid: int = 10_000, trial: Trial = REPLAYED, **options: object) -> TimeLeft:
    left = TimeLeft(TuneOptions(**options), valid)
    for end_s in ends_s:
        left.add(end_s, trial)
    return left


class TestPace:
    def test_the_time_before_the_first_step_is_left_out_and_nothing_said_of_one_step(self):
        assert pace_of([60.0, 61.0, 62.0, 63.0]) == pytest.approx(1.0)
        pace = Pace()
        pace.add(3.0)
        assert (Pace().mean_s, pace.mean_s, len(pace)) == (None, None, 0)

    @pytest.mark.parametrize(("before_s", "after_s"), [(1.0, 4.0), (4.0, 0.5)])
    def test_it_follows_a_change_of_the_number_of_cores(self, before_s, after_s):
        noise = np.random.default_rng(0).lognormal(0.0, 0.3, 220)
        durations_s = noise * ([before_s] * 200 + [after_s] * 20)
        assert pace_of(np.cumsum(durations_s).tolist()) == pytest.approx(after_s, rel=0.3)

    def test_at_a_steady_speed_it_is_the_mean_of_many(self):
        errors = []
        for seed in range(20):
            durations_s = np.random.default_rng(seed).lognormal(0.0, 0.5, 300)
            errors.append(abs(np.log(pace_of(np.cumsum(durations_s).tolist()) / np.exp(0.125))))
        assert np.mean(errors) < 0.06  # of the newest 12 alone, 0.12

    @given(st.lists(st.floats(0.0, 1e4), min_size=2, max_size=80))
    def test_it_is_between_the_durations(self, durations_s):
        found = pace_of(np.cumsum(durations_s).tolist())
        assert -1e-6 <= found <= max(durations_s[1:]) * (1 + 1e-6) + 1e-6


ENDS = [10.0 + number for number in range(20)]


@pytest.mark.parametrize(
    ("options", "valid", "asked", "expected"),
    [
        ({"trials": 50}, 10_000, (20, 30.0, None), 30.0),
        ({"trials": 50}, 25, (20, 30.0, None), 5.0),  # a small space ends it
        ({"budget_s": 40.0}, 10_000, (20, 30.0, None), 10.0),
        ({"budget_s": 40.0, "trials": 23}, 10_000, (20, 30.0, None), 3.0),
        ({"budget_s": 20.0}, 10_000, (20, 30.0, None), 0.0),
        ({"trials": 500}, 10_000, (20, 30.0, 12.5), 12.5),
        ({"until": 0.01}, 10_000, (20, 30.0, 4.0), 4.0),
        ({"until": 0.01}, 10_000, (20, 30.0, None), None),  # an unforeseen gain
        ({"until": 0.01, "budget_s": 60.0}, 10_000, (20, 30.0, None), 30.0),
        ({"trials": 300}, 10_000, (280, 30.0, None), 20.0),  # trials of earlier sessions count towards the target
        ({"trials": 200}, 10_000, (280, 30.0, None), 0.0),
        ({"trials": 50}, 10_000, (4, 14.0, None), None),  # the first trials say nothing
        ({"budget_s": 50.0}, 10_000, (4, 14.0, None), 36.0),
        ({"trials": 50}, 10_000, (5, 15.0, None), 45.0),
        ({"sampler": "brute-force"}, 70, (20, 30.0, None), 50.0),
    ],
)
def test_the_time_until_the_search_ends(options, valid, asked, expected):
    """Asked for with the trials so far, the seconds so far, and the trials after which a gain ends it."""
    left = left_after(ENDS[: min(asked[0], 20)], valid, **options)
    found = left.search_s(*asked)
    assert found == (None if expected is None else pytest.approx(expected))


class TestFinals:
    OK = replace(timed({"BM": 1}, 2000.0), seconds={"load": 0.01, "verify": 0.04})

    def test_they_can_be_left_out_replayed_trials_have_none_and_a_session_that_only_resumes_has_some(self):
        assert left_after([1.0, 2.0, 3.0], trials=50).finals_s == 0.0
        assert left_after([1.0, 2.0], trial=self.OK, finals=0).finals_s == 0.0
        left = TimeLeft(TuneOptions(), 100)
        left.remember([self.OK] * 20)
        assert left.finals_s == left_after([float(n) for n in range(20)], trial=self.OK).finals_s
        assert left.search_s(20, 1.0) is None  # they say nothing of the pace

    def test_they_take_as_long_as_the_race_and_the_checks_a_second_or_a_tenth_of_the_budget_more_at_most(self):
        quick = replace(self.OK, seconds={"load": 0.0005, "verify": 0.001})
        few = left_after([1.0, 2.0], trial=quick).finals_s
        many = left_after([float(n) for n in range(40)], trial=quick).finals_s
        assert 0.3 < few < many < 1.0
        slow = replace(timed({"BM": 1}, 2e6), seconds={"load": 0.0, "verify": 0.0})
        assert left_after([1.0, 2.0], trial=slow).finals_s == pytest.approx(1.0)
        assert left_after([1.0, 2.0], trial=slow, budget_s=20.0).finals_s == pytest.approx(3.0)


def test_the_load_is_that_between_the_first_trial_and_the_last_compilation():
    # time, seconds compiled so far, seconds on the GPU, start of the newest compilation
    readings = [(10.0, 20.0, 5.0, 10.0), (11.0, 21.0, 0.25, 11.0), (12.0, 23.0, 0.25, 11.5), (15.0, 23.0, 3.0, 11.5)]
    assert measure_load([], 2, 1) is measure_load(readings[:1], 2, 1) is None  # one trial has no load
    assert all(measure_load(readings[:count], 2, 1) is not None for count in (2, 3, 4))
    assert measure_load(readings, 2, 1) == Load(gpu_busy=0.25, compilers_busy=0.75, binds="compilers")
    readings.append((50.0, 23.0, 3.0, 50.0))  # for most of this time, neither worked
    load = measure_load(readings, 2, 1)
    assert load is not None
    assert (load.gpu_busy, load.compilers_busy, load.binds) == (pytest.approx(0.1625, abs=1e-3), 0.037, "neither")
    # of a small space, all were compiling before, and it is that up to the last trial
    readings = [(10.0, 8.0, 1.0, 2.0), (12.0, 8.0, 1.5, 2.0), (14.0, 8.0, 1.5, 2.0)]
    assert measure_load(readings, 2, 1) == Load(gpu_busy=0.75, compilers_busy=0.0, binds="gpu")


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_only_asks_the_second_raises_and_afterwards_ctrl_c_is_what_it_was():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        ctrl_c()
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before

    def requested():  # other threads are left alone
        with StopRequest() as stop:
            return stop.requested

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(requested).result() is False


@pytest.mark.parametrize("is_named", [False, True])
def test_while_compilers_are_waited_for_it_ends_what_is_tried_and_the_finals_are_held(bench, monkeypatch, is_named):
    named = {"tries": (DEFAULT, *bench.configs()), "trials": 12} if is_named else {}
    attempt, begun = CompilePool._attempt, list[str]()

    def hang_after_six(pool, job, deadline_s):
        begun.append(job.key)
        if len(begun) == 7:
            wait_until(lambda: len(bench.stored()) > 2)
            ctrl_c()
        if len(begun) > 6:
            wait_until(lambda: pool._closing)
        return attempt(pool, job, deadline_s)

    monkeypatch.setattr(CompilePool, "_attempt", hang_after_six)
    monkeypatch.setenv("AUTOTILE_CACHE", str(bench.folder / "cold"))
    result = bench.tune(bench.record(), **named)
    assert (result.interrupted, result.stopped.rule) == (True, "interrupt")
    assert 2 < sum(result.outcomes.values()) <= 6
    assert result.speedup is not None


def test_in_a_session_it_ends_the_search_and_the_finals_are_held(bench):
    def interrupt(progress):
        if (progress.phase, progress.done) == ("searching", 6):
            ctrl_c()

    result = bench.tune(bench.record(), interrupt, discard=False)
    assert result.interrupted
    assert sum(result.outcomes.values()) == 7  # the one that ran is waited for
    assert result.speedup is not None
    assert 4 <= len(bench.stored("final")) <= 5  # four finalists, and the default if it is not among them
    assert bench.tune(bench.record()).resumed == 7
