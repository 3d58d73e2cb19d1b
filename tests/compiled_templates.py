"""Compilations of templates whose search spaces declare what the compiler will report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotile.core.device import device_profile
from autotile.core.model import Config, Resources, Value
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.kernel.launch import fixed_names, value_or_zero
from autotile.kernel.library import Kernel


def compiled_as_declared(
    kernel: Kernel, config: Config, dtype: str, architecture: str, sizes: Mapping[str, int], *options: str
) -> Resources:
    """Compile a configuration, and check static shared memory and registers against its search space."""
    job = compile_job(kernel, config, dtype, architecture, sizes)
    resources = compile_cubin(replace(job, options=(*job.options, *options))).resources
    launch = kernel.spec.steps[0].launch
    names: Mapping[str, Value] = {**fixed_names(kernel.spec, sizes, device_profile("h200")), **config}
    assert resources.static_smem_bytes == value_or_zero(launch.static_smem_bytes, names), config
    if not resources.spill_bytes:
        assert resources.registers >= value_or_zero(launch.min_registers, names), config
    return resources
