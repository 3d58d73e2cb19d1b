"""When a search ends, and what is left of it."""

from __future__ import annotations

from autotile.tuning.clock import Clock
from autotile.tuning.interrupt import StopRequest
from autotile.tuning.ledger import Ledger
from autotile.tuning.options import TuneOptions


class Bounds:
    """Trials, budget and the user's patience."""

    def __init__(self, options: TuneOptions, ledger: Ledger, clock: Clock, stop: StopRequest) -> None:
        self._options = options
        self._ledger = ledger
        self._clock = clock
        self._stop = stop

    @property
    def is_reached(self) -> bool:
        """Whether no further trial may begin."""
        target, budget_s = self._options.trial_target, self._options.budget_s
        enough = target is not None and len(self._ledger) >= target
        return self._stop.requested or enough or (budget_s is not None and self._clock.elapsed_s >= budget_s)

    @property
    def room(self) -> int | None:
        """Trials that may still begin; None for any number."""
        if self.is_reached:
            return 0
        target = self._options.trial_target
        return None if target is None else target - len(self._ledger)
