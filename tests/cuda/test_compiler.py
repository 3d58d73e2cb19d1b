"""Sources, written for NVRTC or nvcc, to cubins with their functions, resources and errors; the cache of cubins."""

import hashlib
import json
import os
import re
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_settings import cache_settings
from child_python import python
from feature_kernels import copy_kernel
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.device import device_profile, profile_names
from autotile.core.documents import convert, to_fields
from autotile.core.model import Outcome, Problem, Resources
from autotile.cuda import compiler, headers, toolchain
from autotile.cuda.ceiling_kernels import ceiling_job
from autotile.cuda.compiler import Compilation, CompiledFunction, CompileJob, CubinCache, compile_cubin, compile_job
from autotile.cuda.headers import compile_error
from autotile.cuda.toolchain import installed_nvcc, load_cupy, load_nvrtc, nvrtc_version
from autotile.errors import CompileError, InputError, ToolchainError
from autotile.kernel.launch import value_or_zero
from autotile.kernel.library import kernel_names, load_kernel
from autotile.kernel.problem import capability_of, is_below
from autotile.workers.compile_pool import CompilePool

PROGRAMS = Path(__file__).with_name("programs")
SOURCE = (PROGRAMS / "sum.cu").read_text()
JOB = CompileJob(SOURCE, "hash", "/nowhere/sum.cu", "sum", "sm_90", ("-DTILE=64", "-DDTYPE=float"))
OLDEST_OF_NVRTC = {"12": "5.0", "13": "7.5"}
"""Lowest compute capability that each major version of NVRTC compiles for: CUDA Toolkit release notes."""
NAMED = (PROGRAMS / "named.cu").read_text()
SMALL_JOB = CompileJob('extern "C" __global__ void k(float* x) { x[0] = 1; }', "a" * 64, "/tmp/k.cu", "k", "sm_90", ())


@pytest.mark.parametrize(
    ("function", "status", "error", "said"),
    [
        ("GetLoweredName", "NAME_EXPRESSION_NOT_VALID", ToolchainError, r"^NVRTC [0-9.]+ failed with {}$"),
        ("GetCUBINSize", "INVALID_PROGRAM", ToolchainError, "failed with {}$"),
        ("CompileProgram", "OUT_OF_MEMORY", CompileError, "NVRTC returned {}"),  # without a log
    ],
)
def test_a_status_that_is_not_expected_is_named(monkeypatch, function, status, error, said):
    nvrtc, name = load_nvrtc(), f"NVRTC_ERROR_{status}"
    monkeypatch.setattr(nvrtc, f"nvrtc{function}", lambda *_: (getattr(nvrtc.nvrtcResult, name),))
    with pytest.raises(error, match=said.format(name)):
        compile_cubin(SMALL_JOB)


