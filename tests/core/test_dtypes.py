import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.dtypes import DTYPES, output_tolerance

BFLOAT16 = DTYPES["bfloat16"]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126))
def test_bfloat16_rounds_to_nearest(value: float) -> None:
    rounded = BFLOAT16.decode(BFLOAT16.encode(np.array([value])))[0]
    assert abs(rounded - value) <= BFLOAT16.unit_roundoff * abs(value) + 1e-40


def test_bfloat16_ties_go_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8])
    np.testing.assert_array_equal(BFLOAT16.decode(BFLOAT16.encode(ties)), [1.0, 1 + 2**-6])


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_unit_roundoff_is_half_an_ulp_of_one(name: str) -> None:
    assert DTYPES[name].unit_roundoff == np.finfo(name).eps / 2


def test_tolerance_accepts_a_right_product_and_rejects_tf32() -> None:
    """A product accumulated in fp32 passes with a margin; the same with inputs cut to TF32 does not."""
    generator = np.random.default_rng(1)
    a, b = generator.standard_normal((64, 2048)), generator.standard_normal((2048, 64))
    a, b = a.astype(np.float32).astype(np.float64), b.astype(np.float32).astype(np.float64)
    exact = a @ b
    scale = np.sqrt(np.mean(exact**2))
    single = DTYPES["float32"]
    tolerance = output_tolerance(single, [single, single], 2048)

    sequential = np.zeros((64, 64), dtype=np.float32)
    for k in range(2048):
        sequential += np.outer(a[:, k], b[k]).astype(np.float32)
    error = np.max(np.abs(sequential - exact) / np.maximum(np.abs(exact), scale))
    assert error < tolerance / 2

    def tf32(x: np.ndarray) -> np.ndarray:
        return (x.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)

    error = np.max(np.abs(tf32(a) @ tf32(b) - exact) / np.maximum(np.abs(exact), scale))
    assert error > tolerance


def test_a_narrow_output_may_round() -> None:
    half = DTYPES["float16"]
    assert output_tolerance(half, [half, half], 64) >= half.unit_roundoff
    assert output_tolerance(DTYPES["int32"], [DTYPES["int8"]], 64) == 0.0
