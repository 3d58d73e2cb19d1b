"""Tuning of an operation: one budget for all its kernels by successive halving, and a last race with the libraries."""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome, Problem, Trial
from autotile.core.statistics import Interval, raced_ratio, ratio_of
from autotile.core.text import plural
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import CONTEST
from autotile.database.keys import TuningKey, key_of, library_key
from autotile.errors import DatabaseError, DeviceError, EmptySpaceError, InputError, ToolchainError, WorkerError
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Library, Operation
from autotile.kernel.problem import Workrate, resolve_problem
from autotile.settings import Settings
from autotile.tuning.backend import Backend, LiveBackend, expected_folder, workload_of
from autotile.tuning.family_session import is_possible
from autotile.tuning.finals import race_rounds, with_times
from autotile.tuning.operation_result import ContenderState, OperationResult, TunedContender
from autotile.tuning.options import DEFAULT_TRIALS, TuneOptions
from autotile.tuning.pipeline import Pipeline
from autotile.tuning.progress_state import Observer, Place
from autotile.tuning.result import TuneResult
from autotile.tuning.schedule import Lane, Schedule, device_of
from autotile.workers.compile_pool import CompilePool, worker_count
from autotile.workers.gpu import GPU_WORKER, Gpu
from autotile.workers.jobs import LIBRARY_VERSION, Candidate, Entry, LibraryCall, Race, Reading, Workload

if TYPE_CHECKING:
    from autotile.tuning.cluster.gpus import RemoteGpu


Proposal = tuple[str, Config]
"""Name of a kernel, and a configuration."""
Served = Callable[[Kernel, Problem], Config | None]
"""Returns the configuration that is served for a problem of a kernel before it is tuned; None for the default."""
Proposed = Callable[[Mapping[str, Kernel], Mapping[str, Mapping[str, int]], DeviceProperties], Sequence[Proposal]]
"""Returns what a model expects to be fast, best first; given kernels, their sizes, and the device."""

_HOPELESS = 2.0
"""A kernel that is slower than the fastest by this factor after a round gets no more, whatever its rank."""
_RACED_WITHIN = 1.1
"""Kernels within this factor of the fastest take part in the last race, even if they were dropped before."""
_MAX_RACED = 4
_FINALISTS = 6
"""Finalists of a kernel where the time is short."""
_SHORT_S = 120.0
_MIN_SEARCH_S = 0.5
_MAX_SEEDS = 4
"""Configurations of a kernel that a model proposes."""
_CONTEST_S = 2.0
"""Time of the last race besides its launches: compiling from the cache, the checks."""
_COMPARING_S = 2e-3
"""Time to verify a candidate, excluding its two launches: on an H200, the checks at 4096 cubed take 0.6 s."""
_ROUNDS, _RACE_S, _CHECKS, _CHECKS_S = 60, 3.0, 75, 15.0
"""Limits of the finals, as in `autotile.tuning.finals`: rounds and seconds of the race, runs and seconds of the
checks."""


