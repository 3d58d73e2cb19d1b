"""Problems: sizes, flags and types, the devices that support them, the memory that they take, and rates."""

import msgspec
import numpy as np
import pytest
from feature_kernels import CLUSTER_SPACE, SPLIT_SPACE
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from spec_samples import SGEMM

from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.errors import DeviceError, InputError, ProblemError, SpecError
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import Workrate, check_memory, resolve_problem, size_distance, unsupported_reason
from autotile.space.limits import check_config
from autotile.space.search_space import enumerate_space, feasible_space

H200 = device_profile("h200")
SPEC = parse_spec(SGEMM, "sgemm.toml")
SIZES = {"M": 128, "N": 64, "K": 32}
FLAGGED = parse_spec(SPLIT_SPACE, "split.toml")


class TestResolve:
    def test_sizes_come_in_the_kernels_order_with_its_first_dtype_and_defaults_only_where_asked(self):
        problem = resolve_problem(SPEC, {"K": 32, "M": 128, "N": 64})
        assert problem == Problem("sgemm", SIZES, "float32")
        assert (list(problem.sizes), str(problem)) == (["M", "N", "K"], "sgemm M=128 N=64 K=32 float32")
        assert resolve_problem(SPEC, SIZES, "float64").dtype == "float64"
        assert dict(resolve_problem(SPEC, {"M": 1}, defaults=True).sizes) == {"M": 1, "N": 4096, "K": 4096}
        for value in (1, 2**31 - 1, np.int64(3), np.uint8(4)):
            found = resolve_problem(SPEC, {**SIZES, "M": value}).sizes["M"]
            assert (found, type(found)) == (value, int)
        with pytest.raises(ProblemError, match=r"sgemm needs the size N; give its sizes like M=4096 N=4096 K=4096"):
            resolve_problem(SPEC, {"M": 1})

    @pytest.mark.parametrize(
        ("sizes", "dtype", "said"),
        [
            *(({"TRANS_A": each}, None, f"flag TRANS_A is {each!r}, expected 0 or 1") for each in (2, -1, "1")),
            ({"M": 0}, None, "size M is 0, expected 1 to 2147483647"),
            ({"M": 2**31}, None, "size M is 2147483648, expected 1 to 2147483647"),
            ({"M": 1.0}, None, "size M is 1.0, expected a whole number such as 4096"),
            ({"M": "128"}, None, "size M is '128', expected a whole number such as 4096"),
            ({"M": True}, None, "size M is True, expected a whole number such as 4096"),
            ({"L": 1}, None, "sgemm has no size 'L'; give its sizes like M=4096"),
            ({}, "int8", "does not support dtype 'int8'; it supports float32, float64"),
        ],
    )
    def test_refusals(self, sizes, dtype, said):
        with pytest.raises(ProblemError, match=said):
            resolve_problem(FLAGGED if "TRANS_A" in sizes else SPEC, {**SIZES, **sizes}, dtype)
        assert issubclass(ProblemError, InputError)

    def test_arrays_that_would_be_empty(self):
        extra = 'D = { buffer = "dtype", shape = ["K", "N - 4"], access = "in" }'
        spec = parse_spec(SGEMM.replace("[reference]", f"{extra}\n[reference]"), "sgemm.toml")
        assert resolve_problem(spec, {**SIZES, "N": 5}).sizes["N"] == 5
        said = r"N=4 K=32 float32 is too small: its array D would have the shape \(32, 0"
        with pytest.raises(ProblemError, match=said):
            resolve_problem(spec, {**SIZES, "N": 4})


