"""Sources as they are written for nvcc, compiled with NVRTC."""

import sys
from pathlib import Path

import pytest
from cuda import pathfinder

from autotile.api.doctor import doctor
from autotile.cuda import compiler, headers
from autotile.cuda.compiler import CompileJob, compile_cubin
from autotile.cuda.headers import find_header
from autotile.errors import CompileError

USES = {
    "cstdint": "std::uint32_t(3) + uint8_t(4) + INT64_MAX",
    "stdint.h": "uint64_t(3)",
    "cfloat": "FLT_MAX + DBL_EPSILON",
    "climits": "INT_MAX",
    "limits": "std::numeric_limits<float>::infinity() + std::numeric_limits<int>::max()",
    "type_traits": "std::is_same_v<std::remove_cv_t<const int>, int>",
    "cmath": "std::sqrt(x[0]) + std::fabs(x[1]) + INFINITY + NAN + M_PI",
    "math.h": "sqrtf(x[0]) + HUGE_VAL",
    "cassert": "(assert(x[0] > 0), 1)",
    "cstdio": 'printf("%d", 4)',
    "cstdlib": "std::abs(-4)",
    "cstring": "(std::memcpy(x, x + 1, sizeof(float)), 1)",
    "cstddef": "std::size_t(4) + offsetof(float4, y)",
    "cuda.h": "sizeof(CUtensorMap)",
    "cuda_runtime.h": "make_float4(1, 2, 3, 4).x",
    "cuda_fp8.h": "float(__nv_fp8_e4m3(2.0f))",
    "mma.h": "nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>::num_elements",
}


PROGRAMS = Path(__file__).with_name("programs")


def program(name: str) -> str:
    return (PROGRAMS / name).read_text()


