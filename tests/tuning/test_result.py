"""What a session says of itself: the drift of its GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotile.core.model import Outcome, Trial
from autotile.tuning.result import Drift, measure_drift


def trials(gpu: str, *times_us: float) -> list[Trial]:
    """Return trials whose telemetry has these times of the reference kernel, oldest first."""
    return [
        Trial({"BM": place}, Outcome.OK, telemetry={"reference_us": time_us}, gpu=gpu)
        for place, time_us in enumerate(times_us)
    ]


def test_the_drift_is_that_of_the_reference_kernel() -> None:
    found = measure_drift(trials("GPU-a", 60.0, 59.0, 63.0, 61.0))
    assert found == Drift(60.0, 59.0, 63.0)
    assert found.spread == pytest.approx(63 / 59 - 1)
    assert found.to_json() == {
        "reference_us": {"first": 60.0, "least": 59.0, "greatest": 63.0},
        "spread": pytest.approx(0.0678, abs=1e-4),
    }


def test_of_several_gpus_it_is_that_of_the_one_that_drifted_most() -> None:
    """Their speeds differ by more than that of each of them changes."""
    steady, drifting = trials("GPU-a", 70.0, 70.1, 70.2), trials("GPU-b", 60.0, 61.0, 62.0)
    mixed = [trial for pair in zip(steady, drifting, strict=True) for trial in pair]
    assert measure_drift(mixed) == measure_drift(mixed[::-1][::-1]) == Drift(60.0, 60.0, 62.0)


def test_trials_without_the_reference_kernel_say_nothing() -> None:
    plain = [replace(trial, telemetry={}) for trial in trials("GPU-a", 60.0, 61.0)]
    assert measure_drift(plain) is None
    assert measure_drift([]) is None
    assert measure_drift([*plain, *trials("GPU-a", 50.0)]) == Drift(50.0, 50.0, 50.0)
