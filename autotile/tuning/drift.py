"""How the GPU drifted while a study's trials were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autotile.ground.model import Trial


@dataclass(frozen=True, slots=True)
class Drift:
    """Times of the reference kernel, in microseconds: the first, the least and the greatest."""

    first_us: float
    least_us: float
    greatest_us: float

    @property
    def spread(self) -> float:
        """How much longer than the least the greatest is: 0.02 reads as 2 %."""
        return self.greatest_us / self.least_us - 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return {
            "reference_us": {"first": self.first_us, "least": self.least_us, "greatest": self.greatest_us},
            "spread": round(self.spread, 5),
        }


def drift_of(trials: Iterable[Trial]) -> Drift | None:
    """The drift over trials, oldest first; None where none has timed the reference kernel."""
    times = [float(t.telemetry["reference_us"]) for t in trials if t.telemetry.get("reference_us")]
    return Drift(times[0], min(times), max(times)) if times else None
