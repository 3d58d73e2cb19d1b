"""Tuning of an operation: one budget for all its kernels by successive halving, and a last race with the libraries."""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from autotile.core.device import DeviceProperties
from autotile.core.documents import JsonObject, attributes, to_document
from autotile.core.model import Config, Outcome, Problem, Sizes, Trial, config_text, timed_config
from autotile.core.statistics import Interval, is_tie, raced_ratio, ratio_of_times
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Part,
    ResultTable,
    device_text,
    interval_text,
    percent_text,
    plural,
    time_text,
)
from autotile.database.database import CONTEST
from autotile.database.keys import TuningKey, key_of, library_key
from autotile.errors import (
    AutotileError,
    DatabaseError,
    DeviceError,
    EmptySpaceError,
    InputError,
    ToolchainError,
    WorkerError,
)
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Library, Operation
from autotile.kernel.problem import Workrate, resolve_problem
from autotile.kernel.spec import KernelSpec
from autotile.report.notebook import Reported
from autotile.settings import Settings
from autotile.tuning.backend import expected_folder, workload_of
from autotile.tuning.family_session import is_possible
from autotile.tuning.finals import with_times
from autotile.tuning.lanes import Lane
from autotile.tuning.options import DEFAULT_TRIALS, TuneOptions
from autotile.tuning.progress_state import Observer, Place
from autotile.tuning.result import WORK, ScheduleResult
from autotile.tuning.schedule import Schedule, open_gpu
from autotile.tuning.session import Compiling
from autotile.workers.child import GPU_WORKER, memory_share_bytes
from autotile.workers.compile_pool import Compiled, CompilePool, worker_count
from autotile.workers.jobs import (
    LIBRARY_VERSION,
    MAX_ROUNDS,
    RACE_S,
    Entry,
    Race,
    Reading,
    finals_limit_s,
    job_message,
    read_job,
)

ContenderState = Literal["won", "raced", "dropped", "failed", "inapplicable"]


