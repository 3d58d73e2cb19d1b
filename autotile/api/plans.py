"""Tuning by a plan, or of what programs missed: all of its problems, on all GPUs, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autotile.api.progress import observing
from autotile.api.targets import (
    forgetting_served,
    models_of,
    read_keywords,
    serving_call,
    session_options,
    tune_loaded_operation,
    tune_problem,
)
from autotile.core.argument_types import checked
from autotile.core.device import DeviceProperties, is_name_of
from autotile.core.documents import read_regular
from autotile.core.statistics import Interval
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Part,
    Result,
    ResultTable,
    device_text,
    duration_text,
    plural,
    sizes_text,
    time_text,
)
from autotile.cuda.driver import device_count, live_device
from autotile.database.paths import write_output
from autotile.errors import AutotileError, DatabaseError, InputError
from autotile.kernel.inputs import kernel_of_call, read_captured_call
from autotile.kernel.library import KernelName, held_kernel, load_kernel
from autotile.kernel.operation import Operation
from autotile.kernel.problem import Workrate, resolve_problem
from autotile.settings import absolute_path, read_settings, user_path
from autotile.tuning.lanes import GpuName, Lane
from autotile.tuning.operation_session import OperationResult
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import (
    MAX_PLAN_BYTES,
    Missed,
    PlannedProblem,
    TuningPlan,
    is_done,
    missed_problems,
    plan_text,
    read_plan,
)
from autotile.tuning.progress_state import Observer, Place, Progress
from autotile.tuning.result import TuneResult
from autotile.tuning.schedule import Schedule, open_lane

_NO_MISSES = "no missed problem is left to tune; `autotile list --misses` lists what was counted"
State = Literal["tuned", "done", "failed", "left"]

_LEAST_S = 5.0
"""Least part of a plan's time that a problem gets, if so much is left: with less, little is found."""
_MAX_SHOWN = 200
"""Problems in the table of a plan, at most."""


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Outcome of a problem of a plan on a GPU."""

    planned: PlannedProblem
    gpu_name: str
    """Name of the GPU; empty in replay."""
    state: State
    """``tuned``; ``done`` if an earlier session had tuned it; ``failed``; or ``left`` if it did not begin, or was
    interrupted."""
    result: TuneResult | OperationResult | None = None
    reason: str = ""
    """Why it failed; empty otherwise."""
    seconds: float = 0.0

    @property
    def is_tuned(self) -> bool:
        """Whether the problem is tuned, now or before."""
        return self.state in ("tuned", "done")

    @property
    def time_us(self) -> float | None:
        """Time of the winner in microseconds."""
        winner = self.result.winner if self.result is not None else None
        return winner.time_us if winner is not None else None

    @property
    def speedup(self) -> Interval | None:
        """Time of the default over that of the winner, of a kernel; None if unknown."""
        return self.result.speedup if isinstance(self.result, TuneResult) else None

    @property
    def device_label(self) -> str:
        """Name of the GPU, marked if the times were replayed from a recording of it; a dash if it is not known."""
        if self.result is not None and self.result.device.source == "replayed":
            return device_text(self.result.device)
        return self.gpu_name or NOTHING

    @property
    def time_text(self) -> str:
        """Time of the winner, marked if it was replayed; a dash if there is none."""
        return time_text(self.time_us, self.result.device.source if self.result is not None else "")

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            **self.planned.problem.document(),
            "gpu": self.gpu_name or None,
            "state": self.state,
            "reason": self.reason or None,
            "time_us": self.time_us,
            "seconds": round(self.seconds, 3),
            "result": self.result.to_json() if self.result is not None else None,
        }


@dataclass(frozen=True, slots=True, repr=False)
class PlanResult(Result):
    """Outcome of a plan."""

    name: str
    entries: tuple[PlanEntry, ...]
    seconds: float
    interrupted: bool
    database: str
    lists_results: bool = False
    """Whether the JSON is that of the results alone, each as `autotile.tune` returns it: of missed problems."""

    @property
    def is_complete(self) -> bool:
        """Whether every problem is tuned."""
        return all(entry.is_tuned for entry in self.entries)

    def count(self, state: State) -> int:
        """Return the number of problems in a state."""
        return sum(entry.state == state for entry in self.entries)

    @property
    def summary(self) -> str:
        """The number of problems in each state, as text."""
        words = {"tuned": "tuned", "done": "tuned before", "failed": "failed", "left": "left"}
        counts = [f"{self.count(state)} {words[state]}" for state in words if self.count(state)]  # type: ignore[arg-type]
        found = f": {', '.join(counts)}" if counts else ""
        return f"{plural(len(self.entries), 'problem')}{found}, in {duration_text(self.seconds)}"

    def _headline(self) -> str:
        return f"{self._heading()}: {self.summary}"

    def _heading(self) -> str:
        return f"plan {self.name}"

    def _parts(self) -> Iterator[Part]:
        rows = [
            (
                entry.planned.problem.kernel,
                entry.state,
                entry.time_text,
                f"{entry.speedup.value:.3f}x" if entry.speedup is not None else NOTHING,
                duration_text(entry.seconds) if entry.seconds else NOTHING,
                entry.planned.problem.dtype,
                entry.device_label,
                sizes_text(entry.planned.problem.sizes),
                entry.reason,
            )
            for entry in self.entries[:_MAX_SHOWN]
        ]
        figures = f"{RIGHT}time", f"{RIGHT}speed-up", f"{RIGHT}took"
        if rows:
            headings = "kernel", "state", *figures, "dtype", "GPU", "problem", "reason"
            yield ResultTable(headings, rows, ("reason", "problem", "GPU"))
        if len(self.entries) > _MAX_SHOWN:
            yield f"the first {_MAX_SHOWN} problems are shown; --json lists all"
        yield [("result", self.summary), ("saved in", self.database)]

    def to_json(self) -> Any:
        """Return the document that ``autotile tune --plan --json`` prints, or that of ``--misses``."""
        if self.lists_results:
            return [entry.result.to_json() for entry in self.entries if isinstance(entry.result, TuneResult)]
        return {
            "plan": self.name,
            "complete": self.is_complete,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "database": self.database,
            "problems": [entry.to_json() for entry in self.entries],
        }


@checked
def tune_plan(
    plan: TuningPlan | str | Path, options: TuneOptions | None = None, observe: Observer = lambda _: None, **named: Any
) -> PlanResult:
    """Tune all problems of a plan, one a GPU at the same time, and several GPUs a problem where few are left.

    Problems that an earlier run has tuned are left out, so that the same call resumes. One that cannot be tuned does
    not stop the others.

    Parameters
    ----------
    plan
        A plan, or the path of its file.
    options
        Options of each session, where the plan states none; ``devices`` names the GPUs.
    observe
        Called as sessions proceed, by one thread at a time.
    **named
        Options by name, as for `autotile.tune`.

    Raises
    ------
    InputError
        The plan cannot be read, names a GPU that is not there, or the database cannot be written.
    """
    _, options = read_keywords(None, None, named, options)
    read = plan if isinstance(plan, TuningPlan) else read_plan(absolute_path(user_path(plan, "a plan"), "a plan"))
    with open_lane(options, is_of_one_model=False) as opened:
        lane = opened if opened.devices else Lane((options.device_index,))
        with Schedule.open(read_settings(), options, observe, lane) as schedule, forgetting_served():
            return PlanRun(read, schedule).run()


@checked
def tune_misses(
    kernel: KernelName | None = None,
    /,
    *,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
    observe: Observer | None = None,
    announce: Callable[[str], None] = lambda _: None,
    **named: Any,
) -> PlanResult:
    """Tune the problems that programs requested and that could not be served exactly, the costliest first.

    They are tuned as those of a plan are: a problem that cannot be tuned does not stop the others.

    Parameters
    ----------
    kernel
        Name of a kernel, path of its search-space file, or a kernel from `autotile.kernel`; None for all kernels.
    device, database, options, progress, observe, announce
        As for `autotile.tune`; the options hold for each problem.
    **named
        Options by name, as for `autotile.tune`.

    Raises
    ------
    InputError
        There is no such kernel, an option is invalid, or the database cannot be read.
    """
    _, chosen = read_keywords(None, None, named, options, device=device, database=database)
    missed = missed_problems(kernel, chosen)
    for planned, count, lost_s in missed:
        cost = "" if lost_s is None else f", which may have cost {duration_text(lost_s)}"
        announce(f"{planned.problem}: {plural(count, 'call')} not served exactly{cost}")
    if not missed:
        announce(_NO_MISSES)
    with observing(observe or progress) as observer:
        found = tune_plan(_plan_of_misses(missed), chosen, observer)
    entries = []
    for entry in found.entries:
        problem, result = entry.planned.problem, entry.result
        if entry.state == "failed":
            announce(f"{problem} is left out: {entry.reason}")
        if isinstance(result, TuneResult):
            call = serving_call(entry.planned.asked_as, problem, dtype=problem.dtype, database=chosen.database)
            result = replace(result, call=call)
        entries.append(replace(entry, result=result))
    return replace(found, entries=tuple(entries), lists_results=True)


class PlanRun:
    """The sessions of a plan; ``is_tuned`` tells of a problem on a GPU, by name, whether it needs none."""

    def __init__(
        self, plan: TuningPlan, schedule: Schedule, is_tuned: Callable[[PlannedProblem, str], bool] | None = None
    ) -> None:
        self._plan = plan
        self._schedule = schedule
        self._options, lane = schedule.options, schedule.lane
        self._is_tuned = is_tuned or (
            lambda planned, gpu_name: (
                not self._options.fresh
                and is_done(schedule.database, planned, planned.options(self._options), gpu_name)
            )
        )
        models = _models_of(lane, schedule.options)
        self._places = [
            (planned, name, partial(_allows, planned, name, device_of))
            for planned in plan.problems
            for name, device_of in models
            if any(_allows(planned, name, device_of, gpu) for gpu in lane.devices)
        ]
        for planned in plan.problems:
            if not any(place[0] is planned for place in self._places):
                here = ", ".join(name for name, _ in models)
                wanted = " or ".join(map(str, planned.gpus))
                raise InputError(
                    f"{planned.problem} is to be tuned on {wanted}, and the GPUs of this command are {here}"
                )
        self._entries: dict[int, PlanEntry] = {}
        self._latest: dict[int, Progress] = {}

    def run(self) -> PlanResult:
        """Hold the sessions of the problems that are not tuned yet."""
        left = []
        for number, (planned, gpu_name, _) in enumerate(self._places):
            if self._is_tuned(planned, gpu_name):
                self._entries[number] = PlanEntry(planned, gpu_name, "done")
            else:
                left.append(number)
        steps = [partial(self._tune, number) for number in left]
        for _ in self._schedule.run(steps, lambda step, gpu: self._places[left[step]][2](gpu)):
            pass
        return self.result

    @property
    def result(self) -> PlanResult:
        """Outcomes of the problems so far."""
        entries = [
            self._entries.get(number) or PlanEntry(planned, gpu_name, "left")
            for number, (planned, gpu_name, _) in enumerate(self._places)
        ]
        interrupted = self._schedule.interrupted
        seconds, location = self._schedule.elapsed_s, self._schedule.database.location
        return PlanResult(self._plan.name, tuple(entries), seconds, interrupted, location)

    def _budget_s(self, planned: PlannedProblem) -> float | None:
        """Return the time that a problem may take, in seconds, zero or less if none is left; None for any time."""
        if self._plan.total_budget_s is None:
            return None
        left_s = self._plan.total_budget_s - self._schedule.elapsed_s
        if planned.weight is None:
            return left_s
        ahead = sum(one.weight or 0.0 for number, (one, *_) in enumerate(self._places) if number not in self._entries)
        return min(left_s, max(_LEAST_S, left_s * self._schedule.lane.count * planned.weight / ahead))

    def _tune(self, number: int, lane: Lane) -> PlanEntry:
        planned, gpu_name, _ = self._places[number]
        options, budget_s = lane.options(planned.options(self._options)), self._budget_s(planned)
        if budget_s is not None:
            if budget_s <= 0:
                return self._end(number, PlanEntry(planned, gpu_name, "left"))
            options = replace(options, budget_s=min(budget_s, options.budget_s or budget_s))
        if self._is_tuned(planned, gpu_name):  # by another process, meanwhile
            return self._end(number, PlanEntry(planned, gpu_name, "done"))
        begun_s = self._schedule.elapsed_s
        result: TuneResult | OperationResult | None = None
        reason = ""
        see = partial(self._see, number)
        try:
            if isinstance(planned.target, Operation):
                result = tune_loaded_operation(planned.target, planned.problem, options, see, lane)
            else:
                result = tune_problem(planned.target, planned.problem, options, see, lane)
        except DatabaseError:
            raise  # it concerns all
        except AutotileError as error:
            reason = str(error)
        state: State = "failed"
        if result is not None and result.interrupted:
            state, self._schedule.interrupted = "left", True
        elif result is not None and result.winner is not None:
            state = "tuned"
        elif result is not None:
            reason = "no configuration ran"
        return self._end(
            number, PlanEntry(planned, gpu_name, state, result, reason, self._schedule.elapsed_s - begun_s)
        )

    def _see(self, number: int, progress: Progress) -> None:
        self._latest[number] = progress
        self._schedule.observe(progress, Place("problem", number + 1, len(self._places), len(self._entries)))

    def _end(self, number: int, entry: PlanEntry) -> PlanEntry:
        self._entries[number] = entry
        problem = entry.planned.problem
        last = self._latest.get(number)
        if last is None:  # it failed before its session began
            last = Progress("", problem, None, rate=Workrate(None, None, problem.dtype))
        endings = {"tuned": entry.time_text, "failed": f"failed: {entry.reason}", "done": "tuned before"}
        ending = endings.get(entry.state, "left")
        self._see(number, replace(last, problem=problem, phase="ended", ending=ending, path=()))
        return entry


DeviceOf = Callable[[GpuName], DeviceProperties | None]
"""Returns the properties of a GPU of one model; None for any other GPU."""


def _allows(planned: PlannedProblem, name: str, device_of: DeviceOf, gpu: GpuName) -> bool:
    """Return True if a problem is to be tuned on a GPU, and this is of a model; see `_models_of`."""
    if not name:
        return True
    device = device_of(gpu)
    if device is None or not planned.gpus:
        return device is not None
    return any(one == gpu or (isinstance(one, str) and is_name_of(one, device)) for one in planned.gpus)


def has_several_models(options: TuneOptions) -> bool:
    """Return True if the GPUs are of several models, whose times are studies of their own.

    It is an `InputError` if the scheduler cannot be reached, or has no GPU.
    """
    if options.replay is not None or not (options.scheduler or len(options.devices) > 1):
        return False
    with open_lane(options, is_of_one_model=False) as lane:
        return len(_models_of(lane, options)) > 1


def _models_of(lane: Lane, options: TuneOptions) -> list[tuple[str, DeviceOf]]:
    """Return the models of the GPUs, whose times are studies of their own: names, and the properties of their GPUs.

    In replay there is one without a name, of all GPUs.
    """
    if options.replay is not None or (lane.cluster is None and device_count() == 0):
        return [("", lambda _: None)]
    if lane.cluster is not None:

        def device_of(name: str, gpu: GpuName) -> DeviceProperties | None:
            device = lane.device_of(gpu)
            return device if device is not None and device.name == name else None

        names = dict.fromkeys(device.name for device in filter(None, map(lane.device_of, lane.devices)))
        return [(name, partial(device_of, name)) for name in names]
    groups: list[dict[GpuName, DeviceProperties]] = [
        dict.fromkeys(group, live_device(group[0]))
        for group in models_of(index for index in lane.devices if isinstance(index, int))
    ]
    return [(next(iter(group.values())).name, group.get) for group in groups]


@checked
def plan(
    kernel: KernelName | None = None,
    *,
    captured: Iterable[str | Path] = (),
    output: str | Path | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
) -> TuningPlan:
    """Make a plan of the problems that programs missed, or of captured calls, for `tune_plan`.

    Parameters
    ----------
    kernel
        Kernel whose misses are planned, by name or path; None for all.
    captured
        Folders of captured calls, or of several of them; empty for misses.
    output
        File to write the plan to; None for none.
    device
        GPU whose misses are planned; None for the first.
    database
        As for `autotile.tune`.

    Raises
    ------
    InputError
        The database cannot be read, nothing was missed, a folder holds no captured call, or a file cannot be written.
    """
    folders = [*captured]
    if folders and kernel is not None:
        raise InputError("captured calls state their kernels; leave the kernel out")
    if output is not None and kernel is not None and held_kernel(kernel):
        raise InputError("a file of a plan names its kernels; save this one as a search-space file, and give its path")
    problems = []
    for given in folders:
        folder = user_path(given, "a captured call")
        inner = sorted(one.parent for one in folder.glob("*/call.json")) if folder.is_dir() else []
        for path in inner or [folder]:  # a folder may hold several calls
            call = read_captured_call(path)
            named = kernel_of_call(call)
            target = load_kernel(named)
            problem = resolve_problem(target.spec, call.sizes, call.dtype)
            problems.append(PlannedProblem(named, target, problem, captured=str(path.absolute())))
    found = TuningPlan("captured", tuple(problems))
    if not folders:
        found = _plan_of_misses(missed_problems(kernel, session_options(None, device, database)))
    if not found.problems:
        raise InputError(_NO_MISSES)
    if output is not None:
        write_plan(found, output)
    return found


def _plan_of_misses(missed: Iterable[Missed]) -> TuningPlan:
    return TuningPlan("misses", tuple(planned for planned, *_ in missed))


def write_plan(plan: TuningPlan, output: str | Path) -> Path:
    """Write a plan to a file, and return its path; an `InputError` if that cannot be written, or holds no plan."""
    path = user_path(output, "a plan")
    try:
        if path.is_file() and b"[[tune]]" not in read_regular(path, MAX_PLAN_BYTES):
            raise InputError(f"cannot write {path}: it exists and is no plan; name another file")
        write_output(path, plan_text(plan.problems, [f"{plan.name}: {plural(len(plan.problems), 'problem')}"]))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; name another file") from None
    return path