def job(source: str, template: Path = Path("/nowhere/x.cu"), **changes: object) -> CompileJob:
    fields = {"entry": "k", "architecture": "sm_90", "options": (), **changes}
    return CompileJob(source, str(hash(source)), str(template), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("header", USES)
def test_a_header_and_what_it_declares(header):
    if header == "mma.h" and find_header("crt/mma.h") is None:
        pytest.skip("neither nvidia-cuda-crt nor a toolkit is installed")
    assert compile_cubin(job(f"#include <{header}>\n__global__ void k(float* x) {{ x[0] = {USES[header]}; }}")).cubin


def test_the_standard_headers_agree_with_the_toolkits():
    """Types that both define are the same, in either order; the traits have the values that C++ demands."""
    ours = "#include <limits>\n#include <type_traits>\n#include <cstdint>\n#include <cstddef>\n"
    theirs = "#include <cuda/std/limits>\n#include <cuda/std/type_traits>\n#include <algorithm>\n#include <array>\n"
    for source in (ours + theirs, theirs + ours):
        assert compile_cubin(job(source + program("standard_types.cu"))).cubin


def test_complex_numbers_of_thrust_and_cub_as_a_whole():
    """The header of complex numbers declares stream operators, of which NVRTC has no streams."""
    assert compile_cubin(job(program("thrust_and_cub.cu"), entry="k<128>")).resources.static_smem_bytes > 0


def test_what_nvcc_declares_without_a_header():
    source = "__global__ void k(float* x, uint32_t n) { x[n] = INFINITY + M_PI + std::abs(x[0]) + size_t(n); }"
    assert compile_cubin(job(source)).cubin
    assert job(source).source_hash in compiler._written_for_nvcc
    assert compile_cubin(job(source.replace("M_PI", "T + value"), options=("-DT=16", "-Dvalue"))).cubin  # NVRTC's own


def test_folders_of_the_author_and_a_header_that_options_include_first_which_sees_the_macros(tmp_path):
    """Without host code, the folders are the compiler's own business."""
    (tmp_path / "scale.h").write_text("#define SCALE 3\n")
    (tmp_path / "first.h").write_text("constexpr int twice = 2 * TILE;\n")
    options = "-DTILE=8", f"--pre-include={tmp_path}/first.h"
    source = "#include <scale.h>\n__global__ void k(int* y) { y[0] = SCALE * twice; }"
    assert compile_cubin(job(source, options=options, include_folders=(str(tmp_path),))).cubin


def test_a_whole_program():
    assert compile_cubin(job(program("whole.cu"), entry="k<32>")).functions["k<32>"].symbol == "_Z1kILi32EEvPf"


def test_headers_of_the_author_with_host_code():
    """Headers are found beside the template, beside the header that includes them, and in an include folder."""
    name = "with_headers.cu"
    assert compile_cubin(job(program(name), PROGRAMS / name, include_folders=(str(PROGRAMS / "own"),))).cubin


@pytest.mark.parametrize(
    ("source", "cure"),
    [
        ('#include "missing.h"\n__global__ void k() {}', r"\[kernel\] include = "),
        ("#include <cutlass/cutlass.h>\n__global__ void k() {}", "AUTOTILE_INCLUDE"),
        ("#include <curand_none.h>\n__global__ void k() {}", "pip install nvidia-curand"),
        ("__global__ void k(float* x) { x[0] = TILE; }", r"defines = \{ TILE ="),
        ("static const int BLOCK = 128;\n__global__ void k(float* x) { x[0] = BLOCK; }", "BLOCK is a parameter here"),
        ("struct P { int BLOCK; };\n__global__ void k(P p) {}", "the compiler reads '64' for it"),
        ("__global__ void k(float* x) { float* BLOCK::y = x; }", "BLOCK is a parameter here"),
        ("__global__ void k(float* x) { std::vector<int> v; }", "__CUDACC_RTC__"),
        (  # of whose lines none is left out
            "#warning first\n#include <vector>\nint main()\n{\n\n}\n__global__ void k(float* x) { x[0] = y; }",
            r'^x\.cu\(7\): error: identifier "y" is undefined',
        ),
    ],
)
def test_an_error_gives_the_cure_and_the_line(source, cure):
    with pytest.raises(CompileError, match=cure):
        compile_cubin(job(source, options=("-DBLOCK=64",)))


def test_a_toolkit_of_another_major_version_is_not_used(tmp_path, monkeypatch):
    for name, version in (("old", 11080), ("near", 13990), ("same", 0)):
        folder = tmp_path / name / "include"
        folder.mkdir(parents=True)
        major, minor = map(int, headers.nvrtc_version().split("."))
        (folder / "cuda.h").write_text(f"#define CUDA_VERSION {version or major * 1000 + minor * 10}\n")
    monkeypatch.setattr(headers, "_wheel_folders", list)
    monkeypatch.setattr(headers, "toolkit_folders", lambda: tuple(tmp_path / n for n in ("old", "near", "same")))
    found = headers.toolkit_headers.__wrapped__()
    expected = ["same"] + (["near"] if headers.nvrtc_version().startswith("13.") else [])
    assert found == tuple(str(tmp_path / name / "include") for name in expected)


class TestSeveralInstallations:
    """Other packages, such as PyTorch's wheels, may bring an older CCCL, in a folder that Python searches first."""

    @pytest.fixture
    def wheel(self, tmp_path, monkeypatch):
        """Write a CCCL as a wheel installs it, into a new folder of packages."""
        monkeypatch.setattr(headers, "toolkit_folders", tuple)

        def write(place: str, version: str, layout: str = "cu13/include/cccl", *, lies_first: bool = True) -> Path:
            site = tmp_path / place
            folder = site / "nvidia" / layout
            major, minor, patch = map(int, version.split("."))
            number = major * 1_000_000 + minor * 1000 + patch
            texts = {
                "__cccl/version.h": f"#pragma once\n#define CCCL_VERSION {number}\n",
                "__cccl_config": f"#define FOUND {number}\n",
                "version": "",
                "limits": '#error "the older limits"\n',
            }
            texts |= dict.fromkeys(("__algorithm_", "__algorithm/max.h"), "#include <cuda/std/__cccl_config>\n")
            if number >= 3_001_000:
                texts["algorithm"] = "#include <cuda/std/__algorithm/max.h>\n"
            for name, text in texts.items():
                file = folder / "cuda" / "std" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            path = [str(site), *sys.path] if lies_first else [*sys.path, str(site)]
            monkeypatch.setattr(sys, "path", path)
            headers.toolkit_headers.cache_clear()
            return folder

        return write

    @pytest.fixture(autouse=True)
    def _forget(self):
        yield
        headers.toolkit_headers.cache_clear()

    @pytest.mark.parametrize("layout", ["cu13/include/cccl", "cuda_cccl/include"])
    def test_an_older_one_that_is_first(self, wheel, layout):
        newest = headers.cccl_folders()[0]
        older = wheel("torch", "2.8.2", layout)
        assert headers.cccl_folders()[0] == newest
        assert ("2.8.2", str(older)) in headers.cccl_folders() or layout == "cuda_cccl/include"
        source = "#include <cuda/std/__cccl/version.h>\n__global__ void k() { static_assert(CCCL_VERSION > 2008002); }"
        assert compile_cubin(job(source)).cubin

    @pytest.mark.parametrize("first", [True, False])
    def test_the_newest_of_several(self, wheel, first):
        wheel("b", "3.98.1")
        newest = wheel("a", "3.99.0", lies_first=first)
        older = wheel("c", "3.97.7", lies_first=not first)
        (older / "cuda" / "std" / "only_older").touch()  # CUTLASS looks which there are
        versions = [version for version, _ in headers.cccl_folders()]
        assert versions[:3] == ["3.99.0", "3.98.1", "3.97.7"]
        assert find_header("cuda/std/algorithm") == newest / "cuda" / "std" / "algorithm"
        assert find_header("cuda/std/only_older") is None
        declared = "namespace cuda { namespace std {} }\n"
        source = f"{declared}#include <algorithm>\n__global__ void k(int* x) {{ static_assert(FOUND == 3099000); }}"
        assert compile_cubin(job(source)).cubin

    def test_only_an_older_one(self, wheel, monkeypatch):
        """It names the header of the algorithms otherwise."""
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda _: None)
        wheel("old", "3.0.1")
        source = (
            "namespace cuda { namespace std {} }\n#include <algorithm>\n__global__ void k(int* x) { x[0] = FOUND; }"
        )
        assert compile_cubin(job(source)).cubin
        with pytest.raises(CompileError, match=r"CCCL 3\.0\.1 in .*old.* has no cuda/std/ranges; .*--upgrade"):
            compile_cubin(job("#include <cuda/std/ranges>\n__global__ void k(int* x) { }"))

    def test_a_toolkit_with_a_newer_one(self, wheel, tmp_path, monkeypatch):
        """Toolkits of CUDA 12 have CCCL among their own headers."""
        major, minor = map(int, headers.nvrtc_version().split("."))
        toolkit = wheel("toolkit", "3.98.0", lies_first=False).parents[3] / "root"
        (tmp_path / "toolkit" / "nvidia" / "cu13" / "include" / "cccl").rename(toolkit.with_name("moved"))
        (toolkit / "include").parent.mkdir(parents=True)
        toolkit.with_name("moved").rename(toolkit / "include")
        (toolkit / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {major * 1000 + minor * 10}\n")
        monkeypatch.setattr(headers, "toolkit_folders", lambda: (toolkit,))
        older = wheel("older", "3.97.0")
        newer = wheel("newer", "3.99.0")
        found = headers.toolkit_headers()
        order = [found.index(str(folder)) for folder in (newer, toolkit / "include", older)]
        assert order == sorted(order)

    def test_doctor(self, wheel):
        newest = wheel("new", "3.99.0")
        older = wheel("old", "3.0.1")
        (check,) = (check for check in doctor().checks if check.name == "CCCL")
        assert check.detail.startswith(f"3.99.0 in {newest}; ")
        assert f"3.0.1 in {older}" in check.detail