class TestCompiling:
    @pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
    def test_architectures_and_headers_of_the_toolkit(self, architecture):
        source = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cuda/std/cstdint>\n" + SOURCE
        options = ("-DTILE=64", "-DDTYPE=__half")
        assert compile_cubin(replace(JOB, source=source, options=options, architecture=architecture)).cubin

    def test_spills_are_reported(self):
        spilling = replace(JOB, source=(PROGRAMS / "spilling.cu").read_text())
        assert compile_cubin(spilling).resources.spill_bytes > 0

    def test_messages_of_the_compiler_and_what_is_missing_or_refused(self):
        with pytest.raises(CompileError, match=r'sum\.cu\(\d+\): error: identifier "TILE" is undefined') as caught:
            compile_cubin(replace(JOB, options=("-DDTYPE=float",)))
        assert "error" in caught.value.log
        with pytest.raises(CompileError, match=r"'total': identifier \"total\" is undefined.*found: sum\)"):
            compile_cubin(replace(JOB, entry="total"))
        with pytest.raises(CompileError, match="unrecognized option --no-such"):
            compile_cubin(replace(SMALL_JOB, options=("--no-such",)))
        with pytest.raises(ToolchainError, match="sm_11"):
            compile_cubin(replace(JOB, architecture="sm_11"))

    def test_the_key_changes_with_all_that_changes_the_cubin(self):
        others = [
            replace(JOB, source_hash="other"),
            replace(JOB, entry="other"),
            replace(JOB, architecture="sm_80"),
            replace(JOB, options=("-DTILE=32", "-DDTYPE=float")),
        ]
        assert len({job.key for job in [JOB, *others]}) == 5
        assert replace(JOB, template_path="/elsewhere/sum.cu").key == JOB.key
        assert convert(json.loads(json.dumps(to_fields(JOB))), CompileJob) == JOB  # as it is sent to a worker

    def test_macros(self):
        config = {"BM": 64, "GUARDED": True, "MODE": "direct"}
        problem = Problem("matmul_naive", {"M": 1, "N": 1, "K": 1}, "bfloat16")
        job = compile_job(load_kernel("matmul_naive"), config, problem, "sm_80")
        assert job.options == ("-DBM=64", "-DGUARDED=1", "-DMODE=direct", "-DDTYPE=__nv_bfloat16")
        assert job.architecture == "sm_80"

    @pytest.mark.parametrize("architecture", sorted({device_profile(name).architecture for name in profile_names()}))
    def test_a_default_compiles_for_the_architecture_of_every_profile(self, architecture):
        """The code is for that architecture, and needs what the search space declares; others were dropped by NVRTC."""
        kernel = load_kernel("sgemm_2d")
        job = compile_job(kernel, kernel.spec.default, kernel.spec.at(), architecture)
        if is_below(capability_of(architecture), OLDEST_OF_NVRTC[nvrtc_version().partition(".")[0]]):
            with pytest.raises(ToolchainError, match=rf"refuses an option for {architecture}"):
                compile_cubin(job)
            return
        compiled = compile_cubin(job)
        (flags,) = struct.unpack_from("<I", compiled.cubin, 48)  # e_flags of a 64-bit ELF header
        assert int(architecture.removeprefix("sm_")) in (flags & 0xFF, flags >> 8 & 0xFF)
        assert list(compiled.functions) == ["sgemm_2d"]
        resources, launch = compiled.resources, kernel.spec.steps[0].launch
        names = {**kernel.spec.sizes, **kernel.spec.default}
        assert resources.static_smem_bytes == value_or_zero(launch.static_smem_bytes, names)
        assert value_or_zero(launch.min_registers, names) <= resources.registers <= 255
        assert resources.spill_bytes == 0

    def test_resources_of_one_function_among_several(self):
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
        functions = compiler.compiled_functions(b"", log, {"f": "first", "s": "second"})
        assert functions["f"].resources == Resources(40, 4, 12, 8, 1024)
        assert functions["s"].resources == Resources(12, 0, 0, 0, 0)
        with pytest.raises(ToolchainError, match=r"'third'.*only first, second"):
            compiler.compiled_functions(b"", log, {"t": "third"})

    def test_an_error_shows_nothing_of_a_file_that_a_macro_named(self, tmp_path):
        source = '#define HEADER "/etc/passwd"\n#include HEADER\n'
        with pytest.raises(
            CompileError, match=r"^/etc/passwd\(1\): error in a file that the template must not"
        ) as raised:
            compile_cubin(replace(JOB, source=source, template_path=str(tmp_path / "sum.cu")))
        assert "root" not in str(raised.value)

    def test_functions_by_their_cpp_names(self):
        symbols = {
            "scale<BLOCK, DTYPE>": "_Z5scaleILi64EfEvPT0_S0_",
            "scale<BLOCK * 2, unsigned int>": "_Z5scaleILi128EjEvPT0_S0_",
            "inner::fill": "_ZN5inner4fillEPf",
            "(void (*)(int*))twice": "_Z5twicePi",
            "own": "_Z3ownPf",
        }
        first, *others = symbols
        options = ("-DBLOCK=64", "-DDTYPE=float")
        job = CompileJob(NAMED, "hash", "/nowhere/named.cu", first, "sm_90", options, tuple(others))
        alone = replace(job, further_entries=())
        assert job.key != alone.key
        assert list(compile_cubin(alone).functions) == [first]
        compiled = compile_cubin(job)
        assert {entry: function.symbol for entry, function in compiled.functions.items()} == symbols
        assert all(symbol.encode() in compiled.cubin for symbol in symbols.values())
        assert all(function.resources.registers > 0 for function in compiled.functions.values())

    @pytest.mark.parametrize(
        ("entry", "cure"),
        [
            ("scale", "it is a template, so give its arguments"),
            ("twice", "it is overloaded, so give its type"),
            ("inner::full", 'namespace "inner" has no member "full"'),
            ("scale<B, float>", 'identifier "B" is undefined'),
        ],
    )
    def test_an_entry_that_names_no_function_gives_the_cure(self, entry, cure):
        job = CompileJob(NAMED, "hash", "/nowhere/named.cu", entry, "sm_90", ("-DBLOCK=64",))
        with pytest.raises(CompileError, match=re.escape(cure)) as raised:
            compile_cubin(job)
        assert "found: scale<int B, class T>, fill, twice, own" in str(raised.value)

    def test_naming_an_extern_c_function_does_not_change_its_cubin(self):
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

    @pytest.mark.parametrize("is_included", [False, True])
    def test_names_of_template_parameters_are_no_macros(self, tmp_path, is_included):
        toml = copy_kernel(tmp_path, "softmax")
        if is_included:
            toml.with_suffix(".cu").rename(tmp_path / "code.cuh")
            toml.with_suffix(".cu").write_text('#include "code.cuh"\n')
        kernel = load_kernel(str(toml))
        assert (kernel.template_names, kernel.spec.compiled_names) == ({"BLOCK", "SCALAR", "EDGE", "Z", "N"}, ("N",))
        job = compile_job(kernel, kernel.spec.default, kernel.spec.at(), "sm_90")
        assert job.options == ("-DUNROLL=2", "-DDTYPE=float")
        (function,) = compile_cubin(job).functions.values()
        assert function.symbol == "_Z7softmaxILi128EjLb1ELi3EEvPf"
        other = compile_job(kernel, {**kernel.spec.default, "BLOCK": 64}, kernel.spec.at({"N": 8}), "sm_90")
        assert compile_cubin(other).functions[kernel.spec.entry].symbol == "_Z7softmaxILi64EjLb0ELi3EEvPf"
        assert other.key != job.key

    def test_a_name_that_only_the_entry_uses_is_no_macro(self, tmp_path):
        """A header, such as CUB's, may have a parameter of that name."""
        unused = {"+ UNROLL": "+ 1", "template <int UNROLL>": "UNROLL"}
        toml = copy_kernel(tmp_path, "softmax", {**unused, "(N > 10), detail::BLOCK": "(UNROLL > 1), 3"})
        kernel = load_kernel(str(toml))
        job = compile_job(kernel, kernel.spec.default, kernel.spec.at(), "sm_90")
        assert job.options == ("-DDTYPE=float",)
        assert compile_cubin(job).functions[job.entry].symbol == "_Z7softmaxILi128EjLb1ELi3EEvPf"

    def test_no_kernel_of_autotile_lacks_a_macro(self):
        for name in kernel_names():
            kernel = load_kernel(name)
            assert not kernel.template_names & {*kernel.spec.default, *kernel.spec.flags, "DTYPE"}, name


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
    ('#error "uses too much shared data (0x3a980 bytes, 0xc000 max)"\n__global__ void k() {}', "k", ""),
    ('static_assert(false, "ptxas error: requires more registers"); __global__ void k() {}', "k", ""),
    ("__global__ void k(float* x) { x[0] = y; }", "k", ""),
    ('__global__ void k(float* x) { asm volatile("bar.sync 17;"); x[0] = 1; }', "k", ""),  # of the assembler
]
"""Sources, their function, and the beginning of the reason; "" of those that just do not compile."""
needs_nvcc = pytest.mark.skipif(not installed_nvcc(), reason="there is no nvcc on this machine")
COMPILERS = ["nvrtc", pytest.param("nvcc", marks=needs_nvcc)]


