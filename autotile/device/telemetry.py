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
        readings: dict[str, Callable[[], float | int]] = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(device),
        }
        values: dict[str, float | int] = {}
        for name, reading in readings.items():
            try:
                values[name] = reading()
            except nvml.NVMLError:
                continue
        return values
