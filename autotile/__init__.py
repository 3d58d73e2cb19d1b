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
    from autotile.api.databases import CheckResult as CheckResult
    from autotile.api.databases import CleanResult as CleanResult
    from autotile.api.databases import ComparedWinners as ComparedWinners
    from autotile.api.databases import DatabaseDiff as DatabaseDiff
    from autotile.api.databases import MergeResult as MergeResult
    from autotile.api.databases import UnmatchedWinner as UnmatchedWinner
    from autotile.api.databases import db_check as db_check
    from autotile.api.databases import db_clean as db_clean
    from autotile.api.databases import db_diff as db_diff
    from autotile.api.databases import db_merge as db_merge
    from autotile.api.databases import db_path as db_path
    from autotile.api.devices import DeviceList as DeviceList
    from autotile.api.devices import devices as devices
    from autotile.api.devices import measure_device as measure_device
    from autotile.api.devices import worker as worker
    from autotile.api.doctor import HealthCheck as HealthCheck
    from autotile.api.doctor import HealthReport as HealthReport
    from autotile.api.doctor import doctor as doctor
    from autotile.api.exchange import BundleEntry as BundleEntry
    from autotile.api.exchange import ExportedHeader as ExportedHeader
    from autotile.api.exchange import Transfer as Transfer
    from autotile.api.exchange import WrittenBundle as WrittenBundle
    from autotile.api.exchange import bundle as bundle
    from autotile.api.exchange import export as export
    from autotile.api.exchange import import_ as import_
    from autotile.api.explanation import BlockResources as BlockResources
    from autotile.api.explanation import Check as Check
    from autotile.api.explanation import Explanation as Explanation
    from autotile.api.explanation import OperationExplanation as OperationExplanation
    from autotile.api.inspection import OccupancyResult as OccupancyResult
    from autotile.api.inspection import SpaceSummary as SpaceSummary
    from autotile.api.inspection import explain as explain
    from autotile.api.inspection import occupancy as occupancy
    from autotile.api.inspection import space as space
    from autotile.api.judging import check as check
    from autotile.api.listings import FamilyList as FamilyList
    from autotile.api.listings import ListedMiss as ListedMiss
    from autotile.api.listings import MissList as MissList
    from autotile.api.listings import RecordingList as RecordingList
    from autotile.api.listings import StudyList as StudyList
    from autotile.api.listings import StudyTrial as StudyTrial
    from autotile.api.listings import TrialList as TrialList
    from autotile.api.listings import TunedFamily as TunedFamily
    from autotile.api.new_kernel import NewKernel as NewKernel
    from autotile.api.new_kernel import new as new
    from autotile.api.plans import PlanEntry as PlanEntry
    from autotile.api.plans import PlanResult as PlanResult
    from autotile.api.plans import plan as plan
    from autotile.api.plans import tune_misses as tune_misses
    from autotile.api.plans import tune_plan as tune_plan
    from autotile.api.reporting import WrittenReport as WrittenReport
    from autotile.api.reporting import report as report
    from autotile.api.results import BestResult as BestResult
    from autotile.api.results import best as best
    from autotile.api.results import families as families
    from autotile.api.results import list as list
    from autotile.api.results import misses as misses
    from autotile.api.results import recordings as recordings
    from autotile.api.results import trials as trials
    from autotile.api.stepping import TuningSession as TuningSession
    from autotile.api.stepping import session as session
    from autotile.api.surveying import SurveyProgress as SurveyProgress
    from autotile.api.surveying import survey as survey
    from autotile.api.tunable import TunableKernel as TunableKernel
    from autotile.api.tunable import kernel as kernel
    from autotile.api.tuning import record as record
    from autotile.api.tuning import tune as tune
    from autotile.api.tuning import tune_family as tune_family
    from autotile.api.verification import VerifiedProblem as VerifiedProblem
    from autotile.api.verification import VerifyResult as VerifyResult
    from autotile.api.verification import verify as verify
    from autotile.core.device import DeviceProperties as DeviceProperties
    from autotile.core.model import LaunchGeometry as LaunchGeometry
    from autotile.core.model import Measurement as Measurement
    from autotile.core.model import Occupancy as Occupancy
    from autotile.core.model import Outcome as Outcome
    from autotile.core.model import Problem as Problem
    from autotile.core.model import Resources as Resources
    from autotile.core.model import Trial as Trial
    from autotile.core.statistics import Interval as Interval
    from autotile.database.checking import DatabaseCheck as DatabaseCheck
    from autotile.database.keys import TuningKey as TuningKey
    from autotile.database.merging import CopiedRows as CopiedRows
    from autotile.database.merging import MergedStudy as MergedStudy
    from autotile.database.retention import CleanedStudy as CleanedStudy
    from autotile.database.rows import BadRow as BadRow
    from autotile.database.rows import StoredTrial as StoredTrial
    from autotile.database.studies import StudySummary as StudySummary
    from autotile.database.winners import StoredRule as StoredRule
    from autotile.database.winners import Winner as Winner
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
    from autotile.exchange.column_table import ColumnTable as ColumnTable
    from autotile.exchange.column_table import TypedColumn as TypedColumn
    from autotile.exchange.recording import RecordingFile as RecordingFile
    from autotile.exchange.recording import RecordingHeader as RecordingHeader
    from autotile.families.family import Extent as Extent
    from autotile.families.family import Family as Family
    from autotile.families.rule import FamilyRule as FamilyRule
    from autotile.families.rule import Feature as Feature
    from autotile.families.rule import Leaf as Leaf
    from autotile.families.rule import RuleConfig as RuleConfig
    from autotile.families.rule import RulePoint as RulePoint
    from autotile.families.rule import Split as Split
    from autotile.kernel.argument_kind import TensorMap as TensorMap
    from autotile.kernel.argument_kind import Workspace as Workspace
    from autotile.kernel.launch import LaunchData as LaunchData
    from autotile.kernel.problem import Workrate as Workrate
    from autotile.kernel.python_arguments import Buffer as Buffer
    from autotile.kernel.python_arguments import Scalar as Scalar
    from autotile.kernel.python_arguments import Scratch as Scratch
    from autotile.kernel.spec import Parameter as Parameter
    from autotile.report.comparison import ComparedProblem as ComparedProblem
    from autotile.report.comparison import Comparison as Comparison
    from autotile.report.comparison import Difference as Difference
    from autotile.report.comparison import UnmatchedStudy as UnmatchedStudy
    from autotile.report.comparison import compare as compare
    from autotile.report.failures import FailureGroup as FailureGroup
    from autotile.report.live_server import watch as watch
    from autotile.report.survey import QuantityRange as QuantityRange
    from autotile.report.survey import Survey as Survey
    from autotile.search.importance import Effect as Effect
    from autotile.search.importance import ParameterEffects as ParameterEffects
    from autotile.search.importance import Threshold as Threshold
    from autotile.serving.bound import BoundKernel as BoundKernel
    from autotile.serving.capture import capture as capture
    from autotile.serving.choice import Compared as Compared
    from autotile.serving.choice import Contender as Contender
    from autotile.serving.dispatcher import Dispatcher as Dispatcher
    from autotile.serving.dispatcher import add_library as add_library
    from autotile.serving.dispatcher import get_best_kernel as get_best_kernel
    from autotile.serving.dispatcher import matmul as matmul
    from autotile.serving.dispatcher import pin as pin
    from autotile.serving.dispatcher import unpin as unpin
    from autotile.space.enumeration import SpaceStage as SpaceStage
    from autotile.tuning.candidate_check import CandidateCheck as CandidateCheck
    from autotile.tuning.family_session import FamilyResult as FamilyResult
    from autotile.tuning.operation_result import Losses as Losses
    from autotile.tuning.operation_result import OperationFamilyResult as OperationFamilyResult
    from autotile.tuning.operation_result import OperationResult as OperationResult
    from autotile.tuning.operation_result import TunedContender as TunedContender
    from autotile.tuning.options import FamilyPlan as FamilyPlan
    from autotile.tuning.options import TuneOptions as TuneOptions
    from autotile.tuning.pipeline import Load as Load
    from autotile.tuning.progress_state import Place as Place
    from autotile.tuning.progress_state import Progress as Progress
    from autotile.tuning.recorder import Recorded as Recorded
    from autotile.tuning.result import Drift as Drift
    from autotile.tuning.result import Front as Front
    from autotile.tuning.result import TuneResult as TuneResult
    from autotile.tuning.stopping import Stopped as Stopped


