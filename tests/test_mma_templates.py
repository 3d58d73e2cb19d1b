"""The templates of mma.sync, of 16-bit elements and of bf16 limbs: their spaces hold what they should; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from compiled_templates import compiled_as_declared

from autotile.core.device import device_profile
from autotile.core.model import Config
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.kernel.library import Kernel, load_kernel
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

SPACES = Path(__file__).parents[1] / "search_spaces"
MMA, LIMBS = (load_kernel(str(SPACES / f"{name}.toml")) for name in ("gemm_mma", "sgemm_bf16x6"))
H200 = device_profile("h200")
LAYOUTS = [{"TRANS_A": a, "TRANS_B": b} for a, b in product((0, 1), repeat=2)]
SHAPES = [(4096, 4096, 4096), (256, 256, 256), (128, 2112, 7168), (16, 6144, 4096), (512, 16, 500_000), (1, 1, 1)]
of_both = pytest.mark.parametrize("kernel", [MMA, LIMBS], ids=lambda kernel: kernel.name)


def sizes(kernel: Kernel, shape: tuple[int, int, int], **others: int) -> dict[str, int]:
    """Sizes of a problem with those of the flags that the kernel has."""
    flags = {name: value for name, value in others.items() if name in kernel.spec.flags}
    return {**kernel.spec.sizes, **dict(zip("MNK", shape, strict=True)), **flags}


def spilling(kernel: Kernel, part: int) -> Iterator[Config]:
    """Of configurations spread over the space, those that break its limit on spills."""
    for index, shape in enumerate(SHAPES[:4]):
        layout = LAYOUTS[(index + part) % 4]
        problem = sizes(kernel, shape, OUT_FP32=index % 2, NONDETERMINISTIC=part % 2, **layout)
        space = feasible_space(kernel.spec, problem, H200)
        config = dict(space.config((2 * part + 1) * len(space) // 6))
        architecture = "sm_90" if config["CLUSTER_SPLIT"] or part else "sm_80"
        dtype = kernel.spec.dtypes[part % len(kernel.spec.dtypes)]
        resources = compiled_as_declared(kernel, config, dtype, architecture, problem)
        if resources.spill_bytes > (kernel.spec.limits.max_spill_bytes or 0):
            yield config


@of_both
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_the_space_is_searchable_in_a_minute(kernel: Kernel, shape: tuple[int, int, int]) -> None:
    assert 1_000 <= len(feasible_space(kernel.spec, sizes(kernel, shape), H200)) <= 100_000


@of_both
@pytest.mark.parametrize("shape", SHAPES)
def test_the_default_is_right_for_every_size_and_device(kernel: Kernel, shape: tuple[int, int, int]) -> None:
    for layout, device in product(LAYOUTS, [H200, device_profile("a100")]):
        assert check_config(kernel.spec, dict(kernel.spec.default), sizes(kernel, shape, **layout), device) == ""


@of_both
def test_older_devices_get_no_clusters(kernel: Kernel) -> None:
    space = feasible_space(kernel.spec, sizes(kernel, (128, 2112, 7168)), device_profile("a100"))
    assert set(space.column("CLUSTER_SPLIT")) == {0}


@of_both
@pytest.mark.parametrize(
    ("architecture", "layout"),
    list(zip(("sm_80", "sm_90", "sm_90", "sm_80"), LAYOUTS, strict=True)),
    ids=str,
)
def test_the_default_spills_nothing(kernel: Kernel, architecture: str, layout: dict[str, int]) -> None:
    out_fp32 = layout["TRANS_A"]  # each element type is compiled for both architectures
    dtype = kernel.spec.dtypes[out_fp32 % len(kernel.spec.dtypes)]
    problem = sizes(kernel, SHAPES[0], OUT_FP32=out_fp32, NONDETERMINISTIC=0, **layout)
    job = compile_job(kernel, dict(kernel.spec.default), dtype, architecture, problem)
    assert compile_cubin(job).resources.spill_bytes == 0


@of_both
@pytest.mark.parametrize("part", range(3))
def test_configurations_spread_over_the_space_keep_its_limit_on_spills(kernel: Kernel, part: int) -> None:
    assert not list(spilling(kernel, part))
