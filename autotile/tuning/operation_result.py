"""Results of tuning an operation or a family of it: what each kernel and library reached, and with what effort."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem, Trial, config_text
from autotile.core.statistics import Interval, is_tie
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Part,
    Result,
    ResultTable,
    device_text,
    duration_text,
    interval_text,
    percent_text,
    plural,
    time_text,
)
from autotile.kernel.problem import Workrate
from autotile.report.notebook import PageContent, Reported

ContenderState = Literal["won", "raced", "dropped", "failed", "inapplicable"]


@dataclass(frozen=True, slots=True)
class TunedContender:
    """A kernel or library of an operation, and how it came out.

    Attributes
    ----------
    name
        Name of the kernel or library.
    is_library
        Whether it is a library, which has nothing to tune.
    trial
        Its best verified trial, with the time of the last race where it took part; None if nothing ran.
    trials
        Number of configurations tried, those of earlier sessions included.
    seconds
        Wall time that it got, in seconds.
    state
        ``won`` or ``raced`` in the last race; ``dropped`` before it, as others were faster; ``failed``; or
        ``inapplicable`` if it cannot compute the problem on the device.
    reason
        Reason for ``dropped``, ``failed`` and ``inapplicable``.
    ratio
        Time over that of the winner; None if one of them has no time.
    """

    name: str
    is_library: bool
    trial: Trial | None
    trials: int = 0
    seconds: float = 0.0
    state: ContenderState = "raced"
    reason: str = ""
    ratio: Interval | None = None

    @property
    def time_us(self) -> float | None:
        """Time of the best trial, in microseconds."""
        return self.trial.time_us if self.trial is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        measured = self.trial.measurement if self.trial is not None else None
        return {
            "name": self.name,
            "library": self.is_library,
            "state": self.state,
            "reason": self.reason,
            "config": dict(self.trial.config) if self.trial is not None else None,
            "time_us": measured.time_us if measured is not None else None,
            "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
            "ratio": self.ratio.to_json() if self.ratio is not None else None,
            "trials": self.trials,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, repr=False)
class OperationResult(Result, Reported):
    """Result of tuning an operation for a problem.

    Attributes
    ----------
    problem, device
        Problem of the operation, with its conditions, and device that it was tuned for.
    contenders
        Kernels and libraries, fastest first; those without a time are last.
    seconds
        Wall time, in seconds.
    interrupted
        Whether the user ended the session.
    database
        Location of the tuning database.
    unit, passes
        Arithmetic unit of the winner, as for `autotile.kernel.problem.Workrate`.
    flops, bytes
        Operations and bytes moved of one run, where the winner's kernel states them.
    notices
        Remarks for the user, one line each.
    call
        Line of Python that serves the winner; empty where it is not known.
    """

    problem: Problem
    device: DeviceProperties
    contenders: tuple[TunedContender, ...]
    seconds: float
    interrupted: bool
    database: str
    flops: int | None = None
    unit: str | None = None
    passes: int = 1
    bytes: int | None = None
    notices: tuple[str, ...] = ()
    call: str = ""

    @property
    def winner(self) -> TunedContender | None:
        """The kernel or library to use; None where nothing ran, or the session was interrupted before the last race."""
        return next((one for one in self.contenders if one.state == "won"), None)

    @property
    def best(self) -> TunedContender | None:
        """The winner, or else the fastest so far."""
        return self.winner or next((one for one in self.contenders if one.time_us is not None), None)

    @property
    def libraries(self) -> tuple[TunedContender, ...]:
        """The libraries among the contenders."""
        return tuple(one for one in self.contenders if one.is_library)

    def page_content(self) -> PageContent:
        """As for `Reported`."""
        of = self.problem
        return PageContent(self.database, of.kernel, of.sizes, of.dtype, self.device.name)

    def _headline(self) -> str:
        winner = self.winner
        where = f"{self.problem} on {device_text(self.device)}"
        if winner is None:
            return f"{where}: {'interrupted before the last race' if self.interrupted else 'nothing ran'}"
        return f"{where}: {winner.name}, {time_text(winner.time_us)}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        """Yield what each kernel and library reached, then facts about the session."""
        figures = (f"{RIGHT}over the winner", f"{RIGHT}tried", f"{RIGHT}of the time")
        headings = ("", f"{RIGHT}time", "95 % interval, us", *figures, "remark")
        rows = [self.row(one) for one in self.contenders]
        yield ResultTable(headings, rows, ("remark", "of the time", "95 % interval, us"))
        yield [*self._facts()]

    def _facts(self) -> Iterator[tuple[str, str]]:
        best = self.best
        if self.interrupted:
            yield "interrupted", "the last race was not held; the same command goes on from there"
        if best is not None:
            yield ("winner" if best.state == "won" else "best so far"), contender_text(best)
            yield "rate", self.rate_text()
        yield from ((one.name, ratio_text(one)) for one in self.libraries if one is not best)
        yield from (("note", text) for text in self.notices)
        yield "tried", tried_text(self.contenders)
        yield "took", duration_text(self.seconds)
        yield "saved in", self.database
        if self.winner is not None and self.call:
            yield "serve it", self.call

    def row(self, one: TunedContender) -> tuple[str, ...]:
        """Return the cells of a contender: name, time, interval, ratio, configurations, share of the time, remark."""
        measured = one.trial.measurement if one.trial is not None else None
        share = sum(other.seconds for other in self.contenders)
        return (
            one.name,
            time_text(one.time_us) if measured is not None else NOTHING,
            interval_text(measured.low_us, measured.high_us) if measured is not None else NOTHING,
            f"{one.ratio.value:.3f}x" if one.ratio is not None else NOTHING,
            NOTHING if one.is_library else f"{one.trials:,}",
            percent_text(one.seconds / share) if share and not one.is_library else NOTHING,
            remark(one),
        )

    def rate_text(self) -> str:
        """Return the rate of the best contender, such as ``612.3 TFLOP/s``."""
        best = self.best
        if best is None or best.time_us is None:
            return NOTHING
        work = Workrate(self.flops, self.bytes, self.problem.dtype, self.unit, self.passes)
        return work.text(best.time_us, self.device)

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``autotile tune --json`` prints."""
        winner = self.winner
        return {
            "operation": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device.identity,
            "winner": winner.to_json() if winner is not None else None,
            "contenders": [one.to_json() for one in self.contenders],
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "database": self.database,
            "notices": list(self.notices),
            **({"call": self.call} if self.call else {}),
        }


