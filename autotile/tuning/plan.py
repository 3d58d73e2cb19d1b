"""Plans: many problems of kernels and operations, with budgets and priorities, tuned by one command that resumes.

docs/file-format.md specifies the file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from autotile.core.documents import Count, Name, convert, parse_toml, read_regular, toml_value
from autotile.core.model import Problem
from autotile.database.database import CONTEST, Database
from autotile.database.keys import space_hash
from autotile.errors import AutotileError, DataError, InputError, nearest
from autotile.kernel.inputs import call_folder, read_captured_call
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.operation import Operation, find_operation, load_operation
from autotile.kernel.problem import resolve_problem
from autotile.tuning.options import TuneOptions

_MAX_BYTES = 4 << 20
MAX_PROBLEMS = 100_000
"""Problems of a plan, at most; each takes seconds at least."""

_Text = Annotated[str, Meta(max_length=1000)]
_Share = Annotated[float, Meta(gt=0, lt=1)]
_Seconds = Annotated[float, Meta(gt=0, le=1e9)]
_Trials = Annotated[int, Meta(ge=1, le=10**9)]
_Sizes = dict[Name, Count | list[Count]]


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """Table ``[plan]``: the effort for each problem that states none, and the wall time of everything."""

    name: _Text = ""
    trials: _Trials | None = None
    budget_s: _Seconds | None = None
    until: _Share | None = None
    total_budget_s: _Seconds | None = None


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """Table ``[[tune]]``."""

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


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    tune: list[_Entry]
    plan: _Head = msgspec.field(default_factory=_Head)


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A problem of a plan.

    Attributes
    ----------
    asked_as
        Name of the kernel or operation, or absolute path of its file.
    target
        The kernel or the operation.
    problem
        The problem.
    gpus
        Names or CUDA indices of the GPUs to tune it on; empty for all models of the command.
    trials, budget_s, until
        Effort, as in `TuneOptions`; None for that of the command.
    priority
        The problems of the greatest priority come first.
    captured
        Folder of a captured call, whose arguments are the inputs; None for the declared contents.
    """

    asked_as: str
    target: Kernel | Operation
    problem: Problem
    gpus: tuple[str | int, ...] = ()
    trials: int | None = None
    budget_s: float | None = None
    until: float | None = None
    priority: int = 0
    captured: str | None = None

    def options(self, options: TuneOptions) -> TuneOptions:
        """Return the options of its session, given those of the command."""
        effort = {"trials": self.trials, "budget_s": self.budget_s, "until": self.until}
        if any(value is not None for value in effort.values()):
            options = replace(options, trials=self.trials, budget_s=self.budget_s, until=self.until)
        if self.captured is not None:
            options = replace(options, captured=self.captured, fresh=True)
        return options


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """Problems to tune, in the order in which they begin.

    Attributes
    ----------
    name
        Name of the plan.
    problems
        The problems.
    total_budget_s
        Wall time after which no other problem begins, in seconds; None for no limit.
    """

    name: str
    problems: tuple[PlannedProblem, ...]
    total_budget_s: float | None = None


def read_plan(path: Path) -> TuningPlan:
    """Read a plan.

    Parameters
    ----------
    path
        TOML file; kernels and captured calls in it are given by name, or by paths relative to it.

    Raises
    ------
    InputError
        The file cannot be read, is malformed, or names an unknown kernel, size or dtype, or too many problems.
    """
    try:
        document = convert(parse_toml(read_regular(path, _MAX_BYTES).decode()), _Document)
    except OSError as error:
        raise InputError(f"the plan {path} cannot be read: {error.strerror}") from None
    except (DataError, ValueError, InputError) as error:
        raise InputError(f"the plan {path} cannot be read: {_hint(str(error))}") from None
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


def _hint(message: str) -> str:
    tables = {schema: schema.__struct_fields__ for schema in (_Document, _Head, _Entry)}
    unknown = message.partition("unknown field ")[2].strip("`'\" ")
    if not unknown:
        return message
    known = [field for fields in tables.values() if unknown not in fields for field in fields]
    places = {_Document: "at the top level", _Head: "in [plan]", _Entry: "in [[tune]]"}
    belongs = [places[schema] for schema, fields in tables.items() if unknown in fields]
    return message + (f"; it belongs {' or '.join(belongs)}" if belongs else nearest(unknown, known))