@dataclass(slots=True)
class _Kernel:
    """A kernel of the operation, and what it has reached."""

    kernel: Kernel
    problem: Problem
    result: TuneResult | None = None
    best: Trial | None = None
    tried: int = 0
    target: int = 0
    """Number of trials that it was given, where trials are shared."""
    seconds: float = 0.0
    sessions: int = 0
    dropped: str = ""
    failed: str = ""
    inapplicable: str = ""
    """Why it cannot compute the problem on the device; empty if it can."""
    seeds: list[Config] = field(default_factory=list)
    """Configurations to try first."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.kernel.name

    @property
    def time_us(self) -> float:
        """Time of the best configuration, in microseconds; infinite where none ran."""
        time_us = self.best.time_us if self.best is not None else None
        return math.inf if time_us is None else time_us


def tune_operation(
    operation: Operation,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    *,
    libraries: Sequence[Library] = (),
    served: Served = lambda kernel, problem: None,
    proposed: Proposed = lambda kernels, sizes, device: (),
    observe: Observer = lambda _: None,
    lane: Lane | None = None,
) -> OperationResult:
    """Tune the kernels that compute a problem within one budget, and race the best of each with the libraries.

    The budget is shared by successive halving: each round gets an equal part of it, and the slower half of the kernels
    gets no more. Each kernel's sessions resume one another, and share the worker processes and the inputs. The times of
    the last race are stored, those of the libraries under keys of their own.

    Parameters
    ----------
    operation, problem
        Operation, and its problem with the conditions among the sizes.
    settings, options
        As for `autotile.tuning.session.tune`; ``budget_s`` is the wall time of everything, and ``trials`` the number of
        configurations of all kernels together.
    libraries
        Libraries to compare with.
    served, proposed
        See `Served` and `Proposed`; what they return is tried first.
    observe
        Called with the state of the session after each trial.
    lane
        GPUs and the user's interrupt, shared with sessions in other threads; None for those of this machine that the
        options name.

    Raises
    ------
    InputError
        No kernel computes the problem, none of them runs, an option is of one kernel, or the database cannot be
        written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    _check_options(options)
    lane = lane or Lane(options.devices)
    device = device_of(options, lane)
    kernels = [
        _Kernel(kernel := member.load(), resolve_problem(kernel.spec, sizes, problem.dtype))
        for member, sizes in operation.fitting(problem, device)
    ]
    if not kernels:
        raise InputError(f"no kernel of {operation.name} computes {problem}")
    for one in kernels:
        if device is not None and not is_possible(one.kernel.spec, one.problem.sizes, problem.dtype, device):
            one.inapplicable = "no configuration is valid for the problem on this device"
    if device is not None and options.transfer:
        fit = {one.name: one for one in kernels if not one.inapplicable}
        sizes = {name: one.problem.sizes for name, one in fit.items()}
        for name, config in proposed({name: one.kernel for name, one in fit.items()}, sizes, device):
            if len(fit[name].seeds) < _MAX_SEEDS:
                fit[name].seeds.append(config)
    with Schedule.open(settings, options, observe, lane) as schedule:
        return _Halving(operation, problem, schedule, tuple(libraries), served, kernels).run()


