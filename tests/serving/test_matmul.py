"""Choice of the kernel of a matrix product, without a device."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_runs import add_trial, end_run, start_run

import autotile
from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Trial
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.errors import ArgumentError
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher
from autotile.settings import read_settings

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gemm_product import Product, emulating_kernels, fitting_kernels

KERNELS = {member.name for member in load_operation("matmul").members}
PRODUCT = Product(2048, 2048, 2048)


def best_matmul(product: Product, **options: Any) -> BoundKernel:
    """Return what is served for a product."""
    return default_dispatcher.serve_operation("matmul", product.sizes, product.dtype, **options)


def store_winner(name: str, product: Product, time_us: float, database: Path | None = None) -> None:
    """Store a kernel's default configuration as the winner for a product, in the user's database or another one."""
    kernel, device = load_kernel(name), replace(device_profile("h200"), source="cuda")
    problem = resolve_problem(kernel.spec, fitting_kernels(product)[name], product.dtype)
    measurement = Measurement(time_us, 0.99 * time_us, 1.01 * time_us)
    trial = Trial(kernel.spec.default, Outcome.OK, "", "finals", measurement=measurement)
    with Database.open(database or read_settings().database) as opened:
        key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
        study = opened.study(key, device)
        run = start_run(opened, study, sampler="random")
        add_trial(opened, study, run, trial, phase="final", rank=1)
        end_run(opened, run)


@pytest.mark.usefixtures("live_gpu")
def test_only_what_is_launched_counts_as_a_miss() -> None:
    kernel = best_matmul(Product(1001, 999, 1003), library=False)
    assert kernel.tier != "exact"
    assert default_dispatcher.misses.kernels == (kernel,)
    assert best_matmul(Product(1001, 999, 1003), library=False) is kernel


@pytest.mark.usefixtures("live_gpu")
@pytest.mark.parametrize("emulate", [True, False])
def test_what_is_computed_from_parts_is_launched_only_where_that_is_allowed(emulate: bool) -> None:
    store_winner("sgemm_bf16x6", PRODUCT, 2.0)
    store_winner("sgemm_ws", PRODUCT, 3.0)
    store_winner("sgemm", PRODUCT, 4.0)
    kernel = best_matmul(replace(PRODUCT, emulate=emulate))
    assert (kernel.kernel, kernel.tier) == ("sgemm_bf16x6" if emulate else "sgemm_ws", "exact")


def test_without_emulation_all_but_the_emulated_kernels_fit() -> None:
    anything, ieee = fitting_kernels(PRODUCT), fitting_kernels(replace(PRODUCT, emulate=False))
    assert emulating_kernels() < KERNELS
    assert anything.keys() - ieee.keys() == emulating_kernels()
    assert ieee == {name: sizes for name, sizes in anything.items() if name not in emulating_kernels()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_emulation_is_a_question_of_float32_only(dtype: str) -> None:
    product = replace(PRODUCT, dtype=dtype)
    assert fitting_kernels(product) == fitting_kernels(replace(product, emulate=False))


def test_a_path_names_a_database(tmp_path: Path) -> None:
    def served(path: Path) -> tuple[str, str]:
        kernel = best_matmul(PRODUCT, device="NVIDIA H200", database=path)
        return kernel.kernel, kernel.tier

    slow, fast = tmp_path / "slow.db", tmp_path / "fast.db"
    store_winner("sgemm", PRODUCT, 3.0, slow)
    store_winner("sgemm", PRODUCT, 3.0, fast)
    store_winner("sgemm_ws", PRODUCT, 2.0, fast)
    assert served(slow) == ("sgemm", "exact")
    assert served(fast) == ("sgemm_ws", "exact")
    nothing = best_matmul(PRODUCT, device="NVIDIA H200", database=tmp_path / "none.db")
    assert nothing.choice.shipped
    assert nothing.tier in {"exact", "nearest"}  # by the NVRTC that is installed
    measured = [one for one in nothing.contenders if one.doubt is None]
    assert len(measured) > 1
    assert nothing.measurement.time_us == min(one.time_us for one in measured)
    assert (nothing.kernel, nothing.config) == (measured[0].kernel, measured[0].config)


def test_elsewhere_nothing_is_emulated_for_the_times_of_another_gpu(tmp_path: Path) -> None:
    for device in ("rtx-4090", "a100"):
        kernel = best_matmul(Product(256, 256, 256), device=device, database=str(tmp_path / "none.db"))
        assert kernel.kernel not in emulating_kernels()


def test_tensors_of_pytorch_on_the_cpu_are_refused_in_words_of_ours() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match="cannot be used on the GPU"):
        autotile.torch.matmul(torch.ones(8, 8), torch.ones(8, 8))
