"""Messages for the observers of Kernel Tuner that have no counterpart here."""

from __future__ import annotations

from typing import NoReturn

from autotile.errors import InputError

UNSUPPORTED = {
    "PMTObserver": "reads a power meter during the launches; NVMLObserver(['nvml_energy', 'nvml_power']) gives energy",
    "PowerSensorObserver": "reads a power sensor during the launches; NVMLObserver(['nvml_energy']) gives energy",
    "TegraObserver": "sets and reads the clocks of a Tegra; tune at fixed clocks, set with nvpmodel, and leave it out",
    "NCUObserver": "profiles with Nsight Compute; tune first, then run ncu on the best configuration",
}
"""Replacement for each observer that has no counterpart."""


def refuse(name: str) -> NoReturn:
    """Raise an `InputError` for an observer."""
    raise InputError(f"{name} {UNSUPPORTED[name]}")
