import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from autotile.core.device import device_profile, profile_names
from autotile.core.documents import convert
from autotile.core.model import Resources
from autotile.cuda.compiler import CompileJob, compile_cubin, compile_job, compiled_functions, macro_options
from autotile.cuda.toolchain import load_nvrtc, nvrtc_version
from autotile.errors import CompileError, ToolchainError
from autotile.kernel.launch import value_or_zero
from autotile.kernel.library import kernel_names, load_kernel
from autotile.kernel.problem import capability_of, is_below

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
    with pytest.raises(CompileError, match=r"'total': identifier \"total\" is undefined.*found: sum\)"):
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


OLDEST_OF_NVRTC = {"12": "5.0", "13": "7.5"}
"""Lowest compute capability that each major version of NVRTC compiles for: CUDA Toolkit release notes."""


@pytest.mark.parametrize("name", ["matmul_naive", "matmul_tiled", "sgemm_2d"])
@pytest.mark.parametrize("architecture", sorted({device_profile(name).architecture for name in profile_names()}))
def test_a_default_compiles_for_the_architecture_of_every_profile(name: str, architecture: str) -> None:
    """The code is for that architecture, and needs what the search space declares; others were dropped by NVRTC."""
    kernel = load_kernel(name)
    job = compile_job(kernel, kernel.spec.default, "float32", architecture)
    if is_below(capability_of(architecture), OLDEST_OF_NVRTC[nvrtc_version().partition(".")[0]]):
        with pytest.raises(ToolchainError, match=rf"refuses an option for {architecture}"):
            compile_cubin(job)
        return
    compiled = compile_cubin(job)
    (flags,) = struct.unpack_from("<I", compiled.cubin, 48)  # e_flags of a 64-bit ELF header
    assert int(architecture.removeprefix("sm_")) in (flags & 0xFF, flags >> 8 & 0xFF)
    assert list(compiled.functions) == [name]
    resources, launch = compiled.resources, kernel.spec.steps[0].launch
    names = {**kernel.spec.sizes, **kernel.spec.default}
    assert resources.static_smem_bytes == value_or_zero(launch.static_smem_bytes, names)
    assert value_or_zero(launch.min_registers, names) <= resources.registers <= 255
    assert resources.spill_bytes == 0


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
    functions = compiled_functions(b"", log, {"f": "first", "s": "second"})
    assert functions["f"].resources == Resources(40, 4, 12, 8, 1024)
    assert functions["s"].resources == Resources(12, 0, 0, 0, 0)
    with pytest.raises(ToolchainError, match=r"'third'.*only first, second"):
        compiled_functions(b"", log, {"t": "third"})


def test_an_error_shows_nothing_of_a_file_that_a_macro_named(tmp_path: Path) -> None:
    source = '#define HEADER "/etc/passwd"\n#include HEADER\n'
    with pytest.raises(CompileError, match=r"^/etc/passwd\(1\): error in a file that the template must not") as raised:
        compile_cubin(replace(JOB, source=source, template_path=str(tmp_path / "sum.cu")))
    assert "root" not in str(raised.value)


NAMED = """
template <int B, class T> __global__ void __launch_bounds__(B) scale(T* x, T by) { x[threadIdx.x] *= by; }
namespace inner { __global__ void fill(float* x) { x[threadIdx.x] = 1; } }
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
__global__ void twice(int* x) { x[threadIdx.x] *= 2; }
static __global__ void own(float* x) { x[0] = BLOCK; }
"""


