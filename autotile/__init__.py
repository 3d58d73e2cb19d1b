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
from itertools import pairwise
from types import ModuleType

from autotile.version import __version__ as __version__

TYPE_CHECKING = False  # importing `typing` would be most of this module's time, and Ctrl-C in it a traceback
if TYPE_CHECKING:
    import autotile.torch  # noqa: F401 - so that it is an attribute

    # isort: off
    # so that a module is named once, and not once for each name
    from autotile.api.databases import (
        db_check as db_check,
        db_clean as db_clean,
        db_diff as db_diff,
        db_merge as db_merge,
        db_path as db_path,
    )
    from autotile.api.devices import devices as devices, measure_device as measure_device, worker as worker
    from autotile.api.doctor import doctor as doctor
    from autotile.api.exchange import bundle as bundle, export as export, import_ as import_
    from autotile.api.inspection import explain as explain, occupancy as occupancy, space as space, survey as survey
    from autotile.api.plans import plan as plan, tune_misses as tune_misses, tune_plan as tune_plan
    from autotile.api.results import best as best, list as list, report as report, trials as trials
    from autotile.api.tunable import TunableKernel as TunableKernel, kernel as kernel, new as new
    from autotile.api.tuning import record as record, session as session, tune as tune, tune_family as tune_family
    from autotile.api.verification import check as check, verify as verify
    from autotile.api.window import tuning as tuning
    from autotile.errors import (
        ArgumentError as ArgumentError,
        AutotileError as AutotileError,
        BundleError as BundleError,
        CompileError as CompileError,
        ConfigError as ConfigError,
        DatabaseError as DatabaseError,
        DataError as DataError,
        DataWarning as DataWarning,
        DeviceError as DeviceError,
        EmptySpaceError as EmptySpaceError,
        InputError as InputError,
        NotTunedError as NotTunedError,
        PinError as PinError,
        PinWarning as PinWarning,
        ProblemError as ProblemError,
        RecordingError as RecordingError,
        RescuedRunError as RescuedRunError,
        SpecError as SpecError,
        ToolchainError as ToolchainError,
        UnknownKernelError as UnknownKernelError,
        WorkerCrashError as WorkerCrashError,
        WorkerError as WorkerError,
        WorkerTimeoutError as WorkerTimeoutError,
    )
    from autotile.kernel.python_kernel import Buffer as Buffer, Scalar as Scalar, Scratch as Scratch
    from autotile.report.comparison import compare as compare
    from autotile.report.live import watch as watch
    from autotile.serving.bound import BoundKernel as BoundKernel, capture as capture
    from autotile.serving.dispatcher import (
        Dispatcher as Dispatcher,
        add_library as add_library,
        get_best_kernel as get_best_kernel,
        matmul as matmul,
        pin as pin,
        unpin as unpin,
    )
    from autotile.tuning.options import FamilyPlan as FamilyPlan, TuneOptions as TuneOptions
    from autotile.tuning.progress_state import Progress as Progress
    from autotile.tuning.result import TuneResult as TuneResult
    # isort: on


_SUBMODULES = ("errors", "kernel_tuner", "torch")
"""Modules of the package that users name, which are imported when they are first used, too."""


_IMPORTS = __spec__.loader.get_source(__name__).partition("# isort: on")[0]  # type: ignore[union-attr]
_MODULE_OF: dict[str, str] = {
    word.rstrip(","): words[0]
    for words in map(str.split, _IMPORTS.split("    from autotile.")[1:])
    for before, word in pairwise(words)
    if before == "as"
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
