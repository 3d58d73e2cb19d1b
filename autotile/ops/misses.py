"""Problems that programs asked for and that could not be served exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotile.device.properties import device_count, live_device
from autotile.files.library import Kernel, load_kernel
from autotile.ground.errors import InputError
from autotile.ground.model import Problem
from autotile.ops.reading import open_to_read
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
        The database cannot be read, or there is no such kernel.
    """
    opened = open_to_read(database)
    if opened is None:
        return MissesReport([])
    with opened:
        return MissesReport([_in_own_order(miss) for miss in _misses(opened, kernel)])


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
        The database cannot be read, or there is no such kernel.
    """
    live = device_count() > 0 and options.replay is None
    gpu_name = live_device(options.device_index).name if live else None
    opened = open_to_read(options.database)
    if opened is None:
        return []
    with opened:
        asked = [miss for miss in _misses(opened, kernel) if gpu_name in (None, miss.gpu_name)]
        found = [_open(miss) for miss in asked]
        return [missed for missed in found if missed is not None and not _is_tuned(opened, missed, gpu_name)]


def _misses(database: Database, kernel: str | None) -> list[StoredMiss]:
    if kernel is None:
        return database.misses()
    known = database.misses(kernel)  # a kernel that was deleted since is still in the database
    return known or database.misses(load_kernel(kernel).name)


def _in_own_order(miss: StoredMiss) -> StoredMiss:
    """The same with its sizes in the order of the kernel's file; as it is stored where that is not to be found."""
    opened = _open(miss)
    return replace(miss, problem=opened.problem) if opened is not None else miss


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