def contender_text(one: TunedContender) -> str:
    """Return a contender with its configuration."""
    return one.name if one.is_library or one.trial is None else f"{one.name} {config_text(one.trial.config)}"


def ratio_text(one: TunedContender) -> str:
    """Return how a contender compares with the winner."""
    if one.ratio is None:
        return one.reason or "not timed"
    known = f"{one.ratio.value:.3f}x the winner's time, {one.ratio.low:.3f}x to {one.ratio.high:.3f}x"
    return f"{known}: not told apart" if is_tie(one.ratio) else known


_WITH_REASON = {"dropped": "dropped", "failed": "failed", "inapplicable": "not applicable"}


def remark(one: TunedContender) -> str:
    """Return the state of a contender in words, with the reason."""
    if one.state in _WITH_REASON:
        return f"{_WITH_REASON[one.state]}: {one.reason}"
    if one.state == "won":
        return "winner"
    return "not told apart from the winner" if one.ratio is not None and is_tie(one.ratio) else ""


def tried_text(contenders: Sequence[TunedContender]) -> str:
    """Return how many configurations of how many kernels were tried."""
    kernels = [one for one in contenders if not one.is_library and one.state != "inapplicable"]
    return f"{plural(sum(one.trials for one in kernels), 'configuration')} of {plural(len(kernels), 'kernel')}"


@dataclass(frozen=True, slots=True)
class Losses:
    """How well a model chooses at problems that were held out while it was learned.

    Attributes
    ----------
    mean, percentile_99, worst
        Time of what it chooses over that of the fastest that was measured, minus 1.
    over_library
        Geometric mean, 1st percentile and minimum of the library's time over that of what is chosen; None without a
        library.
    """

    mean: float
    percentile_99: float
    worst: float
    over_library: tuple[float, float, float] | None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        names = ("geometric_mean", "percentile_1", "worst")
        return {
            "mean": self.mean,
            "percentile_99": self.percentile_99,
            "worst": self.worst,
            "over_library": dict(zip(names, self.over_library, strict=True)) if self.over_library else None,
        }


@dataclass(frozen=True, slots=True, repr=False)
class OperationFamilyResult(Result):
    """Result of tuning a family of an operation.

    Attributes
    ----------
    operation, dtype, family
        Name of the operation, element type, and the family in its text form.
    device
        Device that it was tuned for.
    problems, pairs
        Number of problems, and of pairs of a problem and a configuration, that the model was learned from.
    candidates
        Number of configurations that the model chooses among; 0 if it was not learned.
    losses
        How well it chooses; None if it was not learned.
    refused
        Number of configurations that failed anywhere, which the model does not hold.
    seconds
        Wall time, in seconds.
    resumed
        Number of problems that an earlier run had measured.
    interrupted
        Whether the user ended it before a model was learned.
    database
        Location of the tuning database.
    notices
        Remarks for the user, one line each.
    """

    operation: str
    dtype: str
    family: str
    device: DeviceProperties
    problems: int
    pairs: int
    candidates: int
    losses: Losses | None
    refused: int
    seconds: float
    resumed: int
    interrupted: bool
    database: str
    notices: tuple[str, ...] = ()

    def _headline(self) -> str:
        found = (
            "interrupted before there was a model"
            if self.losses is None
            else f"{percent_text(self.losses.mean)} mean loss"
        )
        return f"{self.operation} {self.family} {self.dtype} on {device_text(self.device)}: {found}"

    def _heading(self) -> str:
        return f"{self.operation} {self.family} {self.dtype} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        """Yield how well the model chooses."""
        yield [*self._facts()]

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "measured", f"{plural(self.pairs, 'time')} at {plural(self.problems, 'problem')}"
        if self.losses is not None:
            one = self.losses
            yield "model", f"chooses among {plural(self.candidates, 'configuration')}"
            yield (
                "loss",
                (
                    f"{percent_text(one.mean)} on average, {percent_text(one.percentile_99)} at the 99th percentile, "
                    f"at most {percent_text(one.worst)}, at problems that were held out"
                ),
            )
            if one.over_library is not None:
                mean, low, worst = one.over_library
                yield (
                    "library",
                    f"{mean:.3f}x its speed on average, {low:.3f}x at the 1st percentile, at least {worst:.3f}x",
                )
        if self.refused:
            yield "refused", f"{plural(self.refused, 'configuration')} that failed at a problem"
        resumed = f", {plural(self.resumed, 'problem')} resumed" if self.resumed else ""
        yield "took", duration_text(self.seconds) + resumed
        yield "saved in", self.database

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``autotile tune --json`` prints."""
        return {
            "operation": self.operation,
            "family": self.family,
            "dtype": self.dtype,
            "device": self.device.identity,
            "problems": self.problems,
            "pairs": self.pairs,
            "candidates": self.candidates,
            "held_out_loss": self.losses.to_json() if self.losses is not None else None,
            "refused": self.refused,
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "database": self.database,
            "notices": list(self.notices),
        }
