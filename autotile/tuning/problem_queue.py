"""Sessions of several problems at the same time, one a GPU; several GPUs a problem where few problems are left."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from autotile.core.device import DeviceProperties
from autotile.errors import WorkerError
from autotile.tuning.options import TuneOptions
from autotile.tuning.stopping import StopRequest

if TYPE_CHECKING:
    from autotile.tuning.cluster.client import Cluster

Result = TypeVar("Result")
Ended_co = TypeVar("Ended_co", covariant=True)

GpuName = int | str
"""CUDA index of a GPU of this machine, of a simulated one in replay, or UUID of a GPU of a cluster."""

_LOOK_S = 0.2
"""Interval at which the main thread looks for signals, in seconds."""
_END_S = 60.0
"""Time that sessions have to end after the user's second interrupt."""
_ABSENT_S = 300.0
"""Time that problems wait for a GPU of a cluster while none of them is tuned."""


class Lane:
    """The GPUs that a session may use, or that the sessions of a command share.

    Parameters
    ----------
    devices
        The GPUs; none for that of the options.
    stop
        The user's interrupt, which all sessions share; None in the main thread, whose session takes it itself.
    cluster
        Connection to the scheduler that offers the GPUs; None for those of this machine. GPUs may then be added while a
        session runs.
    device
        Properties of the GPUs of a cluster; None where they are of this machine, or simulated.
    """

    def __init__(
        self,
        devices: Sequence[GpuName] = (),
        stop: StopRequest | None = None,
        cluster: Cluster | None = None,
        device: DeviceProperties | None = None,
    ) -> None:
        self._devices = tuple(devices)
        self._device = device
        self.stop = stop
        self.cluster = cluster

    @property
    def devices(self) -> tuple[GpuName, ...]:
        """The GPUs."""
        return self._devices

    @property
    def count(self) -> int:
        """Number of GPUs, one at least."""
        return max(1, len(self.devices))

    @property
    def device(self) -> DeviceProperties | None:
        """Properties of the GPUs of a cluster; None where they are of this machine, or simulated."""
        return self._device

    @property
    def is_parallel(self) -> bool:
        """Whether sessions run in several threads: there are several GPUs, or there may be."""
        return self.cluster is not None or len(self.devices) > 1

    def device_of(self, gpu: GpuName) -> DeviceProperties | None:
        """Return the properties of one of the GPUs; see `device`."""
        return self._device

    def free(self, held: Collection[GpuName]) -> list[GpuName]:
        """Return the GPUs that can begin with a problem, without those that hold one."""
        return [gpu for gpu in self.devices if gpu not in held]

    def add(self, gpu: GpuName) -> None:
        """Let another GPU of a cluster take part."""
        self._devices = (*self._devices, gpu)

    def options(self, options: TuneOptions) -> TuneOptions:
        """Return the options of the session."""
        indices = tuple(index for index in self.devices if isinstance(index, int))
        if not indices:
            return options
        index = options.device_index if options.replay is not None else indices[0]
        return replace(options, devices=indices if len(indices) > 1 else (), device_index=index)


@contextmanager
def open_lane(options: TuneOptions, *, is_of_one_model: bool = True) -> Iterator[Lane]:
    """Return the GPUs that the options name: of this machine, or of a cluster, to which a connection is opened.

    Parameters
    ----------
    options
        Options of the sessions.
    is_of_one_model
        Whether the GPUs of a cluster must be of one model.

    Raises
    ------
    InputError
        The scheduler cannot be reached, it has no GPU, or GPUs of several models.
    """
    if not options.scheduler:
        yield Lane(options.devices)
        return
    from autotile.tuning.cluster.lane import ClusterLane

    with closing(ClusterLane(options, is_of_one_model=is_of_one_model)) as lane:
        yield lane


def _any_gpu(_: GpuName) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Job(Generic[Ended_co]):
    """A problem to tune.

    Attributes
    ----------
    run
        Function that tunes it with the GPUs of a lane.
    allows
        Returns whether it may use a GPU; those that it may use are of one model.
    """

    run: Callable[[Lane], Ended_co]
    allows: Callable[[GpuName], bool] = _any_gpu


