"""Problems that could not be served exactly, and what came of tuning them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autotile.cli.tables import RIGHT, Listing
from autotile.core.text import NOTHING, duration_text, moment_text, sizes_text, time_text
from autotile.database.studies import StoredMiss


@dataclass(frozen=True, slots=True)
class MissRow:
    """One problem on one GPU that was served by a fallback.

    Attributes
    ----------
    call_us
        Time of a call; None where it is not known.
    lost_s
        Seconds that all calls together may have cost over the best; None where it is not known.
    measured
        Whether these times were measured for this problem; they are estimated otherwise.
    tuned
        Whether it was tuned since.
    """

    miss: StoredMiss
    call_us: float | None
    lost_s: float | None
    measured: bool
    tuned: bool


@dataclass(frozen=True, slots=True)
class MissesReport:
    """What was asked for in vain."""

    rows: Sequence[MissRow]

    def to_json(self) -> list[dict[str, Any]]:
        """One row a problem, GPU and tier."""
        return [
            {
                "kernel": row.miss.problem.kernel,
                "problem": dict(row.miss.problem.sizes),
                "dtype": row.miss.problem.dtype,
                "device": row.miss.gpu_name,
                "tier": row.miss.tier,
                "count": row.miss.count,
                "last_at": row.miss.last_at.isoformat(),
                "call_us": row.call_us,
                "lost_s": row.lost_s,
                "measured": row.measured,
                "tuned": row.tuned,
            }
            for row in self.rows
        ]

    def __rich__(self) -> RenderableType:
        """One entry a problem and GPU."""
        if not self.rows:
            return Text("nothing was asked for in vain")
        figures = (f"{RIGHT}calls", f"{RIGHT}a call", f"{RIGHT}may have cost")
        headings = ("kernel", "problem", "device", "served", *figures, "since", "last")
        return Listing(headings, list(map(_row, self.rows)), ("last", "device"))


def _row(row: MissRow) -> tuple[str, ...]:
    miss = row.miss
    about = "" if row.measured or row.call_us is None else "about "
    return (
        miss.problem.kernel,
        f"{sizes_text(miss.problem.sizes)} {miss.problem.dtype}",
        miss.gpu_name,
        miss.tier,
        f"{miss.count:,}",
        about + time_text(row.call_us),
        NOTHING if row.lost_s is None else about + duration_text(row.lost_s),
        "tuned" if row.tuned else NOTHING,
        moment_text(miss.last_at),
    )