def _check_options(options: TuneOptions) -> None:
    """Raise if an option is of one kernel's session."""
    given = {
        "a recording by name": options.replay not in (None, "auto"),
        "fresh": options.fresh,
        "only": options.only is not None,
        "configurations to try": bool(options.tries),
        "problems to verify": bool(options.verify_sizes),
        "objectives": len(options.objectives) > 1 or options.objective is not None,
        "a captured call": options.captured is not None,
        "a timeline": options.trace is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise InputError(f"{name}: an operation takes no such option; tune one of its kernels by name with it")


@dataclass
class _Halving:
    """The rounds of the sessions of an operation's kernels, and the last race."""

    operation: Operation
    problem: Problem
    schedule: Schedule
    libraries: tuple[Library, ...]
    served: Served
    kernels: list[_Kernel]
    _device: DeviceProperties | None = None
    _round: int = 0
    _sharing: threading.Lock = field(default_factory=threading.Lock)
    """Held while the sessions of several threads take their shares."""

    def run(self) -> OperationResult:
        """Share the budget, hold the last race, and store its times."""
        self.options, self.lane = self.schedule.options, self.schedule.lane
        possible = [one for one in self.kernels if not one.inapplicable]
        self._rounds = math.ceil(math.log2(len(possible))) + 1 if possible else 0
        trials = self.options.trials
        if trials is None and self.options.budget_s is None and self.options.until is None:
            trials = DEFAULT_TRIALS
        self._trials_left = trials
        contenders: list[TunedContender] = []
        try:
            self._share_out(possible)
            if not self.schedule.interrupted:
                contenders = self._contest()
        except KeyboardInterrupt:
            self.schedule.interrupted = True
        ran = [one for one in self.kernels if one.best is not None]
        if not ran and not self.schedule.interrupted:
            reasons = dict.fromkeys(one.failed or one.inapplicable for one in self.kernels)
            raise InputError(f"no kernel of {self.operation.name} ran for {self.problem}: {'; '.join(reasons)}")
        return self._result(contenders or [self._unraced(one) for one in self.kernels])

    def _share_out(self, live: list[_Kernel]) -> None:
        """Tune kernels in rounds; after each one the slower half is dropped."""
        for number in range(1, self._rounds + 1):
            self._round = number
            is_last = number == self._rounds or len(live) == 1
            self._begin_round(1 if is_last else self._rounds - number + 1, is_last=is_last)
            for _ in self.schedule.run([partial(self._tune, one, len(live) - place) for place, one in enumerate(live)]):
                pass
            if self.schedule.interrupted:
                return
            live = sorted((one for one in live if one.best is not None), key=lambda one: one.time_us)
            if is_last or not live:
                return
            live = self._survivors(live)

    @staticmethod
    def _survivors(ranked: Sequence[_Kernel]) -> list[_Kernel]:
        """Return the faster half of the kernels; the others remember why they got no more."""
        leader = ranked[0]
        kept = [one for one in ranked[: math.ceil(len(ranked) / 2)] if one.time_us <= _HOPELESS * leader.time_us]
        for one in ranked[len(kept) :]:
            one.dropped = (
                f"{one.time_us / leader.time_us:.2f}x the time of {leader.name} after "
                f"{plural(one.tried, 'configuration')}"
            )
        return kept

    def _begin_round(self, left: int, *, is_last: bool) -> None:
        """Set aside an equal part of what is left of the budget for each of the rounds left; the last holds finals."""
        self._finals = self.options.finals if is_last else 0
        if self.options.budget_s is not None:
            if self.options.budget_s < _SHORT_S:
                self._finals = min(self._finals, _FINALISTS)
            left_s = self.options.budget_s - self.schedule.elapsed_s
            self._round_end_s = self.schedule.elapsed_s + (left_s - self._reserve_s(self._finals)) / left
        if self._trials_left is not None:
            self._round_trials = self._trials_left // left
            self._trials_left -= self._round_trials

    def _tune(self, one: _Kernel, left: int, lane: Lane) -> None:
        """Hold a session of a kernel with its share of the round, in which so many kernels are left, with this one."""
        started_s, place = self.schedule.elapsed_s, Place("round", self._round, self._rounds)
        try:
            result = self.schedule.tune(one.kernel, one.problem, self._session_options(one, left), lane, place)
        except (DatabaseError, ToolchainError):
            raise
        except EmptySpaceError as error:
            one.inapplicable = error.cause
            return
        except DeviceError as error:
            one.inapplicable = str(error)
            return
        except (InputError, WorkerError) as error:
            one.failed = str(error)
            return
        finally:
            one.seconds += self.schedule.elapsed_s - started_s
            one.sessions += 1
        self._device = result.device
        one.result, one.tried = result, sum(result.outcomes.values())
        one.best = result.winner
        one.failed = "" if result.winner is not None else "no configuration ran"

    def _session_options(self, one: _Kernel, left: int) -> TuneOptions:
        budget_s, trials = None, None
        if self.options.budget_s is not None:
            turns = math.ceil(left / self.lane.count)
            budget_s = max((self._round_end_s - self.schedule.elapsed_s) / turns, _MIN_SEARCH_S)
        if self._trials_left is not None:
            with self._sharing:
                share = max(1, self._round_trials // left)
                self._round_trials -= share
            one.target += share
            trials = one.target
        chosen = replace(self.options, budget_s=budget_s, trials=trials, finals=self._finals)
        if chosen.served is None and one.sessions == 0 and chosen.transfer and chosen.replay is None:
            chosen = replace(chosen, served=self.served(one.kernel, one.problem))
        return replace(chosen, tries=tuple(one.seeds)) if one.sessions == 0 else chosen

    def _reserve_s(self, finals: int) -> float:
        """Return the expected time of the last finals and of the last race."""
        fastest_us = min((one.time_us for one in self.kernels), default=math.inf)
        if math.isinf(fastest_us):
            return 0.0
        launch_s = 1e-6 * fastest_us
        race_s = min(_ROUNDS * (finals + 2) * launch_s, _RACE_S)
        checks_s = min(_CHECKS * (2 * launch_s + _COMPARING_S), _CHECKS_S)
        contest_s = min(_ROUNDS * (_MAX_RACED + len(self.libraries)) * launch_s, _RACE_S)
        return race_s + checks_s + contest_s + _CONTEST_S

    def _contest(self) -> list[TunedContender]:
        """Race the best of the kernels and the libraries; return all of them, fastest first."""
        ran = sorted((one for one in self.kernels if one.best is not None), key=lambda one: one.time_us)
        if not ran:
            return []
        near = [one for one in ran if not one.dropped or one.time_us <= _RACED_WITHIN * ran[0].time_us][:_MAX_RACED]
        device = self._device
        assert device is not None
        self._round = self._rounds + 1
        if _is_replayed(device):
            if self.libraries:
                self.schedule.notices["launches are replayed: no library can be timed here"] = None
            return self._compared(near, {})
        finalists = [(one.kernel, one.problem, one.best) for one in near if one.best is not None]
        try:
            contest = hold_contest(
                finalists,
                self.libraries,
                self.problem,
                device=device,
                schedule=self.schedule,
            )
        except (WorkerError, InputError, ToolchainError) as error:
            text = f"the last race could not be held, and the times of the kernels' own finals are compared: {error}"
            self.schedule.notices[text] = None
            return self._compared(near, {})
        names = [*(one.name for one in near), *(library.name for library in self.libraries)]
        raced = dict(zip(names, contest, strict=True))
        for one in near:
            self._store_kernel(one, raced[one.name].trial)
            one.best = raced[one.name].trial if raced[one.name].trial.outcome is Outcome.OK else None
            one.failed = raced[one.name].trial.reason if one.best is None else ""
        for library in self.libraries:
            self._store_library(library, raced[library.name])
        return self._compared(near, {name: entry.times_us for name, entry in raced.items()}, raced)

    def _compared(
        self,
        near: Sequence[_Kernel],
        times_us: Mapping[str, Sequence[float]],
        raced: Mapping[str, RacedTrial] | None = None,
    ) -> list[TunedContender]:
        """Return all contenders with their ratios to the fastest of those that were raced."""
        contenders = [self._unraced(one) for one in self.kernels]
        for library in self.libraries:
            trial = raced[library.name].trial if raced else None
            ok = trial is not None and trial.outcome is Outcome.OK
            contenders.append(
                TunedContender(
                    library.name,
                    is_library=True,
                    trial=trial if ok else None,
                    state="raced" if ok else "failed",
                    reason="" if ok else (trial.reason if trial is not None else "it was not timed"),
                )
            )
        in_race = {*(one.name for one in near), *(library.name for library in self.libraries)}
        racing = [one for one in contenders if one.name in in_race and one.trial is not None]
        if not racing:
            return contenders
        winner = min(racing, key=lambda one: one.time_us or math.inf)

        def judged(one: TunedContender) -> TunedContender:
            if one.trial is None:
                return one
            if one.name == winner.name:
                return replace(one, state="won", reason="", ratio=Interval(1.0, 1.0, 1.0))
            ratio = _ratio(winner, one, times_us)
            return replace(one, state="raced", reason="", ratio=ratio) if one in racing else replace(one, ratio=ratio)

        return sorted(map(judged, contenders), key=lambda one: (one.state != "won", one.time_us or math.inf))

    def _unraced(self, one: _Kernel) -> TunedContender:
        state: ContenderState = "dropped" if one.dropped else "raced"
        if one.best is None and (one.inapplicable or one.failed):
            state = "inapplicable" if one.inapplicable else "failed"
        return TunedContender(
            one.name,
            is_library=False,
            trial=one.best,
            trials=one.tried,
            seconds=one.seconds,
            state=state,
            reason=one.inapplicable or one.failed if one.best is None else one.dropped,
        )

    def _store_kernel(self, one: _Kernel, trial: Trial) -> None:
        """Store a kernel's time in the last race, or the refusal of a configuration that failed in it."""
        assert self._device is not None
        key = key_of(one.kernel, one.problem, self._device, nvrtc_version=nvrtc_version(), l2_mode=self.options.l2)
        self._store(key, trial)

    def _store_library(self, library: Library, raced: RacedTrial) -> None:
        assert self._device is not None
        key = library_key(
            self.operation,
            self.problem,
            self._device,
            library.name,
            raced.version or library.version,
            nvrtc_version=nvrtc_version(),
            l2_mode=self.options.l2,
        )
        self._store(key, raced.trial)

    def _store(self, key: TuningKey, trial: Trial) -> None:
        assert self._device is not None
        self.schedule.database.add_run(
            key,
            [trial],
            sampler=CONTEST,
            device=self._device,
            phase="final",
            is_ranked=trial.outcome is Outcome.OK,
            seed=self.options.seed,
            driver=self._device.driver or "",
            host=platform.node(),
            summary={"operation": self.operation.name},
        )

    def _result(self, contenders: Sequence[TunedContender]) -> OperationResult:
        assert self._device is not None or self.schedule.interrupted
        if self._device is None:
            raise KeyboardInterrupt  # nothing is known yet
        winner = next((one for one in contenders if one.state == "won"), None)
        own = next((one for one in self.kernels if winner is None or one.name == winner.name), self.kernels[0])
        workrate = Workrate.of(own.kernel.spec, own.problem, own.best.config if own.best is not None else None)
        return OperationResult(
            problem=self.problem,
            device=self._device,
            contenders=tuple(contenders),
            seconds=self.schedule.elapsed_s,
            interrupted=self.schedule.interrupted,
            database=self.schedule.database.location,
            flops=workrate.flops,
            bytes=workrate.bytes,
            unit=workrate.unit,
            passes=workrate.passes,
            notices=tuple(self.schedule.notices),
        )


def _is_replayed(device: DeviceProperties) -> bool:
    return device.source == "replayed"


def _ratio(winner: TunedContender, other: TunedContender, times_us: Mapping[str, Sequence[float]]) -> Interval | None:
    """Return the time of a contender over that of the winner: in pairs of a race, else from the intervals."""
    a, b = times_us.get(winner.name), times_us.get(other.name)
    if a and b:
        return raced_ratio(a, b)
    measured = [one.trial.measurement if one.trial is not None else None for one in (winner, other)]
    if measured[0] is None or measured[1] is None:
        return None
    first, second = (Interval(m.time_us, m.low_us, m.high_us) for m in measured if m is not None)
    return ratio_of(first, second)


_CHECKS = 4
"""Verifications of a candidate or a library before the race; a kernel's own finals verified its winner repeatedly."""


Finalist = tuple[Kernel, Problem, Trial]
"""A kernel with its problem and the trial of its best configuration."""


@dataclass(frozen=True, slots=True)
class RacedTrial:
    """A trial with its time in the race, or its fault, and the times of the rounds in microseconds.

    ``version`` is that of a library on another machine, empty otherwise.
    """

    trial: Trial
    times_us: tuple[float, ...]
    version: str = ""


def hold_contest(
    finalists: Sequence[Finalist],
    libraries: Sequence[Library],
    problem: Problem,
    *,
    device: DeviceProperties,
    schedule: Schedule,
) -> list[RacedTrial]:
    """Verify and race configurations of several kernels, and libraries, in interleaved rounds.

    Libraries that an operation file names run in the GPU worker. A Python function cannot be sent there; with one, the
    whole race is held in this process, among candidates that finals have verified.

    Parameters
    ----------
    finalists
        Kernels with their best configurations, one at least.
    libraries
        Libraries.
    problem
        Problem of the operation.
    device
        The device that the kernels were tuned on.
    schedule
        Schedule of the sessions; a race on a GPU of a cluster leaves out Python functions.

    Returns
    -------
    list of RacedTrial
        Of the finalists, then of the libraries.

    Raises
    ------
    WorkerError
        The worker died.
    InputError, ToolchainError
        The problems do not fit in memory beside one another, or the device does not work.
    """
    settings, options = schedule.settings, schedule.options
    worker_pool, lane = schedule.worker_pool, schedule.lane
    with ExitStack() as stack:
        workloads = []
        for kernel, own_problem, _ in finalists:
            folder = expected_folder(kernel, own_problem, options)
            if folder is not None:
                stack.callback(folder.close)
            workload = workload_of(kernel, own_problem, settings, options)
            workloads.append(replace(workload, reference_folder=str(folder.path) if folder is not None else ""))
        backend: Backend
        if lane.cluster is not None:
            backend = stack.enter_context(closing(_remote_gpu(lane, finalists[0], workloads[0], options)))
        else:
            gpu = stack.enter_context(closing(Gpu(workloads[0], options.run_deadline_s, worker_pool=worker_pool)))
            backend = LiveBackend(gpu, device)
        workers, deadline_s = worker_count(options.workers), options.compile_deadline_s
        with closing(CompilePool(settings, workers, deadline_s, worker_pool=worker_pool)) as pool:
            candidates = [_compiled(one, backend, pool) for one in finalists]
        round_us = sum(trial.time_us or 0.0 for _, _, trial in finalists) * (1 + len(libraries) / len(finalists))
        rounds = race_rounds(max(round_us, 1.0))
        expected_s = 1e-6 * rounds * round_us
        raced_kernels = [Entry(one, workload=laid_out) for one, laid_out in zip(candidates, workloads, strict=True)]
        calls = [LibraryCall(library.name, problem.sizes, problem.dtype) for library in libraries]
        raced_libraries = [Entry(library=call, workload=workloads[0]) for call in calls]
        job = Race((*raced_kernels, *raced_libraries), rounds, options.seed, checks=_CHECKS)
        own = {library.name: library.call for library in libraries if library.call is not None}
        if own and lane.cluster is None:
            gpu.close()
            if idle := worker_pool.acquire_idle(GPU_WORKER, str(options.device_index)):
                idle.close()  # frees its memory
            raced = _race_here(job, own, options)
        elif lane.cluster is None:
            raced = gpu.race(job, expected_s=expected_s)
        else:
            found = backend.race(job, expected_s)
            if found is None or len(found) != len(job.entries):
                raise WorkerError(f"the reply of {backend.uuid} holds no times")
            raced = found
    known = [*(trial for _, _, trial in finalists), *(Trial({}, Outcome.OK) for _ in libraries)]
    return [
        _raced(trial, reading, options, is_elsewhere=lane.cluster is not None)
        for trial, reading in zip(known, raced, strict=True)
    ]


def _remote_gpu(lane: Lane, first: Finalist, workload: Workload, options: TuneOptions) -> RemoteGpu:
    from autotile.tuning.cluster.client import RemoteWork  # imports Dask
    from autotile.tuning.cluster.gpus import free_gpu

    return free_gpu(lane, RemoteWork(first[0].name, workload, options.run_deadline_s))


def _compiled(one: Finalist, backend: Backend, pool: CompilePool) -> Candidate:
    """Return the candidate of a finalist, whose cubin is in the cache unless it was trimmed."""
    kernel, problem, trial = one
    compiled = Pipeline(kernel, problem, backend, pool).recompile([trial])
    if not compiled:
        raise InputError(f"{kernel.name}: the best configuration does not compile any more")
    return compiled[0][1]


def _race_here(job: Race, own: Mapping[str, Callable[..., Any]], options: TuneOptions) -> list[Reading]:
    """Hold the race in this process."""
    from autotile.cuda.toolchain import load_cupy
    from autotile.workers.bench import Bench

    cuda = load_cupy().cuda
    readings: list[Reading] = []
    try:
        with cuda.Device(options.device_index):
            Bench(own).run(job, lambda _: None, readings)
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError) as error:
        raise WorkerError(f"the race failed: {error}") from None
    return readings


def _raced(trial: Trial, reading: Reading, options: TuneOptions, *, is_elsewhere: bool) -> RacedTrial:
    if reading.outcome is not Outcome.OK:
        fault = replace(trial, outcome=reading.outcome, reason=reading.reason, stage="finals", measurement=None)
        return RacedTrial(fault, ())
    timed = with_times(trial, reading.rounds_us)
    assert timed.measurement is not None
    version = str(reading.telemetry.get(LIBRARY_VERSION, "")) if is_elsewhere else ""
    return RacedTrial(replace(timed, measurement=replace(timed.measurement, l2=options.l2)), reading.rounds_us, version)
