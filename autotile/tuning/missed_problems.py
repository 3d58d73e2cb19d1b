"""Problems that programs were served by a fallback: the cost of each, and which of them to tune."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autotile.core.model import Problem
from autotile.cuda.driver import device_count, live_device
from autotile.database.database import Database, open_for_reading, rows_of_kernel
from autotile.database.keys import space_hash
from autotile.database.learned import FamilyStore, MissCost, MissCostEstimator, study_times
from autotile.database.winners import StoredMiss
from autotile.errors import InputError
from autotile.kernel.library import Kernel, KernelName, load_kernel, load_named_kernel
from autotile.kernel.problem import resolve_problem
from autotile.tuning.options import TuneOptions


@dataclass(frozen=True, slots=True)
class AssessedMiss:
    """A miss with what is known of it today.

    Attributes
    ----------
    miss
        Stored miss; its sizes are in the order of the search-space file if the kernel is found.
    kernel
        Kernel in its current version; None if it is not found, or no longer has these sizes.
    cost
        Cost of one call; None if unknown.
    tuned
        Whether the problem has been tuned for this version of the kernel.
    """

    miss: StoredMiss
    kernel: Kernel | None
    cost: MissCost | None
    tuned: bool

    @property
    def lost_s(self) -> float | None:
        """Time that all calls together have lost, in seconds; None if unknown."""
        return self.miss.count * self.cost.lost_us * 1e-6 if self.cost is not None else None


@dataclass(frozen=True, slots=True)
class MissedProblem:
    """A problem to tune.

    Attributes
    ----------
    asked_as
        Name of the kernel, or path of its search-space file, by which it is served.
    kernel
        Kernel in its current version.
    problem
        Problem that was missed.
    count
        Calls that were not served exactly, of all tiers together.
    lost_s
        Time that they may have lost, in seconds; None if unknown.
    """

    asked_as: str
    kernel: Kernel
    problem: Problem
    count: int
    lost_s: float | None


def assess_misses(database: Database, kernel: KernelName | None) -> list[AssessedMiss]:
    """Return the misses of a kernel, or of all kernels, with their costs; the most frequent first.

    Parameters
    ----------
    database
        Open database.
    kernel
        Name, or path of a search-space file; None for all kernels.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    return list(_assessed(database, kernel, rows_of_kernel(database.misses, kernel)))


def missed_problems(kernel: KernelName | None, options: TuneOptions) -> list[MissedProblem]:
    """Return the missed problems that are not tuned yet on the GPU that would tune them, the costliest first.

    Problems of kernels that are found neither by name nor by the given path are left out.

    Parameters
    ----------
    kernel
        Name, or path of a search-space file; None for all kernels.
    options
        Options of the sessions that are to tune them; they state the device, the database and whether to replay.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    live = device_count() > 0 and options.replay is None and not options.scheduler
    gpu_name = live_device(options.device_index).name if live else None
    opened = open_for_reading(options.database)
    if opened is None:
        return []
    with opened:
        misses = [miss for miss in rows_of_kernel(opened.misses, kernel) if gpu_name in (None, miss.gpu_name)]
        assessed = list(_assessed(opened, kernel, misses))
    found: dict[str, MissedProblem] = {}
    for one in assessed:
        if one.kernel is None or one.tuned:
            continue
        problem = one.miss.problem
        earlier = found.get(str(problem))
        found[str(problem)] = MissedProblem(
            asked_as=str(kernel) if kernel is not None else one.kernel.name,
            kernel=one.kernel,
            problem=problem,
            count=one.miss.count + (earlier.count if earlier else 0),
            lost_s=_sum(one.lost_s, earlier.lost_s if earlier else None),
        )
    return sorted(found.values(), key=lambda missed: (-(missed.lost_s or 0.0), -missed.count))


def _assessed(database: Database, kernel: KernelName | None, misses: Sequence[StoredMiss]) -> Iterator[AssessedMiss]:
    kernels: dict[str, Kernel | None] = {}
    estimators: dict[str, MissCostEstimator] = {}
    for miss in misses:
        name = miss.problem.kernel
        if name not in kernels:
            kernels[name] = _find_kernel(kernel, name)
        loaded = kernels[name]
        problem = _current_problem(loaded, miss) if loaded is not None else None
        if loaded is None or problem is None:
            yield AssessedMiss(miss, None, None, tuned=False)
            continue
        if name not in estimators:
            estimators[name] = MissCostEstimator(loaded, study_times(database, name), FamilyStore(database).rules(name))
        current = replace(miss, problem=problem)
        tuned = _is_tuned(database, loaded, problem, miss.gpu_name)
        yield AssessedMiss(current, loaded, estimators[name].cost(current), tuned)


def _find_kernel(given: KernelName | None, name: str) -> Kernel | None:
    """Return the kernel of a missed problem, which the user gives, or which is found by its name."""
    try:
        loaded = load_kernel(given) if given is not None else load_named_kernel(name)
    except InputError:
        return None
    return loaded if loaded.name == name else None


def _current_problem(kernel: Kernel, miss: StoredMiss) -> Problem | None:
    """Return the missed problem with its sizes in the kernel's order; None if the kernel has other sizes today."""
    try:
        return resolve_problem(kernel.spec, miss.problem.sizes, miss.problem.dtype)
    except InputError:
        return None


def _is_tuned(database: Database, kernel: Kernel, problem: Problem, gpu_name: str) -> bool:
    """Return whether a finished session has tuned a problem for the kernel's current version."""
    version = (kernel.source_hash, space_hash(kernel.spec))
    stored = database.best(problem.kernel, dtype=problem.dtype, sizes=problem.sizes, gpu_name=gpu_name)
    return any(best.confirmed and (best.key.template_hash, best.key.space_hash) == version for best in stored)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None and b is None else (a or 0.0) + (b or 0.0)