def job(source: str, entry: str = "k", compiler: str = "nvrtc") -> CompileJob:
    return CompileJob(source, "hash", "/nowhere/k.cu", entry, "sm_90", (), compiler=compiler)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with closing(CompilePool(cache_settings(tmp_path_factory.mktemp("pool")), workers=1)) as pool:
        yield pool


class TestLimits:
    @pytest.mark.parametrize("compiler", COMPILERS)
    @pytest.mark.parametrize(("source", "entry", "expected"), CASES)
    def test_outcome_and_reason(self, pool, source, entry, expected, compiler):
        compiled = pool.submit(job(source, entry, compiler)).result()
        assert compiled.outcome is (Outcome.RESOURCE_EXCEEDED if expected else Outcome.COMPILE_FAILED)
        assert compiled.reason.startswith(expected)
        assert "\0" not in compiled.reason

    @pytest.mark.parametrize("source", [SHARED, '__global__ void k() { asm volatile("bar.sync 17;"); }'])
    def test_logs_have_no_nul(self, source):
        """NVRTC puts one between the messages of the front end and those of the assembler."""
        with pytest.raises(CompileError) as caught:
            compile_cubin(job(source))
        assert "ptxas" in caught.value.log
        assert "\0" not in caught.value.log
        assert not caught.value.log.endswith("\n\n")

    @pytest.mark.parametrize(
        ("message", "expected"),
        [
            (
                "Entry function '_Z1kILi4EEvPf' uses too much shared data "
                "(0x20000 bytes + 0x400 bytes system, 0xc000 max)",
                "k<4> uses 132096 bytes of static shared memory, over the limit of 49152 bytes",
            ),
            (
                "Entry function 'k' uses too much local data (0x100000 bytes, 0x80000 max)",
                "k uses 1048576 bytes of local memory, over the limit of 524288 bytes",
            ),
            (
                "Entry function 'k' uses too much parameter space (0x2000 bytes, 0x1100 max).",
                "k uses 8192 bytes of kernel parameters, over the limit of 4352 bytes",
            ),
            (
                "Entry function 'k' uses too much constant data (bank 3, 0x20000 bytes, 0x10000 max)",
                "k uses 131072 bytes of constant memory, over the limit of 65536 bytes",
            ),
            ("Insufficient registers (16) to compile instruction at line 9 in function k", ""),
            ("Out Of Resources to support barriers in entry 'k'", ""),
        ],
    )
    def test_messages_of_other_versions(self, message, expected):
        """As the assembler's own texts have them; no source here provokes these."""
        begin = "ptxas k.ptx, line 9; error   : " if message.startswith("Insuff") else "ptxas error   : "
        log = f"k.cu(1): warning: unused\n{begin}{message}\nptxas fatal   : aborted\n"
        error = compile_error(log, job("", "k<4>"))
        assert error.exceeds_limit
        assert str(error).startswith(expected or message)


