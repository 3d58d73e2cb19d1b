"""Problems that programs asked for and that could not be served exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autotile.core.model import Problem
from autotile.cuda.driver import device_count, live_device
from autotile.database.database import Database
from autotile.database.keys import space_hash
from autotile.database.studies import StoredMiss
from autotile.errors import InputError
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.ops.miss_costs import MissCost, MissCosts
from autotile.ops.reading import open_to_read
from autotile.report.misses import MissesReport, MissRow
from autotile.tuning.options import TuneOptions


@dataclass(frozen=True, slots=True)
class MissedProblem:
    """A problem to tune, and why.

    Attributes
    ----------
    asked_as
        What the kernel is served by: its name, or the path of its file.
    count
        Calls that were not served exactly.
    lost_s
        Seconds that this may have cost; None where it is not known.
    """

    asked_as: str
    kernel: Kernel
    problem: Problem
    count: int
    lost_s: float | None


@dataclass(frozen=True, slots=True)
class _Opened:
    """A miss with its kernel as it is now."""

    miss: StoredMiss
    kernel: Kernel
    problem: Problem
    cost: MissCost | None
    tuned: bool


def list_misses(kernel: str | None = None, *, database: str | None = None) -> MissesReport:
    """What was served for want of an exact result, that which may have cost most first.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    opened = open_to_read(database)
    if opened is None:
        return MissesReport([])
    with opened:
        misses = _misses(opened, kernel)
        rows = [_row(miss, one) for miss, one in zip(misses, _open_all(opened, kernel, misses), strict=True)]
    return MissesReport(sorted(rows, key=lambda row: (-(row.lost_s or 0.0), -row.miss.count)))


def missed_problems(kernel: str | None, options: TuneOptions) -> list[MissedProblem]:
    """What was asked for on the GPU that would tune it and is not tuned yet, that which may have cost most first.

    Problems of kernels that are found neither by name nor by the given path are left out.

    Parameters
    ----------
    kernel
        Only this kernel's, by name or by the path of its file; None for all.
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
        waiting = [one for one in _open_all(opened, kernel, asked) if one is not None and not one.tuned]
    found: dict[str, MissedProblem] = {}
    for one in waiting:
        earlier = found.get(str(one.problem))
        found[str(one.problem)] = MissedProblem(
            asked_as=kernel or one.kernel.name,
            kernel=one.kernel,
            problem=one.problem,
            count=one.miss.count + (earlier.count if earlier else 0),
            lost_s=_sum(_lost_s(one.miss, one.cost), earlier.lost_s if earlier else None),
        )
    return sorted(found.values(), key=lambda missed: (-(missed.lost_s or 0.0), -missed.count))


def _misses(database: Database, kernel: str | None) -> Sequence[StoredMiss]:
    if kernel is None:
        return database.misses()
    known = database.misses(kernel)  # a kernel that was deleted since is still in the database
    return known or database.misses(load_kernel(kernel).name)


def _open_all(database: Database, kernel: str | None, misses: Sequence[StoredMiss]) -> Iterator[_Opened | None]:
    """What is known of each miss; None where its kernel cannot be read."""
    kernels: dict[str, Kernel | None] = {}
    costs: dict[str, MissCosts] = {}
    for miss in misses:
        name = miss.problem.kernel
        if name not in kernels:
            kernels[name] = _kernel(kernel or name, name)
        loaded = kernels[name]
        problem = _problem(loaded, miss) if loaded is not None else None
        if loaded is None or problem is None:
            yield None
            continue
        if name not in costs:
            costs[name] = MissCosts(database, loaded)
        tuned = _is_tuned(database, loaded, problem, miss.gpu_name)
        yield _Opened(miss, loaded, problem, costs[name].of(replace(miss, problem=problem)), tuned)


def _kernel(asked_as: str, name: str) -> Kernel | None:
    try:
        loaded = load_kernel(asked_as)
    except InputError:
        return None
    return loaded if loaded.name == name else None


def _problem(kernel: Kernel, miss: StoredMiss) -> Problem | None:
    """The problem with its sizes in the order of the kernel's file; None where the kernel has other sizes now."""
    try:
        return resolve_problem(kernel.spec, miss.problem.sizes, miss.problem.dtype)
    except InputError:
        return None


def _row(miss: StoredMiss, opened: _Opened | None) -> MissRow:
    if opened is None:
        return MissRow(miss, None, None, False, False)
    cost = opened.cost
    return MissRow(
        replace(miss, problem=opened.problem),
        call_us=cost.call_us if cost is not None else None,
        lost_s=_lost_s(miss, cost),
        measured=cost is not None and cost.measured,
        tuned=opened.tuned,
    )


def _lost_s(miss: StoredMiss, cost: MissCost | None) -> float | None:
    return miss.count * cost.lost_us * 1e-6 if cost is not None else None


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None and b is None else (a or 0.0) + (b or 0.0)


def _is_tuned(database: Database, kernel: Kernel, problem: Problem, gpu_name: str) -> bool:
    """Whether it was tuned after it was missed, with the kernel as it is now."""
    version = (kernel.source_hash, space_hash(kernel.spec))
    stored = database.best(problem.kernel, dtype=problem.dtype, sizes=problem.sizes, gpu_name=gpu_name)
    return any(best.confirmed and (best.key.template_hash, best.key.space_hash) == version for best in stored)
