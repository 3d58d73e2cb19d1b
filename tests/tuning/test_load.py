"""The load of a search, from the times at which trials ended and compilations began."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autotile.core.model import Outcome, Trial
from autotile.tuning.progress_state import Load, LoadMeter


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock under control of the test."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("autotile.tuning.progress_state.time.perf_counter", lambda: clock.now)
    return clock


def ended(gpu_s: float) -> Trial:
    return Trial({"A": 1}, Outcome.OK, seconds={"compile": 9.0, "load": 0.0, "verify": gpu_s / 2, "measure": gpu_s / 2})


def test_the_load_is_that_between_the_first_trial_and_the_last_compilation(moment: SimpleNamespace) -> None:
    pool: Any = SimpleNamespace(busy_s=0.0, begun_at=0.0)
    meter = LoadMeter(pool, workers=2)
    assert meter.read() is None
    # time, seconds on the GPU, seconds compiled so far, start of the newest compilation
    for now, gpu_s, compiled_s, begun_at in [
        (10, 5, 20, 10),
        (11, 0.25, 21, 11),
        (12, 0.25, 23, 11.5),
        (15, 3, 23, 11.5),
    ]:
        moment.now, pool.busy_s, pool.begun_at = now, compiled_s, begun_at
        meter.add(ended(gpu_s))
    load = meter.read()
    assert load == Load(gpu_busy=0.25, compilers_busy=0.75, binds="compilers")


def test_one_trial_has_no_load(moment: SimpleNamespace) -> None:
    pool: Any = SimpleNamespace(busy_s=0.0, begun_at=0.0)
    meter = LoadMeter(pool, workers=2)
    meter.add(ended(1.0))
    assert meter.read() is None