NVCC_SOURCE = (PROGRAMS / "for_nvcc.cu").read_text()
NVCC_JOB = CompileJob(
    NVCC_SOURCE, "hash", "/nowhere/x.cu", "plain", "sm_90", ("-DTILE=4", "--expt-relaxed-constexpr"), compiler="nvcc"
)


@pytest.fixture
def forget():
    toolchain.find_nvcc.cache_clear()
    toolchain.nvcc_version.cache_clear()
    yield
    toolchain.find_nvcc.cache_clear()
    toolchain.nvcc_version.cache_clear()


@needs_nvcc
class TestNvcc:
    def test_functions_resources_and_options(self):
        options = (*NVCC_JOB.options, "--ptxas-options=-dlcm=cg", "--maxrregcount=32", "-lineinfo", "-O3", "-std=c++17")
        job = replace(NVCC_JOB, further_entries=("scale<64, float>", "inner::fill"), options=options)
        functions = compile_cubin(job).functions
        assert [function.symbol for function in functions.values()] == [
            "plain",
            "_Z5scaleILi64EfEvPT0_i",
            "_ZN5inner4fillEPfd",
        ]
        assert [function.parameter_bytes for function in functions.values()] == [(8,), (8, 4), (8, 8)]
        assert all(0 < function.resources.registers <= 32 for function in functions.values())

    def test_errors_are_those_of_the_source(self):
        with pytest.raises(CompileError, match=r'x\.cu\(4\): error: identifier "TILE" is undefined'):
            compile_cubin(replace(NVCC_JOB, options=NVCC_JOB.options[1:], entry="scale<64, float>"))
        with pytest.raises(CompileError, match=r"no __global__ function 'missing'.*plain"):
            compile_cubin(replace(NVCC_JOB, entry="missing"))

    def test_macros_of_names_that_the_headers_of_cuda_use(self):
        source = "namespace a { namespace { __global__ void plain(int* y) { y[0] = T + value; } } }"
        assert compile_cubin(replace(NVCC_JOB, source=source, entry="a::plain", options=("-DT=16", "-Dvalue"))).cubin

    def test_the_version_is_part_of_the_key(self, monkeypatch):
        key = NVCC_JOB.key
        assert key != replace(NVCC_JOB, compiler="nvrtc").key
        monkeypatch.setattr(compiler, "nvcc_version", lambda: "99.9")
        assert NVCC_JOB.key != key


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_source_that_gives_a_parameter_another_value(compiler):
    source = "#define TILE 4\n__global__ void plain(int* y) { y[0] = TILE; }"
    one = replace(NVCC_JOB, source=source, options=("-DTILE=8", "-DFLAG"), compiler=compiler)
    with pytest.raises(CompileError, match=r"x.cu(\(1\)|:1): #define TILE overrides the values of TILE; remove it"):
        compile_cubin(one)
    for right in (replace(one, may_redefine=True), replace(one, options=("-DTILE=4",))):
        assert compile_cubin(right).cubin