@dataclass(frozen=True, slots=True)
class TunedContender:
    """A kernel or library of an operation, and how it came out."""

    name: str
    is_library: bool
    """A library has nothing to tune."""
    trial: Trial | None
    """Its best verified trial, with the time of the last race where it took part; None if nothing ran."""
    trials: int = 0
    """Number of configurations tried, those of earlier sessions included."""
    seconds: float = 0.0
    """Wall time that it got."""
    state: ContenderState = "raced"
    """``won`` or ``raced`` in the last race; ``dropped`` before it, as others were faster; ``failed``; or
    ``inapplicable`` if it cannot compute the problem on the device."""
    reason: str = ""
    """Reason for ``dropped``, ``failed`` and ``inapplicable``."""
    ratio: Interval | None = None
    """Time over that of the winner; None if one of them has no time."""

    @property
    def time_us(self) -> float | None:
        """Time of the best trial, in microseconds."""
        return self.trial.time_us if self.trial is not None else None

    @property
    def remark(self) -> str:
        """Its state in words, with the reason."""
        with_reason = {"dropped": "dropped", "failed": "failed", "inapplicable": "not applicable"}
        if self.state in with_reason:
            return f"{with_reason[self.state]}: {self.reason}"
        if self.state == "won":
            return "winner"
        return "not told apart from the winner" if self.ratio is not None and is_tie(self.ratio) else ""

    def to_json(self) -> JsonObject:
        """Return a plain dictionary."""
        timed = dict.fromkeys(("config", "time_us", "interval_us"))
        if self.trial is not None:
            timed = timed_config(self.trial.config, self.trial.measurement)
        return {
            "name": self.name,
            "library": self.is_library,
            **attributes(self, "state", "reason"),
            **timed,
            "ratio": to_document(self.ratio),
            "trials": self.trials,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class OperationResult(ScheduleResult, Reported):
    """Result of tuning an operation for a problem."""

    problem: Problem
    """With its conditions."""
    contenders: tuple[TunedContender, ...]
    """Kernels and libraries, fastest first; those without a time are last."""
    flops: int | None = None
    bytes: int | None = None
    """Operations and bytes moved of one run, where the winner's kernel states them."""
    unit: str | None = None
    passes: int = 1
    """Arithmetic unit of the winner, as for `autotile.kernel.problem.Workrate`."""

    @property
    def winner(self) -> TunedContender | None:
        """The kernel or library to use; None where nothing ran, or the session was interrupted before the last race."""
        return next((one for one in self.contenders if one.state == "won"), None)

    @property
    def best(self) -> TunedContender | None:
        """The winner, or else the fastest so far."""
        return self.winner or next((one for one in self.contenders if one.time_us is not None), None)

    @property
    def libraries(self) -> tuple[TunedContender, ...]:
        """The libraries among the contenders."""
        return tuple(one for one in self.contenders if one.is_library)

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _headline(self) -> str:
        found = "interrupted before the last race" if self.interrupted else "nothing ran"
        if (winner := self.winner) is not None:
            found = f"{winner.name}, {time_text(winner.time_us)}"
        return f"{self._heading()}: {found}"

    def _parts(self) -> Iterator[Part]:
        figures = (f"{RIGHT}over the winner", f"{RIGHT}tried", f"{RIGHT}of the time")
        headings = ("", f"{RIGHT}time", "95 % interval, us", *figures, "remark")
        rows: list[tuple[str, ...]] = []
        seconds = sum(one.seconds for one in self.contenders)
        for one in self.contenders:
            cells = (
                one.name,
                time_text(one.time_us),
                interval_text(one.trial.measurement if one.trial is not None else None),
                f"{one.ratio.value:.3f}x" if one.ratio is not None else NOTHING,
                NOTHING if one.is_library else f"{one.trials:,}",
                percent_text(one.seconds / seconds) if seconds and not one.is_library else NOTHING,
            )
            rows.append((*cells, one.remark))
        yield ResultTable(headings, rows, ("remark", "of the time", "95 % interval, us"))
        best, facts = self.best, list[tuple[str, str]]()
        if self.interrupted:
            facts.append(("interrupted", "the last race was not held"))
        if best is not None:
            config = f" {config_text(best.trial.config)}" if best.trial is not None and not best.is_library else ""
            work = Workrate(self.flops, self.bytes, self.problem.dtype, self.unit, self.passes)
            label = "winner" if best.state == "won" else "best so far"
            facts += [(label, best.name + config), ("rate", work.text(best.time_us, self.device))]
        for one in self.libraries:
            if one is best:
                continue
            text = one.reason or "not timed"
            if one.ratio is not None:
                text = f"{one.ratio.value:.3f}x the winner's time, {one.ratio.low:.3f}x to {one.ratio.high:.3f}x"
                text += ": not told apart" if is_tie(one.ratio) else ""
            facts.append((one.name, text))
        kernels = [one for one in self.contenders if not one.is_library and one.state != "inapplicable"]
        tried = f"{plural(sum(one.trials for one in kernels), 'configuration')} of {plural(len(kernels), 'kernel')}"
        facts += [*(("note", text) for text in self.notices), ("tried", tried)]
        yield [*facts, *self._effort(is_served=self.winner is not None)]

    def to_json(self) -> JsonObject:
        """Return the document that ``autotile tune --json`` prints."""
        return {
            **self.problem.document("operation"),
            "device": self.device.identity,
            "winner": to_document(self.winner),
            "contenders": to_document(self.contenders),
            **self._ending(),
        }


Served = Callable[[Kernel, Problem], Config | None]
"""Returns the configuration that is served for a problem of a kernel before it is tuned; None for the default."""
Proposed = Callable[[Mapping[str, KernelSpec], Mapping[str, Sizes], DeviceProperties], Sequence[tuple[str, Config]]]
"""Returns the kernels and configurations that a model expects to be fast, best first, given specifications and sizes by
the names of kernels, and the device."""

_HOPELESS = 2.0
"""A kernel that is slower than the fastest by this factor after a round gets no more, whatever its rank."""
_RACED_WITHIN = 1.1
"""Kernels within this factor of the fastest take part in the last race, even if they were dropped before."""
_MAX_RACED = 4
_FINALISTS = 6
"""Finalists of a kernel where the time is short."""
_SHORT_S = 120.0
_MIN_SEARCH_S = 0.5
_LEAST_SHARE_S = 1.0
"""Where a session would get less, each kernel tries what is proposed, and the fastest gets all of the other time."""
_MAX_SEEDS = 4
"""Configurations of a kernel that a model proposes."""
_AHEAD, _MIN_CORES_AHEAD = 2, 4
"""Kernels of which the first configurations are compiled before their turn, on half of the cores, of so many at least:
the session that runs has the others."""
_CONTEST_S = 0.8
"""Time of the last finals and the last race besides their limits: compiling from the cache, laying out, the checks."""
_CHECKS = 4
"""Verifications of a candidate or a library before the race; a kernel's own finals verified its winner repeatedly."""


_UNTIMED = Trial({}, Outcome.NOT_AVAILABLE, "it was not timed")


@dataclass(slots=True)
class _Entrant:
    """A kernel of the operation, and what it has reached."""

    kernel: Kernel
    problem: Problem
    best: Trial | None = None
    tried: int = 0
    target: int = 0
    """Number of trials that it may have; 0 for no limit."""
    seconds: float = 0.0
    sessions: int = 0
    state: ContenderState = "raced"
    reason: str = ""
    seeds: list[Config] = field(default_factory=list)
    """Configurations to try first."""
    begun: list[Future[Compiled]] | None = None
    """Compilations that were begun for the first session; None before that, if there are any."""

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def time_us(self) -> float:
        """Time of the best configuration, in microseconds; infinite where none ran."""
        time_us = self.best.time_us if self.best is not None else None
        return math.inf if time_us is None else time_us

    def fail(self, state: ContenderState, reason: str) -> None:
        """Note why it has no result; one that has, of an earlier session, keeps it."""
        if self.best is None:
            self.state, self.reason = state, reason

    def contender(self) -> TunedContender:
        own = attributes(self, "name", "seconds", "state", "reason")
        return TunedContender(is_library=False, trial=self.best, trials=self.tried, **own)


def tune_operation(
    operation: Operation,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    *,
    libraries: Sequence[Library] = (),
    served: Served = lambda kernel, problem: None,
    proposed: Proposed = lambda specs, sizes, device: (),
    observe: Observer = lambda _: None,
    lane: Lane | None = None,
) -> OperationResult:
    """Tune the kernels that compute a problem within one budget, and race the best of each with the libraries.

    The budget is shared by successive halving: each round gets an equal part of it, and the slower half of the kernels
    gets no more; of a short one, all is left to the fastest kernel after a round of what a model proposes. Each
    kernel's sessions resume one another, and share the worker processes and the inputs. The times of the last race are
    stored, those of the libraries under keys of their own.

    The conditions are among the sizes of the problem. Of the options, ``budget_s`` is the wall time of everything, and
    ``trials`` the number of configurations of all kernels together. What `Served` and `Proposed` return is tried first.
    The lane may be shared with sessions in other threads. An `InputError` says that no kernel computes the problem,
    none of them runs, an option is of one kernel, or the database cannot be written.
    """
    of_one_kernel = {
        "a recording by name": options.replay not in (None, "auto"),
        "fresh": options.fresh,
        "only": options.only is not None,
        "configurations to try": bool(options.tries),
        "problems to verify": bool(options.verify_sizes),
        "objectives": len(options.objectives) > 1 or options.objective is not None or options.maximize,
        "a captured call": options.captured is not None,
        "a timeline": options.trace is not None,
    }
    for name, is_given in of_one_kernel.items():
        if is_given:
            raise InputError(f"{name}: an operation takes no such option; tune one of its kernels by name with it")
    with Schedule.open(settings, options, observe, lane) as schedule:
        device = schedule.device
        entrants = [
            _Entrant(kernel := member.load(), resolve_problem(kernel.spec, sizes, problem.dtype))
            for member, sizes in operation.fitting(problem, device)
        ]
        if not entrants:
            raise InputError(f"no kernel of {operation.name} computes {problem}")
        for one in entrants:
            if device is not None and not is_possible(one.kernel.spec, one.problem.sizes, problem.dtype, device):
                one.fail("inapplicable", "no configuration is valid for the problem on this device")
        if device is not None and options.transfer:
            fit = {one.name: one for one in entrants if one.state != "inapplicable"}
            sizes = {name: one.problem.sizes for name, one in fit.items()}
            for name, config in proposed({name: one.kernel.spec for name, one in fit.items()}, sizes, device):
                if len(fit[name].seeds) < _MAX_SEEDS:
                    fit[name].seeds.append(config)
        return _Halving(operation, problem, schedule, tuple(libraries), served, entrants).run()


@dataclass
class _Halving:
    """The rounds of the sessions of an operation's kernels, and the last race."""

    operation: Operation
    problem: Problem
    schedule: Schedule
    libraries: tuple[Library, ...]
    served: Served
    entrants: list[_Entrant]
    _device: DeviceProperties | None = None
    _compile_pool: CompilePool | None = None
    """Compiles what a kernel tries first, before its first session; None where others compile, or nothing is run."""
    _sharing: threading.Lock = field(default_factory=threading.Lock)
    """Held while several threads begin compilations."""

    def run(self) -> OperationResult:
        schedule = self.schedule
        self.options = options = schedule.options
        possible = [one for one in self.entrants if one.state != "inapplicable"]
        is_unlimited = options.trials is None and options.budget_s is None and options.until is None
        self._trials = DEFAULT_TRIALS if is_unlimited else options.trials
        contenders: list[TunedContender] = []
        workers = worker_count(options.workers)
        try:
            with ExitStack() as stack:
                if workers >= _MIN_CORES_AHEAD and schedule.lane.cluster is None and schedule.device is not None:
                    memory_bytes = memory_share_bytes(workers)  # the session compiles beside it
                    pool = schedule.compilers(workers // 2, memory_bytes=memory_bytes)
                    self._compile_pool = stack.enter_context(closing(pool))
                self._share_out(possible)
            if not schedule.interrupted:
                contenders = self._contest()
        except KeyboardInterrupt:
            schedule.interrupted = True
        if not schedule.interrupted and all(one.best is None for one in self.entrants):
            reasons = dict.fromkeys(one.reason for one in self.entrants)
            raise InputError(f"no kernel of {self.operation.name} ran for {self.problem}: {'; '.join(reasons)}")
        if self._device is None:
            raise KeyboardInterrupt  # nothing is known yet
        contenders = contenders or [one.contender() for one in self.entrants]
        won = {one.name for one in contenders if one.state == "won"}
        own = next((one for one in self.entrants if not won or one.name in won), self.entrants[0])
        rate = Workrate.of(own.kernel.spec, own.problem, own.best.config if own.best is not None else None)
        return OperationResult(
            problem=self.problem,
            device=self._device,
            contenders=tuple(contenders),
            seconds=schedule.elapsed_s,
            interrupted=schedule.interrupted,
            database=schedule.database.place,
            **attributes(rate, *WORK),
            notices=tuple(schedule.notices),
        )

    def _share_out(self, live: list[_Entrant]) -> None:
        """Tune kernels in rounds; after each one the slower half is dropped, and remembers why."""
        options, schedule = self.options, self.schedule
        rounds = math.ceil(math.log2(len(live))) + 1 if live else 0
        turns = math.ceil(len(live) / schedule.lane.count)
        is_short = (
            options.budget_s is not None
            and options.budget_s < rounds * turns * _LEAST_SHARE_S
            and self._trials is None
            and any(one.seeds for one in live)
        )
        if is_short:
            rounds = min(rounds, 2)
        for number in range(1, rounds + 1):
            is_last = number == rounds or len(live) == 1
            left = 1 if is_last else rounds - number + 1
            self._finals = options.finals if is_last else 0
            if options.budget_s is not None:  # an equal part of what is left for each of the rounds left
                if options.budget_s < _SHORT_S:
                    self._finals = min(self._finals, _FINALISTS)
                left_s = options.budget_s - schedule.elapsed_s
                self._round_end_s = schedule.elapsed_s + (left_s - self._reserve_s(left_s / left)) / left
            if self._trials is not None:
                given = sum(one.target for one in self.entrants if one.best is not None)
                round_trials = (self._trials - given) // left
                for place, one in enumerate(live):  # one each at least, but in the first round only
                    share = max(int(number == 1), round_trials // (len(live) - place))
                    round_trials -= share
                    one.target += share
            elif is_short:
                for one in live:
                    one.target = 0 if is_last else len(one.seeds) or 1
            turn = Place("round", number, rounds)
            for _ in schedule.run([partial(self._tune, live[place:], turn) for place in range(len(live))]):
                pass
            if schedule.interrupted:
                return
            ranked = sorted((one for one in live if one.best is not None), key=lambda one: one.time_us)
            if not ranked and is_short and not is_last:
                continue  # with what the searches choose
            if is_last or not ranked:
                return
            leader = ranked[0]
            half = ranked[: 1 if is_short else math.ceil(len(ranked) / 2)]
            live = [one for one in half if one.time_us <= _HOPELESS * leader.time_us]
            for one in ranked[len(live) :]:
                after = f"{leader.name} after {plural(one.tried, 'configuration')}"
                one.state, one.reason = "dropped", f"{one.time_us / leader.time_us:.2f}x the time of {after}"

    def _begin_compiling(self, coming: Sequence[_Entrant]) -> None:
        """Begin to compile what the next kernels try first, so that none waits for the compiler while cores idle."""
        device, pool = self.schedule.device, self._compile_pool
        if pool is None or device is None:
            return
        with self._sharing:
            for one in coming:
                if one.begun is None and not one.sessions:
                    one.begun = []
                    with suppress(AutotileError):  # its own session states it
                        for config in one.seeds or [one.kernel.spec.default]:
                            one.begun += Compiling(one.kernel, one.problem, config, device, submit=pool.submit).pending

    def _tune(self, coming: Sequence[_Entrant], place: Place, lane: Lane) -> None:
        """Hold a session of the first of some kernels with its share of a round, in which these are left."""
        schedule, one, left = self.schedule, coming[0], len(coming)
        started_s = schedule.elapsed_s
        try:
            count = schedule.lane.count
            self._begin_compiling(coming[count : count + _AHEAD])
            if one.begun and not one.sessions:
                wait(one.begun)  # as the session would, whose limits begin behind what it tries first
            budget_s = None
            if self.options.budget_s is not None:
                share_s = (self._round_end_s - started_s) / math.ceil(left / count)
                budget_s = max(share_s - (schedule.elapsed_s - started_s), _MIN_SEARCH_S)
            chosen = replace(self.options, budget_s=budget_s, trials=one.target or None, finals=self._finals)
            if not one.sessions:
                if chosen.served is None and chosen.transfer and chosen.replay is None:
                    chosen = replace(chosen, served=self.served(one.kernel, one.problem))
                chosen = replace(chosen, tries=tuple(one.seeds))
            result = schedule.tune(one.kernel, one.problem, chosen, lane, place)
        except DatabaseError:
            raise
        except (EmptySpaceError, DeviceError) as error:
            one.fail("inapplicable", error.cause if isinstance(error, EmptySpaceError) else str(error))
            return
        except (InputError, WorkerError) as error:
            one.fail("failed", str(error))
            return
        finally:
            one.seconds += schedule.elapsed_s - started_s
            one.sessions += 1
        self._device = result.device
        one.tried, one.best = sum(result.outcomes.values()), result.winner
        one.state, one.reason = "raced", ""
        one.fail("failed", "no configuration ran")

    def _reserve_s(self, search_s: float) -> float:
        """Return the time that the last finals, after a search of about so many seconds, and the last race may take."""
        best_us = [one.time_us for one in self.entrants if one.best is not None]
        fastest_us, entrants = min(best_us, default=0.0), _MAX_RACED + len(self.libraries)
        contest_s = min(1e-6 * MAX_ROUNDS * entrants * fastest_us, RACE_S)
        return _CONTEST_S + contest_s + finals_limit_s(fastest_us, search_s)

    def _contest(self) -> list[TunedContender]:
        """Race the best of the kernels and the libraries, and store the times; return all of them, fastest first."""
        ran = sorted((one for one in self.entrants if one.best is not None), key=lambda one: one.time_us)
        if not ran:
            return []
        raced_us = _RACED_WITHIN * ran[0].time_us
        near = [one for one in ran if one.state != "dropped" or one.time_us <= raced_us][:_MAX_RACED]
        device, schedule, l2 = self._device, self.schedule, self.options.l2
        assert device is not None
        raced: dict[str, Trial] = {}
        contest: Sequence[tuple[Trial, str]] = ()
        if not _is_replayed(device):
            finalists = [(one.kernel, one.problem, one.best) for one in near if one.best is not None]
            try:
                contest = hold_contest(finalists, self.libraries, self.problem, device=device, schedule=schedule)
            except (WorkerError, InputError, ToolchainError) as error:
                cause = "the last race could not be held, and the times of the kernels' own finals are compared"
                schedule.notices[f"{cause}: {error}"] = None
        elif self.libraries:
            schedule.notices["launches are replayed: no library can be timed here"] = None
        for entrant, (trial, _) in zip(near, contest, strict=False):  # the libraries follow
            raced[entrant.name] = trial
            self._store(key_of(entrant.kernel, entrant.problem, device, l2_mode=l2), trial, device)
            entrant.best = trial if trial.outcome is Outcome.OK else None
            entrant.fail("failed", trial.reason)
        for library, (trial, version) in zip(self.libraries, contest[len(near) :], strict=False):
            raced[library.name] = trial
            of = self.operation, self.problem, device, library.name, version or library.version
            self._store(library_key(*of, l2_mode=l2), trial, device)
        contenders = [entrant.contender() for entrant in self.entrants]
        for library in self.libraries:
            trial = raced.get(library.name, _UNTIMED)
            one = TunedContender(library.name, is_library=True, trial=trial)
            if trial.outcome is not Outcome.OK:
                one = replace(one, trial=None, state="failed", reason=trial.reason)
            contenders.append(one)
        measured = {one.name: times for one in contenders if one.trial and (times := one.trial.measurement) is not None}
        names = {*(one.name for one in near), *(library.name for library in self.libraries)}
        racing = [name for name in measured if name in names]
        if not racing:
            return contenders
        winner = min(racing, key=lambda name: measured[name].time_us)
        for place, one in enumerate(contenders):
            if one.name not in measured:
                continue
            pair = measured[winner], measured[one.name]
            if one.name == winner:
                ratio = Interval(1.0, 1.0, 1.0)
            elif winner in raced and one.name in raced:
                ratio = raced_ratio(*(each.samples_us for each in pair))
            else:
                ratio = ratio_of_times(*pair)
            judged = replace(one, state="won" if one.name == winner else "raced", reason="")
            contenders[place] = replace(judged if one.name in names else one, ratio=ratio)
        return sorted(contenders, key=lambda one: (one.state != "won", one.time_us or math.inf))

    def _store(self, key: TuningKey, trial: Trial, device: DeviceProperties) -> None:
        """Store a time of the last race, or the refusal of a configuration that failed in it."""
        self.schedule.database.add_run(
            key,
            [trial],
            sampler=CONTEST,
            device=device,
            phase="final",
            is_ranked=trial.outcome is Outcome.OK,
            seed=self.options.seed,
            host=platform.node(),
            summary={"operation": self.operation.name},
        )


def _is_replayed(device: DeviceProperties) -> bool:
    return device.source == "replayed"


def hold_contest(
    finalists: Sequence[tuple[Kernel, Problem, Trial]],
    libraries: Sequence[Library],
    problem: Problem,
    *,
    device: DeviceProperties,
    schedule: Schedule,
) -> list[tuple[Trial, str]]:
    """Verify and race configurations of several kernels, and libraries, in interleaved rounds; in this order.

    Return the trial of each with its times in the race, or its fault, and of a library on another machine its version,
    else an empty text. The finalists are kernels, one at least, with their problems and their best trials.

    Libraries that an operation file names run in the GPU worker. A Python function cannot be sent there; with one, the
    whole race is held in this process, among candidates that finals have verified. A race on a GPU of a cluster leaves
    it out.

    A `WorkerError` says that the worker died, an `InputError` that the problems do not fit in memory beside one
    another, and a `ToolchainError` that the device does not work.
    """
    settings, options, lane = schedule.settings, schedule.options, schedule.lane
    with ExitStack() as stack:
        workloads, entries = [], list[Entry]()
        for kernel, own_problem, _ in finalists:
            folder = expected_folder(kernel, own_problem, options)
            if folder is not None:
                stack.callback(folder.close)
                folder.wait()
            workloads.append(workload_of(kernel, own_problem, settings, options, folder))
        with closing(schedule.compilers()) as pool:
            for kernel, own_problem, trial in finalists:  # whose cubins are in the cache unless they were trimmed
                compiled = Compiling(kernel, own_problem, trial.config, device, submit=pool.submit).candidate()
                if compiled is None:
                    raise InputError(f"{kernel.name}: the best configuration does not compile any more")
                entries.append(Entry(compiled, problem=len(entries)))
        round_us = sum(trial.time_us or 0.0 for _, _, trial in finalists) * (1 + len(libraries) / len(finalists))
        entries += [Entry(library=replace(problem, kernel=library.name), problem=0) for library in libraries]
        job = Race.lasting(entries, round_us, options.seed, checks=_CHECKS, workloads=workloads)
        own = {library.name: library.call for library in libraries if library.call is not None}
        if own and lane.cluster is None:
            if lane.worker_pool and (idle := lane.worker_pool.acquire_idle(GPU_WORKER, str(options.device_index))):
                idle.close()  # frees its memory
            from autotile.cuda.toolchain import load_cupy
            from autotile.workers.bench import Bench

            cuda = load_cupy().cuda
            readings: list[Reading] = []
            try:
                with cuda.Device(options.device_index):
                    # as a worker gets it, with the computed values of configurations
                    if not Bench(own).run(read_job(job_message(job)), lambda _: None, readings):
                        raise WorkerError("the race failed: a candidate overwrote the data of the others")
            except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError) as error:
                raise WorkerError(f"the race failed: {error}") from None
        else:
            readings = stack.enter_context(open_gpu(lane, options))(job)
    raced = []
    known = [*(trial for _, _, trial in finalists), *(Trial({}, Outcome.OK) for _ in libraries)]
    for trial, reading in zip(known, readings, strict=True):
        if reading.outcome is not Outcome.OK:
            raced.append((replace(reading, stage="finals").result_of(trial), ""))
            continue
        version = str(reading.telemetry.get(LIBRARY_VERSION, "")) if lane.cluster is not None else ""
        raced.append((with_times(trial, reading.rounds_us, options.l2), version))
    return raced
