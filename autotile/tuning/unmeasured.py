"""What can be told of a problem that nothing here can measure."""

from __future__ import annotations

from autotile.device.compiler import compile_cubin, compile_job
from autotile.files.library import Kernel
from autotile.files.profiles import device_profile
from autotile.ground.errors import CompileError, InputError, ToolchainError
from autotile.ground.model import Problem
from autotile.ground.problem import check_memory
from autotile.ground.space import feasible_space

_STAND_IN = "h200"
"""The GPU that the built-in recordings are of."""


def check_unmeasured(kernel: Kernel, problem: Problem) -> None:
    """Tell a fault of the kernel or the problem before the lack of a GPU is told: that would hide it.

    Raises
    ------
    InputError
        The problem does not fit in a large GPU's memory, no configuration is valid for it, or the default
        configuration does not compile.
    """
    device = device_profile(_STAND_IN)
    check_memory(kernel.spec, problem, device)
    feasible_space(kernel.spec, problem.sizes, device, problem.dtype)
    try:
        compile_cubin(compile_job(kernel, kernel.spec.default, problem.dtype, device.architecture, problem.sizes))
    except CompileError as error:
        raise InputError(f"{kernel.spec.source}: the default configuration does not compile: {error}") from None
    except ToolchainError:
        return
