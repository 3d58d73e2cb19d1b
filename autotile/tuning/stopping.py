"""The trials of a session, and the rules that end it: trials, budget, expected gain, failure of every candidate."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from autotile.core.model import SAME_CODE, Config, Outcome, Trial, config_key, config_text
from autotile.errors import InputError
from autotile.search.samplers import RANKED_AHEAD, gain_predicting_samplers
from autotile.space.search_space import SearchSpace
from autotile.tuning.options import TuneOptions

if TYPE_CHECKING:
    from autotile.search.search import Shortlist


class Clock:
    """Wall time of a session and of its phases, from construction on."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._phases: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since construction."""
        return time.monotonic() - self._start

    @property
    def phases_s(self) -> Mapping[str, float]:
        """Seconds of each phase that was reached, including one that an exception ended."""
        return dict(self._phases)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the ``with`` block."""
        start = self.elapsed_s
        try:
            yield
        finally:
            self._phases[name] = round(self.elapsed_s - start, 3)


class StopRequest:
    """Context in which the first SIGINT only sets `requested`, and the next one raises `KeyboardInterrupt`.

    Outside the main thread, where Python delivers no signals, the context has no effect. Sessions in several threads
    share one, which the main thread has entered.

    Attributes
    ----------
    requested
        Whether the user has asked for the end of the session.
    aborted
        Whether the sessions of other threads are to end at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.aborted = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


Rule = Literal["interrupt", "trials", "budget", "until", "settled", "space"]

_SETTLED_GAIN = 1e-3
"""Expected gain of the last 256 proposals together below which a search ends before its limits: 0.1 %, a fifth of what
the interval of a measurement resolves."""
_SETTLED_TRIALS = 50
"""Minimum number of trials before that."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The reason for the end of a search.

    Attributes
    ----------
    rule
        ``interrupt``, ``trials``, ``budget``, ``until``, ``settled`` where nothing more was expected, or ``space``
        where every configuration was tried.
    expected_gain
        Expected relative gain in speed from `more_trials` further trials, 0.01 for 1 %; None for a sampler that does
        not estimate it.
    """

    rule: Rule
    expected_gain: float | None = None

    @property
    def more_trials(self) -> int | None:
        """Number of further trials that `expected_gain` is of; None if it is not known."""
        return None if self.expected_gain is None else RANKED_AHEAD

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {"rule": self.rule, "expected_gain": self.expected_gain, "more_trials": self.more_trials}


class StoppingRules:
    """The limits on trials and budget, the minimum expected gain, and the user's interrupt.

    Parameters
    ----------
    options
        Limits of the session.
    log
        Trials of the study.
    clock
        Wall time of the session.
    stop
        The user's interrupt.

    Attributes
    ----------
    running
        Number of trials that have begun and have not ended.
    expected_gain
        Expected gain of the search, see `autotile.search.search.Search`; it ends a search only if ``until`` is set.
        Where such searches end is in ``benchmarks/results/until.json``.
    settled_gain
        Expected gain over many trials, see `autotile.search.search.Search`; it ends a search before its limits unless
        ``until`` or ``spend`` is set. Replayed over eleven recorded spaces, four seeds, up to 300 trials, 19 of 44
        searches ended earlier, after 161 trials at the earliest, and none of them found anything in the trials that it
        was spared (docs/search.md).
    ends_after
        Number of trials after which one of these two is expected to end the search; None if that is not foreseen.
    """

    def __init__(self, options: TuneOptions, log: TrialLog, clock: Clock, stop: StopRequest) -> None:
        self._options = options
        self._log = log
        self._clock = clock
        self.stop = stop
        self.expected_gain: float | None = None
        self.settled_gain: float | None = None
        self.ends_after: float | None = None
        self.running = 0

    def observe(self, search: Shortlist) -> None:
        """Take over what a search expects of further trials."""
        self.expected_gain, self.settled_gain = search.expected_gain, search.settled_gain
        if self._options.until is not None:
            self.ends_after = search.trials_until(self._options.until, settled=False)
        elif not self._options.spend:
            settled = search.trials_until(_SETTLED_GAIN, settled=True)
            self.ends_after = None if settled is None else max(settled, _SETTLED_TRIALS - len(self._log))

    @property
    def stopped(self) -> Stopped | None:
        """The first rule that holds; None while another trial may begin."""
        target, budget_s, until = self._options.trial_target, self._options.budget_s, self._options.until
        gain = self.expected_gain
        reached: dict[Rule, bool] = {
            "interrupt": self.stop.requested,
            "trials": target is not None and len(self._log) + self.running >= target,
            "budget": budget_s is not None and self._clock.elapsed_s >= budget_s and self._may_end_by_budget(budget_s),
            "until": until is not None and gain is not None and gain < until,
            "settled": self._is_settled,
        }
        return next((Stopped(rule, gain) for rule, holds in reached.items() if holds), None)

    @property
    def is_out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return self._options.budget_s is not None and self._clock.elapsed_s >= self._options.budget_s

    @property
    def _is_settled(self) -> bool:
        """Whether the search has expected nothing for many trials, and may end for that."""
        if self._options.spend or self._options.until is not None or self.settled_gain is None:
            return False
        return len(self._log) >= _SETTLED_TRIALS and self.settled_gain < _SETTLED_GAIN

    def _may_end_by_budget(self, budget_s: float) -> bool:
        """Allow one trial, of the default, for any budget but 0: even the shortest session then has a result."""
        return budget_s == 0.0 or len(self._log) + self.running > 0

    @property
    def room(self) -> int | None:
        """Number of trials that may still begin; None for no limit."""
        if self.stopped is not None:
            return 0
        target = self._options.trial_target
        return None if target is None else target - len(self._log) - self.running


