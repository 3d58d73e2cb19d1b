"""The templates and their search spaces agree with each other and compile for real architectures; needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled_templates import compiled_as_declared

from autotile.core.device import device_profile
from autotile.core.model import Config, Resources, Value
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import capability_of, is_below, unsupported_reason
from autotile.space.limits import check_config
from autotile.space.search_space import SearchSpace, feasible_space

ROOT = Path(__file__).parents[1]
H200 = device_profile("h200")
ALONE = ("stencil_2d", "transpose_tma")
"""Examples whose templates have the default written in them, so that they compile without autotile."""
SPREAD_ELSEWHERE = {"gemm_mma", "gemm_small", "gemm_wgmma", "sgemm", "sgemm_bf16x6", "sgemm_ws"}
SPECS = [
    *sorted((ROOT / "search_spaces").glob("*.toml")),
    *(ROOT / "examples" / name / f"{name}.toml" for name in ALONE),
]


@pytest.fixture(scope="module", params=SPECS, ids=lambda path: path.stem)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return load_kernel(str(request.param))


def spread(space: SearchSpace, count: int) -> Iterator[Config]:
    """Configurations at even distances over the whole space."""
    return (space.config((2 * i + 1) * len(space) // (2 * count)) for i in range(count))


def compiled(kernel: Kernel, config: Config, architecture: str) -> Resources:
    return compile_cubin(compile_job(kernel, config, kernel.spec.dtypes[0], architecture)).resources


def declared_defaults(kernel: Kernel) -> dict[str, Value]:
    """Parameters and flags with their defaults, as the search space has them."""
    return {**kernel.spec.default, **{name: kernel.spec.sizes[name] for name in kernel.spec.flags}}


def written_defaults(kernel: Kernel) -> dict[str, Value]:
    """The same as the template gives them to itself, with the element type left out."""
    macros = dict(re.findall(r"^#define (\w+) (\w+)$", kernel.source, re.MULTILINE))
    kinds = {name: type(value) for name, value in declared_defaults(kernel).items()}
    return {name: kinds[name](int(value)) for name, value in macros.items() if name != "DTYPE"}


@pytest.mark.parametrize("device", ["h200", "rtx-3060"])
def test_the_default_is_valid_at_both_shapes(kernel: Kernel, device: str) -> None:
    if unsupported_reason(kernel.spec, device_profile(device)):
        pytest.skip("the kernel is not for this device")
    for sizes in (kernel.spec.sizes, kernel.spec.ragged):
        assert check_config(kernel.spec, kernel.spec.default, sizes, device_profile(device)) == ""


def test_the_template_alone_has_the_default_of_the_search_space(kernel: Kernel) -> None:
    assert written_defaults(kernel) == declared_defaults(kernel)


def test_the_template_explains_every_parameter(kernel: Kernel) -> None:
    comment = kernel.source.partition("\n\n")[0]
    for parameter in kernel.spec.parameters:
        assert re.search(rf"^// {{3}}.*\b{parameter.name}\b.* {{2}}", comment, re.MULTILINE), parameter.name


@pytest.mark.parametrize("newest", [False, True])
def test_the_default_compiles_without_spilling(kernel: Kernel, newest: bool) -> None:
    least = kernel.spec.minimum_compute_capability or "1.0"
    supported = [name for name in ("sm_75", "sm_80", "sm_90") if not is_below(capability_of(name), least)]
    if (len(supported) == 1 or kernel.spec.architecture) and not newest:
        pytest.skip("there is one architecture, the newest")
    architecture = supported[-1 if newest else 0]
    resources = compiled(kernel, kernel.spec.default, architecture)
    assert resources.spill_bytes == 0
    assert resources.stack_bytes == 0


def test_what_is_declared_is_what_the_compiler_says(kernel: Kernel) -> None:
    if kernel.name in SPREAD_ELSEWHERE:
        pytest.skip("its own tests compile configurations spread over its space")
    for config in spread(feasible_space(kernel.spec, kernel.spec.sizes, H200), count=2):
        compiled_as_declared(kernel, config, kernel.spec.dtypes[0], "sm_90", kernel.spec.sizes)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_compiles_the_template_alone(kernel: Kernel) -> None:
    target = (kernel.spec.architecture or "sm_90").removeprefix("sm_")
    command = ["nvcc", f"-gencode=arch=compute_{target},code=sm_{target}", "-std=c++17", "-Werror=all-warnings"]
    command += ["-ptx", str(kernel.template_path), "-o", "/dev/null"]  # assembled in the tests above
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "least", "most"), [("matmul_naive", 100, 1000), ("matmul_tiled", 50, 500), ("sgemm_2d", 6_000, 15_000)]
)
def test_the_space_is_large_but_not_padded(name: str, least: int, most: int) -> None:
    spec = load_kernel(str(ROOT / "search_spaces" / f"{name}.toml")).spec
    assert least <= len(feasible_space(spec, {"M": 4096, "N": 4096, "K": 4096}, H200)) <= most


def test_an_unguarded_tile_is_admitted_only_where_tiles_are_whole() -> None:
    spec = load_kernel(str(ROOT / "search_spaces" / "matmul_tiled.toml")).spec
    config = {**spec.default, "TILE": 16, "GUARDED": False}
    whole = {"M": 64, "N": 32, "K": 48}
    assert check_config(spec, config, whole, H200) == ""
    for size in whole:
        assert "unguarded_needs_whole_tiles" in check_config(spec, config, {**whole, size: 33}, H200)
