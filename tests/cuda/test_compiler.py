import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotile.core.documents import convert
from autotile.core.model import Resources
from autotile.cuda.compiler import CompileJob, compile_cubin, compile_job, macro_options, parse_resources
from autotile.errors import CompileError, ToolchainError
from autotile.kernel.library import load_kernel

SOURCE = """
extern "C" __global__ void sum(DTYPE* x) {
    __shared__ DTYPE tile[TILE];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] += tile[TILE - 1 - threadIdx.x];
}
"""
JOB = CompileJob(SOURCE, "hash", "/nowhere/sum.cu", "sum", "sm_90", ("-DTILE=64", "-DDTYPE=float"))


def test_a_cubin_comes_with_its_resources() -> None:
    compiled = compile_cubin(JOB)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.resources.static_smem_bytes == 64 * 4
    assert 0 < compiled.resources.registers <= 255
    assert compiled.resources.spill_bytes == 0


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_architectures(architecture: str) -> None:
    assert compile_cubin(replace(JOB, architecture=architecture)).cubin


def test_toolkit_headers_are_found() -> None:
    source = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cuda/std/cstdint>\n" + SOURCE
    assert compile_cubin(replace(JOB, source=source, options=("-DTILE=64", "-DDTYPE=__half"))).cubin


def test_spills_are_reported() -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(1024, 2) sum(float* x) {
        float v[64];
        for (int i = 0; i < 64; ++i) v[i] = x[i * 64 + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < 64; ++j) for (int i = 0; i < 64; ++i) v[i] += v[(i + 1) % 64] * v[(i + 7) % 64];
        for (int i = 0; i < 64; ++i) x[i * 64 + threadIdx.x] = v[i];
    }
    """
    assert compile_cubin(replace(JOB, source=source)).resources.spill_bytes > 0


def test_the_compilers_own_message_is_kept() -> None:
    with pytest.raises(CompileError, match=r'sum\.cu\(\d+\): error: identifier "TILE" is undefined') as caught:
        compile_cubin(replace(JOB, options=("-DDTYPE=float",)))
    assert "error" in caught.value.log


def test_a_missing_entry_names_what_is_there() -> None:
    with pytest.raises(CompileError, match=r"'total'.*found: sum"):
        compile_cubin(replace(JOB, entry="total"))


def test_an_unknown_architecture_is_a_toolchain_error() -> None:
    with pytest.raises(ToolchainError, match="sm_11"):
        compile_cubin(replace(JOB, architecture="sm_11"))


def test_the_key_changes_with_all_that_changes_the_cubin() -> None:
    others = [
        replace(JOB, source_hash="other"),
        replace(JOB, entry="other"),
        replace(JOB, architecture="sm_80"),
        replace(JOB, options=("-DTILE=32", "-DDTYPE=float")),
    ]
    assert len({job.key for job in [JOB, *others]}) == 5
    assert replace(JOB, template_path="/elsewhere/sum.cu").key == JOB.key


def test_a_job_survives_the_way_to_a_worker() -> None:
    assert convert(json.loads(json.dumps(JOB.to_json())), CompileJob) == JOB


def test_macros() -> None:
    options = macro_options({"BM": 64, "GUARDED": True, "MODE": "direct"}, "bfloat16")
    assert options == ("-DBM=64", "-DGUARDED=1", "-DMODE=direct", "-DDTYPE=__nv_bfloat16")


def test_every_builtin_default_compiles_for_every_profile_architecture() -> None:
    for name in ("matmul_naive", "matmul_tiled", "sgemm_2d"):
        kernel = load_kernel(name)
        for architecture in ("sm_80", "sm_90"):
            assert compile_cubin(compile_job(kernel, kernel.spec.default, "float32", architecture)).cubin


def test_resources_of_one_function_among_several() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    assert parse_resources(log, "first") == Resources(40, 4, 12, 8, 1024)
    assert parse_resources(log, "second") == Resources(12, 0, 0, 0, 0)


def test_an_error_shows_nothing_of_a_file_that_a_macro_named(tmp_path: Path) -> None:
    source = '#define HEADER "/etc/passwd"\n#include HEADER\n'
    with pytest.raises(CompileError, match=r"^/etc/passwd\(1\): error in a file that the template must not") as raised:
        compile_cubin(replace(JOB, source=source, template_path=str(tmp_path / "sum.cu")))
    assert "root" not in str(raised.value)
