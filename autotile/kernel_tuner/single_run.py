"""One launch of one configuration, whose arguments come back; for `run_kernel`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Outcome, config_text
from autotile.cuda.compiler import compile_job
from autotile.cuda.driver import device_count, live_device
from autotile.errors import InputError
from autotile.kernel.computed import computed_values
from autotile.kernel.problem import resolve_problem
from autotile.kernel_tuner.array_files import restored_form, session_folder
from autotile.kernel_tuner.kernel_definition import KernelTunerKernel
from autotile.settings import read_settings
from autotile.space.limits import check_config
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Gpu
from autotile.workers.protocol import Candidate, Workload

_COMPILE_DEADLINE_S = 120.0
_RUN_DEADLINE_S = 300.0


def run_once(described: KernelTunerKernel, device_index: int) -> list[Any]:
    """Launch the only configuration of a kernel once, in a process of its own.

    Returns
    -------
    list
        The arguments after the launch: arrays of NumPy, and the others as they are.

    Raises
    ------
    InputError
        There is no GPU, the configuration exceeds its limits, does not compile, or its launch fails.
    """
    kernel = described.build()
    if device_index >= device_count():
        raise InputError(
            f"there is no CUDA device {device_index} here, and run_kernel needs one; see `autotile doctor`"
        )
    device = live_device(device_index)
    problem = resolve_problem(kernel.spec, {}, None, defaults=True)
    config = dict(kernel.spec.default)
    if reason := check_config(kernel.spec, config, problem.sizes, device, problem.dtype):
        raise InputError(f"{described.name} cannot run with {config_text(config)}: {reason}")
    settings = read_settings()
    job = compile_job(kernel, config, problem.dtype, device.architecture, problem.sizes)
    compiled = compile_in_worker(job, settings, _COMPILE_DEADLINE_S)
    if compiled.cubin is None:
        raise InputError(f"{described.name} does not compile: {compiled.reason}")
    names = [buffer.name for buffer in kernel.spec.buffers if buffer.is_written]
    with tempfile.TemporaryDirectory(dir=session_folder()) as folder:
        workload = Workload(
            spec_text=kernel.spec.text,
            spec_source=kernel.spec.source,
            sizes=problem.sizes,
            dtype=problem.dtype,
            l2="hot",
            cache=str(settings.cache),
            cache_limit_bytes=settings.cache_limit_bytes,
            sample_limit_s=0.0,
            device_index=device_index,
            captured=tuple(names),
            capture_folder=folder,
        )
        computed = computed_values(kernel.spec.computed, config)
        candidate = Candidate(config, str(compiled.cubin.path), compiled.cubin.symbols, computed)
        gpu = Gpu(workload, _RUN_DEADLINE_S)
        try:
            evaluation = gpu.evaluate(candidate, None)
        finally:
            gpu.close()
        if evaluation.outcome is not Outcome.OK or not evaluation.captured:
            raise InputError(f"{described.name} failed with {config_text(config)}: {evaluation.reason}")
        contents = {name: np.load(Path(evaluation.captured) / f"{name}.npy", allow_pickle=False) for name in names}
    return _returned(described, [argument.name for argument in kernel.spec.arguments], contents)


def _returned(described: KernelTunerKernel, names: list[str], contents: Mapping[str, NDArray[Any]]) -> list[Any]:
    """Return the arguments in their own types and shapes, those that a kernel cannot write as copies."""
    returned: list[Any] = list(described.arguments)
    for index, array in described.arrays.items():
        stored = contents.get(names[index])
        returned[index] = array.copy() if stored is None else restored_form(stored, array)
    return returned
