"""The same with nvcc, where there is one, and with a stand-in for it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotile.cuda import compiler, toolchain
from autotile.cuda.compiler import CompileJob, compile_cubin
from autotile.errors import CompileError, ToolchainError

SOURCE = """
#include <vector>
#include <limits>
extern "C" __global__ void plain(float* x) { x[threadIdx.x] = std::numeric_limits<float>::infinity(); }
template <int B, class T> __global__ void scale(T* x, int n) { x[threadIdx.x] *= B + TILE; }
namespace inner { __global__ void fill(float* x, double d) { x[0] = d; } }
float host(const std::vector<float>& v) { return v[0]; }
"""
JOB = CompileJob(
    SOURCE, "hash", "/nowhere/x.cu", "plain", "sm_90", ("-DTILE=4", "--expt-relaxed-constexpr"), compiler="nvcc"
)


@pytest.fixture
def forget() -> Iterator[None]:
    toolchain.find_nvcc.cache_clear()
    toolchain.nvcc_version.cache_clear()
    yield
    toolchain.find_nvcc.cache_clear()
    toolchain.nvcc_version.cache_clear()


def has_nvcc() -> bool:
    return bool(toolchain.installed_nvcc())


@pytest.mark.skipif(not has_nvcc(), reason="there is no nvcc on this machine")
class TestNvcc:
    def test_functions_and_resources(self) -> None:
        job = replace(JOB, further_entries=("scale<64, float>", "inner::fill"))
        functions = compile_cubin(job).functions
        assert [function.symbol for function in functions.values()] == [
            "plain",
            "_Z5scaleILi64EfEvPT0_i",
            "_ZN5inner4fillEPfd",
        ]
        assert [function.parameter_bytes for function in functions.values()] == [(8,), (8, 4), (8, 8)]
        assert all(function.resources.registers > 0 for function in functions.values())

    def test_errors_are_those_of_the_source(self) -> None:
        with pytest.raises(CompileError, match=r'x\.cu\(5\): error: identifier "TILE" is undefined'):
            compile_cubin(replace(JOB, options=JOB.options[1:], entry="scale<64, float>"))
        with pytest.raises(CompileError, match=r"no __global__ function 'missing'.*plain"):
            compile_cubin(replace(JOB, entry="missing"))

    def test_options(self) -> None:
        options = (*JOB.options, "--ptxas-options=-dlcm=cg", "--maxrregcount=32", "-lineinfo", "-O3", "-std=c++17")
        assert compile_cubin(replace(JOB, options=options)).cubin

    def test_the_version_is_part_of_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        key = JOB.key
        assert key != replace(JOB, compiler="nvrtc").key
        monkeypatch.setattr(compiler, "nvcc_version", lambda: "99.9")
        assert JOB.key != key


@pytest.mark.usefixtures("forget")
class TestStandIn:
    def place(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        (folder / "bin").mkdir()
        path = folder / "bin" / "nvcc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(folder))

    def test_arguments_are_passed_as_they_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        job = replace(JOB, options=("-DTEXT=a b; $(touch /nowhere) `x`",), include_folders=("/some where",))
        assert toolchain.nvcc_version() == "1.2.3"
        assert compile_cubin(job).resources.registers == 8
        arguments = (tmp_path / "arguments").read_text().splitlines()
        assert "-DTEXT=a b; $(touch /nowhere) `x`" in arguments
        assert "-I/some where" in arguments
        assert "-arch=sm_90" in arguments

    def test_what_nvcc_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place(tmp_path, monkeypatch, "echo 'x.cu(3): error: no such thing' >&2; exit 2")
        with pytest.raises(CompileError, match=r"x\.cu\(3\): error: no such thing"):
            compile_cubin(JOB)
        with pytest.raises(ToolchainError, match="--version fails"):
            toolchain.nvcc_version()

    def test_without_nvcc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "toolkit_folders", lambda: (tmp_path,))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ToolchainError, match="no nvcc on this machine; install the CUDA toolkit"):
            compile_cubin(JOB)
