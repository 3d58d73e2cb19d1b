"""Observers, as Kernel Tuner's scripts define and pass them.

autotile measures in a process of its own, launches by launch without a stop, so nothing of an observer runs between the
launches. `autotile.kernel_tuner.observation` states what is called, and when. The names of Kernel Tuner's modules, such
as ``observers.nvml``, are those of this module.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from autotile.errors import InputError

_OBSERVABLES = ("power_readings", "nvml_power", "nvml_energy", "core_freq", "mem_freq", "temperature", "gr_voltage")
UNSUPPORTED = {
    "PMTObserver": "reads a power meter during the launches; NVMLObserver(['nvml_energy', 'nvml_power']) gives energy",
    "PowerSensorObserver": "reads a power sensor during the launches; NVMLObserver(['nvml_energy']) gives energy",
    "TegraObserver": "sets and reads the clocks of a Tegra; tune at fixed clocks, set with nvpmodel, and leave it out",
    "NCUObserver": "profiles with Nsight Compute; tune first, then run ncu on the best configuration",
}
"""Replacement for each observer that has no counterpart."""


class BenchmarkObserver(ABC):
    """Base class of observers: adds values to the results of each configuration."""

    def register_device(self, dev: Any) -> None:
        """Keep the device: an object with ``name``, ``max_threads`` and ``env``."""
        self.dev = dev

    def register_configuration(self, params: Mapping[str, Any]) -> None:  # noqa: B027 - to override, not abstract
        """Receive the configuration that is measured next."""

    def before_start(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    def after_start(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    def during(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    def after_finish(self) -> None:  # noqa: B027
        """Is not called; see the module."""

    @abstractmethod
    def get_results(self) -> dict[str, Any]:
        """Return the values to add to the results."""


class IterationObserver(BenchmarkObserver):
    """An observer of each launch."""


class ContinuousObserver(BenchmarkObserver):
    """An observer of power during a long sequence of launches."""


class OutputObserver(BenchmarkObserver):
    """An observer of what the kernel wrote."""

    @abstractmethod
    def process_output(self, answer: Sequence[Any], output: Sequence[Any]) -> None:
        """Receive the answer, and the arrays that the kernel wrote for it."""


class PrologueObserver(BenchmarkObserver):
    """An observer of one launch before the measurement."""


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


class RegisterObserver(BenchmarkObserver):
    """Adds ``num_regs``, the registers of a thread, to the results."""

    def get_results(self) -> dict[str, Any]:
        """Return nothing: the session knows the registers from the compiler."""
        return {}


def refuse(name: str) -> NoReturn:
    """Raise an `InputError` for an observer."""
    raise InputError(f"{name} {UNSUPPORTED[name]}")


class _Refused:
    """An observer that has no counterpart here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        refuse(type(self).__name__)


class PMTObserver(_Refused):
    """Raises an `InputError` that names what to use instead."""


class PowerSensorObserver(_Refused):
    """Raises an `InputError` that names what to use instead."""


class TegraObserver(_Refused):
    """Raises an `InputError` that names what to use instead."""


class NCUObserver(_Refused):
    """Raises an `InputError` that names what to use instead."""


for _name in ("observer", "nvml", "register", "pmt", "powersensor", "tegra", "ncu"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