class TestFlags:
    """Problem parameters that are 0 or 1."""

    MNK = {"M": 33, "N": 17, "K": 70}  # noqa: RUF012

    def test_they_stand_behind_the_sizes_and_like_sizes_of_one_may_be_left_out(self):
        assert list(FLAGGED.sizes) == ["M", "N", "K", "BATCH", "TRANS_A", "TRANS_B", "OUT_FP32"]
        assert FLAGGED.flags == ("TRANS_A", "TRANS_B", "OUT_FP32")
        ragged = {"M": 45, "N": 37, "K": 67, "BATCH": 3, "TRANS_A": 1, "TRANS_B": 0, "OUT_FP32": 0}
        assert FLAGGED.ragged_sizes({**FLAGGED.sizes, "TRANS_A": 1}) == ragged
        problem = resolve_problem(FLAGGED, self.MNK)
        assert problem.sizes == {**self.MNK, "BATCH": 1, "TRANS_A": 0, "TRANS_B": 0, "OUT_FP32": 0}
        turned = resolve_problem(FLAGGED, {**self.MNK, "TRANS_B": True}).sizes["TRANS_B"]
        assert (turned, type(turned)) == (1, int)
        said = "needs the size K; give its sizes like M=256 N=192 K=320 BATCH=1 TRANS_A=0"
        with pytest.raises(ProblemError, match=said):
            resolve_problem(FLAGGED, {"M": 33, "N": 17})

    def test_shapes_and_types_follow_them(self):
        a, _, c = FLAGGED.buffers
        sizes = resolve_problem(FLAGGED, {**self.MNK, "BATCH": 2}).sizes
        assert [a.extents({**sizes, "TRANS_A": flag}) for flag in (0, 1)] == [(2, 33, 70), (2, 70, 33)]
        types = [c.element_type("float16", {**sizes, "OUT_FP32": flag}) for flag in (0, 1)]
        assert types == ["float16", "float32"]
        turned = 'turned = { scalar = "int32", value = "TRANS_A" }\nM = { scalar'
        spec = parse_spec(SPLIT_SPACE.replace("M = { scalar", turned), "split.toml")  # one is passed on as a number
        (binding,) = (scalar.binding for scalar in spec.scalars if scalar.name == "turned")
        assert [binding.evaluate({**spec.sizes, "TRANS_A": flag}) for flag in (0, 1)] == [0, 1]

    @pytest.mark.parametrize(
        "text", ["TRANS_A", "not TRANS_B", "TRANS_A == 1", "TRANS_A + 1 > 1", "SPLIT_K > 1 and TRANS_A"]
    )
    @pytest.mark.parametrize("flags", [{"TRANS_A": 0, "TRANS_B": 1}, {"TRANS_A": 1, "TRANS_B": 0}])
    def test_a_rule_means_the_same_for_a_table_and_for_one_row(self, text, flags):
        rule = f'flagged = "TILE == 16 or ({text}) or not (TILE < 32 or TRANS_A and {text})"'
        spec = parse_spec(SPLIT_SPACE.replace("[launch]", f"{rule}\n[launch]"), "split.toml")
        sizes = {**spec.sizes, **flags}
        whole, found = feasible_space(FLAGGED, FLAGGED.at(sizes), H200), feasible_space(spec, spec.at(sizes), H200)
        configs = map(whole.config, range(len(whole)))
        expected = [config for config in configs if not check_config(spec, config, spec.at(sizes), H200)]
        assert found.configs == expected


class TestDistance:
    def test_flags_count_before_sizes_and_names_of_one_side_are_passed_over(self):
        asked = {"M": 1024, "TRANS_A": 0, "TRANS_B": 1}
        assert size_distance(asked, asked) == (0, 0.0)
        assert size_distance({**asked, "M": 4096}, asked) == (0, 2.0)
        assert size_distance({"M": 512, "TRANS_A": 1, "TRANS_B": 0}, asked) == (2, 1.0)
        assert size_distance({"M": 8, "L": 1}, {"M": 8, "K": 4}) == (0, 0.0)

    NAMED = st.dictionaries(st.sampled_from("MNK"), st.integers(1, 2**31 - 1))

    @given(NAMED, NAMED)
    def test_it_is_the_same_both_ways(self, a, b):
        flags, doublings = size_distance(a, b)
        assert (flags, doublings) == (0, pytest.approx(size_distance(b, a)[1]))
        assert doublings >= 0


@pytest.mark.parametrize(
    ("spec", "dtype", "element_bytes"),
    [
        (SPEC, "float32", 2 * 4 + 2 * 4 + 2 * 4 + 8),
        (SPEC, "float64", 2 * 8 + 2 * 8 + 2 * 8 + 8),
        # what is only written is held once
        (
            parse_spec(SGEMM.replace('access = "inout"', 'access = "out"').replace(" + C", ""), "sgemm.toml"),
            "float32",
            2 * 4 + 2 * 4 + 4 + 8,
        ),
    ],
)
def test_memory_is_just_enough(spec, dtype, element_bytes):
    """A, B and C are held twice (C is updated), the reference in float64, and a buffer of the size of the L2 cache."""
    problem = resolve_problem(spec, {"M": 1000, "N": 1000, "K": 1000}, dtype)
    needed = 1_000_000 * element_bytes + H200.l2_bytes
    check_memory(spec, problem, replace(H200, memory_bytes=needed))
    said = r"needs 0\.1 GiB of device memory to tune, but NVIDIA H200 has 0\.1 GiB"
    with pytest.raises(ProblemError, match=said):
        check_memory(spec, problem, replace(H200, memory_bytes=needed - 1))
    with pytest.raises(ProblemError, match=r"choose smaller sizes"):  # absurd ones do not overflow
        check_memory(spec, resolve_problem(spec, dict.fromkeys("MNK", 2**31 - 1)), H200)


