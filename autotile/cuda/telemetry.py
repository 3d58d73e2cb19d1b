"""Clocks, power and temperature of the GPU from NVML, and the energy of a launch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from autotile.core.text import plural
from autotile.cuda.timing import BackToBack, Launch, Timer
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError

_IDLE_PERCENT = 5
"""Share of the last second, in percent, in which an idle GPU may run a kernel, such as that of a display."""


class Telemetry:
    """Readings of NVML for a CUDA device; empty if NVML is missing or fails.

    Parameters
    ----------
    index
        CUDA device index. The NVML device is found by its PCI address, as CUDA and NVML number devices differently.
    """

    def __init__(self, index: int = 0) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            address = load_cupy().cuda.runtime.deviceGetPCIBusId(index)
            self._device = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            self._nvml = pynvml
        except Exception:  # NVML is optional: tuning works in a container without it
            self._nvml = None

    def read(self) -> dict[str, float | int]:
        """Return SM clock (MHz), power (W), temperature (degrees Celsius) and throttle reasons (bit mask of NVML)."""
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
        """Return the energy used since the driver was loaded, in millijoules; None if NVML does not report it.

        The counter is updated between a few times and some tens of times per second.
        """
        return self._read(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))

    def power_w(self) -> float | None:
        """Return the power in watts, from Ampere on averaged over a second; None if NVML does not report it."""
        return self._read(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1e3)

    def other_users(self) -> tuple[str, ...]:
        """Return the other users of the GPU, one line each; to be called before this process has a context on it."""
        if self._nvml is None:
            return ()
        nvml, found = self._nvml, []
        try:
            others = [one for one in nvml.nvmlDeviceGetComputeRunningProcesses(self._device) if one.pid != os.getpid()]
            if others:
                listed = ", ".join(str(one.pid) for one in others[:5])
                found.append(f"{plural(len(others), 'other process', 'other processes')} on the GPU (PID {listed})")
        except nvml.NVMLError:
            pass
        busy = self._read(lambda: nvml.nvmlDeviceGetUtilizationRates(self._device).gpu)
        if busy is not None and busy > _IDLE_PERCENT:
            found.append(f"the GPU was {busy} % busy before the measurement")
        return tuple(found)

    def _read(self, reading: Callable[[], float | int]) -> float | int | None:
        if self._nvml is None:
            return None
        try:
            return reading()
        except self._nvml.NVMLError:
            return None


Source = Literal["counter", "power"]

_COUNTER_RUN_IN_S = 0.15
"""Time before the first reading of the energy counter, whose value may be 100 ms old."""
_POWER_RUN_IN_S = 1.0
"""Time before the first reading of the power, which from Ampere on is averaged over a second."""
_MIN_WINDOW_S = 0.2
"""Minimum averaging time."""
_MIN_ENERGY_MJ = 1000.0
"""Minimum energy within the averaging time; the counter's resolution of 1 mJ is 0.1 % of it."""
_LIMIT_S = 5.0
_POLL_S = 5e-4
"""Polling interval, and so the uncertainty of the time of a counter update: 0.25 % of the minimum averaging time."""
_MIN_SHARE = 0.01
"""Minimum share of a launch in the energy of a launch and its flush; smaller values cannot be resolved."""
_FLUSHES = 3
_DIGITS = 4


class EnergyMeter:
    """Measures the energy of a launch with NVML's energy counter or, if that is missing, its power readings.

    Both are of the whole board and are updated about ten times per second, so the candidate is launched back to back
    until a steady power can be determined. With a cold L2 each launch follows a flush, whose energy is measured once by
    itself and subtracted.

    Parameters
    ----------
    timer
        Timer of the candidates.
    telemetry
        Readings of NVML.

    Raises
    ------
    InputError
        NVML reports neither energy nor power.
    """

    def __init__(self, timer: Timer, telemetry: Telemetry) -> None:
        self._timer = timer
        self._telemetry = telemetry
        self._source = _source(telemetry)
        self._flush: tuple[float, float] | None = (0.0, 0.0) if timer.l2 == "hot" else None
        """Time of a flush in microseconds and its energy in millijoules; None if not measured yet."""

    def read(self, launch: Launch, time_us: float) -> dict[str, float | str]:
        """Return the energy of a launch of about ``time_us``, in millijoules, and the source of the readings.

        Raises
        ------
        ToolchainError
            NVML has stopped updating the readings.
        """
        if self._flush is None:
            flush_us = float(np.median(self._timer.samples(self._timer.flush, _FLUSHES)))
            self._flush = flush_us, self._energy_mj([self._timer.flush], flush_us)
        flush_us, flush_mj = self._flush
        whole_mj = self._energy_mj([self._timer.flush, launch], flush_us + time_us)
        energy_mj = max(whole_mj - flush_mj, _MIN_SHARE * whole_mj)
        return {"energy_mj": float(f"{energy_mj:.{_DIGITS}g}"), "energy_source": self._source}

    def _energy_mj(self, step: Sequence[Launch], time_us: float) -> float:
        """Return the energy of a step that is repeated back to back."""
        with self._timer.back_to_back(step, time_us) as running:
            power_w = self._steady_power_w(running)
            return 1e-3 * power_w * running.end()

    def _steady_power_w(self, running: BackToBack) -> float:
        """Return the mean power between two updates of the readings."""
        read_mj = self._telemetry.energy_mj if self._source == "counter" else _PowerSum(self._telemetry.power_w)
        run_in_s = _COUNTER_RUN_IN_S if self._source == "counter" else _POWER_RUN_IN_S
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
                elapsed_s, used_mj = now_s - first[0], now_mj - first[1]
                if elapsed_s >= _MIN_WINDOW_S and used_mj >= _MIN_ENERGY_MJ:
                    return 1e-3 * used_mj / elapsed_s
            before_mj = now_mj
            time.sleep(_POLL_S)
        raise ToolchainError("NVML has stopped updating the energy of the GPU; leave the objective energy out")


class _PowerSum:
    """Energy in millijoules, integrated from readings of the power."""

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
        "NVML reports neither the energy nor the power of this GPU; leave the objective energy out, "
        "and see `autotile doctor`"
    )


def _moves(energy_mj: Callable[[], float | None]) -> bool:
    """Return whether a counter exists and is updated; even an idle GPU uses some millijoules in a tenth of a second."""
    first, begin_s = energy_mj(), time.perf_counter()
    while first is not None and time.perf_counter() - begin_s < 1.0:
        if energy_mj() != first:
            return True
        time.sleep(_POLL_S)
    return False