@pytest.mark.usefixtures("forget")
class TestStandIn:
    def place(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        (folder / "bin").mkdir()
        path = folder / "bin" / "nvcc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(folder))

    def test_arguments_are_passed_as_they_are(self, tmp_path, monkeypatch):
        report = """ptxas info    : Compiling entry function 'plain' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers"""
        self.place(
            tmp_path,
            monkeypatch,
            f"""if [ "$1" = --version ]; then echo 'release 1.2, V1.2.3'; exit; fi
for word in "$@"; do echo "$word" >> {tmp_path}/arguments; done
while [ "$1" != -o ]; do shift; done
echo cubin > "$2"; cat >&2 <<'END'
{report}
END""",
        )
        job = replace(NVCC_JOB, options=("--text=a b; $(touch /nowhere) `x`",), include_folders=("/some where",))
        assert toolchain.nvcc_version() == "1.2.3"
        assert compile_cubin(job).resources.registers == 8
        arguments = (tmp_path / "arguments").read_text().splitlines()
        assert "--text=a b; $(touch /nowhere) `x`" in arguments
        assert "-I/some where" in arguments
        assert "-arch=sm_90" in arguments

    def test_what_nvcc_says_and_that_there_is_none(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
        self.place(tmp_path, monkeypatch, 'echo "x.cu(3): error: no such thing in $LC_ALL" >&2; exit 2')
        with pytest.raises(CompileError, match=r"x\.cu\(3\): error: no such thing in C$"):
            compile_cubin(NVCC_JOB)
        with pytest.raises(ToolchainError, match="--version fails"):
            toolchain.nvcc_version()
        toolchain.find_nvcc.cache_clear()
        monkeypatch.setattr(toolchain, "toolkit_folders", lambda: (tmp_path / "none",))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ToolchainError, match="no nvcc on this machine; install the CUDA toolkit"):
            compile_cubin(NVCC_JOB)


PARAMETERS_SOURCE = (PROGRAMS / "parameters.cu").read_text()


@pytest.fixture(scope="module")
def cubin():
    return compile_cubin(CompileJob(PARAMETERS_SOURCE, "hash", "/nowhere/x.cu", "k<int>", "sm_90", ())).cubin


class TestParameters:
    @pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
    def test_parameters_of_compiled_functions(self, architecture):
        job = CompileJob(PARAMETERS_SOURCE, "hash", "/nowhere/x.cu", "k<double>", architecture, (), ("none", "k<int>"))
        functions = compile_cubin(job).functions
        assert functions["k<double>"].parameter_bytes == (8, 4, 1, 24, 128, 8)
        assert (functions["k<int>"].parameter_bytes, functions["none"].parameter_bytes) == ((8, 4, 1, 24, 128, 4), ())
        assert [functions[name].max_threads for name in ("none", "k<int>")] == [96, None]
        fixed = SMALL_JOB.source.replace("void k", "void __cluster_dims__(4, 2, 1) k")
        (function,) = compile_cubin(replace(SMALL_JOB, source=fixed)).functions.values()
        assert (function.cluster, functions["none"].cluster) == ((4, 2, 1), None)

    @given(at=st.integers(0, 4000), byte=st.integers(0, 255), length=st.integers(0, 9000))
    def test_a_damaged_file_has_unknown_or_few_parameters(self, cubin, at, byte, length):
        damaged = bytearray(cubin)
        damaged[min(at, len(cubin) - 1)] = byte
        found, *_ = compiler.function_attributes(bytes(damaged[:length]), "_Z1kIiEvPT_ic5Three3MapS0_")
        assert found is None or len(found) < 1000


ROOT = Path(__file__).parents[2]
TRANSPOSE = ROOT / "examples" / "transpose_tma" / "transpose_tma.toml"


class TestFeatures:
    def test_flags_are_macros_and_part_of_the_cubins_key(self, tmp_path):
        kernel = load_kernel(str(copy_kernel(tmp_path, "split")))
        plain = compile_job(kernel, kernel.spec.default, kernel.spec.at(dtype="float16"), "sm_90")
        assert plain.options[-4:] == ("-DTRANS_A=0", "-DTRANS_B=0", "-DOUT_FP32=0", "-DDTYPE=__half")
        problem = kernel.spec.at({**kernel.spec.sizes, "TRANS_B": 1}, "float16")
        turned = compile_job(kernel, kernel.spec.default, problem, "sm_90")
        assert "-DTRANS_B=1" in turned.options
        assert turned.key != plain.key
        assert compile_cubin(turned).cubin != compile_cubin(plain).cubin

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_target_is_the_kernels_own(self, tmp_path, dtype):
        kernel = load_kernel(str(copy_kernel(tmp_path, "swap")))
        job = compile_job(kernel, {"THREADS": 64, "CLUSTER": 8, "WHOLE": True}, kernel.spec.at(dtype=dtype), "sm_90")
        assert job.architecture == "sm_90a"
        assert compile_cubin(job).resources.static_smem_bytes == 256

    def test_the_page_shows_the_example_as_it_is(self):
        page = (ROOT / "docs" / "file-format.md").read_text(encoding="utf-8")
        section = page.partition("## Example with a tensor map")[2].partition("\n## ")[0]
        shown = [line.strip() for line in section.splitlines() if line.startswith("    ") and line.strip()]
        files = [TRANSPOSE.read_text(encoding="utf-8"), TRANSPOSE.with_suffix(".cu").read_text(encoding="utf-8")]
        known = {line.strip() for text in files for line in text.splitlines()}
        told = {line for line in shown if line not in known}
        assert len(shown) > 20
        assert {line.split(":")[0] for line in told} <= {"tensor_maps", "= 128"}


FFMA, DFMA, HFMA2, HMMA, DMMA, HGMMA, LDG, STG = 0x023, 0x02B, 0x031, 0x03C, 0x03F, 0x1F0, 0x181, 0x186
"""Lowest 9 bits of the opcodes of Turing and later, without the bits that tell where operands are."""
HFMA2_MMA, QGMMA = 0x035, 0x1F3
"""The fp16 FMA of the other pipe, and wgmma of 8-bit floats."""


def instructions(compiled: Compilation, entry: str) -> Counter[int]:
    code = compiler._elf_section(compiled.cubin, f".text.{compiled.functions[entry].symbol}".encode())
    return Counter(struct.unpack_from("<Q", code, at)[0] & 0x1FF for at in range(0, len(code), 16))


class TestCeilingKernels:
    @pytest.mark.parametrize("capability", ["8.0", "9.0"])
    def test_no_instruction_was_removed_and_nothing_is_spilled(self, capability):
        cubin = compile_cubin(ceiling_job(capability))
        is_hopper = capability == "9.0"
        assert instructions(cubin, "fma_float32")[FFMA] == 8 * 64
        assert instructions(cubin, "fma_float64")[DFMA] == 8 * 64
        half = instructions(cubin, "fma_float16")
        assert 0 <= half[HFMA2] + half[HFMA2_MMA] - 8 * 64 < 8  # some set registers to constants
        for name in ("float16", "bfloat16", "tf32"):
            assert instructions(cubin, f"mma_{name}")[HMMA] == 2 * 4 * 4  # 4 of 32 steps are unrolled
        assert instructions(cubin, "mma_float64")[DMMA] == 2 * 2 * 4
        assert instructions(cubin, "read_words")[LDG] >= 4
        copy = instructions(cubin, "copy_words")
        assert min(copy[LDG], copy[STG]) >= 4
        for name in ("float16", "bfloat16", "tf32", "float8_e4m3fn") if is_hopper else ():
            found = instructions(cubin, f"wgmma_{name}")
            assert found[HGMMA] + found[QGMMA] == 4  # and no more, which the compiler adds to synchronise
        assert {function.resources.spill_bytes for function in cubin.functions.values()} == {0}

    def test_each_architecture_gets_what_it_has(self):
        entries = {capability: ceiling_job(capability).entries for capability in ("7.5", "8.6", "8.9", "9.0", "12.0")}
        assert not any("mma" in name for name in entries["7.5"])
        assert "mma_float64" not in entries["8.6"]
        assert "mma_float8_e4m3fn" in entries["8.9"]
        assert "wgmma_float8_e4m3fn" in entries["9.0"]
        assert "wgmma_tf32" not in entries["12.0"]
        assert ceiling_job("9.0").architecture == "sm_90a"


def test_without_the_wheels_there_are_no_headers_and_without_cupy_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(headers, "toolkit_folders", tuple)
    assert headers.toolkit_headers.__wrapped__() == ()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ToolchainError, match=r"CuPy is not installed .*pip install"):
        load_cupy.__wrapped__()