class TestCapabilities:
    @staticmethod
    def declared(line: str, text: str = SPLIT_SPACE) -> str:
        return text.replace('entry = "split"\n', f'entry = "split"\n{line}\n')

    @pytest.mark.parametrize(
        ("line", "device", "said"),
        [
            ("", "g80", ""),
            ('minimum_compute_capability = "8.0"', "a100", ""),
            ('minimum_compute_capability = "8.0"', "b200", ""),
            ('minimum_compute_capability = "8.0"', "t4", "split needs compute capability 8.0, but Tesla T4 has 7.5"),
            ('architecture = "sm_90a"', "h100", ""),
            ('architecture = "sm_90a"\nminimum_compute_capability = "8.0"', "h200", ""),
            ('architecture = "sm_90a"', "b200", "for sm_90a only, which requires compute capability 9.0, but NVIDIA"),
            ('architecture = "sm_90a"', "a100", "choose a device of capability 9.0, or another kernel"),
        ],
    )
    def test_devices(self, line, device, said):
        spec = parse_spec(self.declared(line), "split.toml")
        fault = unsupported_reason(spec, device_profile(device))
        assert said in fault
        assert bool(said) == bool(fault)
        if said:
            assert check_config(spec, spec.default, spec.at(), device_profile(device)) == fault
            with pytest.raises(DeviceError, match="compute capability"):
                enumerate_space(spec, spec.at(), device_profile(device))

    def test_clusters_need_theirs_unless_the_minimum_is_lower_and_they_are_of_one_block(self):
        line, a100 = 'architecture = "sm_90a"', device_profile("a100")
        spec = parse_spec(CLUSTER_SPACE.replace(line, ""), "swap.toml")
        assert "swap needs compute capability 9.0 for its clusters" in unsupported_reason(spec, a100)
        assert unsupported_reason(spec, device_profile("b200")) == ""
        spec = parse_spec(CLUSTER_SPACE.replace(line, 'minimum_compute_capability = "8.0"'), "swap.toml")
        assert unsupported_reason(spec, a100) == ""
        assert "NVIDIA A100" in check_config(spec, spec.default, spec.at(), a100)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (declared('architecture = "sm90"'), "expected a target such as 'sm_90a'"),
            (declared('architecture = "compute_90"'), "expected a target"),
            (declared('minimum_compute_capability = "9"'), "expected a compute capability such as '8.0'"),
            (declared("minimum_compute_capability = 9.0"), "expected a string"),
            (
                declared('architecture = "sm_90a"\nminimum_compute_capability = "10.0"'),
                r"kernel\.architecture.*sm_90a runs on compute capability 9.0 only, but the kernel needs 10.0, its min",
            ),
            (
                CLUSTER_SPACE.replace('"sm_90a"', '"sm_80"'),
                r"kernel\.architecture.*sm_80 runs on compute capability 8.0 only, but the kernel needs 9.0 for its cl",
            ),
        ],
    )
    def test_refusals(self, text, said):
        with pytest.raises(SpecError, match=said):
            parse_spec(text, "split.toml")


SQUARE = Workrate(flops=2 * 4096**3, bytes=12 * 4096**2, dtype="float32")
HALF = Workrate(2 * 4096**3, 6 * 4096**2, "float16", "tensor_float16")
PRODUCTS = msgspec.structs.replace(SQUARE, unit="tensor_bfloat16", passes=6)


@pytest.mark.parametrize(
    ("rate", "time_us", "device", "shown"),
    [
        (SQUARE, 4790, "h200", "28.7 TFLOP/s (42.9 % of fp32 peak)"),
        # what tensor cores reach is not called a share of a limit
        (SQUARE, 1453, "h200", "94.6 TFLOP/s (141.4 % of the CUDA cores' fp32 peak)"),
        (Workrate(None, 2**30, "float32"), 251.1, "h200", "4,276 GB/s (89.1 % of bandwidth)"),
        # work that is both is set against the nearer limit
        (Workrate(2**28, 2**31, "float32"), 500, "h200", "4,295 GB/s (89.5 % of bandwidth)"),
        (Workrate(2 * 4096**3, 6 * 4096**2, "float16"), 200, "h200", "687 TFLOP/s"),
        (HALF, 200, "h200", "687 TFLOP/s (69.5 % of fp16 tensor peak)"),
        (PRODUCTS, 1453, "h200", "94.6 TFLOP/s (57.4 % of bf16 tensor peak over 6 products)"),
        (Workrate(2**36, 2**26, "float32", "fma_float32"), 4790, "h200", "14.3 TFLOP/s (21.4 % of fp32 peak)"),
        # a unit without a known peak is no reason to name the memory
        (HALF, 20_000, "g80", "6.87 TFLOP/s"),
        (Workrate(None, None, "float32"), 1.0, "h200", "-"),
        (SQUARE, None, "h200", "-"),
        (SQUARE, 4790, None, "28.7 TFLOP/s"),
        (Workrate(812_000, None, "float32"), 1.0, None, "812 GFLOP/s"),
        (Workrate(None, 42_000, "float32"), 1.0, None, "42 GB/s"),
    ],
)
def test_rates(rate, time_us, device, shown):
    assert rate.text(time_us, device_profile(device) if device else None) == shown
