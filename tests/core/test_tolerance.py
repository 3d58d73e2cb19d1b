"""The tolerance accepts correct results of every accumulation order and rejects wrong ones."""

import math

import numpy as np
import pytest

from autotile.core.dtypes import DTYPES, output_tolerance

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


class TestProducts:
    @pytest.mark.parametrize("k", [1, 16, 149, 1024, 4096])
    def test_a_serial_fp32_sum_is_right(self, k: int) -> None:
        a, b = product(k)
        want = np.sum(a.astype(np.float64) * b, axis=1)
        assert relative_error(one_after_another(a, b), want) < output_tolerance(FLOAT, [FLOAT, FLOAT], k)

    @pytest.mark.parametrize("k", [149, 1024, 4096])
    def test_inputs_rounded_to_tf32_are_wrong(self, k: int) -> None:
        a, b = product(k)
        want = np.sum(a.astype(np.float64) * b, axis=1)

        def rounded(values: np.ndarray) -> np.ndarray:
            return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

        assert relative_error(one_after_another(rounded(a), rounded(b)), want) > output_tolerance(FLOAT, [FLOAT], k)

    @pytest.mark.parametrize("k", [149, 4096])
    def test_one_product_left_out_is_wrong(self, k: int) -> None:
        a, b = product(k)
        want = np.sum(a.astype(np.float64) * b, axis=1)
        short = np.sum(a[:, 1:].astype(np.float64) * b[:, 1:], axis=1)
        assert relative_error(short, want) > output_tolerance(FLOAT, [FLOAT], k)

    def test_a_half_result_of_an_fp32_sum_is_right(self) -> None:
        a, b = product(1024)
        a, b = (HALF.decode(HALF.encode(x)) for x in (a, b))
        want = np.sum(a * b, axis=1)
        got = HALF.decode(HALF.encode(one_after_another(a.astype(np.float32), b.astype(np.float32))))
        assert relative_error(got, want) < output_tolerance(HALF, [HALF, HALF], 1024)

    def test_a_half_sum_is_wrong(self) -> None:
        """A template must not accumulate in fp16."""
        a, b = product(4096)
        want = np.sum(a.astype(np.float16).astype(np.float64) * b.astype(np.float16), axis=1)
        total = np.zeros(len(a), np.float16)
        for k in range(a.shape[1]):
            total += a[:, k].astype(np.float16) * b[:, k].astype(np.float16)
        assert relative_error(total.astype(np.float64), want) > output_tolerance(HALF, [HALF, HALF], 4096)


class TestFormula:
    def test_integers_must_be_exact(self) -> None:
        assert output_tolerance(INT, [FLOAT, INT], 10_000) == 0.0

    def test_it_grows_with_the_root_of_the_sum(self) -> None:
        assert output_tolerance(FLOAT, [FLOAT], 400) == pytest.approx(20 * output_tolerance(FLOAT, [FLOAT], 1))
        assert output_tolerance(FLOAT, [FLOAT], 0) == output_tolerance(FLOAT, [FLOAT], 1)

    def test_tf32_is_rejected_up_to_the_length_that_is_promised(self) -> None:
        assert output_tolerance(FLOAT, [FLOAT], 400_000) < 3.1e-4 < TF32_ROUNDOFF

    def test_the_accumulator_is_fp32_or_the_widest(self) -> None:
        assert output_tolerance(DOUBLE, [DOUBLE], 100) == pytest.approx(80 * 2.0**-53)
        assert output_tolerance(FLOAT, [HALF, HALF], 100) == pytest.approx(80 * 2.0**-24)
        assert output_tolerance(FLOAT, [DOUBLE], 100) == pytest.approx(2 * 2.0**-24 + 80 * 2.0**-53)

    @pytest.mark.parametrize("narrow", [HALF, BRAIN])
    def test_a_narrow_output_adds_its_own_rounding(self, narrow: object) -> None:
        assert output_tolerance(narrow, [narrow], 100) == pytest.approx(  # type: ignore[arg-type]
            2 * narrow.unit_roundoff + 80 * 2.0**-24  # type: ignore[attr-defined]
        )

    def test_integer_inputs_of_a_float_output(self) -> None:
        assert output_tolerance(FLOAT, [INT, INT], 100) == pytest.approx(80 * 2.0**-24)
