"""Find, prove, remember and serve the fastest tile sizes of CUDA C++ kernels.

The pipeline, one candidate's way::

    SearchSpace -> Config -> static limits -> source + macros -> cubin -> compiled resources, occupancy
                -> load -> verify -> measure -> Trial -> database -> Best -> dispatch

Importing this module is cheap; what a name needs is imported when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotile.errors import AutotileError, InputError
    from autotile.ops import tune, tune_family
    from autotile.serving.bound import BoundKernel
    from autotile.serving.dispatcher import get_best_kernel
    from autotile.serving.matmul import matmul
    from autotile.tuning.family_session import FamilyPlan
    from autotile.tuning.options import TuneOptions

__version__ = "0.1.0"

__all__ = [
    "AutotileError",
    "BoundKernel",
    "FamilyPlan",
    "InputError",
    "TuneOptions",
    "__version__",
    "get_best_kernel",
    "matmul",
    "tune",
    "tune_family",
]

_HOME = {
    "AutotileError": "autotile.errors",
    "BoundKernel": "autotile.serving.bound",
    "FamilyPlan": "autotile.tuning.family_session",
    "InputError": "autotile.errors",
    "TuneOptions": "autotile.tuning.options",
    "get_best_kernel": "autotile.serving.dispatcher",
    "matmul": "autotile.serving.matmul",
    "tune": "autotile.ops",
    "tune_family": "autotile.ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autotile' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
