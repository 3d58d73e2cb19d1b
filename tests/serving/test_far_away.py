"""Far from all tuned sizes, only configurations are served that a search would try there."""

import pytest

from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.exchange.shipped import shipped_winners
from autotile.kernel.library import load_kernel
from autotile.serving.selection import KernelRequest, Shelf, choose
from autotile.space.limits import check_config, meets_heuristics
from autotile.space.search_space import feasible_space

KERNELS = ("sgemm", "sgemm_ws", "gemm_mma", "sgemm_bf16x6", "gemm_wgmma")
H200 = device_profile("h200")


def problem_of(name: str, **sizes: int) -> Problem:
    spec = load_kernel(name).spec
    return Problem(name, {**spec.sizes, **sizes}, spec.dtypes[0])


@pytest.mark.parametrize("device", ["h200", "a100"])
@pytest.mark.parametrize("size", [1024, 2048, 4096])
def test_a_winner_of_far_smaller_products_is_not_served(device: str, size: int) -> None:
    kernel, properties = load_kernel("sgemm"), device_profile(device)
    problem = problem_of("sgemm", M=size, N=size, K=size)
    small = [
        best
        for best in shipped_winners("sgemm", "float32")
        if all(best.key.sizes[name] <= 256 for name in ("M", "N", "K"))
    ]
    assert small
    chosen = choose(KernelRequest(kernel, problem, properties, small[0].key.nvrtc_version, Shelf(small)))
    assert meets_heuristics(kernel.spec, chosen.config, problem.sizes, properties)


def test_a_winner_nearby_is_served_though_a_search_would_not_try_it() -> None:
    kernel = load_kernel("sgemm")
    (best, *_) = (
        best for best in shipped_winners("sgemm", "float32") if best.key.sizes["M"] == best.key.sizes["N"] == 256
    )
    sizes = {**best.key.sizes, "M": 400}
    chosen = choose(
        KernelRequest(kernel, Problem("sgemm", sizes, "float32"), H200, best.key.nvrtc_version, Shelf([best]))
    )
    assert chosen.tier == "nearest"
    assert chosen.config == best.config


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sizes", [(2, 4096, 4096), (64, 64, 8192), (16, 4096, 7168), (4096, 16, 512)])
def test_an_untuned_kernel_is_served_as_a_search_would_begin(name: str, sizes: tuple[int, int, int]) -> None:
    """If any configuration is valid, there is a space to search."""
    kernel = load_kernel(name)
    problem = problem_of(name, **dict(zip("MNK", sizes, strict=True)))
    chosen = choose(KernelRequest(kernel, problem, H200, "13.0", Shelf()))
    assert chosen.tier == "default"
    assert check_config(kernel.spec, chosen.config, problem.sizes, H200, problem.dtype) == ""
    space = feasible_space(kernel.spec, problem.sizes, H200, problem.dtype)
    assert space.row_of(chosen.config) is not None
