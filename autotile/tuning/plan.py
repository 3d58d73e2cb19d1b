"""Problems to tune: those of a plan, a file that docs/file-format.md specifies, and those that programs missed.

A plan names many problems of kernels and operations, with budgets and priorities; the command that tunes them resumes.
A miss is a problem that a program was served by a fallback: the cost of each says which of them to tune.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from autotile.core.documents import Count, Name, convert, parse_toml, read_regular, toml_value
from autotile.core.model import Problem, Sizes
from autotile.cuda.driver import device_count, live_device
from autotile.database.database import CONTEST, Database, StoredRun, open_for_reading, rows_of_kernel
from autotile.database.keys import TuningKey, version_of
from autotile.database.learned import miss_costs
from autotile.database.winners import StoredMiss
from autotile.errors import AutotileError, DataError, InputError, nearest
from autotile.kernel.inputs import call_folder, read_captured_call
from autotile.kernel.library import Kernel, KernelName, held_kernel, load_kernel, load_named_kernel
from autotile.kernel.operation import Operation, named_operation
from autotile.kernel.problem import resolve_problem
from autotile.tuning.options import TuneOptions

MAX_PLAN_BYTES = 4 << 20
MAX_PROBLEMS = 100_000
"""Problems of a plan, at most; each takes seconds at least."""

_Text = Annotated[str, Meta(max_length=1000)]
_Share = Annotated[float, Meta(gt=0, lt=1)]
_Seconds = Annotated[float, Meta(gt=0, le=1e9)]
_Trials = Annotated[int, Meta(ge=1, le=10**9)]
_Sizes = dict[Name, Count | list[Count]]


class _PlanTable(msgspec.Struct, forbid_unknown_fields=True):
    """Table ``[plan]``: the effort for each problem that states none, and the wall time of everything."""

    name: _Text = ""
    trials: _Trials | None = None
    budget_s: _Seconds | None = None
    until: _Share | None = None
    total_budget_s: _Seconds | None = None


class _TuneTable(msgspec.Struct, forbid_unknown_fields=True):
    kernel: _Text
    sizes: _Sizes = {}
    problems: list[dict[Name, Count]] = []
    dtypes: list[Name] = []
    gpus: list[_Text | Count] = []
    captured: _Text = ""
    trials: _Trials | None = None
    budget_s: _Seconds | None = None
    until: _Share | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


class _PlanDocument(msgspec.Struct, forbid_unknown_fields=True):
    tune: list[_TuneTable]
    plan: _PlanTable = msgspec.field(default_factory=_PlanTable)


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A problem of a plan; without trials, budget and gain, its effort is that of the command."""

    asked_as: str
    """Name of the kernel or operation, or absolute path of its file."""
    held: Kernel | Operation | None = field(compare=False)
    """Kernel or operation; None where it is loaded by its name, as of a plan that was pickled."""
    problem: Problem
    gpus: tuple[str | int, ...] = ()
    """Names or CUDA indices of the GPUs to tune it on; empty for all models of the command."""
    trials: int | None = None
    budget_s: float | None = None
    until: float | None = None
    priority: int = 0
    """The problems of the greatest priority come first."""
    captured: str | None = None
    """Folder of a captured call, whose arguments are the inputs; None for the declared contents."""
    weight: float | None = None
    """Part of the plan's time, relative to that of the problems after it; None for all that is left."""

    @property
    def target(self) -> Kernel | Operation:
        """The kernel or operation; errors as for `load_kernel`."""
        return self.held if self.held is not None else named_operation(self.asked_as) or load_kernel(self.asked_as)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it by the name of what it is of, as parsed expressions cannot be."""
        return PlannedProblem, (self.asked_as, None, *(getattr(self, one.name) for one in fields(self)[2:]))

    def options(self, options: TuneOptions) -> TuneOptions:
        """Return the options of its session, given those of the command."""
        effort: dict[str, Any] = {"trials": self.trials, "budget_s": self.budget_s, "until": self.until}
        if any(value is not None for value in effort.values()):
            options = replace(options, **effort)
        if self.captured is not None:
            options = replace(options, captured=self.captured, fresh=True)
        return options


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """Problems to tune, in the order in which they begin."""

    name: str
    problems: tuple[PlannedProblem, ...]
    total_budget_s: float | None = None
    """Wall time after which no other problem begins; None for no limit."""


def read_plan(path: Path) -> TuningPlan:
    """Read a plan from a TOML file; kernels and captured calls in it are given by name, or by paths relative to it.

    An `InputError` is raised if the file cannot be read, is malformed, or names an unknown kernel, size or dtype, or
    too many problems.
    """
    try:
        document = convert(parse_toml(read_regular(path, MAX_PLAN_BYTES).decode("utf-8-sig")), _PlanDocument)
    except OSError as error:
        raise InputError(f"the plan {path} cannot be read: {error.strerror}") from None
    except (DataError, ValueError, InputError) as error:
        message = str(error)
        if isinstance(error, DataError):  # its field is one such as tune[1].sizes[...][0]
            place = re.sub(r"\[(\d+)\]", lambda index: f" number {int(index[1]) + 1}", error.field.replace("[...]", ""))
            place = place.replace("tune number", "[[tune]] number", 1).replace(".", ": ")
            message = str(DataError(error.fault, field=place))
        if unknown := message.partition("unknown field ")[2].strip("`'\" "):
            tables = {
                "at the top level": _PlanDocument.__struct_fields__,
                "in [plan]": _PlanTable.__struct_fields__,
                "in [[tune]]": _TuneTable.__struct_fields__,
            }
            belongs = [place for place, fields in tables.items() if unknown in fields]
            known = [field for fields in tables.values() for field in fields]
            message += f"; it belongs {' or '.join(belongs)}" if belongs else nearest(unknown, known)
        raise InputError(f"the plan {path} cannot be read: {message}") from None
    found: dict[tuple[str, str, tuple[str | int, ...]], PlannedProblem] = {}
    for number, entry in enumerate(document.tune, start=1):
        try:
            for one in _problems_of(entry, document.plan, path.parent, MAX_PROBLEMS - len(found)):
                found.setdefault((one.asked_as, str(one.problem), one.gpus), one)
        except AutotileError as error:
            raise InputError(f"{path}: [[tune]] number {number}: {error}") from None
    if not found:
        raise InputError(f"the plan {path} names no problem; add a table [[tune]] with a kernel and its sizes")
    ordered = sorted(found.values(), key=lambda one: -one.priority)
    return TuningPlan(document.plan.name or path.stem, tuple(ordered), document.plan.total_budget_s)


def _problems_of(entry: _TuneTable, head: _PlanTable, folder: Path, room: int) -> list[PlannedProblem]:
    name = entry.kernel
    if "/" in name or name.endswith(".toml"):
        name = str((folder / name).absolute())
    own = (entry.trials, entry.budget_s, entry.until)
    if entry.captured:
        if entry.sizes or entry.problems or entry.dtypes:
            raise InputError("a captured call states its sizes and its dtype; leave sizes, problems and dtypes out")
        path = call_folder((folder / entry.captured).absolute())
        call = read_captured_call(path)
        kernel = load_kernel(name)
        problem = resolve_problem(kernel.spec, call.sizes, call.dtype)
        return [PlannedProblem(name, kernel, problem, tuple(entry.gpus), *own, entry.priority, str(path))]
    choices = {size: value if isinstance(value, list) else [value] for size, value in entry.sizes.items()}
    count = math.prod(map(len, choices.values())) if choices or not entry.problems else 0
    dtypes: Sequence[str | None] = entry.dtypes or [None]
    if (count + len(entry.problems)) * len(dtypes) > room:
        raise InputError(f"it has more problems than a plan may hold, {MAX_PROBLEMS:,} in all; split the plan")
    listed: Iterable[Sizes] = entry.problems
    if choices or not entry.problems:  # without any size, the one problem of the file
        combined = itertools.product(*choices.values())
        listed = itertools.chain(listed, (dict(zip(choices, row, strict=True)) for row in combined))
    target = named_operation(name) or load_kernel(name)
    effort = own if any(own) else (head.trials, head.budget_s, head.until)
    resolve = target.resolve if isinstance(target, Operation) else partial(resolve_problem, target.spec)
    return [
        PlannedProblem(name, target, resolve(sizes, dtype, defaults=True), tuple(entry.gpus), *effort, entry.priority)
        for sizes in listed
        for dtype in dtypes
    ]


def is_done(database: Database, planned: PlannedProblem, options: TuneOptions, gpu_name: str) -> bool:
    """Return True if a finished session tuned a problem on a GPU, unnamed in replay, with at least this effort."""
    target, problem = planned.target, planned.problem
    for kernel in [member.load() for member in target.members] if isinstance(target, Operation) else [target]:
        version = (*version_of(kernel), options.l2, "cuda" if gpu_name else "replayed")
        sizes = {size: problem.sizes[size] for size in kernel.spec.sizes if size in problem.sizes}
        for best in database.best(kernel.name, dtype=problem.dtype, gpu_name=gpu_name or None):
            key, run = best.key, best.run
            is_same = (*key.version, key.l2_mode, key.source) == version
            if not (is_same and best.confirmed and all(key.sizes.get(size) == value for size, value in sizes.items())):
                continue
            # of an operation, the last race has been held
            is_enough = run.sampler == CONTEST if isinstance(target, Operation) else _has_effort(run, options)
            if is_enough:
                return True
    return False


def is_final(database: Database, key: TuningKey, *, raced: bool) -> bool:
    """Return True if the best result of a study is of its finals, or of a race with other kernels if it is to be.

    A session that was killed, or still runs, leaves the best trial so far; one of an operation, winners of few kernels.
    """
    final = (best for best in database.best(digest=key.digest) if best.confirmed)
    return any(not raced or best.run.sampler in (CONTEST, "race") for best in final)


def _has_effort(run: StoredRun, options: TuneOptions) -> bool:
    """Return True if a run was as long as options ask for, or ended because nothing was left to gain."""
    settings, summary = run.settings, run.summary
    if summary.get("interrupted") or (settings.get("captured") or None) != options.captured:
        return False
    stopped = summary.get("stopped") or {}
    if isinstance(stopped, Mapping) and stopped.get("rule") in ("space", "settled"):
        return True
    known = {name: value for name, value in settings.items() if isinstance(value, int | float)}
    asked = {"trials": options.trials, "budget_s": options.budget_s}
    is_long = all(known.get(name, -math.inf) >= value for name, value in asked.items() if value is not None)
    return is_long and (options.until is None or known.get("until", math.inf) <= options.until)


def plan_text(problems: Sequence[PlannedProblem], comments: Sequence[str] = ()) -> str:
    """Return a plan as TOML, below comments: one table for each kernel and dtype, and for each captured call."""
    lines = [f"# {comment}" for comment in comments]
    groups: dict[tuple[str, str, int], list[PlannedProblem]] = {}
    for one in problems:
        if one.captured is not None:
            lines += ["", "[[tune]]", f"kernel = {toml_value(one.asked_as)}", f"captured = {toml_value(one.captured)}"]
        else:
            groups.setdefault((one.asked_as, one.problem.dtype, one.priority), []).append(one)
    for (name, dtype, priority), group in groups.items():
        lines += ["", "[[tune]]", f"kernel = {toml_value(name)}", f"dtypes = [{toml_value(dtype)}]"]
        lines += [f"priority = {priority}"] if priority else []
        lines += ["problems = ["]
        for one in group:
            inner = ", ".join(f"{size} = {value}" for size, value in one.problem.sizes.items())
            lines.append(f"    {{ {inner} }},")
        lines.append("]")
    return "\n".join(lines).lstrip("\n") + "\n"


class AssessedMiss(StoredMiss, frozen=True):
    """Calls of one problem on one GPU that were served by a fallback, with their cost as far as it is known."""

    kernel: Kernel | None
    """In its current version; None if it is not found, or no longer has these sizes. Else these are in the order of its
    file."""
    tuned: bool
    """Whether the problem has been tuned since."""
    call_us: float | None = None
    """Time of one call, in microseconds; None if unknown."""
    lost_us: float | None = None
    """Part of it that the best configuration would have saved; None if unknown."""
    measured: bool = False
    """Whether these times were measured at this problem rather than estimated from others."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without the kernel, whose parsed expressions cannot be."""
        return AssessedMiss, structs.astuple(structs.replace(self, kernel=None))

    @property
    def lost_s(self) -> float | None:
        """Time that all calls together may have lost against the best configuration, in seconds; None if unknown."""
        return self.count * self.lost_us * 1e-6 if self.lost_us is not None else None


