"""Configurations that are served by their estimated times compute the right results."""

from __future__ import annotations

import pytest

from autotile.cuda.driver import live_device
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel, KernelCode
from autotile.serving.choice import Choice
from autotile.serving.selection import KernelRequest, Shelf, untuned_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gemm_mma", (64, 64, 32768)), ("sgemm", (33, 1000, 4096)), ("sgemm_2d", (64, 2048, 2048))],
)
def test_the_least_estimate_is_right(name: str, sizes: tuple[int, int, int]) -> None:
    import cupy

    kernel, device = load_kernel(name), live_device(0)
    problem = resolve_problem(kernel.spec, dict(zip("MNK", sizes, strict=True)), None)
    config, estimated = untuned_config(KernelRequest(kernel, problem, device, "", Shelf()))
    if estimated is None:
        pytest.skip(f"the default is served on {device.name}")
    rng = cupy.random.default_rng(0)
    m, n, k = sizes
    half = problem.dtype != "float32"
    a, b = (rng.standard_normal(shape, dtype=cupy.float32) for shape in ((m, k), (k, n)))
    if half:
        kernel_dtype = resolve_problem(kernel.spec, dict(problem.sizes), "float16")
        problem, a, b = kernel_dtype, a.astype(cupy.float16), b.astype(cupy.float16)
        config, estimated = untuned_config(KernelRequest(kernel, problem, device, "", Shelf()))
    served = BoundKernel(
        KernelCode(kernel, problem, device, config), Choice("default", config, estimated=estimated), device, 0
    )
    found = served(a, b).astype(cupy.float64).reshape(m, n)
    expected = a.astype(cupy.float64) @ b.astype(cupy.float64)
    tolerance = (2e-3 if half else 1e-5) * float(cupy.abs(expected).max())
    assert float(cupy.abs(found - expected).max()) <= tolerance