@pytest.mark.parametrize(
    ("entry", "symbol"),
    [
        ("scale<BLOCK, DTYPE>", "_Z5scaleILi64EfEvPT0_S0_"),
        ("scale<BLOCK * 2, unsigned int>", "_Z5scaleILi128EjEvPT0_S0_"),
        ("inner::fill", "_ZN5inner4fillEPf"),
        ("(void (*)(int*))twice", "_Z5twicePi"),
        ("own", "_Z3ownPf"),
    ],
)
def test_functions_by_their_cpp_name(entry: str, symbol: str) -> None:
    job = CompileJob(NAMED, "hash", "/nowhere/named.cu", entry, "sm_90", ("-DBLOCK=64", "-DDTYPE=float"))
    compiled = compile_cubin(job)
    assert list(compiled.functions) == [entry]
    assert compiled.functions[entry].symbol == symbol
    assert symbol.encode() in compiled.cubin
    assert compiled.resources.registers > 0


def test_several_functions_of_one_cubin() -> None:
    job = CompileJob(
        NAMED, "hash", "/nowhere/named.cu", "own", "sm_90", ("-DBLOCK=64",), ("inner::fill", "scale<4, int>", "own")
    )
    assert job.key != replace(job, further_entries=()).key
    functions = compile_cubin(job).functions
    assert {entry: function.symbol for entry, function in functions.items()} == {
        "own": "_Z3ownPf",
        "inner::fill": "_ZN5inner4fillEPf",
        "scale<4, int>": "_Z5scaleILi4EiEvPT0_S0_",
    }


@pytest.mark.parametrize(
    ("entry", "cure"),
    [
        ("scale", "it is a template, so give its arguments"),
        ("twice", "it is overloaded, so give its type"),
        ("inner::full", 'namespace "inner" has no member "full"'),
        ("scale<B, float>", 'identifier "B" is undefined'),
    ],
)
def test_an_entry_that_names_no_function_gives_the_cure(entry: str, cure: str) -> None:
    job = CompileJob(NAMED, "hash", "/nowhere/named.cu", entry, "sm_90", ("-DBLOCK=64",))
    with pytest.raises(CompileError, match=re.escape(cure)) as raised:
        compile_cubin(job)
    assert "found: scale<int B, class T>, fill, twice, own" in str(raised.value)


def test_naming_an_extern_c_function_does_not_change_its_cubin() -> None:
    """Cubins of kernels that were compiled without a name expression stay as they are."""
    nvrtc = load_nvrtc()
    options = [b"--gpu-architecture=sm_90", b"--std=c++17", b"--ptxas-options=-v", b"--no-cache", b"-I/nowhere"]
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"sum.cu", 0, [], [])
    options += [option.encode() for option in JOB.options]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    plain = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, plain)
    assert compile_cubin(JOB).cubin == bytes(plain)


SOFTMAX = """
[kernel]
name = "softmax"
template = "softmax.cu"
entry = "softmax<BLOCK, SCALAR, (N > 10), detail::BLOCK>"
[problem]
sizes = { N = 64 }
[parameters]
BLOCK = [64, 128]
SCALAR = ["float", "unsigned int"]
UNROLL = [1, 2]
[default]
BLOCK = 128
SCALAR = "unsigned int"
UNROLL = 2
[launch]
block = ["BLOCK"]
grid = [1]
[arguments]
x = { buffer = "float32", shape = ["N"], access = "inout" }
[reference]
outputs = { x = "x" }
"""
TEMPLATES = """// template <int UNROLL>
namespace detail { constexpr int BLOCK = 3; }
template <int BLOCK, typename SCALAR, bool EDGE, int Z>
__global__ void __launch_bounds__(BLOCK) softmax(float* x) { x[threadIdx.x] = SCALAR(EDGE + Z + UNROLL + BLOCK); }
"""


