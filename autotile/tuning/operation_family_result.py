"""The state and the result of tuning a family of an operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.core.text import Displayed, device_text, duration_text, percent_text, plural

SweepPhase = Literal["measuring", "learning"]


@dataclass(frozen=True, slots=True)
class SweepStep:
    """State of the tuning of a family of an operation.

    Attributes
    ----------
    phase
        ``measuring`` or ``learning``.
    problem
        Problem that was measured last; None at first.
    problems, pairs
        Number of problems and of pairs of a problem and a configuration that were measured, earlier runs included.
    elapsed_s, budget_s
        Wall time so far, and its limit.
    """

    phase: SweepPhase
    problem: Problem | None
    problems: int
    pairs: int
    elapsed_s: float
    budget_s: float | None

    @property
    def text(self) -> str:
        """The state as one line."""
        limit = f" of {duration_text(self.budget_s)}" if self.budget_s is not None else ""
        at = f", {self.problem}" if self.problem is not None else ""
        done = f"{plural(self.problems, 'problem')}, {plural(self.pairs, 'time')}"
        return f"{self.phase}: {done}; {duration_text(self.elapsed_s)}{limit}{at}"


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
class OperationFamilyResult(Displayed):
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

    def _facts(self) -> Iterable[tuple[str, str]]:
        yield from self.facts()

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of a label and its text."""
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
        """Return the document that ``autotile tune --family --json`` prints."""
        return {
            "operation": self.operation,
            "family": self.family,
            "dtype": self.dtype,
            "device": {"name": self.device.name, "source": self.device.source},
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
