"""The progress of a session: its trials, the rules that end it, the time that is left, and what observers are told."""

from __future__ import annotations

import signal
import threading
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from autotile.core.device import DeviceProperties
from autotile.core.model import SAME_CODE, Config, Outcome, Problem, Rule, Stopped, Trial, config_key, config_text
from autotile.core.timeline import MIN_PACE_STEPS, STEADY_STEPS, Pace
from autotile.errors import InputError
from autotile.kernel.problem import Workrate
from autotile.search.samplers import AUTO, SAMPLERS
from autotile.space.search_space import SearchSpace
from autotile.tuning.options import TuneOptions
from autotile.workers.jobs import REPEATS, finals_limit_s, race_rounds


class StopRequest:
    """Context in which the first SIGINT only sets `requested`, and the next one raises `KeyboardInterrupt`.

    Outside the main thread, where Python delivers no signals, the context has no effect: sessions in several threads
    enter one that the main thread has entered.
    """

    def __init__(self) -> None:
        self.requested = False
        self.aborted = False
        """Whether the sessions of other threads are to end at once."""
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread() and self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _receive(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


SETTLED_GAIN = 5e-3
"""Expected gain below which a search ends before its limits: 0.5 %, what the interval of a measurement resolves."""
_EXPECTED_TRIALS = 128
"""Number of trials that come of the 256 proposals of an expected gain, about: each second one is measured, of the first
ones fewer."""


@dataclass
class StoppingRules:
    """The limits on trials and budget, the minimum expected gain, and the user's interrupt.

    They are of a session's options and log, of a function of its time so far, in seconds, and of its interrupt.
    """

    _options: TuneOptions
    _log: TrialLog
    _elapsed_s: Callable[[], float]
    stop: StopRequest
    expected_gain: float | None = None
    """Expected gain of the search, see `autotile.search.search.Search`; it ends a search where it is below ``until``,
    or unless ``spend`` is set, below 0.5 %. ``benchmarks/results/until.json`` has where, and what that loses."""
    ends_after: float | None = None
    """Number of trials after which the gain is expected to end the search; None if that is not foreseen."""
    running: int = 0
    """Number of trials that have begun and have not ended."""

    @property
    def least_gain(self) -> float:
        """Expected gain below which the search ends; 0 for none."""
        return self._options.until or (0.0 if self._options.spend else SETTLED_GAIN)

    @property
    def stopped(self) -> Stopped | None:
        """The first rule that holds; None while another trial may begin."""
        target, budget_s, gain = self._options.trial_target, self._options.budget_s, self.expected_gain
        ends = gain is not None and gain < self.least_gain
        reached: dict[Rule, bool] = {
            "interrupt": self.stop.requested,
            "trials": target is not None and len(self._log) + self.running >= target,
            # one trial, of the default, begins with any budget but 0: even the shortest session then has a result
            "budget": self.is_out_of_time and (budget_s == 0.0 or len(self._log) + self.running > 0),
            "until": ends and self._options.until is not None,
            "settled": ends,
        }
        more_trials = _EXPECTED_TRIALS if gain is not None else None
        return next((Stopped(rule, gain, more_trials) for rule, holds in reached.items() if holds), None)

    @property
    def is_out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return self._options.budget_s is not None and self._elapsed_s() >= self._options.budget_s

    @property
    def room(self) -> int | None:
        """Number of trials that may still begin; None for no limit."""
        if self.stopped is not None:
            return 0
        target = self._options.trial_target
        return None if target is None else target - len(self._log) - self.running


def check_until(options: TuneOptions) -> None:
    """Raise an `InputError` if the option ``until`` cannot be applied.

    A sampler without a model could only be stopped after many trials without an improvement, which says little about
    the configurations that are left. With several objectives there is no single best to improve on.
    """
    if options.until is None:
        return
    if not 0 < options.until < 1:
        raise InputError(f"the gain to stop at is {options.until}, expected more than 0 and less than 1: 0.01 for 1 %")
    if len(options.objectives) > 1:
        raise InputError(
            "--until goes by the best time, and there are several objectives: stop by --trials or --budget"
        )
    able = [AUTO, *(name for name, entry in SAMPLERS.items() if entry.predicts_gain)]
    if options.sampler not in able:
        raise InputError(
            f"--until needs a sampler that says what another measurement is expected to gain, and {options.sampler!r} "
            f"does not: choose {' or '.join(able)}, or stop by --trials or --budget"
        )


class TrialLog:
    """The newest trial of each configuration, including those of earlier sessions, which are given oldest first.

    Of these, configurations that are no longer in the space are left out: a value or a rule may have changed since, and
    an invalid configuration must not win. Counts are updated with each trial: they are read after every one of tens of
    thousands of trials.
    """

    def __init__(self, space: SearchSpace, earlier: Iterable[Trial]) -> None:
        self._space = space
        self._trials: dict[str, Trial] = {}
        self._outcomes: Counter[Outcome] = Counter()
        self._stages: Counter[str] = Counter()
        self.best: Trial | None = None
        """The best trial that was measured to the end."""
        newest = {trial.config_key: trial for trial in earlier}
        for trial in newest.values():
            if space.row_of(trial.config) is not None:
                self.add(trial)
        self.resumed = len(self._trials)
        """Number of trials taken over from earlier sessions."""

    def __len__(self) -> int:
        return len(self._trials)

    @property
    def trials(self) -> list[Trial]:
        """All trials."""
        return list(self._trials.values())

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Number of trials by outcome."""
        return self._outcomes.copy()

    @property
    def gates(self) -> Mapping[str, int]:
        """Configurations left after the rules and the limits, and candidates rejected or passed at the later gates."""
        rules = self._space.rules
        return {
            "combinations": self._space.combinations,
            "rules": rules[-1].remaining if rules else self._space.combinations,
            "limits": len(self._space),
            "compile_rejected": self._stages["compile"],
            "resources_rejected": self._stages["resources"],
            "same_code": self._stages[SAME_CODE],
            "launched": len(self) - sum(self._stages[stage] for stage in ("compile", "resources", SAME_CODE)),
        }

    def add(self, trial: Trial) -> None:
        """Add the trial of a configuration that has none yet."""
        self._trials[trial.config_key] = trial
        self._outcomes[trial.outcome] += 1
        self._stages[trial.stage] += 1
        best = float("inf") if self.best is None or self.best.cost is None else self.best.cost
        if trial.outcome is Outcome.OK and trial.cost is not None and trial.cost < best:
            self.best = trial

    def find(self, config: Config) -> Trial | None:
        """Return the trial of a configuration."""
        return self._trials.get(config_key(config))


_MIN_FAILURES = 8
"""Candidates, the default among them, that must fail with the same outcome before the kernel itself is blamed."""

_KERNEL_FAILURES = {
    Outcome.COMPILE_FAILED: "no candidate compiles; the compiler says of",
    Outcome.WRONG_RESULT: "no candidate agrees with the reference; correct one of the two. This is wrong with",
}


def check_kernel_failure(
    source: str, outcomes: Mapping[Outcome, int], last: Trial, default: Trial | None, max_trials: int
) -> None:
    """Raise an `InputError` if the kernel itself is at fault, as every candidate failed with the same outcome.

    The default is expected to run: without its trial, nothing is concluded until all candidates that the study will try
    have failed.
    """
    required = max_trials if default is None else min(_MIN_FAILURES, max_trials)
    if len(outcomes) == 1 and sum(outcomes.values()) >= required and last.outcome in _KERNEL_FAILURES:
        example = default or last
        failure = f"{_KERNEL_FAILURES[example.outcome]} {config_text(example.config)}: {example.reason}"
        raise InputError(f"{source}: {failure}")


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a session among those of a schedule, such as round 2 of 3."""

    of: str
    """Unit that is counted: ``round``, ``tuning point``, ``measuring point`` or ``problem``."""
    number: int
    """From 1; a last race has one above the count."""
    count: int
    ended: int = 0
    """Number of them that have ended."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running session.

    Attributes
    ----------
    phase
        ``starting``, ``searching`` or ``finals`` of a session; ``measuring`` or ``learning`` of a family of an
        operation, whose trials are those of all its problems; ``ended`` of a problem of a plan.
    problem
        Problem that is tuned; None before the first one of a family of an operation.
    device
        Device that it is tuned for; None if it is not known yet.
    done
        Number of trials of this session; ``outcomes`` counts those of earlier sessions too. Of a family of an
        operation, number of problems.
    target
        Target number of trials of the study; None where there is none.
    elapsed_s, budget_s
        Wall time so far, and its limit; None without a limit.
    outcomes
        Number of trials by outcome.
    gates
        As in `TuneResult`; empty where no space is searched.
    best, last
        The best and the newest trial.
    rate
        Work of the problem, from which a time gives a rate.
    notices
        Remarks for the user, one line each.
    remaining_s
        Estimated time until the session ends, finals included, in seconds; None before there is a basis for it.
    may_end_earlier
        Whether ``remaining_s`` is a limit: ``until`` is expected to end the search, and it is not foreseen when.
    waiting
        What the session waits for beside results, such as a scheduler that is lost; empty for nothing.
    path
        Places of the session in the schedules that hold it, the outermost first; empty for a session alone.
    ending
        Of a problem of a plan that has ended, the time of its winner or why there is none; empty otherwise.
    """

    phase: str
    problem: Problem | None
    device: DeviceProperties | None
    done: int = 0
    target: int | None = None
    elapsed_s: float = 0.0
    budget_s: float | None = None
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    gates: Mapping[str, int] = field(default_factory=dict)
    best: Trial | None = None
    rate: Workrate = field(default_factory=lambda: Workrate(None, None, ""))
    last: Trial | None = None
    notices: tuple[str, ...] = ()
    remaining_s: float | None = None
    may_end_earlier: bool = False
    waiting: str = ""
    path: tuple[Place, ...] = ()
    ending: str = ""


Observer = Callable[[Progress], None]
"""Callable that observes sessions."""

_FINALS_S = 0.2
"""Time of finals besides the race and the checks: recompiling, a second set of inputs."""
_RACE_SHARE = 0.2
"""Share of all rounds of a race that is run, as slower finalists leave early and it ends when all is known."""


@dataclass
class TimeLeft:
    """Estimates how long a session with some options still takes in a space of so many configurations."""

    _options: TuneOptions
    _valid: int
    _pace: Pace = field(default_factory=Pace)
    _times_us: list[float] = field(default_factory=list)
    _gpu_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEADY_STEPS))

    def add(self, elapsed_s: float, trial: Trial) -> None:
        """Register a trial that has just ended, ``elapsed_s`` seconds after the session began."""
        self._pace.add(elapsed_s)
        self.remember([trial])

    def remember(self, trials: Iterable[Trial]) -> None:
        """Register trials of earlier sessions, which may be in the finals."""
        for trial in trials:
            if trial.source == "replayed" or trial.outcome is not Outcome.OK or trial.time_us is None:
                continue  # finals in replay compare stored times
            insort(self._times_us, trial.time_us)
            del self._times_us[self._options.finals :]
            self._gpu_s.append(trial.seconds.get("load", 0.0) + trial.seconds.get("verify", 0.0))

    def search_s(self, tried: int, elapsed_s: float, settles_after: float | None = None) -> float | None:
        """Return the estimated time until the search ends, in seconds; None before there is a basis for an estimate.

        ``tried`` counts the trials of the study, those of earlier sessions included; ``settles_after`` those after
        which a rule on the expected gain is expected to end the search.
        """
        target, budget_s = self._options.trial_target, self._options.budget_s
        trials = [] if settles_after is None else [settles_after]
        if target is not None:
            trials.append(max(0.0, min(target, self._valid) - tried))
        elif self._options.until is None:  # long before the space ends, a gain ends a search without another limit
            trials.append(max(0.0, self._valid - tried))
        limits_s = [] if budget_s is None else [max(0.0, budget_s - elapsed_s)]
        pace_s = self._pace.mean_s if len(self._pace) >= MIN_PACE_STEPS - 1 else None
        if trials and pace_s is not None:
            limits_s.append(pace_s * min(trials))
        return min(limits_s, default=None)

    @property
    def finals_s(self) -> float:
        """Estimated time of the finals in seconds, without that of compute-sanitizer; 0 if there are none."""
        if not self._times_us or not self._options.finals:
            return 0.0
        round_us = sum(self._times_us)
        check_s = sum(self._gpu_s) / len(self._gpu_s)
        race_s = 1e-6 * _RACE_SHARE * race_rounds(round_us) * round_us
        limit_s = finals_limit_s(self._times_us[0], self._options.budget_s or 0.0)
        return _FINALS_S + min(limit_s, race_s) + REPEATS * check_s  # the winner is verified as often in any case


