"""Tuning where a program warms up: what a block of it asks for is tuned at its end, and served from then on."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

from msgspec import structs

from autotile.api.plans import PlanEntry, PlanResult, PlanRun
from autotile.api.progress import observing
from autotile.api.targets import read_duration
from autotile.api.tuning import FamilySize
from autotile.core.argument_types import checked
from autotile.core.forks import FORK_LOCK, cached_property
from autotile.core.model import L2Mode, Problem
from autotile.core.text import plural
from autotile.cuda.toolchain import load_cupy
from autotile.database.keys import key_of
from autotile.errors import InputError, NotTunedError, ProblemError, WorkerError
from autotile.families.family import extent_text, parse_extent
from autotile.kernel.library import Kernel, held_kernel
from autotile.kernel.operation import Operation, load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving.aside import wait_for_compilations
from autotile.serving.bound import BoundKernel, Lookup
from autotile.serving.dispatcher import Dispatcher, dispatchers, state_of
from autotile.settings import read_settings
from autotile.space.time_estimate import estimate_configs
from autotile.tuning.lanes import Lane
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import PlannedProblem, TuningPlan, is_final
from autotile.tuning.progress_state import Observer
from autotile.tuning.schedule import Schedule

_FINALISTS = 6
"""Finalists of a problem, at most: many problems share the time of a block."""
_ASIDE_S = 60.0
"""Maximum wait for what is being chosen and compiled aside when a block ends: what stands in for it is not it."""
_MAX_ADDED = 10_000
"""Problems that ``sizes`` may add to each."""
_UNKNOWN_US = 100.0
"""Time of a call of which nothing is known."""
_OF_THE_BLOCK = ("database", "device_index", "devices", "scheduler", "gpu_model", "l2", "fresh", "captured")
"""Options that follow from what the program asks for."""

_open: list[TuningWindow] = []
"""Blocks of this process that have not ended, the one that began first at the front."""


def _forget_blocks() -> None:
    """Leave the blocks to the parent, in a forked child."""
    _open.clear()
    for dispatcher in list(dispatchers):
        dispatcher.asked, dispatcher.may_race = None, True


os.register_at_fork(after_in_child=_forget_blocks)


@dataclass(eq=False)
class _Collected:
    """A problem that a program asked for, or is expected to, and the number of its calls."""

    dispatcher: Dispatcher
    lookup: Lookup
    target: Kernel | Operation
    problem: Problem
    calls: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for look-ups that differ only in what they allow to be served: they are tuned once."""
        return self.place, self.lookup.place, self.lookup.name, str(self.problem)

    @property
    def place(self) -> tuple[str, L2Mode]:
        """The database, and the state of the L2 cache for which it is served."""
        return self.lookup.location, self.dispatcher.l2

    def find(self, *, pinned: bool = False) -> BoundKernel | None:
        """Return the kernel that would be served now, pinned or not unless that counts; None if there is none."""
        pins = self.dispatcher.pins
        try:
            with nullcontext() if pinned else pins.instead(None):
                return self.dispatcher.find(self.lookup, anew=True)
        except InputError:
            return None

    def is_exact(self, *, pinned: bool = False) -> bool:
        served = self.find(pinned=pinned)
        return served is not None and served.tier == "exact"

    def time_us(self) -> float:
        """Return the time of all calls as they are served, as far as it is known or can be estimated."""
        served = self.find()
        if served is None:
            return self.calls * _UNKNOWN_US
        contenders = served.choice.contenders
        if contenders and contenders[0].time_us:
            return self.calls * contenders[0].time_us
        spec, config = served.definition.spec, served.config or served.definition.spec.default
        problem = self.problem.at({name: self.problem.sizes.get(name, usual) for name, usual in spec.sizes.items()})
        found = estimate_configs(spec, problem, served.device, [config])
        return self.calls * (float(found.time_us[0]) if found is not None else _UNKNOWN_US)

    @cached_property
    def planned(self) -> PlannedProblem:
        """The problem as one of a plan, when all calls have been counted."""
        name = self.target.name if held_kernel(self.lookup.name) else str(self.lookup.name)
        gpus = (self.lookup.place,) if self.lookup.place is not None else ()
        return PlannedProblem(name, self.target, self.problem, gpus, weight=self.time_us())


