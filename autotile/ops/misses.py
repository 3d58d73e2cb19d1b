"""Problems that programs asked for and that could not be served exactly."""

from __future__ import annotations

from dataclasses import dataclass

from autotile.device.properties import device_count, live_device
from autotile.files.library import Kernel
from autotile.files.settings import read_settings
from autotile.ground.errors import InputError
from autotile.ground.model import Problem
from autotile.ops.targets import open_problem
from autotile.report.misses import MissesReport
from autotile.store.database import Database
from autotile.store.keys import space_hash
from autotile.store.misses import StoredMiss
from autotile.tuning.options import TuneOptions


@dataclass(frozen=True, slots=True)
class MissedProblem:
    """A problem to tune, and why."""

    kernel: Kernel
    problem: Problem
    count: int


def list_misses(kernel: str | None = None, *, database: str | None = None) -> MissesReport:
    """Problems that were asked for in vain, most frequent first.

    Raises
    ------
    InputError
        The database cannot be read.
    """
    opened = Database.open_readonly(database or read_settings().database)
    if opened is None:
        return MissesReport([])
    with opened:
        return MissesReport(opened.misses(kernel))


def missed_problems(kernel: str | None, options: TuneOptions) -> list[MissedProblem]:
    """What was asked for on the GPU that would tune it and is not tuned yet, most frequent first.

    Problems of kernels that cannot be found by name any more are left out.

    Parameters
    ----------
    kernel
        Only this kernel's; None for all.
    options
        Of the sessions to come: which device, which database, replayed or not.

    Raises
    ------
    InputError
        The database cannot be read.
    """
    live = device_count() > 0 and options.replay is None
    gpu_name = live_device(options.device_index).name if live else None
    opened = Database.open_readonly(options.database or read_settings().database)
    if opened is None:
        return []
    with opened:
        asked = [miss for miss in opened.misses(kernel) if gpu_name in (None, miss.gpu_name)]
        found = [_open(miss) for miss in asked]
        return [missed for missed in found if missed is not None and not _is_tuned(opened, missed, gpu_name)]


def _open(miss: StoredMiss) -> MissedProblem | None:
    try:
        kernel, problem = open_problem(miss.problem.kernel, miss.problem.sizes, miss.problem.dtype)
    except InputError:
        return None
    return MissedProblem(kernel, problem, miss.count)


def _is_tuned(database: Database, missed: MissedProblem, gpu_name: str | None) -> bool:
    """Whether it was tuned after it was missed, with the kernel as it is now."""
    problem, version = missed.problem, (missed.kernel.source_hash, space_hash(missed.kernel.spec))
    stored = database.best(problem.kernel, dtype=problem.dtype, sizes=problem.sizes, gpu_name=gpu_name)
    return any(best.confirmed and (best.key.template_hash, best.key.space_hash) == version for best in stored)
