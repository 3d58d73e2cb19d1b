"""Scalar arguments as a kernel takes them: NumPy scalars of the exact type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotile.ground.dtypes import DTYPES
from autotile.ground.errors import ArgumentError
from autotile.ground.spec import ScalarArgument


def scalar_value(scalar: ScalarArgument, sizes: Mapping[str, int], problem_dtype: str, *, check: bool) -> Any:
    """A scalar argument's value for a problem.

    Parameters
    ----------
    scalar
        The argument.
    sizes, problem_dtype
        The problem.
    check
        Use the check value where one is given.

    Returns
    -------
    numpy scalar
        As `encode_scalar` gives it.

    Raises
    ------
    ArgumentError
        The value does not fit in the argument's type.
    """
    if isinstance(scalar.value, int | float):
        value: Any = scalar.check_value if check and scalar.check_value is not None else scalar.value
    else:
        value = scalar.value.evaluate(sizes)
    return encode_scalar(scalar, value, problem_dtype)


def encode_scalar(scalar: ScalarArgument, value: Any, problem_dtype: str) -> Any:
    """A value in the argument's type, as a NumPy scalar (bfloat16: its bits in uint16).

    Raises
    ------
    ArgumentError
        It is not a number, or does not fit: too large, or a fraction for an integer.
    """
    dtype = DTYPES[scalar.element_type(problem_dtype)]
    given = np.asarray([value])
    if given.shape != (1,) or given.dtype.kind not in "biuf":
        raise ArgumentError(f"scalar {scalar.name} is {value!r}, expected a number that fits in {dtype.name}")
    with np.errstate(over="ignore", invalid="ignore"):
        stored = dtype.encode(given)
    kept = dtype.decode(stored)
    fits = bool((kept == given).all()) if dtype.is_integer else bool((np.isinf(kept) == np.isinf(given)).all())
    if not fits:
        raise ArgumentError(f"scalar {scalar.name} is {value!r}, which does not fit in {dtype.name}")
    return stored[0]


def decode_scalar(scalar: ScalarArgument, stored: Any, problem_dtype: str) -> float:
    """The number that an encoded scalar stands for."""
    return float(DTYPES[scalar.element_type(problem_dtype)].decode(np.asarray([stored]))[0])
