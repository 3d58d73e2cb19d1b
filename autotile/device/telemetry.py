"""Clock, power, temperature and throttle reasons of the GPU, by NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotile.device.toolchain import load_cupy


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
