"""Expected outputs of a problem: computed on the device in float64, or agreed on by several configurations."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotile.core.dtypes import Dtype
from autotile.core.model import Config, config_key
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError
from autotile.kernel.array_expressions import ArrayExpression, Matmul, ShapeOnly
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.spec import KernelSpec

_SMALL_ELEMENTS = 1 << 20
_SMALL_FLOPS = 1 << 26
"""Up to these sizes, of intermediate arrays too, NumPy computes a reference in a few milliseconds, as a check of the
device."""
_AGREEMENT = 1e-9
"""NumPy and the device add in different orders, so a sum of 1e8 terms differs by about 1e-16 sqrt(1e8) = 1e-12."""


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """Expected values of an output.

    Attributes
    ----------
    values
        C-contiguous array on the device: float64, complex128 for a complex output, or the type of an integer output,
        whose values are then exact.
    scale
        Root mean square of the values.
    """

    values: Any
    scale: float


def checked_output(
    values: Any, name: str, shape: tuple[int, ...], dtype: Dtype, *, place: str, support: SupportKernels
) -> ReferenceOutput:
    """Return expected values in the form in which outputs are compared with them.

    Parameters
    ----------
    values
        Array of numbers on the device.
    name, shape, dtype
        Name of the output, shape of its array and its element type.
    place
        Origin of the values, for error messages.
    support
        Support kernels of the worker.

    Raises
    ------
    InputError
        The shape is not the output's, a value is not finite, or it is not one of the output's type.
    """
    cupy = load_cupy()
    if values.shape != shape:
        raise InputError(f"{place} has shape {values.shape}, but the argument {name} has {shape}")
    if values.dtype.kind == "c" and not dtype.is_complex:
        raise InputError(f"{place} is complex, but the argument {name} is {dtype.name}; take real(...) of it")
    if values.dtype.kind in "biu" and dtype.component.is_integer:
        return _whole_output(values, name, dtype, place)
    values = cupy.ascontiguousarray(values, np.complex128 if dtype.is_complex else np.float64)
    parts = values.view(np.float64)
    unfinite, squares = support.summarise(parts.data.ptr, parts.size)
    if unfinite:
        raise InputError(f"{place} is not finite; choose inputs (init) for which it is")
    return ReferenceOutput(values, math.sqrt(squares / values.size))


def _whole_output(values: Any, name: str, dtype: Dtype, place: str) -> ReferenceOutput:
    """Return exact values of an integer output."""
    cupy = load_cupy()
    storage = np.dtype(dtype.component.storage)
    stored = cupy.ascontiguousarray(values, storage)
    if values.dtype != storage:
        low, high = (0, 1) if storage.kind == "b" else (np.iinfo(storage).min, np.iinfo(storage).max)
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise InputError(f"{place} has values from {least} to {most}, which do not fit in {name}, {dtype.name}")
    return ReferenceOutput(stored, math.sqrt(float((stored.astype(np.float64) ** 2).mean())))


class ReferenceSolution:
    """Evaluates the array expressions of a reference on the device.

    Small ones are also computed by NumPy, and both results must agree. This validates the device's arithmetic on the
    ragged shape before it is relied on for the tuned one.

    Parameters
    ----------
    environment
        float64 device arrays and numbers by name.
    support
        Support kernels of the worker.
    """

    def __init__(self, environment: Mapping[str, Any], support: SupportKernels) -> None:
        self._environment = environment
        self._support = support
        self._largest_product_flops = 0

    def output(
        self, name: str, expression: ArrayExpression, shape: tuple[int, ...], dtype: Dtype, place: str
    ) -> ReferenceOutput:
        """Compute the expected values of an output.

        Parameters
        ----------
        name, shape, dtype
            Name of the output, shape of its array and its element type.
        expression
            Expression of its values.
        place
            Position of the expression in the search-space file and problem sizes, for error messages.

        Raises
        ------
        InputError
            The expression cannot be evaluated, its shape is not the output's, or its value is not finite.
        ToolchainError
            The results of the device and of NumPy differ.
        """
        output = checked_output(
            self._evaluate(expression, place), name, shape, dtype, place=place, support=self._support
        )
        if self._is_small(expression):
            self._check(output.values, output.scale, expression, place)
        return output

    def _evaluate(self, expression: ArrayExpression, place: str) -> Any:
        """Evaluate on the device; with NumPy if CuPy cannot compile its kernels or the memory does not suffice."""
        cupy = load_cupy()
        try:
            return cupy.asarray(_guarded(expression, self._environment, self._product, place))
        except (cupy.cuda.compiler.CompileException, cupy.cuda.memory.OutOfMemoryError):
            return cupy.asarray(_guarded(expression, self._on_host(), np.matmul, place))

    def _product(self, a: Any, b: Any) -> Any:
        if "c" in (a.dtype.kind, b.dtype.kind) or min(a.ndim, b.ndim) < 2:
            return a @ b
        if a.dtype.kind + b.dtype.kind != "ff":
            return self._mixed_product(a, b)
        product = self._support.matmul(a, b)
        self._largest_product_flops = max(self._largest_product_flops, 2 * product.size * a.shape[-1])
        return product

    def _mixed_product(self, a: Any, b: Any) -> Any:
        """Multiply whole numbers, or whole and real ones: in float64 where that is exact, which is faster."""
        exact = all(x.dtype.kind == "f" or (abs(int(x.max())) < 2**53 and abs(int(x.min())) < 2**53) for x in (a, b))
        of_whole = "f" not in (a.dtype.kind, b.dtype.kind)
        if of_whole and exact:
            largest = [max(abs(int(x.max())), abs(int(x.min()))) for x in (a, b)]
            exact = a.shape[-1] * largest[0] * largest[1] < 2**53
        if not exact:
            return a @ b
        product = self._product(a.astype(np.float64), b.astype(np.float64))
        return product.astype(np.int64) if of_whole else product

    def _is_small(self, expression: ArrayExpression) -> bool:
        shapes = {
            name: ShapeOnly(value.shape) if np.ndim(value) else value for name, value in self._environment.items()
        }
        largest = getattr(expression.evaluate(shapes), "largest", 1)
        return largest <= _SMALL_ELEMENTS and self._largest_product_flops <= _SMALL_FLOPS

    def _check(self, values: Any, scale: float, expression: ArrayExpression, place: str) -> None:
        expected = _guarded(expression, self._on_host(), np.matmul, place)
        found, expected = values.get(), np.asarray(expected)
        if found.dtype.kind in "biu" and expected.dtype.kind in "biu":
            error = found != expected
        else:
            error = np.abs(found - expected) > _AGREEMENT * np.maximum(np.abs(expected), scale)
        if error.any():
            raise ToolchainError(
                f"{place}: {np.count_nonzero(error)} of {values.size} values differ between the device and NumPy; "
                "see `autotile doctor`"
            )

    def _on_host(self) -> dict[str, Any]:
        return {name: value.get() if np.ndim(value) else value for name, value in self._environment.items()}


def _guarded(expression: ArrayExpression, environment: Mapping[str, Any], matmul: Matmul, place: str) -> Any:
    try:
        return expression.evaluate(environment, matmul)
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        raise InputError(f"{place}: {error}") from None


_MAX_KEPT = 6
"""Number of results that wait for another that agrees; the oldest gives way."""

Outputs = Mapping[str, ReferenceOutput]


class Agreement:
    """Results of configurations for one set of inputs, until two of different launches agree."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Hashable, Outputs]] = []

    def offer(self, launch: Hashable, agrees: Callable[[Outputs], bool], outputs: Callable[[], Outputs]) -> Any:
        """Compare the result of a configuration with those that wait.

        Parameters
        ----------
        launch
            Key of its launches, see `launch_key`.
        agrees
            Whether it agrees with other outputs.
        outputs
            Function that copies its outputs.

        Returns
        -------
        Mapping or None
            The outputs with which it agrees, from a configuration of another launch; None if it waits now.
        """
        for other, waiting in self._waiting:
            if agrees(waiting):
                if other != launch:
                    self._waiting.clear()
                    return waiting
                return None
        self._waiting = [*self._waiting[1 - _MAX_KEPT :], (launch, outputs())]
        return None


def launch_key(spec: KernelSpec, config: Config, plan: LaunchPlan) -> Hashable:
    """Return the identity of a configuration's launches: blocks and grids, or all if these are always equal.

    Two configurations of one launch may share an error, such as a loop that ends too early.
    """
    parameters = {parameter.name for parameter in spec.parameters}
    extents = [extent for step in spec.steps for extent in (*step.launch.block, *step.launch.grid)]
    if not any(extent.names & parameters for extent in extents):
        return config_key(config)
    return tuple((launch.step, launch.geometry.grid, launch.geometry.block) for launch in plan.launches)