@pytest.mark.parametrize("is_included", [False, True])
def test_names_of_template_parameters_are_no_macros(tmp_path: Path, is_included: bool) -> None:
    (tmp_path / "softmax.toml").write_text(SOFTMAX)
    (tmp_path / "softmax.cu").write_text('#include "code.cuh"\n' if is_included else TEMPLATES)
    (tmp_path / "code.cuh").write_text(TEMPLATES if is_included else "")
    kernel = load_kernel(str(tmp_path / "softmax.toml"))
    assert kernel.template_names == {"BLOCK", "SCALAR", "EDGE", "Z", "N"}
    assert kernel.spec.compiled_names == ("N",)
    job = compile_job(kernel, kernel.spec.default, "float32", "sm_90")
    assert job.options == ("-DUNROLL=2", "-DDTYPE=float")
    (function,) = compile_cubin(job).functions.values()
    assert function.symbol == "_Z7softmaxILi128EjLb1ELi3EEvPf"
    other = compile_job(kernel, {**kernel.spec.default, "BLOCK": 64}, "float32", "sm_90", {"N": 8})
    assert compile_cubin(other).functions[kernel.spec.entry].symbol == "_Z7softmaxILi64EjLb0ELi3EEvPf"
    assert other.key != job.key


def test_a_name_that_only_the_entry_uses_is_no_macro(tmp_path: Path) -> None:
    """A header, such as CUB's, may have a parameter of that name."""
    (tmp_path / "softmax.toml").write_text(SOFTMAX.replace("(N > 10), detail::BLOCK", "(UNROLL > 1), 3"))
    (tmp_path / "softmax.cu").write_text(
        TEMPLATES.replace("+ UNROLL", "+ 1").replace("template <int UNROLL>", "UNROLL")
    )
    kernel = load_kernel(str(tmp_path / "softmax.toml"))
    job = compile_job(kernel, kernel.spec.default, "float32", "sm_90")
    assert job.options == ("-DDTYPE=float",)
    assert compile_cubin(job).functions[job.entry].symbol == "_Z7softmaxILi128EjLb1ELi3EEvPf"


def test_no_kernel_of_autotile_lacks_a_macro() -> None:
    for name in kernel_names():
        kernel = load_kernel(name)
        assert not kernel.template_names & {*kernel.spec.default, *kernel.spec.flags, "DTYPE"}, name


def small_job(**changes: object) -> CompileJob:
    source = 'extern "C" __global__ void k(float* x) { x[0] = 1; }'
    return replace(CompileJob(source, "a" * 64, "/tmp/k.cu", "k", "sm_90", ()), **changes)  # type: ignore[arg-type]


class TestStatuses:
    """What NVRTC returns besides success, and besides errors of the source; the statuses are its own."""

    def test_a_status_that_is_not_expected_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvrtc = load_nvrtc()
        real = nvrtc.nvrtcGetLoweredName
        monkeypatch.setattr(nvrtc, "nvrtcGetLoweredName", lambda program, _: real(program, b"another"))
        with pytest.raises(ToolchainError, match=r"^NVRTC [0-9.]+ failed with NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID$"):
            compile_cubin(small_job())

    def test_a_program_that_cannot_be_read_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvrtc = load_nvrtc()
        real = nvrtc.nvrtcGetCUBINSize
        monkeypatch.setattr(nvrtc, "nvrtcGetCUBINSize", lambda _: real(0))
        with pytest.raises(ToolchainError, match=r"failed with NVRTC_ERROR_INVALID_PROGRAM$"):
            compile_cubin(small_job())

    def test_a_failure_without_a_log_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvrtc = load_nvrtc()

        def without_log(program: object, *_: object) -> tuple[object]:
            real(program, 0, [])
            return (nvrtc.nvrtcResult.NVRTC_ERROR_OUT_OF_MEMORY,)

        real = nvrtc.nvrtcCompileProgram
        monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", without_log)
        with pytest.raises(CompileError, match="NVRTC returned NVRTC_ERROR_OUT_OF_MEMORY"):
            compile_cubin(small_job())

    def test_an_option_that_is_refused_is_no_fault_of_the_source(self) -> None:
        with pytest.raises(ToolchainError, match=r"refuses an option for sm_90: .*--no-such"):
            compile_cubin(small_job(options=("--no-such",)))