Missed = tuple[PlannedProblem, int, float | None]
"""A missed problem, its calls that were not served exactly, and the seconds that they may have lost, if known."""


def missed_problems(kernel: KernelName | None, options: TuneOptions) -> list[Missed]:
    """Return the missed problems that are not tuned yet on the GPU that would tune them, the costliest first.

    Problems of kernels that are found neither by name nor by the given path are left out. The options are those of the
    sessions that are to tune them; errors as for `assess_misses`.
    """
    live = device_count() > 0 and options.replay is None and not options.scheduler
    gpu_name = live_device(options.device_index).name if live else None
    with open_for_reading(options.database) as opened:
        assessed = assess_misses(opened, kernel, gpu_name) if opened is not None else []
    found: dict[str, Missed] = {}
    for one in assessed:
        if one.kernel is None or one.tuned:
            continue
        asked_as = one.kernel.name if kernel is None or held_kernel(kernel) else str(kernel)
        planned = PlannedProblem(asked_as, one.kernel, one.problem)
        _, count, lost_s = found.get(str(one.problem), (planned, 0, None))
        if one.lost_s is not None:
            lost_s = (lost_s or 0.0) + one.lost_s
        found[str(one.problem)] = planned, count + one.count, lost_s
    return sorted(found.values(), key=lambda missed: (-(missed[2] or 0.0), -missed[1]))


