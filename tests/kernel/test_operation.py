"""Operation files: what they declare, which kernels compute a problem, and what is refused."""

from dataclasses import replace

import pytest
from feature_kernels import space_text

from autotile.errors import ProblemError, SpecError, UnknownKernelError
from autotile.kernel.library import kernel_names
from autotile.kernel.operation import find_operation, load_operation, named_operation, parse_operation
from autotile.settings import read_settings

TWO = space_text("sums")
TWICE = '[kernels.own]\nkernel = "sgemm_2d"\nsizes = { M = "ROWS", K = "N" }'


def fitting(dtype: str, **sizes: int) -> list[str]:
    operation = load_operation("matmul")
    return [member.name for member, _ in operation.fitting(operation.resolve(sizes, dtype))]


class TestMatmul:
    def test_kernels_follow_the_dtype_and_conditions_and_the_sizes_are_by_their_names(self):
        assert "matmul" in kernel_names(read_settings().operation_folders)
        assert find_operation("sgemm") is None
        emulated = ["sgemm_bf16x6", "sgemm_bf16x6_ws"]
        assert fitting("bfloat16", M=64, N=64, K=512) == ["gemm_wgmma", "gemm_mma", "gemm_small"]
        assert fitting("float32", M=64, N=64, K=512) == ["gemm_small", "sgemm", "sgemm_ws", *emulated]
        assert not {*emulated} & {*fitting("float32", M=64, N=64, K=512, EMULATE=0)}
        unaligned = fitting("bfloat16", M=64, N=64, K=512, ALIGNED=0)
        assert ("gemm_wgmma" in unaligned, "gemm_wgmma_padded" in unaligned) == (False, True)
        assert "sgemm" not in fitting("float32", M=64, N=64, K=512, OUT_FP32=1)  # it has no such flag
        operation = load_operation("matmul")
        problem = operation.resolve({"M": 3, "N": 5, "K": 7, "TRANS_B": 1, "NONDETERMINISTIC": 1}, "float16")
        found = {member.name: values.get("NONDETERMINISTIC") for member, values in operation.fitting(problem)}
        assert found == {"gemm_wgmma": 1, "gemm_mma": 1, "gemm_small": None, "gemm_wgmma_padded": 1}

    @pytest.mark.parametrize(
        ("sizes", "is_copied"),
        [
            ({"M": 65, "N": 64, "K": 512}, False),
            ({"M": 65, "N": 64, "K": 512, "TRANS_A": 1}, True),
            ({"M": 64, "N": 65, "K": 512}, True),
            ({"M": 64, "N": 65, "K": 512, "TRANS_B": 1}, False),
            ({"M": 64, "N": 64, "K": 511, "TRANS_A": 1}, False),
            ({"M": 64, "N": 64, "K": 511, "TRANS_A": 1, "TRANS_B": 1}, True),
        ],
    )
    def test_factors_are_copied_only_if_their_stored_rows_need_it(self, sizes, is_copied):
        assert ("gemm_wgmma_padded" in fitting("float16", **sizes)) == is_copied

    @pytest.mark.parametrize(
        ("sizes", "dtype", "said"),
        [
            ({"M": 1, "N": 1}, "float32", "needs the size K"),
            ({"M": 1, "N": 1, "K": 1, "Q": 1}, "float32", "has no size 'Q'"),
            ({"M": 0, "N": 1, "K": 1}, "float32", "size M is 0"),
            ({"M": 1, "N": 1, "K": 1, "EMULATE": 2}, "float32", "flag EMULATE is 2"),
            ({"M": 1, "N": 1, "K": 1}, "float64", "it supports bfloat16, float16, float32"),
        ],
    )
    def test_refusals(self, sizes, dtype, said):
        with pytest.raises(ProblemError, match=said):
            load_operation("matmul").resolve(sizes, dtype)


class TestOwnOperations:
    def test_expressions_give_the_sizes_of_a_kernel(self):
        operation = parse_operation(TWO, "sums.toml")
        found = {m.name: sizes for m, sizes in operation.fitting(operation.resolve({"ROWS": 8, "N": 100}))}
        assert found["sgemm_2d"] | {"M": 8, "N": 100, "K": 200} == found["sgemm_2d"]
        assert not list(operation.fitting(operation.resolve({"ROWS": 129, "N": 100})))

    def test_a_program_reads_the_kernels_of_its_element_type_and_a_command_all(self, tmp_path):
        path = tmp_path / "sums.toml"
        other = '[kernels.sgemm_2e]\ndtypes = ["float16"]\nsizes = { M = "ROWS", K = "N" }\n'
        path.write_text(TWO.replace('dtypes = ["float32"]', 'dtypes = ["float32", "float16"]', 1) + other)
        operation = load_operation(str(path), checks=False)
        problem = operation.resolve({"ROWS": 8, "N": 100}, "float32")
        assert [member.name for member, _ in operation.fitting(problem)] == ["sgemm_2d"]
        halves = replace(problem, dtype="float16")
        for read in (load_operation, named_operation, lambda _: list(operation.fitting(halves))):
            with pytest.raises(UnknownKernelError, match="did you mean sgemm_2d"):
                read(str(path))

    def test_a_path_is_below_the_folder_of_the_file(self, tmp_path):
        path = tmp_path / "sums.toml"
        path.write_text(TWO.replace("[kernels.sgemm_2d]", '[kernels.own]\nkernel = "./own.toml"'))
        with pytest.raises(UnknownKernelError, match=r"own\.toml"):
            load_operation(str(path))

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('M = "ROWS", ', "", "has the size M"),
            ('"2 * N"', '"2 * Q"', "Q"),
            ('"ROWS <= 128"', '"ROWS + 1"', "kernels.sgemm_2d.when"),
            ('dtypes = ["float32"]', 'dtypes = ["float16"]', "supports float32"),
            ('dtypes = ["float32"]', 'dtypes = ["float32"]\nlibraries = ["os"]', "'os' is not known"),
            ("[kernels.sgemm_2d]", "[kernels.sgemm_2e]", "did you mean sgemm_2d"),
            ('name = "sums"\n', "", "'name' is missing"),
            ("[operation]", "[operations]", "unknown section"),
            ('when = "ROWS <= 128"', TWICE, "sgemm_2d is the kernel of an earlier entry"),
        ],
    )
    def test_mistakes_are_named(self, old, new, said):
        assert old in TWO
        with pytest.raises((SpecError, UnknownKernelError), match=said):
            _ = parse_operation(TWO.replace(old, new), "sums.toml").members
