"""Find, verify, store and serve the fastest tile sizes of CUDA C++ kernels.

The pipeline, one candidate's way::

    SearchSpace -> Config -> static limits -> source + macros -> cubin -> compiled resources, occupancy
                -> load -> verify -> measure -> Trial -> database -> Best -> dispatch

Each command of the command line is a function of this package under the command's name: ``autotile tune`` is `tune`,
``autotile db check`` is `db_check`, and ``autotile import`` is `import_`.

Importing the package imports none of its modules; a name is imported from its module when it is first used.
"""

from __future__ import annotations

import sys
from types import ModuleType

from autotile.version import __version__ as __version__

TYPE_CHECKING = False  # importing `typing` would be most of this module's time, and Ctrl-C in it a traceback
if TYPE_CHECKING:
    import autotile.torch  # noqa: F401 - so that it is an attribute
    from autotile.api.databases import db_check as db_check
    from autotile.api.databases import db_clean as db_clean
    from autotile.api.databases import db_diff as db_diff
    from autotile.api.databases import db_merge as db_merge
    from autotile.api.databases import db_path as db_path
    from autotile.api.devices import devices as devices
    from autotile.api.devices import measure_device as measure_device
    from autotile.api.devices import worker as worker
    from autotile.api.doctor import doctor as doctor
    from autotile.api.exchange import bundle as bundle
    from autotile.api.exchange import export as export
    from autotile.api.exchange import import_ as import_
    from autotile.api.inspection import explain as explain
    from autotile.api.inspection import occupancy as occupancy
    from autotile.api.inspection import space as space
    from autotile.api.inspection import survey as survey
    from autotile.api.plans import plan as plan
    from autotile.api.plans import tune_misses as tune_misses
    from autotile.api.plans import tune_plan as tune_plan
    from autotile.api.results import best as best
    from autotile.api.results import list as list
    from autotile.api.results import report as report
    from autotile.api.results import trials as trials
    from autotile.api.tunable import TunableKernel as TunableKernel
    from autotile.api.tunable import kernel as kernel
    from autotile.api.tunable import new as new
    from autotile.api.tuning import record as record
    from autotile.api.tuning import session as session
    from autotile.api.tuning import tune as tune
    from autotile.api.tuning import tune_family as tune_family
    from autotile.api.verification import check as check
    from autotile.api.verification import verify as verify
    from autotile.api.window import tuning as tuning
    from autotile.errors import ArgumentError as ArgumentError
    from autotile.errors import AutotileError as AutotileError
    from autotile.errors import BundleError as BundleError
    from autotile.errors import CompileError as CompileError
    from autotile.errors import ConfigError as ConfigError
    from autotile.errors import DatabaseError as DatabaseError
    from autotile.errors import DataError as DataError
    from autotile.errors import DataWarning as DataWarning
    from autotile.errors import DeviceError as DeviceError
    from autotile.errors import EmptySpaceError as EmptySpaceError
    from autotile.errors import InputError as InputError
    from autotile.errors import NotTunedError as NotTunedError
    from autotile.errors import PinError as PinError
    from autotile.errors import PinWarning as PinWarning
    from autotile.errors import ProblemError as ProblemError
    from autotile.errors import RecordingError as RecordingError
    from autotile.errors import RescuedRunError as RescuedRunError
    from autotile.errors import SpecError as SpecError
    from autotile.errors import ToolchainError as ToolchainError
    from autotile.errors import UnknownKernelError as UnknownKernelError
    from autotile.errors import WorkerCrashError as WorkerCrashError
    from autotile.errors import WorkerError as WorkerError
    from autotile.errors import WorkerTimeoutError as WorkerTimeoutError
    from autotile.kernel.python_kernel import Buffer as Buffer
    from autotile.kernel.python_kernel import Scalar as Scalar
    from autotile.kernel.python_kernel import Scratch as Scratch
    from autotile.report.comparison import compare as compare
    from autotile.report.live import watch as watch
    from autotile.serving.bound import BoundKernel as BoundKernel
    from autotile.serving.bound import capture as capture
    from autotile.serving.dispatcher import Dispatcher as Dispatcher
    from autotile.serving.dispatcher import add_library as add_library
    from autotile.serving.dispatcher import get_best_kernel as get_best_kernel
    from autotile.serving.dispatcher import matmul as matmul
    from autotile.serving.dispatcher import pin as pin
    from autotile.serving.dispatcher import unpin as unpin
    from autotile.tuning.options import FamilyPlan as FamilyPlan
    from autotile.tuning.options import TuneOptions as TuneOptions
    from autotile.tuning.progress_state import Progress as Progress
    from autotile.tuning.result import TuneResult as TuneResult


_SUBMODULES = ("errors", "kernel_tuner", "torch")
"""Modules of the package that users name, which are imported when they are first used, too."""


_MODULE_OF: dict[str, str] = {
    line.split()[3]: line.split()[1].removeprefix("autotile.")
    for line in __spec__.loader.get_source(__name__).splitlines()  # type: ignore[union-attr]
    if line.startswith("    from autotile.") and " as " in line
}
"""Module of each name that the block above imports, which is for type checkers and does not run."""

__all__ = ["__version__"]
__all__.extend(sorted(set(_MODULE_OF) - {"list"}))  # a star import must not replace the built-in


class _Package(ModuleType):
    """Type of this module: a public name is never replaced by the subpackage of the same name.

    Python makes a subpackage an attribute of its package when it imports it. Without this, the function `space` would
    become the package ``autotile.space`` as soon as any of its modules was imported. Names of that package are imported
    by ``from autotile.space.search_space import SearchSpace``; ``import autotile.space.search_space as name`` fails, as
    it looks for them in the function. The same holds for `kernel` and `tuning`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF and name not in _SUBMODULES:
        raise AttributeError(f"module 'autotile' has no attribute {name!r}")
    from importlib import import_module

    from autotile.core.forks import fork_guard

    with fork_guard.use():  # a child that is forked while a module is imported waits for it for ever
        if name in _SUBMODULES:
            return import_module(f"autotile.{name}")
        value = getattr(import_module(f"autotile.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> object:
    return sorted([*__all__, "list"])
