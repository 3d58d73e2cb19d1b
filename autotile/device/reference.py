"""The right answers of a problem, in float64 on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotile.device.support import SupportKernels
from autotile.device.toolchain import load_cupy
from autotile.ground.arrays import ArrayExpression, Matmul
from autotile.ground.dtypes import Array
from autotile.ground.errors import InputError, ToolchainError

_SMALL_ELEMENTS = 1 << 20
_SMALL_FLOPS = 1 << 26
"""Products of less are computed by NumPy in a few milliseconds, as a check of the device's."""
_AGREEMENT = 1e-9
"""NumPy and the device add in different orders: a sum of 1e8 terms then differs by about 1e-16 sqrt(1e8) = 1e-12."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One output's right values.

    Attributes
    ----------
    values
        float64 on the device, C order.
    scale
        Root of their mean square.
    """

    values: Any
    scale: float


class Reference:
    """Evaluates array expressions over device arrays.

    Small ones are computed a second time by NumPy, and the two must agree: so the device's arithmetic is proved on the
    ragged shape before it is believed on the tuned one.

    Parameters
    ----------
    environment
        Float64 device arrays and numbers by name.
    support
        The worker's own kernels.
    """

    def __init__(self, environment: Mapping[str, Any], support: SupportKernels) -> None:
        self._environment = environment
        self._support = support
        self._largest_product_flops = 0

    def answer(self, name: str, expression: ArrayExpression, shape: tuple[int, ...], place: str) -> Answer:
        """The right values of an output.

        Parameters
        ----------
        name, shape
            The output.
        place
            Where the expression stands and at which sizes, for messages.

        Raises
        ------
        InputError
            The expression cannot be evaluated, has another shape than the output, or is not finite.
        ToolchainError
            The device computes otherwise than NumPy does.
        """
        values = self._evaluate(expression, place)
        if values.shape != shape:
            raise InputError(f"{place} has shape {values.shape}, but the argument {name} has {shape}")
        answer = load_cupy().ascontiguousarray(values)
        unfinite, squares = self._support.summarise(answer.data.ptr, answer.size)
        if unfinite:
            raise InputError(f"{place} is not finite; choose inputs (init) for which it is")
        scale = math.sqrt(squares / answer.size)
        if self._is_small(answer):
            self._check(answer, scale, expression, place)
        return Answer(answer, scale)

    def _evaluate(self, expression: ArrayExpression, place: str) -> Any:
        """On the device; by NumPy where CuPy cannot compile its kernels, or the intermediate values do not fit."""
        cupy = load_cupy()
        try:
            return cupy.asarray(_guarded(expression, self._environment, self._product, place))
        except (cupy.cuda.compiler.CompileException, cupy.cuda.memory.OutOfMemoryError):
            return cupy.asarray(_guarded(expression, self._on_host(), np.matmul, place))

    def _product(self, a: Any, b: Any) -> Any:
        if min(a.ndim, b.ndim) < 2 or a.shape[-1] != b.shape[-2]:
            return a @ b
        product = self._support.matmul(a, b)
        self._largest_product_flops = max(self._largest_product_flops, 2 * product.size * a.shape[-1])
        return product

    def _is_small(self, answer: Any) -> bool:
        elements = [answer.size, *(np.size(value) for value in self._environment.values())]
        return max(elements) <= _SMALL_ELEMENTS and self._largest_product_flops <= _SMALL_FLOPS

    def _check(self, answer: Any, scale: float, expression: ArrayExpression, place: str) -> None:
        expected = _guarded(expression, self._on_host(), np.matmul, place)
        error = np.abs(answer.get() - expected) > _AGREEMENT * np.maximum(np.abs(expected), scale)
        if error.any():
            raise ToolchainError(
                f"{place}: the device computes {np.count_nonzero(error)} of {answer.size} values otherwise than NumPy; "
                "see `autotile doctor`"
            )

    def _on_host(self) -> dict[str, Any]:
        return {name: value.get() if np.ndim(value) else value for name, value in self._environment.items()}


def _guarded(expression: ArrayExpression, environment: Mapping[str, Any], matmul: Matmul, place: str) -> Array:
    try:
        return expression.evaluate(environment, matmul)
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        raise InputError(f"{place}: {error}") from None