def _problems_of(entry: _Entry, head: _Head, folder: Path, room: int) -> list[PlannedProblem]:
    name = entry.kernel
    if "/" in name or name.endswith(".toml"):
        name = str((folder / name).absolute())
    if entry.captured:
        return [_captured_problem(entry, folder, name)]
    choices = {size: value if isinstance(value, list) else [value] for size, value in entry.sizes.items()}
    count = math.prod(map(len, choices.values())) if choices or not entry.problems else 0
    dtypes: Sequence[str | None] = entry.dtypes or [None]
    if (count + len(entry.problems)) * len(dtypes) > room:
        raise InputError(f"it has more problems than a plan may hold, {MAX_PROBLEMS:,} in all; split the plan")
    listed: Iterable[Mapping[str, int]] = entry.problems
    if choices or not entry.problems:  # without any size, the one problem of the file
        combined = itertools.product(*choices.values())
        listed = itertools.chain(listed, (dict(zip(choices, row, strict=True)) for row in combined))
    target: Kernel | Operation
    target = load_operation(name) if find_operation(name) is not None else load_kernel(name)
    own = (entry.trials, entry.budget_s, entry.until)
    trials, budget_s, until = own if any(own) else (head.trials, head.budget_s, head.until)
    return [
        PlannedProblem(
            name,
            target,
            target.resolve(sizes, dtype, defaults=True)
            if isinstance(target, Operation)
            else resolve_problem(target.spec, sizes, dtype, defaults=True),
            tuple(entry.gpus),
            trials,
            budget_s,
            until,
            entry.priority,
        )
        for sizes in listed
        for dtype in dtypes
    ]


def _captured_problem(entry: _Entry, folder: Path, name: str) -> PlannedProblem:
    if entry.sizes or entry.problems or entry.dtypes:
        raise InputError("a captured call states its sizes and its dtype; leave sizes, problems and dtypes out")
    path = call_folder((folder / entry.captured).absolute())
    call = read_captured_call(path)
    kernel = load_kernel(name)
    problem = resolve_problem(kernel.spec, call.sizes, call.dtype)
    effort = (entry.trials, entry.budget_s, entry.until)
    return PlannedProblem(name, kernel, problem, tuple(entry.gpus), *effort, entry.priority, str(path))


def is_done(database: Database | None, planned: PlannedProblem, options: TuneOptions, gpu_name: str) -> bool:
    """Return whether a finished session has tuned a problem on a GPU with at least the effort of the plan.

    Parameters
    ----------
    database
        Open database; None if there is none yet.
    planned
        The problem.
    options
        Options of its session.
    gpu_name
        Name of the GPU; empty in replay.
    """
    if database is None:
        return False
    if isinstance(planned.target, Operation):
        kernels = {member.name: member.load() for member in planned.target.members}
    else:
        kernels = {planned.target.name: planned.target}
    for name, kernel in kernels.items():
        version = (kernel.source_hash, space_hash(kernel.spec))
        sizes = {size: planned.problem.sizes[size] for size in kernel.spec.sizes if size in planned.problem.sizes}
        for best in database.best(name, dtype=planned.problem.dtype, gpu_name=gpu_name or None):
            same = all(best.key.sizes.get(size) == value for size, value in sizes.items())
            is_current = (best.key.template_hash, best.key.space_hash) == version
            source = "cuda" if gpu_name else "replayed"
            is_same_kind = (best.key.l2_mode, best.key.source) == (options.l2, source)
            if not (same and is_current and is_same_kind and best.confirmed):
                continue
            if isinstance(planned.target, Operation):
                if best.run.sampler == CONTEST:  # its last race has been held
                    return True
            elif _has_effort(best.run.settings, best.run.summary, options):
                return True
    return False


def _has_effort(settings: Mapping[str, Any], summary: Mapping[str, Any], options: TuneOptions) -> bool:
    """Return whether a run was as long as options ask for, or ended because nothing was left to gain."""
    if summary.get("interrupted") or (settings.get("captured") or None) != options.captured:
        return False
    stopped = summary.get("stopped") or {}
    if isinstance(stopped, Mapping) and stopped.get("rule") in ("space", "settled"):
        return True
    asked = {"trials": options.trials, "budget_s": options.budget_s}
    for name, value in asked.items():
        known = settings.get(name)
        if value is not None and not (isinstance(known, int | float) and known >= value):
            return False
    until = settings.get("until")
    return options.until is None or (isinstance(until, int | float) and until <= options.until)


def plan_text(problems: Sequence[PlannedProblem], comments: Sequence[str] = ()) -> str:
    """Return a plan as TOML, one table for each kernel and dtype, and for each captured call.

    Parameters
    ----------
    problems
        The problems.
    comments
        Lines at the top.
    """
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