def assess_misses(database: Database, kernel: KernelName | None, gpu_name: str | None = None) -> list[AssessedMiss]:
    """Return the misses of a kernel, or of all kernels, with their costs; the most frequent first.

    They are those on one GPU, or on all. An `InputError` is raised if the database cannot be read, or there is no such
    kernel.
    """

    @cache
    def current_kernel(name: str) -> Kernel | None:
        with suppress(InputError):
            loaded = load_kernel(kernel) if kernel is not None else load_named_kernel(name)
            return loaded if loaded.name == name else None
        return None

    found: list[AssessedMiss] = []
    costs: dict[str, Callable[[StoredMiss], tuple[float, float, bool] | None]] = {}
    for miss in rows_of_kernel(database.misses, kernel):
        if gpu_name not in (None, miss.gpu_name):
            continue
        name = miss.problem.kernel
        current = current_kernel(name)
        problem: Problem | None = None
        if current is not None:
            with suppress(InputError):  # it has other sizes today
                problem = resolve_problem(current.spec, miss.problem.sizes, miss.problem.dtype)
        counts = (miss.gpu_name, miss.tier, miss.count, miss.last_at)
        if current is None or problem is None:
            found.append(AssessedMiss(miss.problem, *counts, None, tuned=False))
            continue
        version = version_of(current)
        stored = database.best(name, dtype=problem.dtype, sizes=problem.sizes, gpu_name=miss.gpu_name)
        tuned = any(best.confirmed and best.key.version == version for best in stored)
        if name not in costs:
            costs[name] = miss_costs(database, current)
        cost = costs[name](structs.replace(miss, problem=problem)) or ()
        found.append(AssessedMiss(problem, *counts, current, tuned, *cost))
    return found