class TuningWindow:
    """A block of a program in which it warms up; see `tuning`.

    Attributes
    ----------
    result
        What became of the problems, the costliest first; None before the end of the outermost block, and if that
        raised.
    """

    def __init__(
        self,
        budget_s: float,
        sizes: Mapping[str, tuple[int, ...]],
        options: TuneOptions,
        progress: bool | Observer,
        *,
        replays: bool,
        strict: bool,
        l2: L2Mode | None,
    ) -> None:
        self.result: PlanResult | None = None
        self.replays, self._strict, self._l2 = replays, strict, l2
        self._budget_s, self._sizes, self._options, self._progress = budget_s, sizes, options, progress
        self._asked: dict[BoundKernel, None] = {}
        self._calls: dict[BoundKernel, int] = {}
        """Numbers of calls before the block, of what was served then."""
        self._inner: list[TuningWindow] = []
        """Blocks that have ended within this one, and are tuned with it."""
        self._is_used = False

    def __enter__(self) -> Self:
        with FORK_LOCK:
            if self._is_used:
                raise InputError("a block of autotile.tuning is entered once; call autotile.tuning again for another")
            self._is_used = True
            _take_notes()
            self._calls = {kernel: kernel.calls for kernel in _served()}
            _open.append(self)
            _allow_races()
            if self._l2 is not None:
                for dispatcher in list(dispatchers):
                    dispatcher.l2 = self._l2
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self in _open:
            wait_for_compilations(_ASIDE_S)
        with FORK_LOCK:
            if self not in _open:  # in a forked child: the block is its parent's
                return
            _take_notes()
            _open.remove(self)
            _allow_races()
            served = _served()
            for kernel in served:
                if kernel not in self._calls or kernel.calls > self._calls[kernel]:
                    self._asked[kernel] = None
            outer = _open[0] if _open else None
            if outer is None:
                for dispatcher in list(dispatchers):
                    dispatcher.asked = None
            elif error is None and not self.replays:
                outer._inner += [self, *self._inner]
                outer._asked |= self._asked
                return
            else:  # it is to tune nothing that was asked for here
                outer._calls |= {kernel: kernel.calls for kernel in self._asked}
                for kernel in self._asked:
                    outer._asked.pop(kernel, None)
        if error is None:
            self._end(served)

    def _end(self, served: Mapping[BoundKernel, Dispatcher]) -> None:
        """Tune what was asked for, unless the block replays, and serve it."""
        for dispatcher in list(dispatchers) if self._l2 is not None else ():
            dispatcher.refresher.refresh()  # what was served before
        found: dict[tuple[object, ...], _Collected] = {}
        blocks = [self, *self._inner]
        own = [[*block._requests(served, self._calls)] for block in blocks]
        for one in own[0]:
            if (known := found.setdefault(one.key, one)) is not one:
                known.calls += one.calls
        for block, requests in zip(blocks, own, strict=True):
            for one in block._added(requests):
                found.setdefault(one.key, one)
        problems = sorted(found.values(), key=lambda one: -(one.planned.weight or 0.0))
        try:
            if self.replays:
                entries = tuple(
                    PlanEntry(one.planned, "", "done" if one.is_exact(pinned=True) else "left") for one in problems
                )
                places = ", ".join(dict.fromkeys(one.lookup.location for one in problems))
                self.result = PlanResult("replay", entries, 0.0, False, places)
            else:
                self._tune(problems)
        finally:
            for block in blocks:
                block.result = self.result
                block._asked, block._calls, block._inner = {}, {}, []
        left = [str(one.problem) for one in problems if self._strict and not one.is_exact(pinned=True)]
        if left:
            raise NotTunedError(
                f"strict=True allows no fallback, and {plural(len(left), 'problem')} of the block "
                f"{'is' if len(left) == 1 else 'are'} not tuned: {'; '.join(left)}; tune with a greater budget, or use "
                "the block without strict"
            )

    def _requests(
        self, served: Mapping[BoundKernel, Dispatcher], calls: Mapping[BoundKernel, int]
    ) -> Iterator[_Collected]:
        """Yield what was asked for; ``calls`` are numbers of calls not to count."""
        for kernel in self._asked:
            lookup, dispatcher = kernel.lookup, served.get(kernel)
            if lookup is None or dispatcher is None or isinstance(lookup.place, str):  # to be inspected only
                continue
            target = kernel.definition if kernel.operation is None else load_operation(str(lookup.name))
            count = max(1, kernel.calls - calls.get(kernel, 0))
            yield _Collected(dispatcher, lookup, target, kernel.operation or kernel.problem, count)

    def _added(self, requests: Iterable[_Collected]) -> Iterator[_Collected]:
        """Yield the problems at further sizes beside those that were asked for."""
        known = dict[str, None]()
        for one in requests:
            target = one.target
            sizes = target.sizes if isinstance(target, Operation) else target.spec.sizes
            known |= dict.fromkeys(sizes)
            given = {name: values for name, values in self._sizes.items() if name in sizes}
            for row in itertools.product(*given.values()) if given else ():
                lookup = structs.replace(one.lookup, sizes={**one.lookup.sizes, **dict(zip(given, row, strict=True))})
                if isinstance(target, Operation):
                    problem = target.resolve(lookup.sizes, one.problem.dtype)
                else:
                    problem = resolve_problem(target.spec, lookup.sizes, one.problem.dtype)
                yield replace(one, lookup=lookup, problem=problem)
        if known and (unknown := [name for name in self._sizes if name not in known]):
            raise ProblemError(
                f"nothing that was asked for has a size {unknown[0]!r}; the sizes are {', '.join(known)}"
            )

    def _tune(self, problems: Sequence[_Collected]) -> None:
        """Tune problems, those of one database after those of another, and serve the winners."""
        rank, ranks = _rank()
        others = [one for number, one in enumerate(problems) if number % ranks != rank]
        ordered = [*problems[rank::ranks], *reversed(others)]  # ranks that are done help from the other end
        begun_s, results = time.monotonic(), list[PlanResult]()
        try:
            with observing(self._progress) as observe:
                for place in dict.fromkeys(one.place for one in ordered):
                    left_s = self._budget_s - (time.monotonic() - begun_s)
                    group = [one for one in ordered if one.place == place]
                    self._tune_in(group, left_s, observe, results)
        finally:
            entries = [_with_memory(entry) for result in results for entry in result.entries]
            entries.sort(key=lambda entry: -(entry.planned.weight or 0.0))
            interrupted = any(result.interrupted for result in results)
            places = ", ".join(result.database for result in results)
            self.result = PlanResult("tuning", tuple(entries), time.monotonic() - begun_s, interrupted, places)
            if interrupted:
                text = (
                    f"the tuning at the end of a block was interrupted: {self.result.summary}; what is tuned is served"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _tune_in(
        self, problems: Sequence[_Collected], budget_s: float, observe: Observer, results: list[PlanResult]
    ) -> None:
        """Tune the problems of a database and a state of the L2 cache, add the result, and serve the winners."""
        location, l2 = problems[0].place
        gpus = sorted({gpu for one in problems for gpu in one.planned.gpus if isinstance(gpu, int)})
        for gpu in gpus:  # what the block has launched would disturb the first measurements
            load_cupy().cuda.Device(gpu).synchronize()
        options = replace(
            self._options,
            database=location,
            l2="hot" if l2 == "eager" else l2,  # launches by the host are compared in this process, afterwards
            finals=min(self._options.finals, _FINALISTS),
        )
        if gpus:
            options = replace(options, device_index=gpus[0], devices=tuple(gpus) if len(gpus) > 1 else ())
        lane = Lane(options.devices or (options.device_index,))
        requests = {id(one.planned): one for one in problems}
        plan = TuningPlan("tuning", tuple(one.planned for one in problems), budget_s)
        with Schedule.open(read_settings(), options, observe, lane) as schedule:

            def is_tuned(planned: PlannedProblem, gpu_name: str) -> bool:
                served, measured_as = requests[id(planned)].find(), l2
                if served is None:
                    return False
                if served.choice.differences == (("l2_mode", "hot", "eager"),):  # what is left is to compare launches
                    measured_as = "hot"
                elif served.tier != "exact":
                    return False
                if served.is_library or served.choice.shipped:
                    return True
                key = key_of(served.definition, served.problem, served.device, l2_mode=measured_as)
                return is_final(schedule.database, key, raced=served.operation is not None and served.source == "cuda")

            run = PlanRun(plan, schedule, is_tuned)
            try:
                run.run()
            except KeyboardInterrupt:
                schedule.interrupted = True
                raise
            finally:
                result = run.result
                if l2 == "eager" and gpus:
                    entries = tuple(_raced(entry, requests[id(entry.planned)]) for entry in result.entries)
                    result = replace(result, entries=entries)
                results.append(result)
                tuned = {
                    (one.planned.problem.kernel, one.planned.problem.dtype)
                    for one in run.result.entries
                    if one.is_tuned
                }
                if tuned:
                    for dispatcher in list(dispatchers):
                        dispatcher.refresher.refresh(location, tuned)


def _raced(entry: PlanEntry, request: _Collected) -> PlanEntry:
    """Compare launches by the host of a problem that was tuned, and store the times; return what became of it."""
    if not entry.is_tuned or request.is_exact():
        return entry
    from autotile.serving.racing import race_as_launched, store_race

    try:
        raced = race_as_launched(request.dispatcher.contenders(request.lookup))
        if not raced:
            raise WorkerError("they take too long, or too much memory")
        operation = request.target if isinstance(request.target, Operation) else None
        store_race(raced, operation, request.lookup.location)
    except Exception as error:  # the program goes on with what it has
        return replace(entry, state="failed", reason=f"launches by the host could not be compared: {error}")
    return entry


def _served() -> dict[BoundKernel, Dispatcher]:
    return {kernel: one for one in list(dispatchers) for kernel in one.refresher.kernels()}


def _take_notes() -> None:
    """Add what the dispatchers have noted to the blocks, and let them note all requests anew."""
    for dispatcher in list(dispatchers):
        for kernel in dispatcher.note_requests():
            for block in _open:
                block._asked[kernel] = None


def _allow_races() -> None:
    """Let nothing be measured while a block replays."""
    for dispatcher in list(dispatchers):
        dispatcher.may_race = not any(block.replays for block in _open)


def _rank() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks, if PyTorch has begun a distributed job; else 0 of 1."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _with_memory(entry: PlanEntry) -> PlanEntry:
    """Return the outcome of a problem; one that did not fit in memory says who may hold it."""
    gpu = next((gpu for gpu in entry.planned.gpus if isinstance(gpu, int)), None)
    if entry.state != "failed" or gpu is None or "memory" not in entry.reason.lower():
        return entry
    with load_cupy().cuda.Device(gpu):
        free, total = load_cupy().cuda.runtime.memGetInfo()
    hint = (
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free beside the program, and a process of its own measures"
    )
    if "torch" in sys.modules:
        hint += "; torch.cuda.empty_cache() at the end of the block returns what PyTorch keeps"
    return replace(entry, reason=f"{entry.reason}; {hint}")


@checked
def tuning(
    budget: str | float = "60s",
    *,
    sizes: Mapping[str, FamilySize] | None = None,
    mode: Literal["tune", "replay"] = "tune",
    strict: bool = False,
    l2: Literal["cold", "hot"] | None = None,
    deployment: Literal["graph", "eager"] | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
) -> TuningWindow:
    """Tune what a block of the program asks for, when it ends, and serve it from then on.

    Within the block the program runs as without it. What it asks for by `get_best_kernel`, `matmul`, functions of
    `autotile.torch` or kernels from `autotile.kernel`, in any thread, and is not served in tier ``exact``, is tuned at
    the end, in processes beside the program, on the GPU that it is served for. What costs the program most is tuned
    first and longest. Winners are stored one by one, and taken over by what the program already holds; CUDA graphs that
    it has captured keep what they launch.

    Parameters
    ----------
    budget
        Wall time of the tuning, such as ``"60s"`` or ``"5m"``, or seconds. What has begun by then is completed.
    sizes
        Further sizes: each problem that was asked for is also tuned at these, with its other sizes unchanged. Values
        are as for `tune`; a range such as ``"1..64"`` stands for its ends and the powers of two between them. Of
        several sizes, all combinations.
    mode
        ``"tune"``; or ``"replay"``: nothing is measured, neither within the block nor at its end.
    strict
        Raise at the end if anything that was asked for, or is named by ``sizes``, is not served in tier ``exact``.
    l2
        State of the L2 cache for which the program is served from the block on, and is tuned: ``"cold"`` where a call
        finds its inputs in memory, ``"hot"`` where the one before leaves them in the cache. None: as before the block.
    deployment
        ``"eager"`` where the program launches kernels and libraries one by one, so that the host's part counts: those
        that tuning leaves are timed back to back by the clock of the host, in the program's own process, and the
        program is served the fastest from the block on. ``"graph"`` where it does not. None: as before the block.
    options
        Further options of the sessions.
    progress
        As for `tune`.

    Returns
    -------
    TuningWindow
        A context manager. Its ``result`` is there after the block. A block within another leaves the tuning to the
        outermost, or the last to end where several threads have one each. A block that raises tunes nothing. After
        Ctrl-C while it tunes, the program goes on with the winners so far, and a warning; after a second one it gets
        the `KeyboardInterrupt`.

    Raises
    ------
    InputError
        An argument is invalid; at the end of the block, also: the database cannot be written, or ``sizes`` names what
        no problem has.
    NotTunedError
        At the end of the block, with ``strict``; it names all such problems.

    Examples
    --------
    >>> with autotile.tuning("60s", sizes={"M": [1, 2, 4, 8]}) as window:  # doctest: +SKIP
    ...     model(example)
    >>> print(window.result)  # doctest: +SKIP
    """
    chosen, usual = options or TuneOptions(), TuneOptions()
    for name in _OF_THE_BLOCK:
        if getattr(chosen, name) != getattr(usual, name):
            raise InputError(f"the option {name} follows from what the program asks for in the block; leave it out")
    values: dict[str, tuple[int, ...]] = {}
    for name, extent in (sizes or {}).items():
        found = set[int]()
        for low, high in parse_extent(name, extent_text(name, extent)).parts:
            found |= {low, high, *(2**power for power in range(low.bit_length(), high.bit_length()))}
        values[name] = tuple(sorted(found))
    if (count := math.prod(map(len, values.values()))) > _MAX_ADDED:
        raise InputError(f"sizes are {count:,} for each problem, expected {_MAX_ADDED:,} at most")
    return TuningWindow(
        read_duration(budget),
        values,
        chosen,
        progress,
        replays=mode == "replay",
        strict=strict,
        l2=state_of(l2, deployment),
    )
