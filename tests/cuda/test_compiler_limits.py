"""Sources that need more of a resource than there is: not a failure of the compiler, but of the configuration."""

from pathlib import Path

import pytest
from cache_settings import cache_settings

from autotile.core.model import Outcome
from autotile.cuda.compiler import CompileJob, compile_cubin
from autotile.cuda.headers import compile_error
from autotile.cuda.toolchain import installed_nvcc
from autotile.errors import CompileError
from autotile.workers.compile_pool import CompilePool

_SUM = "s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[threadIdx.x ^ 1];"
SHARED = f"#warning a warning\n__global__ void k(float* x) {{ int unused; __shared__ float s[60000]; {_SUM} }}"
SHARED_TEMPLATE = f"template <int N> __global__ void k(float* x) {{ __shared__ float s[N]; {_SUM} }}"
CONSTANT = "__constant__ float c[20000]; __global__ void k(float* x, int i) { x[0] = c[i]; }"
PARAMETERS = "struct P { float a[10000]; }; __global__ void k(float* x, P p, int i) { x[0] = p.a[i]; }"
CASES = [
    (SHARED, "k", "k uses 240000 bytes of static shared memory, over the limit of 49152 bytes"),
    (SHARED_TEMPLATE, "k<60000>", "k<60000> uses 240000 bytes of static shared memory, over the limit of 49152 bytes"),
    (CONSTANT, "k", "the source uses 80000 bytes of constant memory, over the limit of 65536 bytes"),
    (PARAMETERS, "k", "k uses 40012 bytes of kernel parameters, over the limit of 32764 bytes"),
]
COMPILERS = ["nvrtc", pytest.param("nvcc", marks=pytest.mark.skipif(not installed_nvcc(), reason="needs nvcc"))]


def job(source: str, entry: str = "k", compiler: str = "nvrtc") -> CompileJob:
    return CompileJob(source, "hash", "/nowhere/k.cu", entry, "sm_90", (), compiler=compiler)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(("source", "entry", "expected"), CASES)
def test_the_outcome_and_the_bytes(tmp_path: Path, source: str, entry: str, expected: str, compiler: str) -> None:
    pool = CompilePool(cache_settings(tmp_path), workers=1, deadline_s=60)
    try:
        compiled = pool.submit(lambda: job(source, entry, compiler)).result()
    finally:
        pool.close()
    assert compiled.outcome is Outcome.RESOURCE_EXCEEDED
    assert compiled.reason.startswith(expected)
    assert "\0" not in compiled.reason


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "source",
    [
        '#error "uses too much shared data (0x3a980 bytes, 0xc000 max)"\n__global__ void k() {}',
        'static_assert(false, "ptxas error: requires more registers"); __global__ void k() {}',
        "__global__ void k(float* x) { x[0] = y; }",
        '__global__ void k(float* x) { asm volatile("bar.sync 17;"); x[0] = 1; }',  # an error of the assembler
    ],
)
def test_other_errors_are_failures_of_the_compiler(tmp_path: Path, source: str, compiler: str) -> None:
    pool = CompilePool(cache_settings(tmp_path), workers=1, deadline_s=60)
    try:
        compiled = pool.submit(lambda: job(source, compiler=compiler)).result()
    finally:
        pool.close()
    assert compiled.outcome is Outcome.COMPILE_FAILED
    assert "\0" not in compiled.reason


@pytest.mark.parametrize("source", [SHARED, CONSTANT, '__global__ void k() { asm volatile("bar.sync 17;"); }'])
def test_logs_have_no_nul(source: str) -> None:
    """NVRTC puts one between the messages of the front end and those of the assembler."""
    with pytest.raises(CompileError) as caught:
        compile_cubin(job(source))
    assert "ptxas" in caught.value.log
    assert "\0" not in caught.value.log
    assert not caught.value.log.endswith("\n\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "ptxas error   : Entry function '_Z1kILi4EEvPf' uses too much shared data "
            "(0x20000 bytes + 0x400 bytes system, 0xc000 max)",
            "k<4> uses 132096 bytes of static shared memory, over the limit of 49152 bytes",
        ),
        (
            "ptxas error   : Entry function 'k' uses too much local data (0x100000 bytes, 0x80000 max)",
            "k uses 1048576 bytes of local memory, over the limit of 524288 bytes",
        ),
        (
            "ptxas error   : Entry function 'k' uses too much parameter space (0x2000 bytes, 0x1100 max).",
            "k uses 8192 bytes of kernel parameters, over the limit of 4352 bytes",
        ),
        (
            "ptxas error   : Entry function 'k' uses too much constant data (bank 3, 0x20000 bytes, 0x10000 max)",
            "k uses 131072 bytes of constant memory, over the limit of 65536 bytes",
        ),
        (
            "ptxas k.ptx, line 9; error   : Insufficient registers (16) to compile instruction at line 9 in function k",
            "Insufficient registers (16) to compile instruction at line 9 in function k",
        ),
        (
            "ptxas error   : Out Of Resources to support barriers in entry 'k'",
            "Out Of Resources to support barriers in entry 'k'",
        ),
    ],
)
def test_messages_of_other_versions(line: str, expected: str) -> None:
    """As the assembler's own texts have them; no source here provokes these."""
    error = compile_error(f"k.cu(1): warning: unused\n{line}\nptxas fatal   : aborted\n", job("", "k<4>"))
    assert error.exceeds_limit
    assert str(error).startswith(expected)