_NAMES = {
    "api.databases": (
        "CheckResult",
        "CleanResult",
        "ComparedWinners",
        "DatabaseDiff",
        "MergeResult",
        "UnmatchedWinner",
        "db_clean",
        "db_check",
        "db_path",
        "db_diff",
        "db_merge",
    ),
    "api.devices": (
        "DeviceList",
        "devices",
        "measure_device",
        "worker",
    ),
    "api.doctor": (
        "HealthCheck",
        "HealthReport",
        "doctor",
    ),
    "api.exchange": (
        "BundleEntry",
        "ExportedHeader",
        "Transfer",
        "WrittenBundle",
        "bundle",
        "export",
        "import_",
    ),
    "api.explanation": (
        "BlockResources",
        "Check",
        "Explanation",
        "OperationExplanation",
    ),
    "api.inspection": (
        "OccupancyResult",
        "SpaceSummary",
        "explain",
        "occupancy",
        "space",
    ),
    "api.judging": ("check",),
    "api.listings": (
        "FamilyList",
        "ListedMiss",
        "MissList",
        "RecordingList",
        "StudyList",
        "StudyTrial",
        "TrialList",
        "TunedFamily",
    ),
    "api.new_kernel": (
        "NewKernel",
        "new",
    ),
    "api.plans": (
        "PlanEntry",
        "PlanResult",
        "plan",
        "tune_misses",
        "tune_plan",
    ),
    "api.reporting": (
        "WrittenReport",
        "report",
    ),
    "api.results": (
        "BestResult",
        "best",
        "families",
        "list",
        "misses",
        "recordings",
        "trials",
    ),
    "api.stepping": (
        "TuningSession",
        "session",
    ),
    "api.surveying": (
        "SurveyProgress",
        "survey",
    ),
    "api.tunable": (
        "TunableKernel",
        "kernel",
    ),
    "api.tuning": (
        "record",
        "tune",
        "tune_family",
    ),
    "api.verification": (
        "VerifiedProblem",
        "VerifyResult",
        "verify",
    ),
    "core.device": ("DeviceProperties",),
    "core.model": (
        "LaunchGeometry",
        "Measurement",
        "Occupancy",
        "Outcome",
        "Problem",
        "Resources",
        "Trial",
    ),
    "core.statistics": ("Interval",),
    "database.keys": ("TuningKey",),
    "database.merging": (
        "CopiedRows",
        "MergedStudy",
    ),
    "database.retention": ("CleanedStudy",),
    "database.studies": ("StudySummary",),
    "database.rows": ("BadRow", "StoredTrial"),
    "database.checking": ("DatabaseCheck",),
    "database.winners": (
        "StoredRule",
        "Winner",
    ),
    "errors": (
        "ArgumentError",
        "AutotileError",
        "BundleError",
        "CompileError",
        "ConfigError",
        "DataError",
        "DataWarning",
        "DatabaseError",
        "DeviceError",
        "EmptySpaceError",
        "InputError",
        "NotTunedError",
        "PinError",
        "PinWarning",
        "ProblemError",
        "RecordingError",
        "RescuedRunError",
        "SpecError",
        "ToolchainError",
        "UnknownKernelError",
        "WorkerCrashError",
        "WorkerError",
        "WorkerTimeoutError",
    ),
    "exchange.column_table": (
        "ColumnTable",
        "TypedColumn",
    ),
    "exchange.recording": (
        "RecordingFile",
        "RecordingHeader",
    ),
    "families.family": (
        "Extent",
        "Family",
    ),
    "families.rule": (
        "FamilyRule",
        "Feature",
        "Leaf",
        "RuleConfig",
        "RulePoint",
        "Split",
    ),
    "kernel.launch": ("LaunchData",),
    "kernel.python_arguments": (
        "Buffer",
        "Scalar",
        "Scratch",
    ),
    "kernel.spec": ("Parameter",),
    "kernel.argument_kind": ("TensorMap", "Workspace"),
    "kernel.problem": ("Workrate",),
    "report.comparison": (
        "ComparedProblem",
        "Comparison",
        "Difference",
        "UnmatchedStudy",
        "compare",
    ),
    "search.importance": ("Effect", "ParameterEffects", "Threshold"),
    "report.failures": ("FailureGroup",),
    "report.live_server": ("watch",),
    "report.survey": (
        "QuantityRange",
        "Survey",
    ),
    "serving.bound": ("BoundKernel",),
    "serving.capture": ("capture",),
    "serving.choice": ("Compared", "Contender"),
    "serving.dispatcher": (
        "Dispatcher",
        "add_library",
        "get_best_kernel",
        "matmul",
        "pin",
        "unpin",
    ),
    "space.enumeration": ("SpaceStage",),
    "tuning.candidate_check": ("CandidateCheck",),
    "tuning.family_session": ("FamilyResult",),
    "tuning.operation_result": (
        "Losses",
        "OperationFamilyResult",
        "OperationResult",
        "TunedContender",
    ),
    "tuning.options": ("FamilyPlan", "TuneOptions"),
    "tuning.pipeline": ("Load",),
    "tuning.progress_state": ("Place", "Progress"),
    "tuning.recorder": ("Recorded",),
    "tuning.result": (
        "Drift",
        "Front",
        "TuneResult",
    ),
    "tuning.stopping": ("Stopped",),
}
"""Public names by the module that defines them."""

_SUBMODULES = ("errors", "kernel_tuner", "torch")
"""Modules of the package that users name, which are imported when they are first used, too."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__"]
__all__.extend(sorted(set(_MODULE_OF) - {"list"}))  # a star import must not replace the built-in


class _Package(ModuleType):
    """Type of this module: a public name is never replaced by the subpackage of the same name.

    Python makes a subpackage an attribute of its package when it imports it. Without this, the function `space` would
    become the package ``autotile.space`` as soon as any of its modules was imported. Names of that package are imported
    by ``from autotile.space.search_space import SearchSpace``; ``import autotile.space.search_space as name`` fails, as
    it looks for them in the function. The same holds for `kernel`.
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
