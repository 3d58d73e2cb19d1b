"""What a session says of itself: the drift of its GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotile.core.documents import to_document
from autotile.core.model import Outcome, Trial
from autotile.tuning.result import measure_drift


def trials(gpu: str, *times_us: float) -> list[Trial]:
    """Return trials whose telemetry has these times of the reference kernel, oldest first."""
    return [
        Trial({"BM": place}, Outcome.OK, telemetry={"reference_us": time_us}, gpu=gpu)
        for place, time_us in enumerate(times_us)
    ]


STEADY, DRIFTING = trials("GPU-a", 70.0, 70.1, 70.2), trials("GPU-b", 60.0, 61.0, 62.0)
PLAIN = [replace(trial, telemetry={}) for trial in trials("GPU-a", 60.0, 61.0)]


@pytest.mark.parametrize(
    ("of", "first", "least", "greatest"),
    [
        (trials("GPU-a", 60.0, 59.0, 63.0, 61.0), 60.0, 59.0, 63.0),
        # speeds of GPUs differ by more than that of each of them changes; the one that drifted most counts
        ([trial for pair in zip(STEADY, DRIFTING, strict=True) for trial in pair], 60.0, 60.0, 62.0),
        ([*PLAIN, *trials("GPU-a", 50.0)], 50.0, 50.0, 50.0),
    ],
)
def test_the_drift_is_that_of_the_reference_kernel(
    of: list[Trial], first: float, least: float, greatest: float
) -> None:
    assert to_document(measure_drift(of)) == {
        "reference_us": {"first": first, "least": least, "greatest": greatest},
        "spread": pytest.approx(greatest / least - 1, abs=1e-5),
    }


def test_trials_without_the_reference_kernel_say_nothing() -> None:
    assert measure_drift(PLAIN) is None
    assert measure_drift([]) is None
