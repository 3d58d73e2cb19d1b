"""Observers and verification functions: what is called for a configuration, and what it adds to the results.

Of an observer, `register_device` is called at the start. For each configuration that was launched
`register_configuration`, `process_output` (of observers of the output) and `get_results`. The launches are timed in
another process, without a stop between them, so the methods that Kernel Tuner calls around a launch are not called.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Trial
from autotile.errors import InputError
from autotile.kernel_tuner.files import restored_form
from autotile.kernel_tuner.observers import UNSUPPORTED, refuse

_LAUNCH_METHODS = ("before_start", "after_start", "during", "after_finish")
_BASE_MODULE = ".observers"
_TELEMETRY: Mapping[str, tuple[str, float]] = {
    "nvml_power": ("power_w", 1.0),
    "nvml_energy": ("energy_mj", 1e-3),
    "core_freq": ("sm_clock_mhz", 1.0),
    "temperature": ("temperature_c", 1.0),
}
"""Telemetry of autotile for each quantity of NVMLObserver, and its factor: W, J, MHz, degrees Celsius."""


class Observation:
    """The observers of a tuning session.

    Parameters
    ----------
    observers
        Observers, or functions that return one.

    Raises
    ------
    InputError
        An observer has no counterpart here.
    """

    def __init__(self, observers: Iterable[Any] | None) -> None:
        self._all = [_instance(each) for each in observers or ()]
        self._nvml = [name for each in self._all for name in _nvml_quantities(each)]
        self._has_registers = any(_kind(each) == "RegisterObserver" for each in self._all)
        special = ("NVMLObserver", "RegisterObserver")
        self._called = [each for each in self._all if _kind(each) not in special]
        self.of_output = [each for each in self._called if callable(getattr(each, "process_output", None))]
        for each in self._called:
            _warn_of_launch_methods(each)
        for name in self._nvml:
            if name not in _TELEMETRY:
                warnings.warn(f"NVMLObserver: {name!r} is not read by autotile, and left out", stacklevel=4)

    @property
    def needs_energy(self) -> bool:
        """Whether the energy of a launch is to be measured."""
        return "nvml_energy" in self._nvml

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

    def process_output(self, answer: Sequence[Any] | None, outputs: Sequence[Any]) -> dict[str, Any]:
        """Pass outputs on to the observers of them; return what they add to the results."""
        for each in self.of_output:
            each.process_output(answer, outputs)
        return {name: value for each in self.of_output for name, value in each.get_results().items()}

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


def _instance(observer: Any) -> Any:
    """Return an observer, which a function may make, as Kernel Tuner allows."""
    if callable(getattr(observer, "get_results", None)) and not isinstance(observer, type):
        found = observer
    elif callable(observer):
        return _instance(observer({"device": 0, "platform": 0, "compiler": None, "lang": "CUDA"}))
    else:
        raise InputError(
            f"an observer is {observer!r:.80}, expected a BenchmarkObserver, or a function that returns one"
        )
    if _kind(found) in UNSUPPORTED:
        refuse(_kind(found))
    return found


def _kind(observer: Any) -> str:
    return type(observer).__name__


def _nvml_quantities(observer: Any) -> list[str]:
    if _kind(observer) != "NVMLObserver":
        return []
    continuous = getattr(observer, "continuous_observer", None)  # Kernel Tuner's own class keeps power there
    return [*observer.observables, *getattr(continuous, "observables", [])]


def _warn_of_launch_methods(observer: Any) -> None:
    """Warn if an observer's own methods would have run between launches."""
    own = [
        name
        for name in _LAUNCH_METHODS
        if (method := getattr(type(observer), name, None)) is not None
        and _BASE_MODULE not in getattr(method, "__module__", "")
    ]
    if own:
        warnings.warn(
            f"the observer {_kind(observer)}: {', '.join(own)} are not called, as autotile times launches in another "
            "process without a stop between them; its get_results is",
            stacklevel=5,
        )


class OutputCheck:
    """Check of what a kernel wrote, by observers of the output and a function.

    Parameters
    ----------
    arguments
        Arguments of the kernel as NumPy arrays, by position, and their number.
    answer
        Returns the expected arguments of a configuration; None for no answer.
    verify
        Function of answer, outputs and, if it takes it, ``atol``, which returns whether the outputs are right; None
        for none.
    atol
        Absolute tolerance.
    observation
        Observers.
    """

    def __init__(
        self,
        arguments: Mapping[int, NDArray[Any]],
        count: int,
        answer: Sequence[Any] | None,
        verify: Callable[..., Any] | None,
        atol: float,
        observation: Observation,
    ) -> None:
        self._arguments = arguments
        self._count = count
        self._answer = answer
        self._verify = verify
        self._takes_atol = verify is not None and "atol" in inspect.signature(verify).parameters
        self._atol = atol
        self._observation = observation

    def __call__(
        self, params: Mapping[str, Any], contents: Mapping[int, NDArray[Any]]
    ) -> tuple[str, Mapping[str, float | str]]:
        """Return the fault of the outputs of a configuration, and the values that observers add to its results."""
        outputs: list[Any] = [None] * self._count
        for index, stored in contents.items():
            outputs[index] = restored_form(stored, self._arguments[index])
        observed = self._observation.process_output(self._answer, outputs)
        telemetry = {
            name: _recorded(value) for name, value in observed.items() if isinstance(value, Number | np.generic)
        }
        if self._verify is None:
            return "", telemetry
        options = {"atol": self._atol} if self._takes_atol else {}
        is_right = bool(self._verify(self._answer, outputs, **options))
        return "" if is_right else "the function verify returned False", telemetry


def _recorded(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)
