import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.dtypes import DTYPES, canonical_dtype, dtype_name, output_tolerance

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


FP8 = ["float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", FP8)
def test_every_finite_8_bit_float_is_encoded_as_itself(name: str) -> None:
    stored = np.arange(256, dtype=np.uint8)
    values = DTYPES[name].decode(stored)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(DTYPES[name].encode(values[finite]), stored[finite])
    assert values[finite].max() == DTYPES[name].largest


@pytest.mark.parametrize("name", FP8)
@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6))
def test_8_bit_floats_round_to_nearest_and_saturate(name: str, value: float) -> None:
    dtype = DTYPES[name]
    every = dtype.decode(np.arange(256, dtype=np.uint8))
    every = every[np.isfinite(every)]
    rounded = dtype.decode(dtype.encode(np.array([value])))[0]
    assert abs(rounded - value) == np.abs(every - value).min()


def test_ties_of_8_bit_floats_go_to_even() -> None:
    ties = np.array([1 + 1 / 16, 1 + 3 / 16, 2.0**-10, 3 * 2.0**-10, -(1 + 1 / 16)])
    e4m3 = DTYPES["float8_e4m3fn"]
    np.testing.assert_array_equal(e4m3.decode(e4m3.encode(ties)), [1, 1.25, 0, 2.0**-8, -1])
    barely = np.array([np.nextafter(1 + 1 / 16, 2), np.nextafter(1 + 1 / 16, 1)])
    np.testing.assert_array_equal(e4m3.decode(e4m3.encode(barely)), [1.125, 1])


@pytest.mark.parametrize("name", FP8)
def test_8_bit_floats_saturate_infinity_and_keep_nan(name: str) -> None:
    dtype = DTYPES[name]
    decoded = dtype.decode(dtype.encode(np.array([np.inf, -np.inf, np.nan], np.float32)))
    np.testing.assert_array_equal(decoded, [dtype.largest, -dtype.largest, np.nan])


def test_vectors_are_arrays_of_their_components() -> None:
    float4 = DTYPES["float4"]
    assert (float4.size_bytes, float4.alignment_bytes, float4.array_shape((5,))) == (16, 16, (5, 4))
    assert float4.component is DTYPES["float32"]
    assert [DTYPES[name].alignment_bytes for name in ("float3", "uchar4", "double4", "half2", "complex128")] == [
        4,
        4,
        16,
        4,
        16,
    ]


def test_complex_values_keep_both_parts() -> None:
    single = DTYPES["complex64"]
    assert single.decode(single.encode(np.array([1 + 2j])))[0] == 1 + 2j
    assert not single.is_integer
    assert single.is_complex


def test_names_of_other_libraries_are_known() -> None:
    assert canonical_dtype("float8_e4m3") == "float8_e4m3fn"
    assert dtype_name("torch.float8_e5m2") == "float8_e5m2"
    assert dtype_name(np.complex64) == "complex64"
    assert dtype_name(bool) == "bool"
