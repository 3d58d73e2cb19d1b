from dataclasses import replace

import numpy as np
import pytest
from spec_samples import SGEMM

from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.errors import InputError, ProblemError
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import check_memory, resolve_problem

SPEC = parse_spec(SGEMM, "sgemm.toml")
SIZES = {"M": 128, "N": 64, "K": 32}


class TestResolve:
    def test_sizes_come_in_the_kernels_order(self) -> None:
        problem = resolve_problem(SPEC, {"K": 32, "M": 128, "N": 64})
        assert problem == Problem("sgemm", SIZES, "float32")
        assert list(problem.sizes) == ["M", "N", "K"]
        assert str(problem) == "sgemm M=128 N=64 K=32 float32"

    def test_the_dtype_is_the_first_unless_named(self) -> None:
        assert resolve_problem(SPEC, SIZES).dtype == "float32"
        assert resolve_problem(SPEC, SIZES, "float64").dtype == "float64"

    def test_defaults_fill_in_only_where_asked(self) -> None:
        problem = resolve_problem(SPEC, {"M": 1}, defaults=True)
        assert dict(problem.sizes) == {"M": 1, "N": 4096, "K": 4096}
        with pytest.raises(ProblemError, match=r"sgemm needs the size N; give its sizes like M=4096 N=4096 K=4096"):
            resolve_problem(SPEC, {"M": 1})

    @pytest.mark.parametrize("value", [1, 2**31 - 1])
    def test_the_ends_of_the_range(self, value: int) -> None:
        assert resolve_problem(SPEC, {**SIZES, "M": value}).sizes["M"] == value

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (0, "size M is 0, expected 1 to 2147483647"),
            (-5, "size M is -5, expected 1 to 2147483647"),
            (2**31, "size M is 2147483648, expected 1 to 2147483647"),
            (1.0, "size M is 1.0, expected a whole number such as 4096"),
            ("128", "size M is '128', expected a whole number such as 4096"),
            (True, "size M is True, expected a whole number such as 4096"),
            (None, "size M is None, expected a whole number such as 4096"),
        ],
    )
    def test_bad_sizes(self, value: object, said: str) -> None:
        with pytest.raises(ProblemError, match=said):
            resolve_problem(SPEC, {**SIZES, "M": value})  # type: ignore[dict-item]

    def test_arrays_that_would_be_empty(self) -> None:
        extra = 'D = { buffer = "dtype", shape = ["K", "N - 4"], access = "in" }'
        spec = parse_spec(SGEMM.replace("[reference]", f"{extra}\n[reference]"), "sgemm.toml")
        assert resolve_problem(spec, {**SIZES, "N": 5}).sizes["N"] == 5
        with pytest.raises(
            ProblemError, match=r"N=4 K=32 float32 is too small: its array D would have the shape \(32, 0"
        ):
            resolve_problem(spec, {**SIZES, "N": 4})

    def test_unknown_sizes_and_dtypes(self) -> None:
        with pytest.raises(ProblemError, match=r"sgemm has no size 'L'; give its sizes like M=4096"):
            resolve_problem(SPEC, {**SIZES, "L": 1})
        with pytest.raises(ProblemError, match=r"does not support dtype 'int8'; it supports float32, float64"):
            resolve_problem(SPEC, SIZES, "int8")
        assert issubclass(ProblemError, InputError)


class TestMemory:
    """A, B and C are held twice (C is updated), the reference in float64, and a buffer of the size of the L2 cache."""

    def test_just_enough(self) -> None:
        problem = resolve_problem(SPEC, {"M": 1000, "N": 1000, "K": 1000})
        device = device_profile("h200")
        needed = 1_000_000 * (2 * 4 + 2 * 4 + 2 * 4 + 8) + device.l2_bytes
        check_memory(SPEC, problem, replace(device, memory_bytes=needed))
        with pytest.raises(
            ProblemError, match=r"needs 0\.1 GiB of device memory to tune, but NVIDIA H200 has 0\.1 GiB"
        ):
            check_memory(SPEC, problem, replace(device, memory_bytes=needed - 1))

    def test_the_dtype_counts(self) -> None:
        device = device_profile("h200")
        sizes = {"M": 1000, "N": 1000, "K": 1000}
        needed = 1_000_000 * (2 * 8 + 2 * 8 + 2 * 8 + 8) + device.l2_bytes
        check_memory(SPEC, resolve_problem(SPEC, sizes, "float64"), replace(device, memory_bytes=needed))
        with pytest.raises(ProblemError):
            check_memory(SPEC, resolve_problem(SPEC, sizes, "float64"), replace(device, memory_bytes=needed - 1))

    def test_absurd_sizes_do_not_overflow(self) -> None:
        huge = resolve_problem(SPEC, dict.fromkeys("MNK", 2**31 - 1))
        with pytest.raises(ProblemError, match=r"choose smaller sizes"):
            check_memory(SPEC, huge, device_profile("h200"))

    def test_what_is_only_written_is_held_once(self) -> None:
        spec = parse_spec(SGEMM.replace('access = "inout"', 'access = "out"').replace(" + C", ""), "sgemm.toml")
        problem = resolve_problem(spec, {"M": 1000, "N": 1000, "K": 1000})
        device = device_profile("h200")
        needed = 1_000_000 * (2 * 4 + 2 * 4 + 4 + 8) + device.l2_bytes
        check_memory(spec, problem, replace(device, memory_bytes=needed))
        with pytest.raises(ProblemError):
            check_memory(spec, problem, replace(device, memory_bytes=needed - 1))


def test_numpys_integers_are_sizes() -> None:
    kernel = load_kernel("sgemm_2d")
    problem = resolve_problem(kernel.spec, {"M": np.int64(3), "N": np.uint8(4), "K": 5})  # type: ignore[dict-item]
    assert problem.sizes == {"M": 3, "N": 4, "K": 5}
    assert all(type(size) is int for size in problem.sizes.values())