@pytest.mark.parametrize(("load", "collections"), [("import cupy", 1), ("toolchain.load_cupy()", 0)])
def test_the_import_of_cupy_begins_no_full_collection(load, collections):
    """In a process that is about to, and so does as CuPy is imported otherwise."""
    script = f"""
import gc, sys
from autotile.cuda import toolchain
gc.disable()
kept = [[] for _ in range(300_000)]
while gc.get_count()[2] <= gc.get_threshold()[2]:
    gc.collect(1)
gc.enable()
before = gc.get_stats()[2]["collections"]
assert "cupy" not in sys.modules
{load}
print(gc.get_stats()[2]["collections"] - before, gc.get_freeze_count() < 1000)
"""
    assert python("-c", script, check=True).stdout.split() == [str(collections), "True"]


RESOURCES = Resources(32, 0, 0, 0, 1024)


def compilation(fill: int, size: int = 1000) -> Compilation:
    return Compilation(bytes([fill]) * size, {"f": CompiledFunction("_Z1fv", RESOURCES)})


@pytest.fixture
def cache(tmp_path):
    return CubinCache(tmp_path, 10**6)


def change(cubin: Path, make: Callable[[dict[str, Any]], object]) -> None:
    description = cubin.with_suffix(".json")
    document = json.loads(description.read_text())
    make(document)
    description.write_text(json.dumps(document))


