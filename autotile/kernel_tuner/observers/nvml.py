"""Power, energy, clock and temperature, which autotile reads from NVML where it measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotile.errors import InputError
from autotile.kernel_tuner.observers import BenchmarkObserver

_OBSERVABLES = ("power_readings", "nvml_power", "nvml_energy", "core_freq", "mem_freq", "temperature", "gr_voltage")


class NVMLObserver(BenchmarkObserver):
    """Adds quantities of NVML to the results: see ``observers`` in docs/from-kernel-tuner.md for those that there are.

    Parameters
    ----------
    observables
        Names of the quantities.
    device, save_all, nvidia_smi_fallback, use_locked_clocks, continuous_duration
        Accepted and ignored: the device is that of the session, and clocks are not changed.

    Raises
    ------
    InputError
        A quantity is unknown.
    """

    def __init__(
        self,
        observables: Sequence[str],
        device: int | None = None,
        save_all: bool = False,
        nvidia_smi_fallback: str | None = None,
        use_locked_clocks: bool = False,
        continuous_duration: float = 1,
    ) -> None:
        for name in observables:
            if name not in _OBSERVABLES:
                raise InputError(f"NVMLObserver knows no {name!r}; expected {', '.join(_OBSERVABLES)}")
        self.observables = list(observables)
        self.save_all = save_all

    def get_results(self) -> dict[str, Any]:
        """Return nothing: the session reads the quantities."""
        return {}
