"""Observers as Kernel Tuner's scripts define and pass them: what is called for a configuration, and what it adds.

Of an observer, `register_device` is called at the start. For each configuration that was launched
`register_configuration`, `process_output` (of observers of the output) and `get_results`. The launches are timed in
another process, without a stop between them, so the methods that Kernel Tuner calls around a launch are not called.

The names of Kernel Tuner's modules, such as ``observers.nvml``, are those of this module.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Trial
from autotile.errors import InputError
from autotile.kernel_tuner.translation import Check, ScriptKernel, restored_form

_OBSERVABLES = ("power_readings", "nvml_power", "nvml_energy", "core_freq", "mem_freq", "temperature", "gr_voltage")
_UNSUPPORTED = {
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

    after_start = during = after_finish = before_start

    @abstractmethod
    def get_results(self) -> dict[str, Any]:
        """Return the values to add to the results."""


# Of each launch, of power during many launches, and of one launch before the measurement: here, all are called alike.
IterationObserver = ContinuousObserver = PrologueObserver = BenchmarkObserver


class OutputObserver(BenchmarkObserver):
    """An observer of what the kernel wrote."""

    @abstractmethod
    def process_output(self, answer: Sequence[Any] | None, output: Sequence[Any]) -> None:
        """Receive the answer, None where none is given, and the arrays that the kernel wrote for it."""


class NVMLObserver(BenchmarkObserver):
    """Adds quantities of NVML to the results: see ``observers`` in docs/from-kernel-tuner.md for those that there are.

    The further arguments are ignored: the device is that of the session, and clocks are not changed. An unknown
    quantity is an `InputError`.
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


def _refused(name: str) -> type:
    """Return a class whose construction raises an `InputError` that names what to use instead."""

    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        raise InputError(f"{name} {_UNSUPPORTED[name]}")

    return type(name, (), {"__init__": refuse, "__doc__": "Raises an `InputError` that names what to use instead."})


PMTObserver, PowerSensorObserver, TegraObserver, NCUObserver = map(_refused, _UNSUPPORTED)

for _name in ("observer", "nvml", "register", "pmt", "powersensor", "tegra", "ncu"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]

_LAUNCH_METHODS = ("before_start", "after_start", "during", "after_finish")
_TELEMETRY: Mapping[str, tuple[str, float]] = {
    "nvml_power": ("power_w", 1.0),
    "nvml_energy": ("energy_mj", 1e-3),
    "core_freq": ("sm_clock_mhz", 1.0),
    "temperature": ("temperature_c", 1.0),
}
"""Telemetry of autotile for each quantity of NVMLObserver, and its factor: W, J, MHz, degrees Celsius."""


class Observation:
    """The observers of a call, or functions that return one; one without a counterpart here is an `InputError`."""

    def __init__(self, observers: Iterable[Any] | None) -> None:
        given = [(type(one).__name__, one) for one in map(_instance, observers or ())]
        self._nvml: list[str] = []
        for kind, each in given:
            if kind == "NVMLObserver":
                continuous = getattr(each, "continuous_observer", None)  # Kernel Tuner's own class keeps power there
                self._nvml += [*each.observables, *getattr(continuous, "observables", [])]
        self.needs_energy = "nvml_energy" in self._nvml
        """Whether the energy of a launch is to be measured."""
        self._has_registers = any(kind == "RegisterObserver" for kind, _ in given)
        self._called = [each for kind, each in given if kind not in ("NVMLObserver", "RegisterObserver")]
        self.of_output = [each for each in self._called if callable(getattr(each, "process_output", None))]
        for each in self._called:
            methods = ((name, getattr(type(each), name, None)) for name in _LAUNCH_METHODS)
            if own := [name for name, method in methods if method and ".observers" not in method.__module__]:
                warnings.warn(
                    f"the observer {type(each).__name__}: {', '.join(own)} are not called, as autotile times launches "
                    "in another process without a stop between them; its get_results is",
                    stacklevel=3,
                )
        for name in self._nvml:
            if name not in _TELEMETRY:
                warnings.warn(f"NVMLObserver: {name!r} is not read by autotile, and left out", stacklevel=3)

    def register_device(self, device: DeviceProperties, index: int) -> None:
        """Pass the device on to the observers that are called."""
        shown = SimpleNamespace(
            name=device.name,
            max_threads=device.max_threads_per_block,
            cc=device.compute_capability.replace(".", ""),
            env={"device_name": device.name, "compute_capability": device.compute_capability},
            device=index,
        )
        for each in self._called:
            if callable(register := getattr(each, "register_device", None)):
                register(shown)

    def results(self, params: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
        """Return the values that observers add to the result of a configuration that has a time."""
        found: dict[str, Any] = {}
        for name in self._nvml:
            key, factor = _TELEMETRY.get(name, ("", 1.0))
            if (value := trial.telemetry.get(key)) is not None:
                found[name] = factor * float(value)
        if self._has_registers and trial.resources is not None:
            found["num_regs"] = trial.resources.registers
        for each in self._called:
            if callable(register := getattr(each, "register_configuration", None)):
                register(dict(params))
            if each not in self.of_output:
                found |= each.get_results()
        return found

    def output_check(
        self, kernel: ScriptKernel, answer: Sequence[Any] | None, verify: Callable[..., Any] | None
    ) -> Check:
        """Return a check of what a kernel wrote, by observers of the output and a function.

        The function takes answer, outputs and, if it has such a parameter, ``atol``, and returns whether the outputs
        are right.
        """
        arguments, count = kernel.arrays, len(kernel.arguments)
        takes_atol = verify is not None and "atol" in inspect.signature(verify).parameters
        options = {"atol": kernel.atol} if takes_atol else {}

        def check(
            params: Mapping[str, Any], contents: Mapping[int, NDArray[Any]]
        ) -> tuple[str, Mapping[str, float | str]]:
            outputs: list[Any] = [None] * count
            for index, stored in contents.items():
                outputs[index] = restored_form(stored, arguments[index])
            for each in self.of_output:
                each.process_output(answer, outputs)
            observed = {name: value for each in self.of_output for name, value in each.get_results().items()}
            kept = [name for name, value in observed.items() if isinstance(value, Number | np.generic)]
            numbers = {name: float(observed[name]) for name in kept}
            telemetry = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
            is_right = verify is None or bool(verify(answer, outputs, **options))
            return "" if is_right else "the function verify returned False", telemetry

        return check


def _instance(observer: Any) -> Any:
    """Return an observer, which a function may make, as Kernel Tuner allows."""
    if not callable(getattr(observer, "get_results", None)) or isinstance(observer, type):
        if not callable(observer):
            raise InputError(
                f"an observer is {observer!r:.80}, expected a BenchmarkObserver, or a function that returns one"
            )
        try:
            made = observer({"device": 0, "platform": 0, "compiler": None, "lang": "CUDA"})
        except TypeError as error:
            if not isinstance(observer, type):
                raise
            name = observer.__name__
            raise InputError(f"an observer is the class {name} ({error}), expected an object of it: {name}()") from None
        return _instance(made)
    if (name := type(observer).__name__) in _UNSUPPORTED:  # Kernel Tuner's own class
        raise InputError(f"{name} {_UNSUPPORTED[name]}")
    return observer