HAMMER = """
import sys
from pathlib import Path
from autotile.core.model import Resources
from autotile.cuda.compiler import Compilation, CompiledFunction, CubinCache
cache, fill = CubinCache(Path(sys.argv[1]), 10**6), int(sys.argv[2])
functions = {"f": CompiledFunction("_Z1fv", Resources(32, 0, 0, 0, 1024))}
shared, own = (Compilation(bytes([byte]) * 1000, functions) for byte in (7, fill))
for _ in range(50):
    cache.put("shared", shared)
    cache.put(f"own{fill}", own)
    assert cache.get("shared").path.read_bytes() == shared.cubin
"""


class TestCubinCache:
    def test_what_was_put_is_found(self, cache):
        assert cache.get("key") is None
        put = cache.put("key", compilation(1))
        assert cache.get("key") == put
        assert (put.path.read_bytes(), put.resources, put.symbols) == (bytes([1]) * 1000, RESOURCES, {"f": "_Z1fv"})
        other, changed = cache.put("other", compilation(1)), cache.put("changed", compilation(2))
        assert changed.cubin_hash != other.cubin_hash == put.cubin_hash

    @pytest.mark.parametrize(
        "damage",
        [
            lambda cubin: cubin.write_bytes(b"half"),
            lambda cubin: cubin.with_suffix(".json").write_text("[]"),
            lambda cubin: change(cubin, lambda document: document["functions"]["f"]["resources"].update(registers=33)),
            lambda cubin: change(cubin, lambda document: document.pop("entry_hash")),  # as earlier versions wrote it
        ],
        ids=["cubin", "description", "resources", "without hash"],
    )
    def test_what_was_damaged_is_a_miss(self, cache, damage):
        damage(cache.put("key", compilation(1)).path)
        assert cache.get("key") is None

    def test_a_file_of_another_key_is_a_miss(self, cache):
        """Cubins may be exchanged with each other only together with their keys."""
        own, other = cache.put("own", compilation(1)).path, cache.put("other", compilation(2)).path
        for suffix in (".json", ".cubin"):
            shutil.copy(other.with_suffix(suffix), own.with_suffix(suffix))
        assert cache.get("own") is None
        assert cache.get("other") is not None
        cache.put("own", compilation(1))
        assert cache.get("own") is not None

    def test_a_cubin_is_hashed_once_to_be_checked(self, cache, monkeypatch):
        cache.put("key", compilation(1, 100_000))
        hashed: list[int] = []
        counting = SimpleNamespace(sha256=lambda data: hashed.append(len(data)) or hashlib.sha256(data))
        monkeypatch.setattr(compiler, "hashlib", counting)
        assert cache.get("key") is not None
        assert 100_000 <= sum(hashed) < 101_000

    @pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o277])
    def test_its_folders_are_for_the_user_alone(self, tmp_path, mask):
        previous = os.umask(mask)
        try:
            cache = CubinCache(tmp_path / "new" / "cache", 10**6)
        finally:
            os.umask(previous)
        path = cache.put("key", compilation(1)).path
        for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
            assert folder.stat().st_mode & 0o777 == 0o700
        assert CubinCache(tmp_path / "new" / "cache", 10**6).get("key") is not None

    @pytest.mark.parametrize("mode", [0o770, 0o775, 0o702, 0o777])
    @pytest.mark.parametrize("name", [".", "cubins"])
    def test_a_folder_that_others_may_write_is_not_used(self, tmp_path, name, mode):
        CubinCache(tmp_path, 10**6).put("key", compilation(1))
        (tmp_path / name).chmod(mode)
        with pytest.raises(InputError, match=f"can be written by other users.*AUTOTILE_CACHE.*chmod go-w {tmp_path}"):
            CubinCache(tmp_path, 10**6)
        (tmp_path / name).chmod(mode & ~0o022)
        assert CubinCache(tmp_path, 10**6).get("key") is not None

    def test_a_folder_beside_those_of_others_is_used_and_one_that_cannot_be_made_is_bad_input(self, tmp_path):
        """As below /tmp, where only the owner of an entry may replace it."""
        tmp_path.chmod(0o1777)
        cache = CubinCache(tmp_path, 10**6)
        (cache.put("key", compilation(1)).path.parent).chmod(0o1777)
        with pytest.raises(InputError, match="can be written by other users"):
            CubinCache(tmp_path, 10**6)
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="AUTOTILE_CACHE"):
            CubinCache(tmp_path / "file", 10**6)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
    @pytest.mark.parametrize("name", [".", "cubins", "link"])
    def test_a_folder_or_a_link_of_another_user_is_not_used(self, tmp_path, name):
        """A link would make autotile fill, and trim, another folder of the user."""
        if name == "link":
            (tmp_path / "documents").mkdir(mode=0o700)
            tmp_path.chmod(0o1777)
            (tmp_path / "cubins").symlink_to("documents")
        CubinCache(tmp_path, 10**6)
        os.chown(tmp_path / ("cubins" if name == "link" else name), 12345, -1, follow_symlinks=False)
        with pytest.raises(InputError, match=r"belongs to another user.*AUTOTILE_CACHE"):
            CubinCache(tmp_path, 10**6)

    def test_trimming_keeps_what_was_used_last_and_many_writes_stay_within_the_limit(self, tmp_path):
        cache = CubinCache(tmp_path, 5_000)
        for index in range(8):
            path = cache.put(f"key{index}", compilation(index)).path
            for file in (path, path.with_suffix(".json")):
                os.utime(file, (index, index))
        cache.get("key0")
        cache.trim()
        assert cache.size_bytes() <= 5_000
        assert cache.get("key0") is not None
        assert cache.get("key1") is None
        assert cache.get("key7") is not None
        cache = CubinCache(tmp_path, 20_000)
        for index in range(200):
            cache.put(f"key{index}", compilation(index % 256))
        assert cache.size_bytes() <= 20_000 + 32 * 1_300

    def test_processes_share_it(self, tmp_path):
        with ThreadPoolExecutor(2) as writers:
            for done in writers.map(lambda fill: python("-c", HAMMER, tmp_path, fill), ("0", "1")):
                assert done.returncode == 0, done.stderr
        assert not list(tmp_path.rglob(".writing-*"))
