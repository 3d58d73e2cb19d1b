"""The fault kit has the faults that it states, as far as this can be checked without a GPU."""

import pytest

from autotile.core.device import device_profile
from autotile.core.model import Config
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.kernel.library import Kernel
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from faults.fault_kit import HEALTHY, fault_kernel, read_faults

H200 = device_profile("h200")
COMPILE_FAULTS = {"compile_error", "compile_minutes", "compile_memory"}
FAULTS = {fault.name: fault for fault in read_faults()}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return fault_kernel(tmp_path_factory.mktemp("faults"))


def configs_of(kernel: Kernel) -> list[Config]:
    space = feasible_space(kernel.spec, kernel.spec.at(), H200)
    return [space.config(row) for row in range(len(space))]


def test_every_fault_is_in_the_space_once_and_expected_and_can_be_alone(kernel, tmp_path):
    assert sorted(config["FAULT"] for config in configs_of(kernel)) == sorted([*FAULTS, *[HEALTHY] * 4])
    alone = configs_of(fault_kernel(tmp_path, "trap"))
    assert sorted(config["FAULT"] for config in alone) == [*[HEALTHY] * 4, "trap"]


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - COMPILE_FAULTS))
def test_faults_of_running_compile(kernel, fault):
    (config,) = [config for config in configs_of(kernel) if config["FAULT"] == fault]
    assert compile_cubin(compile_job(kernel, config, kernel.spec.at(), "sm_90")).resources.spill_bytes == 0


def test_declared_shared_memory_beyond_the_limit_is_seen_before_compiling(kernel):
    config: Config = {"THREADS": 128, "FAULT": "shared_memory_declared"}
    reason = check_config(kernel.spec, config, kernel.spec.at(), H200)
    assert reason.startswith("shared_memory: 0 bytes static and 233,472 dynamic, NVIDIA H200 allows")
