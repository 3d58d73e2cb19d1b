"""Clocks, power and temperature of the GPU by NVML, and the energy of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from autotile.cuda.timing import BackToBack, Launch, Timer
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError


class Telemetry:
    """Reads NVML for the current CUDA device; reads nothing where NVML is missing or refuses.

    Parameters
    ----------
    index
        CUDA device index; the NVML device is found by its PCI address, since the two number devices differently.
    """

    def __init__(self, index: int = 0) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            address = load_cupy().cuda.runtime.deviceGetPCIBusId(index)
            self._device = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            self._nvml = pynvml
        except Exception:  # NVML is a courtesy: a container without it can still tune
            self._nvml = None

    def read(self) -> dict[str, float | int]:
        """SM clock in MHz, power in W, temperature in degrees Celsius, throttle reasons as NVML's bit mask."""
        if self._nvml is None:
            return {}
        nvml, device = self._nvml, self._device
        values = {
            "sm_clock_mhz": self._read(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
            "power_w": self.power_w(),
            "temperature_c": self._read(lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
            "throttle_reasons": self._read(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(device)),
        }
        return {name: value for name, value in values.items() if value is not None}

    def energy_mj(self) -> float | None:
        """Energy that the GPU has used since its driver was loaded, in millijoules; None where NVML does not count it.

        The counter moves a few times to some tens of times a second.
        """
        return self._read(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))

    def power_w(self) -> float | None:
        """Power in watts; None where NVML does not give it. From Ampere on it is the mean of the last second."""
        return self._read(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1e3)

    def _read(self, reading: Callable[[], float | int]) -> float | int | None:
        if self._nvml is None:
            return None
        try:
            return reading()
        except self._nvml.NVMLError:
            return None


Source = Literal["counter", "power"]

_RUN_IN_S = 0.15
"""Before the counter is believed: what it shows may be 100 ms old."""
_POWER_RUN_IN_S = 1.0
"""Before readings of the power are: from Ampere on they are means over a second."""
_WINDOW_S = 0.2
"""The least that is averaged over."""
_LEAST_MOVE_MJ = 1000.0
"""The counter counts millijoules: of so many, one is 0.1 %."""
_LIMIT_S = 5.0
_POLL_S = 5e-4
"""Of the least window 0.25 %: when the counter moved is not known better."""
_LEAST_SHARE = 0.01
"""Of what a run and its flush use together: a run cannot be told to use less."""
_FLUSHES = 3
_DIGITS = 4


class EnergyMeter:
    """Measures the energy of a run by NVML: its counter of energy, or where that is missing its readings of power.

    Both say what the whole board draws, and seldom: some ten times a second. So the candidate runs back to back for as
    long as it takes to see a steady power. With a cold L2 each run comes with its flush; what a flush uses is measured
    alone, once, and taken off.

    Parameters
    ----------
    timer
        What candidates are timed with.
    telemetry
        Reads NVML.

    Raises
    ------
    InputError
        NVML gives neither.
    """

    def __init__(self, timer: Timer, telemetry: Telemetry) -> None:
        self._timer = timer
        self._telemetry = telemetry
        self._source = _source(telemetry)
        self._flush: tuple[float, float] | None = (0.0, 0.0) if timer.l2 == "hot" else None
        """Time of a flush in microseconds, and its energy in millijoules."""

    def read(self, launch: Launch, time_us: float) -> dict[str, float | str]:
        """Energy of one run of about ``time_us``, in millijoules, and what it was read from.

        Raises
        ------
        ToolchainError
            NVML has stopped counting.
        """
        if self._flush is None:
            flush_us = float(np.median(self._timer.samples(self._timer.flush, _FLUSHES)))
            self._flush = flush_us, self._energy_mj([self._timer.flush], flush_us)
        flush_us, flush_mj = self._flush
        whole_mj = self._energy_mj([self._timer.flush, launch], flush_us + time_us)
        energy_mj = max(whole_mj - flush_mj, _LEAST_SHARE * whole_mj)
        return {"energy_mj": float(f"{energy_mj:.{_DIGITS}g}"), "energy_source": self._source}

    def _energy_mj(self, step: Sequence[Launch], time_us: float) -> float:
        """Energy of a step that is repeated back to back."""
        with self._timer.back_to_back(step, time_us) as running:
            power_w = self._steady_power_w(running)
            return 1e-3 * power_w * running.end()

    def _steady_power_w(self, running: BackToBack) -> float:
        """Mean power from one step of the counter to another."""
        read_mj = self._telemetry.energy_mj if self._source == "counter" else _PowerSum(self._telemetry.power_w)
        run_in_s = _RUN_IN_S if self._source == "counter" else _POWER_RUN_IN_S
        begin_s = time.perf_counter()
        first: tuple[float, float] | None = None
        before_mj = read_mj()
        while time.perf_counter() - begin_s < _LIMIT_S:
            running.keep_going()
            now_s, now_mj = time.perf_counter(), read_mj()
            if now_mj is None or before_mj is None:
                break
            if now_mj != before_mj and now_s - begin_s > run_in_s:
                first = first or (now_s, now_mj)
                passed_s, used_mj = now_s - first[0], now_mj - first[1]
                if passed_s >= _WINDOW_S and used_mj >= _LEAST_MOVE_MJ:
                    return 1e-3 * used_mj / passed_s
            before_mj = now_mj
            time.sleep(_POLL_S)
        raise ToolchainError("NVML has stopped saying how much energy the GPU uses; leave the objective energy out")


class _PowerSum:
    """Energy in millijoules since the first call, summed up from readings of the power."""

    def __init__(self, power_w: Callable[[], float | None]) -> None:
        self._power_w = power_w
        self._last_s = time.perf_counter()
        self._sum_mj = 0.0

    def __call__(self) -> float | None:
        now_s, power_w = time.perf_counter(), self._power_w()
        if power_w is None:
            return None
        self._sum_mj += 1e3 * power_w * (now_s - self._last_s)
        self._last_s = now_s
        return self._sum_mj


def _source(telemetry: Telemetry) -> Source:
    if _moves(telemetry.energy_mj):
        return "counter"
    if telemetry.power_w() is not None:
        return "power"
    raise InputError(
        "NVML says neither how much energy this GPU uses nor its power; leave the objective energy out, "
        "and see `autotile doctor`"
    )


def _moves(energy_mj: Callable[[], float | None]) -> bool:
    """Whether there is a counter and it counts: even an idle GPU uses some millijoules in a tenth of a second."""
    first, begin_s = energy_mj(), time.perf_counter()
    while first is not None and time.perf_counter() - begin_s < 1.0:
        if energy_mj() != first:
            return True
        time.sleep(_POLL_S)
    return False
