"""Find, prove, remember and serve the fastest tile sizes of CUDA C++ kernels.

The pipeline, one candidate's way::

    SearchSpace -> Config -> static limits -> source + macros -> cubin -> compiled resources, occupancy
                -> load -> verify -> measure -> Trial -> database -> Best -> dispatch

Each command of the command line is a function of this package under the command's name: ``autotile tune-family`` is
`tune_family`, ``autotile db check`` is `db_check`, and ``autotile import`` is `import_`.

Importing the package imports none of its modules; a name is imported from its module when it is first used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotile.api.exchange import ExportedHeader as ExportedHeader
    from autotile.api.exchange import Transfer as Transfer
    from autotile.api.exchange import WrittenBundle as WrittenBundle
    from autotile.api.exchange import bundle as bundle
    from autotile.api.exchange import export as export
    from autotile.api.exchange import import_ as import_
    from autotile.api.tuning import TunedMisses as TunedMisses
    from autotile.api.tuning import record as record
    from autotile.api.tuning import tune as tune
    from autotile.api.tuning import tune_family as tune_family
    from autotile.api.tuning import tune_misses as tune_misses
    from autotile.core.device import DeviceProperties as DeviceProperties
    from autotile.core.model import Measurement as Measurement
    from autotile.core.model import Occupancy as Occupancy
    from autotile.core.model import Outcome as Outcome
    from autotile.core.model import Problem as Problem
    from autotile.core.model import Resources as Resources
    from autotile.core.model import Trial as Trial
    from autotile.core.statistics import Interval as Interval
    from autotile.errors import ArgumentError as ArgumentError
    from autotile.errors import AutotileError as AutotileError
    from autotile.errors import BundleError as BundleError
    from autotile.errors import CompileError as CompileError
    from autotile.errors import ConfigError as ConfigError
    from autotile.errors import DatabaseError as DatabaseError
    from autotile.errors import DeviceError as DeviceError
    from autotile.errors import EmptySpaceError as EmptySpaceError
    from autotile.errors import InputError as InputError
    from autotile.errors import NotTunedError as NotTunedError
    from autotile.errors import ProblemError as ProblemError
    from autotile.errors import RecordingError as RecordingError
    from autotile.errors import SpecError as SpecError
    from autotile.errors import ToolchainError as ToolchainError
    from autotile.errors import UnknownKernelError as UnknownKernelError
    from autotile.errors import WorkerCrashError as WorkerCrashError
    from autotile.errors import WorkerError as WorkerError
    from autotile.errors import WorkerTimeoutError as WorkerTimeoutError
    from autotile.families.rule import FamilyRule as FamilyRule
    from autotile.serving.bound import BoundKernel as BoundKernel
    from autotile.serving.dispatcher import get_best_kernel as get_best_kernel
    from autotile.serving.matmul import matmul as matmul
    from autotile.tuning.family_session import FamilyPlan as FamilyPlan
    from autotile.tuning.family_session import FamilyResult as FamilyResult
    from autotile.tuning.family_session import FamilyStep as FamilyStep
    from autotile.tuning.options import TuneOptions as TuneOptions
    from autotile.tuning.recorder import Recorded as Recorded
    from autotile.tuning.result import Progress as Progress
    from autotile.tuning.result import TuneResult as TuneResult

__version__ = "0.1.0"

_NAMES = {
    "api.exchange": ("ExportedHeader", "Transfer", "WrittenBundle", "bundle", "export", "import_"),
    "api.tuning": ("TunedMisses", "record", "tune", "tune_family", "tune_misses"),
    "core.device": ("DeviceProperties",),
    "core.model": ("Measurement", "Occupancy", "Outcome", "Problem", "Resources", "Trial"),
    "core.statistics": ("Interval",),
    "errors": (
        "ArgumentError",
        "AutotileError",
        "BundleError",
        "CompileError",
        "ConfigError",
        "DatabaseError",
        "DeviceError",
        "EmptySpaceError",
        "InputError",
        "NotTunedError",
        "ProblemError",
        "RecordingError",
        "SpecError",
        "ToolchainError",
        "UnknownKernelError",
        "WorkerCrashError",
        "WorkerError",
        "WorkerTimeoutError",
    ),
    "families.rule": ("FamilyRule",),
    "serving.bound": ("BoundKernel",),
    "serving.dispatcher": ("get_best_kernel",),
    "serving.matmul": ("matmul",),
    "tuning.family_session": ("FamilyPlan", "FamilyResult", "FamilyStep"),
    "tuning.options": ("TuneOptions",),
    "tuning.recorder": ("Recorded",),
    "tuning.result": ("Progress", "TuneResult"),
}
"""Public names by the module that defines them."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__"]
__all__.extend(sorted(_MODULE_OF))


class _Package(ModuleType):
    """Type of this module: a public name is never replaced by the subpackage of the same name.

    Python makes a subpackage an attribute of its package when it imports it. Without this, the function `space` would
    become the package ``autotile.space`` as soon as any of its modules was imported.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'autotile' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"autotile.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> Any:
    return __all__