@dataclass(frozen=True, slots=True)
class Load:
    """Utilization during the search, from the first trial to the start of the last compilation.

    Where all compilations began before the first trial, as in a small space, it is that up to the last trial.
    """

    gpu_busy: float
    """Share of the wall time in which the GPU workers load, verify or measure, 0 to 1; of several, the mean."""
    compilers_busy: float
    """Mean share of the compile workers that are compiling, 0 to 1."""
    binds: Literal["gpu", "compilers", "neither"]
    """The busier of the two, for which the search waits, if it is busy for at least half of the time."""


_MIN_SHARE_BINDS = 0.5
"""Share of the time above which a resource binds: with any number of it, a search takes at least one minus this share
as long, so that below, most of its time is spent elsewhere."""


LoadReading = tuple[float, float, float, float]
"""Seconds as a trial ended: by the clock, of compiling so far, of the trial on its GPU, and at the start of the newest
compilation."""


def measure_load(readings: Sequence[LoadReading], workers: int, gpu_count: int) -> Load | None:
    """Return the load of a search with a number of compile workers and of GPUs; None before two trials have ended."""
    if len(readings) < 2:
        return None
    last_begun_s = readings[-1][3]
    end = next((place for place, reading in enumerate(readings) if reading[0] >= last_begun_s), 0) or len(readings) - 1
    wall_s, compiled_s = readings[end][0] - readings[0][0], readings[end][1] - readings[0][1]
    gpu_s = sum(reading[2] for reading in readings[1 : end + 1])
    gpu, compilers = gpu_s / wall_s / gpu_count, compiled_s / wall_s / workers
    is_bound = max(gpu, compilers) >= _MIN_SHARE_BINDS
    binds: Literal["gpu", "compilers", "neither"] = "gpu" if gpu >= compilers else "compilers"
    return Load(round(gpu, 3), round(compilers, 3), binds if is_bound else "neither")