def check_until(options: TuneOptions) -> None:
    """Raise if the option ``until`` cannot be applied.

    A sampler without a model could only be stopped after many trials without an improvement, which says little about
    the configurations that are left. With several objectives there is no single best to improve on.

    Raises
    ------
    InputError
        The gain is not between 0 and 1, the sampler has no model, or there are several objectives.
    """
    if options.until is None:
        return
    if not 0 < options.until < 1:
        raise InputError(f"the gain to stop at is {options.until}, expected more than 0 and less than 1: 0.01 for 1 %")
    if len(options.objectives) > 1:
        raise InputError(
            "--until goes by the best time, and there are several objectives: stop by --trials or --budget"
        )
    able = gain_predicting_samplers()
    if options.sampler not in able:
        raise InputError(
            f"--until needs a sampler that says what another measurement is expected to gain, and {options.sampler!r} "
            f"does not: choose {' or '.join(able)}, or stop by --trials or --budget"
        )


class TrialLog:
    """The newest trial of each configuration, including those of earlier sessions.

    Counts are updated with each trial: they are read after every one of tens of thousands of trials.

    Parameters
    ----------
    space
        The feasible space.
    earlier
        Stored trials of earlier sessions, oldest first. Those whose configurations are no longer in the space are
        left out: a value or a rule may have changed since, and an invalid configuration must not win.

    Attributes
    ----------
    resumed
        Number of trials taken over from earlier sessions.
    """

    def __init__(self, space: SearchSpace, earlier: Iterable[Trial]) -> None:
        self._space = space
        self._trials: dict[str, Trial] = {}
        self._outcomes: Counter[Outcome] = Counter()
        self._stages: Counter[str] = Counter()
        self._best: Trial | None = None
        newest = {config_key(trial.config): trial for trial in earlier}
        for trial in newest.values():
            if space.row_of(trial.config) is not None:
                self.add(trial)
        self.resumed = len(self._trials)

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
    def best(self) -> Trial | None:
        """The best trial that was measured to the end."""
        return self._best

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
        self._trials[config_key(trial.config)] = trial
        self._outcomes[trial.outcome] += 1
        self._stages[trial.stage] += 1
        if trial.outcome is Outcome.OK and _cost(trial) < _cost(self._best):
            self._best = trial

    def find(self, config: Config) -> Trial | None:
        """Return the trial of a configuration."""
        return self._trials.get(config_key(config))


def _cost(trial: Trial | None) -> float:
    return float("inf") if trial is None or trial.cost is None else trial.cost


_MIN_FAILURES = 8
"""Candidates, the default among them, that must fail with the same outcome before the kernel itself is blamed."""

_KERNEL_FAILURES = {
    Outcome.COMPILE_FAILED: "no candidate compiles; the compiler says of",
    Outcome.WRONG_RESULT: "no candidate agrees with the reference; correct one of the two. This is wrong with",
}


def kernel_failure(outcomes: Mapping[Outcome, int], last: Trial, default: Trial | None, max_trials: int) -> str:
    """Return the error of the kernel itself, if every candidate failed with the same outcome; empty otherwise.

    Parameters
    ----------
    outcomes
        Number of trials by outcome.
    last
        The newest trial.
    default
        Trial of the default configuration, if there is one. The default is expected to run: without its trial,
        nothing is concluded until all candidates have failed.
    max_trials
        Number of candidates that the study will try.
    """
    required = max_trials if default is None else min(_MIN_FAILURES, max_trials)
    if len(outcomes) != 1 or sum(outcomes.values()) < required or last.outcome not in _KERNEL_FAILURES:
        return ""
    example = default or last
    return f"{_KERNEL_FAILURES[example.outcome]} {config_text(example.config)}: {example.reason}"


def check_kernel_failure(source: str, log: TrialLog, last: Trial, default: Config, max_trials: int) -> None:
    """Raise if the kernel itself is at fault, instead of failing every candidate for the same reason.

    Parameters
    ----------
    source
        File of the kernel.
    log, last, default, max_trials
        As for `kernel_failure`; ``default`` is the configuration.

    Raises
    ------
    InputError
        Every candidate failed with the same outcome.
    """
    if last.outcome not in _KERNEL_FAILURES:
        return
    failure = kernel_failure(log.outcomes, last, log.find(default), max_trials)
    if failure:
        raise InputError(f"{source}: {failure}")
