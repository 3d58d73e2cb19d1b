"""Comparison of outputs by a Python function, instead of tolerances."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Config
from autotile.kernel.library import Inspection
from autotile.kernel.spec import KernelSpec


def comparison_of(spec: KernelSpec, function: Callable[..., Any], folder: Path) -> Inspection:
    """Return the check of a kernel's outputs by a function.

    Parameters
    ----------
    spec
        The kernel.
    function
        Called with the expected and the written values, and with the tolerance if it takes three arguments. It returns
        whether they agree, or a text that says what is wrong.
    folder
        Folder through which the outputs reach this process.
    """
    unchecked = spec.reference.unchecked
    names = [buffer.name for buffer in spec.buffers if buffer.is_written and buffer.name not in unchecked]
    tolerance = spec.reference.tolerance
    takes_tolerance = _takes_three(function)

    def check(config: Config, contents: Mapping[str, NDArray[Any]]) -> tuple[str, Mapping[str, float | str]]:
        expected, got = ([contents[f"{name}.{what}"] for name in names] for what in ("expected", "value"))
        given = [values[0] if len(names) == 1 else dict(zip(names, values, strict=True)) for values in (expected, got)]
        try:
            found = function(*given, *([tolerance] if takes_tolerance else []))
        except Exception as error:
            return f"the comparison raises {type(error).__name__}: {error}", {}
        if isinstance(found, str):
            return found, {}
        return ("" if found is None or np.all(found) else "the comparison found a difference"), {}

    buffers = tuple(f"{name}.{what}" for name in names for what in ("expected", "value"))
    return Inspection(buffers, check, str(folder))


def _takes_three(function: Callable[..., Any]) -> bool:
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C without a signature
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(argument.kind in plain for argument in arguments) >= 3
