"""Tuned results that were measured again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from autotile.cli.tables import RIGHT, Listing
from autotile.core.model import Config, Measurement, Problem, config_key, config_text
from autotile.core.statistics import Interval
from autotile.core.text import NOTHING, sizes_text, time_text

Verdict = Literal["confirmed", "replaced", "demoted", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class VerifiedProblem:
    """One problem.

    Attributes
    ----------
    aged
        What had changed since the result was measured.
    before, after
        Configuration that was served, and that is served now; None where nothing is left but the default.
    speedup
        Time of the default over that of the fastest; None where that is not known.
    reason
        Why a configuration was demoted, or nothing could be measured.
    demoted
        Whether what was served is wrong.
    tied
        Whether what was served could not be told apart from what is served now.
    """

    problem: Problem
    device: str
    aged: tuple[str, ...]
    before: Config
    before_measurement: Measurement | None
    after: Config | None
    after_measurement: Measurement | None
    speedup: Interval | None
    reason: str
    demoted: bool
    tied: bool
    interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        """What came of it."""
        if self.interrupted:
            return "interrupted"
        if self.demoted:
            return "demoted"
        if self.speedup is None and self.reason:
            return "failed"
        return "confirmed" if self.after is not None and _same(self.before, self.after) else "replaced"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All problems that were verified."""

    rows: Sequence[VerifiedProblem]

    def to_json(self) -> list[dict[str, Any]]:
        """One row a problem."""
        return [
            {
                "kernel": row.problem.kernel,
                "problem": dict(row.problem.sizes),
                "dtype": row.problem.dtype,
                "device": row.device,
                "aged": list(row.aged),
                "verdict": row.verdict,
                "reason": row.reason,
                "tied": row.tied,
                "before": _document(row.before, row.before_measurement),
                "after": _document(row.after, row.after_measurement) if row.after is not None else None,
                "speedup": {"ratio": row.speedup.value, "interval": [row.speedup.low, row.speedup.high]}
                if row.speedup is not None
                else None,
            }
            for row in self.rows
        ]

    def __rich__(self) -> RenderableType:
        """One entry a problem."""
        if not self.rows:
            return Text("nothing has aged: what is tuned was measured with the present driver and compiler")
        times = (f"{RIGHT}time then", f"{RIGHT}now", f"{RIGHT}over default")
        headings = ("problem", "verdict", *times, "configuration", "reason", "aged")
        return Listing(headings, list(map(_row, self.rows)), ("reason", "aged", "configuration"))


def _row(row: VerifiedProblem) -> tuple[str, ...]:
    then = row.before_measurement.time_us if row.before_measurement else None
    now = row.after_measurement.time_us if row.after_measurement else None
    return (
        f"{row.problem.kernel} {sizes_text(row.problem.sizes)} {row.problem.dtype}",
        row.verdict,
        time_text(then),
        time_text(now),
        f"{row.speedup.value:.3f}" if row.speedup is not None else NOTHING,
        config_text(row.after) if row.after is not None else "the default",
        row.reason,
        "; ".join(row.aged),
    )


def _document(config: Config, measurement: Measurement | None) -> dict[str, Any]:
    interval = [measurement.low_us, measurement.high_us] if measurement is not None else None
    return {
        "config": dict(config),
        "time_us": measurement.time_us if measurement is not None else None,
        "interval_us": interval,
    }


def _same(a: Config, b: Config) -> bool:
    return config_key(a) == config_key(b)
