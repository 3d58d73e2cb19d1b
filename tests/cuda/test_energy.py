"""Energy of a launch, on a simulated GPU whose time advances while the meter sleeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from autotile.cuda import timing as energy
from autotile.cuda.timing import EnergyMeter
from autotile.errors import InputError, ToolchainError

FLUSH_US, FLUSH_W = 25.0, 200.0
LAUNCH_US, LAUNCH_W = 100.0, 400.0
IDLE_W = 100.0


class SimulatedGpu:
    """Clock, board and NVML; the energy counter is updated every tenth of a second."""

    def __init__(self, *, counts: bool = True, has_power: bool = True) -> None:
        self.now_s = 0.0
        self.used_mj = 0.0
        self.shown_mj = 5.0
        self.power = IDLE_W
        self.counts = counts
        self.has_power = has_power

    def sleep(self, seconds: float) -> None:
        for _ in range(round(seconds / 1e-4)):
            self.now_s += 1e-4
            self.used_mj += 1e3 * self.power * 1e-4
            if self.counts and round(self.now_s * 1e4) % 1000 == 0:
                self.shown_mj = 5.0 + float(int(self.used_mj))

    def energy_mj(self) -> float | None:
        return self.shown_mj

    def power_w(self) -> float | None:
        return self.power if self.has_power else None


class WithoutCounter(SimulatedGpu):
    def energy_mj(self) -> float | None:
        return None


class SimulatedTimer:
    """Launches back to back on the simulated GPU."""

    def __init__(self, gpu: SimulatedGpu, l2: str = "cold") -> None:
        self._gpu = gpu
        self.l2 = l2
        self.ran: list[int] = []

    def flush(self) -> None:
        pass

    def samples(self, launch: Any, count: int) -> list[float]:
        return [FLUSH_US] * count

    @contextmanager
    def back_to_back(self, step: Sequence[Any], probe_us: float) -> Iterator[Any]:
        self.ran.append(len(step))
        flush_us = FLUSH_US if self.l2 == "cold" else 0.0
        launch_us = LAUNCH_US if len(step) > 1 else 0.0
        step_us = flush_us + launch_us
        assert probe_us == step_us
        self._gpu.power = (flush_us * FLUSH_W + launch_us * LAUNCH_W) / step_us

        class Running:
            def keep_going(self) -> None:
                pass

            def end(self) -> float:
                return step_us

        yield Running()
        self._gpu.power = IDLE_W


def meter(gpu: SimulatedGpu, l2: str, monkeypatch: pytest.MonkeyPatch) -> tuple[EnergyMeter, SimulatedTimer]:
    monkeypatch.setattr(energy.time, "perf_counter", lambda: gpu.now_s)
    monkeypatch.setattr(energy.time, "sleep", gpu.sleep)
    timer: Any = SimulatedTimer(gpu, l2)
    made_up: Any = gpu
    return EnergyMeter(timer, made_up), timer


@pytest.mark.parametrize("l2", ["cold", "hot"])
@pytest.mark.parametrize(("gpu", "source"), [(SimulatedGpu, "counter"), (WithoutCounter, "power")])
def test_the_energy_is_that_of_the_run_alone(
    gpu: type[SimulatedGpu], source: str, l2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = meter(gpu(), l2, monkeypatch)[0].read(lambda: None, LAUNCH_US)
    assert found == {"energy_mj": pytest.approx(1e-3 * LAUNCH_US * LAUNCH_W, rel=0.01), "energy_source": source}


def test_a_flush_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, timer = meter(SimulatedGpu(), "cold", monkeypatch)
    first, second = (subject.read(lambda: None, LAUNCH_US) for _ in range(2))
    assert first["energy_mj"] == pytest.approx(second["energy_mj"], rel=0.01)
    assert timer.ran == [1, 2, 2]


def test_a_counter_that_stands_still_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = meter(SimulatedGpu(counts=False), "hot", monkeypatch)[0].read(lambda: None, LAUNCH_US)
    assert found["energy_source"] == "power"


def test_without_power_either_there_is_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="neither the energy nor the power of this GPU; leave the objective"):
        meter(WithoutCounter(has_power=False), "cold", monkeypatch)


def test_a_counter_that_stops_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu()
    subject, _ = meter(gpu, "hot", monkeypatch)
    gpu.counts = False
    with pytest.raises(ToolchainError, match="NVML has stopped updating"):
        subject.read(lambda: None, LAUNCH_US)
