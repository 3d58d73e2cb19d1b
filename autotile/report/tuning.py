"""What a tuning session found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.tables import RIGHT, below, facts, lines, table, title
from autotile.core.model import Outcome, config_key, config_text
from autotile.core.statistics import Interval, is_tie
from autotile.core.text import (
    NOTHING,
    device_text,
    duration_text,
    funnel_text,
    interval_text,
    occupancy_text,
    plural,
    time_text,
)
from autotile.kernel.workrate import Workrate
from autotile.report.front import front_table
from autotile.tuning.pipeline import Load
from autotile.tuning.result import Drift, TuneResult
from autotile.tuning.stopping import Stopped

_TIES_SHOWN = 5
_DRIFT_TOLD = 0.02
"""Less is within what a single reading of the reference kernel varies by: 1.5 % on an H200."""
_OTHER_LOAD = 0.1
"""Clocks alone moved it by 2.3 % at most on an H200; matrix products of another process by 22 to 230 %."""


@dataclass(frozen=True, slots=True)
class TuneReport:
    """A session's result.

    Attributes
    ----------
    call
        The line of Python that serves the winner.
    """

    result: TuneResult
    call: str

    def to_json(self) -> dict[str, Any]:
        """The session's document, every outcome counted, with the line that serves the winner."""
        document = self.result.to_json()
        counted = {str(outcome): self.result.outcomes.get(outcome, 0) for outcome in Outcome}
        return {**document, "outcomes": counted, "call": self.call}

    def __rich__(self) -> RenderableType:
        """Winner and default side by side, then what a person does next."""
        result = self.result
        parts: list[RenderableType] = [title(f"{result.problem} on {device_text(result.device)}")]
        if result.winner is not None:
            front = [] if result.front is None else [below(front_table(result.front, result.winner.config))]
            parts += [self._comparison(), *front, below(facts(self._facts()))]
        else:
            parts.append(facts([(self._winner, "none: no configuration ran"), *self._facts()]))
        return Group(*parts)

    @property
    def _winner(self) -> str:
        return "best so far" if self.result.interrupted else "winner"

    def _comparison(self) -> Table:
        shown = table("", f"{RIGHT}time", "95 % interval, us", "rate")
        rate = Workrate(self.result.flops, self.result.bytes, self.result.problem.dtype)
        for label, trial in ((self._winner, self.result.winner), ("default", self.result.default)):
            measured = trial.measurement if trial is not None else None
            if measured is not None:
                interval = interval_text(measured.low_us, measured.high_us)
                speed = rate.text(measured.time_us, self.result.device)
                shown.add_row(label, time_text(measured.time_us), interval, speed)
            else:
                shown.add_row(label, NOTHING, NOTHING, str(trial.outcome) if trial is not None else "not run")
        return shown

    def _facts(self) -> Iterator[tuple[str, RenderableType]]:
        result = self.result
        if result.interrupted:
            yield "interrupted", self._cut_short()
        if result.winner is not None:
            yield self._winner, config_text(result.winner.config)
            if result.winner.occupancy is not None:
                yield "occupancy", occupancy_text(result.device, result.winner.occupancy)
        if result.default is not None:
            yield "default", config_text(result.default.config)
        if result.speedup is not None:
            yield "speed-up", self._speedup(result.speedup)
        if result.ties:
            yield "ties", lines(self._ties())
        if result.refused:
            yield "refused", lines(self._refused())
        yield from self._search_facts()
        if result.winner is not None:
            yield "serve it", self.call

    def _search_facts(self) -> Iterator[tuple[str, str]]:
        result = self.result
        if result.insight is not None and result.winner is not None:
            yield "matters", result.insight.sentence
        if result.drift is not None and result.drift.spread > _DRIFT_TOLD:
            yield "drift", self._drift(result.drift)
        if result.learnt_from:
            yield "learnt", f"from {'; '.join(result.learnt_from)}"
        if result.load is not None:
            yield "busy", self._load(result.load)
        yield "gates", funnel_text(result.gates, result.outcomes)
        if result.stopped is not None and result.stopped.rule == "until":
            yield "stopped", self._stopped(result.stopped)
        resumed = f", {plural(result.resumed, 'trial')} resumed" if result.resumed else ""
        yield "took", duration_text(result.seconds) + resumed
        yield "saved in", result.database

    def _cut_short(self) -> str:
        tried = plural(sum(self.result.outcomes.values()), "configuration")
        compared = "" if self.result.speedup is not None else ", before the best were timed side by side"
        return f"the search was cut short after {tried}{compared}; the same command goes on from there"

    def _speedup(self, ratio: Interval) -> str:
        winner, default = self.result.winner, self.result.default
        if winner is not None and default is not None and config_key(winner.config) == config_key(default.config):
            return "none: the default configuration is the winner"
        known = f"{ratio.value:.3f}x over the default, 95 % interval {ratio.low:.3f}x to {ratio.high:.3f}x"
        return f"{known}: not told apart from the default" if is_tie(ratio) else known

    def _refused(self) -> Iterator[str]:
        for trial in self.result.refused:
            yield f"{config_text(trial.config)}: {trial.outcome} in stage {trial.stage}: {trial.reason}"

    @staticmethod
    def _stopped(stopped: Stopped) -> str:
        gain = 100 * (stopped.expected_gain or 0.0)
        return f"all the candidates that lay ready were expected to gain {gain:.2g} %, less than --until asks for"

    @staticmethod
    def _drift(drift: Drift) -> str:
        times = f"a reference kernel took {drift.least_us:.4g} to {drift.greatest_us:.4g} us ({drift.spread:.1%})"
        if drift.spread > _OTHER_LOAD:
            return f"{times}: something else ran on the GPU; tune again where the winner matters"
        return f"{times} through the search; the finals are free of that"

    @staticmethod
    def _load(load: Load) -> str:
        shares = f"the compilers {load.compilers_busy:.0%} of the search, the GPU {load.gpu_busy:.0%}"
        return f"{shares}: the search waits for the {'GPU' if load.binds == 'gpu' else 'compilers'}"

    def _ties(self) -> Iterator[str]:
        ties = self.result.ties
        yield f"{plural(len(ties), 'configuration')} cannot be told apart from the winner:"
        for config in ties[:_TIES_SHOWN]:
            yield f"  {config_text(config)}"
        if len(ties) > _TIES_SHOWN:
            yield f"  and {len(ties) - _TIES_SHOWN} more, listed by --json"
