"""Tests for the decision to launch what is served rather than to call the library, by the models that ship."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from autotile.serving.bound import BoundKernel
from autotile.serving.gains import Gain, find_product, is_transposed, stored_transposed


def served_for(m: int, n: int, k: int, dtype: str) -> BoundKernel:
    served = find_product(m, n, k, dtype, trans_b=True, device="h200", keeps=False)
    assert served is not None
    return served


def gain_of(m: int, n: int, k: int, dtype: str) -> Gain:
    return Gain.of(served_for(m, n, k, dtype))


class TestGain:
    def test_cublas_stays_the_programs_own(self) -> None:
        gain = gain_of(4096, 4096, 4096, "bfloat16")
        assert (gain.kernel, gain.launches) == ("cublas", 0)
        assert gain.time_us == gain.library_us == gain.total_us(bias=True)
        assert not gain.is_worthwhile()

    @pytest.mark.parametrize("recorded", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    def test_a_large_float32_product_pays_for_all_costs(self, bias: bool, recorded: bool) -> None:
        gain = gain_of(512, 4096, 4096, "float32")
        assert gain.time_us < gain.library_us / 1.4
        assert gain.is_worthwhile(bias=bias, recorded=recorded)

    def test_a_bias_and_a_record_cost_a_small_product_more_than_it_gains(self) -> None:
        gain = gain_of(384, 2048, 2048, "float32")
        assert gain.is_worthwhile()
        assert not gain.is_worthwhile(bias=True)
        assert not gain.is_worthwhile(recorded=True)

    def test_in_a_graph_the_host_costs_nothing(self) -> None:
        gain = gain_of(1, 4096, 4096, "float32")  # twice as fast, and shorter than the host's part of any product
        assert not gain.is_worthwhile()
        assert gain.is_worthwhile(bias=True, in_graph=True)

    def test_a_bias_is_read_and_written_at_the_bandwidth(self) -> None:
        small, large = (gain_of(m, 4096, 4096, "float32").bias_us for m in (1024, 4096))
        assert large - small == pytest.approx(1e6 * 2 * 3072 * 4096 * 4 / 4.8e12, rel=0.05)

    def test_what_is_pinned_is_launched_whatever_is_expected(self) -> None:
        gain = gain_of(64, 512, 512, "float32")
        pinned = replace(gain, choice=structs.replace(gain.choice, pinned="choices.json"), library_us=None)
        assert not replace(gain, library_us=None).is_worthwhile()
        assert pinned.is_worthwhile(bias=True, recorded=True)

    def test_while_something_stands_in_what_was_chosen_decides(self) -> None:
        served, raced = (served_for(512, 4096, 4096, "float32") for _ in range(2))
        chosen, other = Gain.of(served), served_for(4096, 4096, 4096, "bfloat16")
        other.choice = structs.replace(other.choice, awaited="the kernel, which is being compiled")
        raced.find_ways = other.find_ways = None
        assert served.adopt(raced)
        assert replace(Gain.of(served), choice=chosen.choice) == chosen
        assert served.adopt(other)
        now, final = Gain.of(served), Gain.of(served, final=True)
        assert (now.kernel, now.launches) == ("cublas", 0)
        assert (final.kernel, final.time_us, final.library_us) == (chosen.kernel, chosen.time_us, chosen.library_us)
        assert final.is_worthwhile()
        assert served.contenders == other.choice.contenders

    def test_only_looked_at_it_is_not_kept(self) -> None:
        served = find_product(3, 5, 7, "float32", device="h200", keeps=False)
        assert served is not None
        assert served is not find_product(3, 5, 7, "float32", device="h200", keeps=False)
        assert find_product(3, 5, 7, "float32", device="h200") is find_product(3, 5, 7, "float32", device="h200")

    def test_what_no_kernel_computes(self) -> None:
        assert find_product(0, 5, 7, "float32", device="h200") is None


class TestOrder:
    @pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4, 1), (1, 1), (2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1)])
    def test_it_is_that_of_numpy(self, shape: tuple[int, ...]) -> None:
        array = np.zeros(shape, np.uint8)
        swapped = np.zeros((*shape[:-2], shape[-1], shape[-2]), np.uint8).swapaxes(-1, -2)
        assert stored_transposed(shape, array.strides) is False
        assert stored_transposed(shape, swapped.strides) is (not swapped.flags.c_contiguous)

    def test_neither(self) -> None:
        assert stored_transposed((3, 4), (8, 2)) is None
        assert stored_transposed((2, 3, 4), (4, 8, 1)) is None

    @pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4, 1), (1, 1)])
    def test_of_weights(self, shape: tuple[int, int]) -> None:
        weights = np.zeros(shape, np.uint8)
        assert is_transposed(*shape) is stored_transposed(shape[::-1], weights.T.strides)
