"""The templates and their search spaces agree with each other, hold what they should, and compile; needs no GPU."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, Resources, Value
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.errors import InputError
from autotile.kernel.launch import LaunchPlan, fixed_names, launch_geometry, value_or_zero
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import capability_of, is_below, unsupported_reason
from autotile.space.limits import check_config
from autotile.space.search_space import SearchSpace, feasible_space

ROOT = Path(__file__).parents[1]
H200 = device_profile("h200")
ALONE = ("stencil_2d", "transpose_tma")
"""Examples whose templates have the default written in them, so that they compile without autotile."""
SPECS = [
    *sorted((ROOT / "search_spaces").glob("*.toml")),
    *(ROOT / "examples" / name / f"{name}.toml" for name in ALONE),
]


@pytest.fixture(scope="module", params=SPECS, ids=lambda path: path.stem)
def kernel(request):
    return load_kernel(str(request.param))


def without(*names: str) -> pytest.MarkDecorator:
    """All kernels but some, for which a test further below says more."""
    specs = [path for path in SPECS if path.stem not in names]
    return pytest.mark.parametrize("kernel", specs, indirect=True, ids=lambda path: path.stem)


def compiled_as_declared(
    kernel: Kernel, config: Config, dtype: str, architecture: str, sizes: Mapping[str, int]
) -> Resources:
    """Compile a configuration, and check static shared memory and registers against its search space.

    A warning of the assembler, as of an ignored setmaxnreg, is an error.
    """
    job = compile_job(kernel, config, kernel.spec.at(sizes, dtype), architecture)
    resources = compile_cubin(replace(job, options=(*job.options, "--ptxas-options=-Werror"))).resources
    launch = kernel.spec.steps[0].launch
    names: Mapping[str, Value] = {**fixed_names(kernel.spec, kernel.spec.at(sizes), device_profile("h200")), **config}
    assert resources.static_smem_bytes == value_or_zero(launch.static_smem_bytes, names), config
    if not resources.spill_bytes:
        assert resources.registers >= value_or_zero(launch.min_registers, names), config
    return resources


@pytest.mark.parametrize("device", ["h200", "rtx-3060"])
def test_the_default_is_valid_at_both_shapes(kernel, device):
    if unsupported_reason(kernel.spec, device_profile(device)):
        pytest.skip("the kernel is not for this device")
    for sizes in (kernel.spec.sizes, kernel.spec.ragged):
        assert fault(kernel, kernel.spec.default, sizes, device_profile(device)) == ""


def test_the_template_alone_has_the_default_of_the_search_space(kernel):
    flags = {name: kernel.spec.sizes[name] for name in kernel.spec.flags}
    declared: dict[str, Value] = {**kernel.spec.default, **flags}
    macros = dict(re.findall(r"^#define (\w+) (\w+)$", kernel.source, re.MULTILINE))
    written = {name: type(declared[name])(int(value)) for name, value in macros.items() if name != "DTYPE"}
    assert written == declared


def test_the_template_explains_every_parameter(kernel):
    comment = kernel.source.partition("\n\n")[0]
    for parameter in kernel.spec.parameters:
        assert re.search(rf"^// {{3}}.*\b{parameter.name}\b.* {{2}}", comment, re.MULTILINE), parameter.name


@without("gemm_mma", "gemm_wgmma", "sgemm_bf16x6")
def test_the_default_compiles_without_spilling_for_the_oldest_and_the_newest_device(kernel):
    least = kernel.spec.minimum_compute_capability or "1.0"
    supported = [name for name in ("sm_75", "sm_80", "sm_90") if not is_below(capability_of(name), least)]
    for architecture in {kernel.spec.architecture} if kernel.spec.architecture else {supported[0], supported[-1]}:
        default, dtype = kernel.spec.default, kernel.spec.dtypes[0]
        resources = compiled_as_declared(kernel, default, dtype, architecture, kernel.spec.sizes)
        assert (resources.spill_bytes, resources.stack_bytes) == (0, 0), architecture


@without("gemm_mma", "gemm_small", "gemm_wgmma", "sgemm", "sgemm_bf16x6", "sgemm_ws")
def test_what_is_declared_is_what_the_compiler_says(kernel):
    config = middle(kernel, kernel.spec.sizes, 0, 2)  # one that compiles in half the time of the middle one
    compiled_as_declared(kernel, config, kernel.spec.dtypes[0], "sm_90", kernel.spec.sizes)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_compiles_the_template_alone(kernel):
    target = (kernel.spec.architecture or "sm_90").removeprefix("sm_")
    command = ["nvcc", f"-gencode=arch=compute_{target},code=sm_{target}", "-std=c++17", "-Werror=all-warnings"]
    command += ["-ptx", "-Xcicc", "-O0"]  # optimized and assembled in the tests above
    command += [str(kernel.template_path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


NAMES = ("gemm_small", "gemm_wgmma", "gemm_wgmma_padded", "gemm_mma", "sgemm_bf16x6", "sgemm", "sgemm_ws")
NAMES += ("matmul_naive", "matmul_tiled", "sgemm_2d")
SMALL, WGMMA, PADDED, MMA, LIMBS, SGEMM, SGEMM_WS, NAIVE, TILED, SGEMM_2D = (
    load_kernel(str(ROOT / "search_spaces" / f"{name}.toml")) for name in NAMES
)


def test_an_unguarded_tile_is_admitted_only_where_tiles_are_whole():
    config = {**TILED.spec.default, "TILE": 16, "GUARDED": False}
    whole = {"M": 64, "N": 32, "K": 48}
    assert fault(TILED, config, whole) == ""
    for size in whole:
        assert "unguarded_needs_whole_tiles" in fault(TILED, config, {**whole, size: 33})


LAYOUTS = [{"TRANS_A": a, "TRANS_B": b} for a, b in product((0, 1), repeat=2)]
Shape = tuple[int, int, int]


def sizes(kernel: Kernel, shape: Shape, **others: int) -> dict[str, int]:
    """Sizes of a problem with those of the flags that the kernel has."""
    flags = {name: value for name, value in others.items() if name in kernel.spec.flags}
    return {**kernel.spec.sizes, **dict(zip("MNK", shape, strict=True)), **flags}


def feasible(kernel: Kernel, problem: Mapping[str, int], device: DeviceProperties = H200) -> SearchSpace:
    return feasible_space(kernel.spec, kernel.spec.at(problem), device)


def fault(kernel: Kernel, config: Config, problem: Mapping[str, int], device: DeviceProperties = H200) -> str:
    return check_config(kernel.spec, config, kernel.spec.at(problem), device)


def middle(kernel: Kernel, problem: Mapping[str, int], part: int, parts: int) -> Config:
    """The configuration in the middle of one of the equal parts of a space."""
    space = feasible(kernel, problem)
    return space.config((2 * part + 1) * len(space) // (2 * parts))


def named(*kernels: Kernel) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", kernels, ids=lambda kernel: kernel.name)


SMALL_SHAPES = [(1, 4096, 7168), (16, 6144, 4096), (512, 16, 500_000), (5124, 7, 2560)]
WGMMA_SHAPES = [(256, 256, 256), (4096, 4096, 4096), (128, 2112, 7168), (64, 7168, 16384), (65536, 128, 128)]
MATRIX = (4096, 4096, 4096)
FP32_SHAPES = [(256, 256, 256), (64, 7168, 16384), (512, 16, 500000), (1023, 701, 511)]
MMA_SHAPES = [MATRIX, (256, 256, 256), (128, 2112, 7168), (16, 6144, 4096), (512, 16, 500_000), (1, 1, 1)]
SEARCHABLE = [
    *((SMALL, shape, layout, (1_000, 100_000)) for shape, layout in product(SMALL_SHAPES, LAYOUTS)),
    *((WGMMA, shape, layout, (1_000, 100_000)) for shape, layout in product(WGMMA_SHAPES, LAYOUTS)),
    *((kernel, shape, {}, (1_000, 100_000)) for kernel, shape in product((MMA, LIMBS), MMA_SHAPES[:-1])),
    *((kernel, shape, {}, (101, None)) for kernel, shape in product((SGEMM, SGEMM_WS), FP32_SHAPES)),
    *((NAIVE, MATRIX, {}, (100, 1000)), (TILED, MATRIX, {}, (50, 500)), (SGEMM_2D, MATRIX, {}, (6_000, 15_000))),
]


@pytest.mark.parametrize(
    ("kernel", "shape", "layout", "bounds"), SEARCHABLE, ids=lambda each: getattr(each, "name", str(each))
)
def test_the_space_is_large_but_searchable_in_a_minute(kernel, shape, layout, bounds):
    found, (least, most) = len(feasible(kernel, sizes(kernel, shape, **layout))), bounds
    assert least <= found <= (most or found)


SQUARES = [(size, size, size) for size in (68, 256, 1024, 4096)]


@named(WGMMA, MMA, LIMBS, SGEMM, SGEMM_WS)
def test_the_default_is_valid_for_every_size_layout_and_device(kernel):
    shapes = {"gemm_wgmma": SQUARES[3:], "gemm_mma": MMA_SHAPES, "sgemm_bf16x6": MMA_SHAPES}.get(kernel.name, SQUARES)
    devices = [H200, device_profile("a100")] if kernel in (MMA, LIMBS) else [H200]
    for shape, layout, device in product(shapes, LAYOUTS, devices):
        problem = sizes(kernel, shape, OUT_FP32=layout["TRANS_A"] ^ layout["TRANS_B"], **layout)
        assert fault(kernel, kernel.spec.default, problem, device) == "", (shape, layout, device.name)


SPREAD = [
    *((SMALL, shape, ("sm_80", "sm_90")[index % 2]) for index, shape in enumerate(SMALL_SHAPES)),
    *((WGMMA, shape, "sm_90a") for shape in WGMMA_SHAPES),
    *product((MMA, LIMBS), MMA_SHAPES[:4], ("",)),
    *((kernel, (700, 520, kernel.spec.sizes["K"]), "sm_90a") for kernel in (SGEMM, SGEMM_WS) for _ in range(2)),
]


@pytest.mark.parametrize("index", range(len(SPREAD)), ids=[f"{kernel.name}-{shape}" for kernel, shape, _ in SPREAD])
def test_configurations_spread_over_the_space_keep_its_limit_on_spills(index):
    """So that a search rejects none after compiling."""
    (kernel, shape, architecture), part = SPREAD[index], index % 2
    layout = LAYOUTS[(index + 2 * part) % 4]
    problem = sizes(kernel, shape, OUT_FP32=(index + part) % 2, NONDETERMINISTIC=part, **layout)
    config = middle(kernel, problem, part, 2)
    if not architecture:
        architecture = "sm_90" if config["CLUSTER_SPLIT"] or part else "sm_80"
    dtype = kernel.spec.dtypes[(index // 2 + 2 * part) % len(kernel.spec.dtypes)]
    resources = compiled_as_declared(kernel, config, dtype, architecture, problem)
    limit = 300 if kernel in (SGEMM, SGEMM_WS) else kernel.spec.max_spill_bytes
    assert resources.spill_bytes <= limit, config


OF_AMPERE = list(zip(("sm_80", "sm_90", "sm_90", "sm_80"), LAYOUTS, strict=True))
DEFAULTS = [
    *((WGMMA, "sm_90a", layout) for layout in LAYOUTS),
    *((kernel, *each) for kernel in (MMA, LIMBS) for each in OF_AMPERE),
]


@pytest.mark.parametrize(
    ("kernel", "architecture", "layout"), DEFAULTS, ids=lambda each: getattr(each, "name", str(each))
)
def test_the_default_spills_nothing_in_any_layout(kernel, architecture, layout):
    out_fp32 = layout["TRANS_A"]  # each element type is compiled for both architectures
    dtype = kernel.spec.dtypes[out_fp32 % len(kernel.spec.dtypes)]
    problem = sizes(kernel, MMA_SHAPES[0], OUT_FP32=out_fp32, NONDETERMINISTIC=0, **layout)
    resources = compiled_as_declared(kernel, kernel.spec.default, dtype, architecture, problem)
    assert resources.spill_bytes == 0
    assert out_fp32 or resources.stack_bytes == 0


FIXED = [
    *((SMALL, *each, H200, ("SMALL_A", int(each[0][0] < each[0][1]))) for each in product(SMALL_SHAPES, LAYOUTS)),
    (WGMMA, (64, 101, 64), {"TRANS_B": 1}, H200, ("TMA_STORE", 0)),  # the threads write odd rows of C
    (WGMMA, MATRIX, {}, H200, ("CLUSTER_SPLIT", 0)),  # clusters along K are for few tiles, on sm_90
    *((kernel, (128, 2112, 7168), {}, device_profile("a100"), ("CLUSTER_SPLIT", 0)) for kernel in (MMA, LIMBS)),
]


@pytest.mark.parametrize(
    ("kernel", "shape", "flags", "device", "only"),
    FIXED,
    ids=[f"{kernel.name}-{shape}-{flags}" for kernel, shape, flags, *_ in FIXED],
)
def test_the_problem_and_the_device_leave_one_value(kernel, shape, flags, device, only):
    space = feasible(kernel, sizes(kernel, shape, **flags), device)
    assert set(space.column(only[0])) == {only[1]}


@pytest.mark.parametrize(
    ("kernel", "shape", "flags", "rule"),
    [
        (SMALL, (17, 17, 1000), {}, "vector_like"),
        (WGMMA, (64, 64, 100), {}, "whole_rows"),  # which the copy engine cannot take
        (WGMMA, (64, 100, 64), {}, "whole_rows"),
        (WGMMA, (100, 64, 64), {"TRANS_A": 1}, "whole_rows"),
        (PADDED, (2**15 + 1, PADDED.spec.sizes["N"], 2**14 + 1), {}, "copies_of_a_gibibyte"),
        (PADDED, (2**31 - 1, 2**31 - 1, 2**31 - 1), {}, "copies_of_a_gibibyte"),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_a_rule_leaves_nothing(kernel, shape, flags, rule):
    with pytest.raises(InputError, match=rule):
        feasible(kernel, sizes(kernel, shape, **flags))


def test_clusters_along_k_are_for_few_tiles():
    problem = sizes(WGMMA, (2560, 64, 2560))
    space = feasible(WGMMA, problem)
    clusters = [config for config in map(space.config, range(len(space))) if config["CLUSTER_SPLIT"] == 1]
    assert {config["SPLIT_K"] for config in clusters} == set(range(2, 9))
    assert all(config["PINGPONG"] == 0 and config["CLUSTER_M"] == config["CLUSTER_N"] == 1 for config in clusters)
    for config in clusters[:: len(clusters) // 4]:
        assert compiled_as_declared(WGMMA, config, "float16", "sm_90a", problem).spill_bytes == 0


# --- wgmma over padded copies


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_rows_of_any_length_at_any_address_are_copied(tmp_path):
    """With zeros behind each row, and without a load outside of the matrix."""
    source, program = Path(__file__).parent / "emulator" / "padded_rows_on_cpu.cpp", tmp_path / "copy"
    command = ["g++", "-std=c++17", "-O1", f"-I{ROOT / 'templates'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("part", range(3))
def test_configurations_with_copies_compile_without_spilling(part):
    problem = sizes(PADDED, (1905, 653, 4737), TRANS_A=part % 2, TRANS_B=part // 2)
    assert 1000 <= len(feasible(PADDED, problem)) <= 100_000
    job = compile_job(PADDED, middle(PADDED, problem, part, 3), PADDED.spec.at(problem, "float16"), "sm_90a")
    cubin = compile_cubin(replace(job, options=(*job.options, "--ptxas-options=-Werror")))
    spills = {entry: found.resources.spill_bytes for entry, found in cubin.functions.items()}
    assert spills == {"pad_rows": 0, "gemm_wgmma": 0}


def test_the_product_is_the_main_step():
    plan = LaunchPlan.of(PADDED.spec, PADDED.spec.default, PADDED.spec.at(), H200)
    assert (len(plan.launches), plan.main.step) == (2, 1)
    assert plan.launches[0].threads > plan.main.threads


# --- fp32


@named(SGEMM, SGEMM_WS)
def test_all_configurations_of_large_enough_squares_are_verified_at_the_ragged_shape(kernel):
    ragged = feasible(kernel, kernel.spec.ragged)
    for size in (256, 1024, 4096):
        problem = sizes(kernel, (size, size, size))
        assert kernel.spec.ragged_sizes(problem) == kernel.spec.ragged
        assert feasible(kernel, problem).rows_in(ragged).all(), size


@named(SGEMM, SGEMM_WS)
def test_few_blocks_have_little_to_do(kernel):
    space = feasible(kernel, sizes(kernel, (1024, 1024, 1024)))
    bm, bn, splits = (space.column(name) for name in ("BM", "BN", "SPLIT_K"))
    blocks = 1024 // bm * (1024 // bn) * splits
    defaults_tile = (bm == 128) & (bn == 128) & (splits == 1)
    assert (blocks[~defaults_tile] >= H200.sm_count / 2).all()
    assert np.mean(defaults_tile) < 0.05


@named(SGEMM, SGEMM_WS)
def test_what_is_transposed_is_swizzled_or_padded(kernel):
    padded, swizzled = ({**kernel.spec.default, "SWIZZLE": swizzle} for swizzle in (0, 1))
    transposed = {**kernel.spec.sizes, "TRANS_B": 1}
    of = kernel.spec.at(transposed), H200
    geometries = [launch_geometry(kernel.spec, config, *of) for config in (padded, swizzled)]
    gaps = 4 * (4 + 4) * padded["BK"] * padded["STAGES"]
    assert geometries[0].dynamic_smem_bytes - geometries[1].dynamic_smem_bytes == gaps
    copied = {**kernel.spec.sizes, "TRANS_A": 1}
    assert "swizzle_is_felt" in fault(kernel, swizzled, copied)


@named(SGEMM, SGEMM_WS)
def test_wide_loads_are_for_rows_that_allow_them(kernel):
    aligned, odd = ({**kernel.spec.sizes, "N": n, "K": n} for n in (512, 511))
    narrow = {**kernel.spec.default, "VEC": 1}
    assert fault(kernel, kernel.spec.default, aligned) == ""
    assert "wide_where_it_fits" in fault(kernel, kernel.spec.default, odd)
    assert fault(kernel, narrow, odd) == fault(kernel, narrow, aligned) == ""
    assert feasible(kernel, odd).row_of(narrow) is not None
    assert feasible(kernel, aligned).row_of(narrow) is None
