from typing import Any

import numpy as np
import pytest

from autotile.errors import ArgumentError
from autotile.kernel.arguments import ScalarArgument, decode_scalar, encode_scalar, scalar_value
from autotile.kernel.expressions import parse_expression


def scalar(dtype: str, value: Any = 1.0, check: float | None = None) -> ScalarArgument:
    return ScalarArgument("alpha", dtype, value, check)


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("float32", 0.1, np.float32(0.1)),
        ("float32", float("inf"), np.float32("inf")),
        ("float64", 0.1, np.float64(0.1)),
        ("float16", 65504, np.float16(65504)),
        ("bfloat16", -1.5, np.uint16(0xBFC0)),
        ("int32", -7, np.int32(-7)),
        ("int32", 7.0, np.int32(7)),
        ("int64", 2**53 + 1, np.int64(2**53 + 1)),
        ("uint64", 2**64 - 1, np.uint64(2**64 - 1)),
        ("uint8", True, np.uint8(1)),
        ("float32", np.float64(2.5), np.float32(2.5)),
    ],
)
def test_a_value_takes_the_exact_type(dtype: str, value: Any, stored: np.generic) -> None:
    got = encode_scalar(scalar(dtype), value, "float32")
    assert type(got) is type(stored)
    assert got == stored


@pytest.mark.parametrize(
    ("problem_dtype", "kind"), [("float16", np.float16), ("bfloat16", np.uint16), ("float64", np.float64)]
)
def test_a_scalar_of_the_problems_dtype(problem_dtype: str, kind: type) -> None:
    stored = scalar_value(scalar("dtype", 1.5), {}, problem_dtype, check=False)
    assert type(stored) is kind
    assert decode_scalar(scalar("dtype"), stored, problem_dtype) == 1.5


def test_bound_free_and_check_values() -> None:
    bound = scalar("int32", parse_expression("M * 2", {"M": "number"}))
    assert scalar_value(bound, {"M": 21}, "float32", check=True) == 42
    free = scalar("float32", 1.0, 0.75)
    assert scalar_value(free, {}, "float32", check=False) == 1.0
    assert scalar_value(free, {}, "float32", check=True) == 0.75
    assert scalar_value(scalar("float32", 0.5), {}, "float32", check=True) == 0.5
    assert scalar_value(scalar("float32", 1.0, 0.0), {}, "float32", check=True) == 0.0


def test_what_does_not_fit_is_refused_instead_of_wrapped() -> None:
    product = scalar("int32", parse_expression("M * M", {"M": "number"}))
    with pytest.raises(ArgumentError, match=r"scalar alpha is 4294967296, which does not fit in int32"):
        scalar_value(product, {"M": 65536}, "float32", check=False)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", 0.5),
        ("int32", float("nan")),
        ("int32", float("inf")),
        ("uint8", -1),
        ("uint8", 256),
        ("float16", 1e6),
        ("float32", 1e39),
        ("float32", "1"),
        ("float32", None),
        ("float32", [1.0]),
        ("float32", 1j),
        ("int64", 2**64),
    ],
)
def test_refusals(dtype: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"fit[s]? in {dtype}"):
        encode_scalar(scalar(dtype), value, "float32")