def run_jobs(jobs: Sequence[Job[Result]], lane: Lane) -> Generator[tuple[int, Result | Exception], None, None]:
    """Run jobs in their order, as many at once as there are GPUs; yield each one's number and result as it ends.

    With one GPU of this machine they run in this thread, one after the other, and it is up to the caller to go on after
    an interrupted one. After the user's interrupt no other job begins, and after a second one `KeyboardInterrupt` is
    raised, when the sessions have ended.

    Of a cluster, GPUs may join and leave: one that joins takes the next problem, or helps where none waits; a session
    whose GPUs have left gets the next one that is free.

    Parameters
    ----------
    jobs
        The jobs.
    lane
        GPUs to share. Without an interrupt of its own, the user's is received here.

    Raises
    ------
    WorkerError
        The cluster has no GPU left for the problems that wait.
    """
    if not lane.is_parallel:
        for number, job in enumerate(jobs):
            outcome: Result | Exception
            try:
                outcome = job.run(lane)
            except Exception as error:
                outcome = error
            yield number, outcome
            if lane.stop is not None and lane.stop.requested:
                return
        return
    stop = lane.stop or StopRequest()
    with stop if lane.stop is None else nullcontext():
        yield from _Run(jobs, lane, stop).results()


class _Run(Generic[Result]):
    """Jobs in threads."""

    def __init__(self, jobs: Sequence[Job[Result]], lane: Lane, stop: StopRequest) -> None:
        self._jobs = jobs
        self._lane = lane
        self._stop = stop
        self._waiting = dict(enumerate(jobs))
        self._running: dict[int, tuple[threading.Thread, Lane]] = {}
        self._ended: queue.Queue[tuple[int, Result | BaseException]] = queue.Queue()

    def results(self) -> Generator[tuple[int, Result | Exception], None, None]:
        """Run the jobs, and yield each one's number and result."""
        busy_at = time.monotonic()
        try:
            while self._waiting or self._running:
                if not self._stop.requested:
                    self._assign()
                if self._running:
                    busy_at = time.monotonic()
                elif self._stop.requested or self._lane.cluster is None:
                    return
                elif time.monotonic() - busy_at > _ABSENT_S:
                    raise WorkerError(
                        f"the cluster has had no GPU for the problems left for {_ABSENT_S:.0f} s; what was measured is "
                        "stored, and the same command goes on"
                    )
                try:
                    number, outcome = self._ended.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                self._running.pop(number)[0].join()
                if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                    raise outcome
                yield number, outcome
        except BaseException:  # that of a caller who wants no more, too
            self._stop.requested = self._stop.aborted = True
            for thread, _ in self._running.values():
                thread.join(_END_S)
            raise

    def _assign(self) -> None:
        """Give free GPUs to sessions that have lost theirs, then to problems that wait, then to those that run."""
        lanes = {number: lane for number, (_, lane) in self._running.items()}
        free = self._lane.free({gpu for lane in lanes.values() for gpu in lane.devices})
        if self._lane.cluster is not None:
            present = {*self._lane.devices}
            stranded = {number: lane for number, lane in lanes.items() if not present & {*lane.devices}}
            free = self._add(stranded, free, limit=1)
        while (chosen := _next(self._waiting, free)) is not None:
            number, taken = chosen
            del self._waiting[number]
            free = [gpu for gpu in free if gpu not in taken]
            self._begin(number, taken)
        if self._lane.cluster is not None and not self._waiting:
            self._add({number: lane for number, (_, lane) in self._running.items()}, free)

    def _add(self, lanes: dict[int, Lane], free: list[GpuName], limit: int | None = None) -> list[GpuName]:
        """Add GPUs to running sessions, to those with the fewest first; return those that are left."""
        left = []
        added = dict.fromkeys(lanes, 0)
        for gpu in free:
            able = [one for one in lanes if self._jobs[one].allows(gpu) and (limit is None or added[one] < limit)]
            if able:
                number = min(able, key=lambda one: len(lanes[one].devices))
                lanes[number].add(gpu)
                added[number] += 1
            else:
                left.append(gpu)
        return left

    def _begin(self, number: int, taken: tuple[GpuName, ...]) -> None:
        lane = Lane(taken, self._stop, self._lane.cluster, self._lane.device_of(taken[0]))

        def work() -> None:
            outcome: Result | BaseException
            try:
                outcome = self._jobs[number].run(lane)
            except BaseException as error:
                outcome = error
            self._ended.put((number, outcome))

        thread = threading.Thread(target=work, name=f"problem {number}", daemon=True)
        self._running[number] = thread, lane
        thread.start()


def _next(waiting: dict[int, Job[Result]], free: Sequence[GpuName]) -> tuple[int, tuple[GpuName, ...]] | None:
    """Return the first job for which a GPU is free, and the GPUs that it gets; None if there is none."""
    for number, job in waiting.items() if free else ():
        allowed = [gpu for gpu in free if job.allows(gpu)]
        if allowed:
            rivals = (other for other in waiting.values() if any(map(other.allows, allowed)))
            count = sum(1 for _ in islice(rivals, len(allowed)))
            return number, tuple(allowed[: max(1, len(allowed) // count)])
    return None
