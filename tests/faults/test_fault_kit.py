"""The fault kit has the faults that it states, as far as this can be checked without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_settings import cache_settings

from autotile.core.device import device_profile
from autotile.core.model import Config, Outcome, Resources
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.errors import CompileError
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel
from autotile.space.limits import check_config, resource_violation
from autotile.space.search_space import feasible_space
from autotile.workers.compile_pool import Compiled, CompilePool
from faults.fault_kit import HEALTHY, fault_kernel, read_faults

H200 = device_profile("h200")
COMPILE_FAULTS = {"compile_error", "compile_minutes", "compile_memory"}
FAULTS = {fault.name: fault for fault in read_faults()}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return fault_kernel(tmp_path_factory.mktemp("faults"))


def faulty(kernel: Kernel, fault: str) -> Config:
    """Return the configuration with a fault."""
    space = feasible_space(kernel.spec, kernel.spec.sizes, H200)
    return next(space.config(row) for row in range(len(space)) if space.config(row)["FAULT"] == fault)


def resources(kernel: Kernel, config: Config) -> Resources:
    return compile_cubin(compile_job(kernel, config, "float32", "sm_90")).resources


def gate(kernel: Kernel, config: Config) -> str:
    """Return the verdict of the second gate."""
    geometry, used = launch_geometry(kernel.spec, config, kernel.spec.sizes, H200), resources(kernel, config)
    return resource_violation(kernel.spec, geometry, used, H200)


def compiled(kernel: Kernel, fault: str, folder: Path, *, deadline_s: float, memory_bytes: int) -> Compiled:
    pool = CompilePool(cache_settings(folder), workers=1, deadline_s=deadline_s, memory_bytes=memory_bytes)
    try:
        return pool.submit(lambda: compile_job(kernel, faulty(kernel, fault), "float32", "sm_90")).result()
    finally:
        pool.close()


def test_every_fault_is_in_the_space_once_and_expected(kernel):
    space = feasible_space(kernel.spec, kernel.spec.sizes, H200)
    tried = [space.config(row)["FAULT"] for row in range(len(space))]
    assert sorted(name for name in tried if name != HEALTHY) == sorted(FAULTS)
    assert tried.count(HEALTHY) == 4


def test_a_session_can_have_one_fault_alone(tmp_path):
    kernel = fault_kernel(tmp_path, "trap")
    space = feasible_space(kernel.spec, kernel.spec.sizes, H200)
    assert sorted({space.config(row)["FAULT"] for row in range(len(space))}) == [HEALTHY, "trap"]
    assert len(space) == 5


@pytest.mark.parametrize("threads", [64, 128, 256, 1024])
def test_healthy_configurations_compile_and_pass_the_gate(kernel, threads):
    assert gate(kernel, {"THREADS": threads, "FAULT": HEALTHY}) == ""


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - COMPILE_FAULTS))
def test_faults_of_running_compile(kernel, fault):
    assert resources(kernel, faulty(kernel, fault)).spill_bytes == 0


def test_too_much_is_seen_before_the_launch(kernel):
    registers, shared = faulty(kernel, "registers"), faulty(kernel, "shared_memory")
    assert resources(kernel, registers).registers > 64
    assert "1024 threads" in gate(kernel, registers)
    assert gate(kernel, registers).endswith("limited by registers")
    assert resources(kernel, shared).static_smem_bytes == 16 * 1024
    assert gate(kernel, shared).endswith("limited by shared_memory")


def test_declared_shared_memory_beyond_the_limit_is_seen_before_compiling(kernel):
    config: Config = {"THREADS": 128, "FAULT": "shared_memory_declared"}
    reason = check_config(kernel.spec, config, kernel.spec.sizes, H200)
    assert reason.startswith("shared_memory: 0 bytes static and 233,472 dynamic, NVIDIA H200 allows")


def test_a_compile_error_is_told(kernel):
    with pytest.raises(CompileError, match=FAULTS["compile_error"].reason):
        resources(kernel, faulty(kernel, "compile_error"))


def test_a_compilation_of_minutes_is_stopped(kernel, tmp_path):
    slow = compiled(kernel, "compile_minutes", tmp_path, deadline_s=2, memory_bytes=2**33)
    assert (slow.outcome, slow.reason) == (Outcome.TIMED_OUT, "the compiler was stopped after 2 s")


def test_a_compilation_without_end_of_memory_is_stopped(kernel, tmp_path):
    large = compiled(kernel, "compile_memory", tmp_path, deadline_s=60, memory_bytes=2**29)
    assert large.outcome is Outcome.COMPILE_FAILED
    assert "out of memory" in large.reason
    assert list((tmp_path / "cubins").iterdir()) == []
