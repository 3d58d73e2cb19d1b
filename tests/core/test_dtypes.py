import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.dtypes import DTYPES, Dtype, canonical_dtype, dtype_name, output_tolerance

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
    names = ("float3", "uchar4", "double4", "half2", "complex128")
    assert [DTYPES[name].alignment_bytes for name in names] == [4, 4, 16, 4, 16]


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


FLOAT, HALF, DOUBLE, BRAIN, INT = (DTYPES[name] for name in ("float32", "float16", "float64", "bfloat16", "int32"))
TF32_ROUNDOFF = 2.0**-11


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the maximum error relative to max(|expected|, RMS of expected), as in verification."""
    scale = math.sqrt(float(np.mean(np.square(want))))
    return float(np.max(np.abs(got - want) / np.maximum(np.abs(want), scale)))


def product(k: int, outputs: int = 400) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(k)
    a, b = generator.standard_normal((2, outputs, k), dtype=np.float32)
    return a, b


def one_after_another(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros(len(a), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k] * b[:, k]
    return total.astype(np.float64)


@pytest.mark.parametrize("k", [1, 16, 149, 1024, 4096])
def test_only_a_right_fp32_sum_is_within_the_tolerance(k: int) -> None:
    a, b = product(k)
    want = np.sum(a.astype(np.float64) * b, axis=1)
    tolerance = output_tolerance(FLOAT, [FLOAT, FLOAT], k)
    assert relative_error(one_after_another(a, b), want) < tolerance
    if k < 149:
        return

    def as_tf32(values: np.ndarray) -> np.ndarray:
        return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

    assert relative_error(one_after_another(as_tf32(a), as_tf32(b)), want) > tolerance
    one_left_out = np.sum(a[:, 1:].astype(np.float64) * b[:, 1:], axis=1)
    assert relative_error(one_left_out, want) > tolerance


def test_a_half_result_of_an_fp32_sum_is_right_and_a_half_sum_is_wrong() -> None:
    """A template must not accumulate in fp16."""
    a, b = (HALF.decode(HALF.encode(x)) for x in product(1024))
    got = HALF.decode(HALF.encode(one_after_another(a.astype(np.float32), b.astype(np.float32))))
    assert relative_error(got, np.sum(a * b, axis=1)) < output_tolerance(HALF, [HALF, HALF], 1024)
    a, b = (x.astype(np.float16) for x in product(4096))
    total = np.zeros(len(a), np.float16)
    for k in range(a.shape[1]):
        total += a[:, k] * b[:, k]
    want = np.sum(a.astype(np.float64) * b, axis=1)
    assert relative_error(total.astype(np.float64), want) > output_tolerance(HALF, [HALF, HALF], 4096)


@pytest.mark.parametrize(
    ("output", "inputs", "reduction", "expected"),
    [
        (INT, [FLOAT, INT], 10_000, 0.0),  # integers must be exact
        (INT, [DTYPES["int8"]], 64, 0.0),
        (FLOAT, [FLOAT], 400, 20 * 8 * 2.0**-24),  # it grows with the root of the sum
        (FLOAT, [FLOAT], 0, 8 * 2.0**-24),
        (DOUBLE, [DOUBLE], 100, 80 * 2.0**-53),  # the accumulator is fp32 or the widest
        (FLOAT, [HALF, HALF], 100, 80 * 2.0**-24),
        (FLOAT, [INT, INT], 100, 80 * 2.0**-24),
        (FLOAT, [DOUBLE], 100, 2 * 2.0**-24 + 80 * 2.0**-53),  # a narrow output adds its own rounding
        (HALF, [HALF], 100, 2 * 2.0**-11 + 80 * 2.0**-24),
        (BRAIN, [BRAIN], 100, 2 * 2.0**-8 + 80 * 2.0**-24),
    ],
)
def test_the_tolerance_follows_its_formula(output: Dtype, inputs: list[Dtype], reduction: int, expected: float) -> None:
    assert output_tolerance(output, inputs, reduction) == pytest.approx(expected)


def test_tf32_is_rejected_up_to_the_length_that_is_promised() -> None:
    assert output_tolerance(FLOAT, [FLOAT], 400_000) < 3.1e-4 < TF32_ROUNDOFF
