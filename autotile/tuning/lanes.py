"""Lanes: the GPUs that the sessions of a command share, one each, or several where few problems are left.

GPUs of a cluster may join and leave.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from autotile.core.device import DeviceProperties
from autotile.errors import WorkerError
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import StopRequest
from autotile.workers.child import WorkerPool

if TYPE_CHECKING:
    from autotile.tuning.cluster.requests import Cluster

Ended = TypeVar("Ended")

GpuName = int | str
"""CUDA index of a GPU of this machine, of a simulated one in replay, or UUID of a GPU of a cluster."""

_LOOK_S = 0.2
"""Interval at which the main thread looks for signals, in seconds."""
_END_S = 60.0
"""Time that sessions have to end after the user's second interrupt."""
_ABSENT_S = 300.0
"""Time that problems wait for a GPU of a cluster while none of them is tuned."""


@dataclass(eq=False)
class Lane:
    """The GPUs that a session may use, or that the sessions of a command share; none for that of the options.

    The user's interrupt is that which all sessions share; None in the main thread, whose session takes it itself. With
    a connection to a scheduler that offers the GPUs, these may be added while a session runs, and their properties are
    known, if they are of one model; GPUs of this machine, and simulated ones, have none. The worker processes are those
    that all sessions share; None for a session that starts and ends its own.
    """

    _devices: tuple[GpuName, ...] = ()
    stop: StopRequest | None = None
    cluster: Cluster | None = None
    device: DeviceProperties | None = None
    worker_pool: WorkerPool | None = None

    @property
    def devices(self) -> tuple[GpuName, ...]:
        """The GPUs."""
        return self._devices

    @property
    def count(self) -> int:
        """Number of GPUs, one at least."""
        return max(1, len(self.devices))

    @property
    def is_parallel(self) -> bool:
        """Whether sessions run in several threads: there are several GPUs, or there may be."""
        return self.cluster is not None or len(self.devices) > 1

    def device_of(self, gpu: GpuName) -> DeviceProperties | None:
        """Return the properties of one of the GPUs; see `device`."""
        return self.device

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


def run_jobs(
    jobs: Sequence[Callable[[Lane], Ended]], lane: Lane, allows: Callable[[int, GpuName], bool] = lambda _, __: True
) -> Generator[tuple[int, Ended], None, None]:
    """Run jobs in their order, as many at once as there are GPUs; yield each one's number and result as it ends.

    With one GPU of this machine they run in this thread, one after the other, and it is up to the caller to go on after
    an interrupted one. After the user's interrupt no other job begins. `KeyboardInterrupt` after a second one, and the
    error of a job, are raised when the sessions have ended. Without an interrupt of the lane, the user's is received
    here.

    Of a cluster, GPUs may join and leave: one that joins takes the next problem, or helps where none waits; a session
    whose GPUs have left gets the next one that is free. A `WorkerError` says that none is left. The GPUs that a job, by
    its number, is allowed to use are of one model.
    """
    if not lane.is_parallel:
        for number, job in enumerate(jobs):
            yield number, job(lane)
            if lane.stop is not None and lane.stop.requested:
                return
        return
    stop = lane.stop or StopRequest()
    waiting = dict.fromkeys(range(len(jobs)))
    running: dict[int, Lane] = {}
    threads: dict[int, threading.Thread] = {}
    ended: queue.Queue[tuple[int, Ended | BaseException]] = queue.Queue()

    def work(number: int, own: Lane) -> None:
        outcome: Ended | BaseException
        try:
            outcome = jobs[number](own)
        except BaseException as error:
            outcome = error
        ended.put((number, outcome))

    def lend(lanes: dict[int, Lane], free: Sequence[GpuName], *, once: bool = False) -> list[GpuName]:
        """Add GPUs to running sessions, to those with the fewest first, or one to each; return those that are left."""
        left = []
        for gpu in free:
            able = [number for number in lanes if allows(number, gpu)]
            if able:
                number = min(able, key=lambda one: len(lanes[one].devices))
                lanes[number].add(gpu)
                if once:
                    del lanes[number]
            else:
                left.append(gpu)
        return left

    def assign() -> None:
        """Give free GPUs to sessions that have lost theirs, then to problems that wait, then to those that run."""
        free = lane.free({gpu for own in running.values() for gpu in own.devices})
        if lane.cluster is not None:
            present = {*lane.devices}
            lost = {number: own for number, own in running.items() if present.isdisjoint(own.devices)}
            free = lend(lost, free, once=True)
        for chosen in [*waiting] if free else ():
            allowed = [gpu for gpu in free if allows(chosen, gpu)]
            if not allowed:
                continue
            rivals = (other for other in waiting if any(allows(other, gpu) for gpu in allowed))  # itself included
            count = sum(1 for _ in islice(rivals, len(allowed)))
            taken = tuple(allowed[: max(1, len(allowed) // count)])
            del waiting[chosen]
            free = [gpu for gpu in free if gpu not in taken]
            running[chosen] = own = Lane(taken, stop, lane.cluster, lane.device_of(taken[0]), lane.worker_pool)
            threads[chosen] = threading.Thread(target=work, args=(chosen, own), name=f"problem {chosen}", daemon=True)
            threads[chosen].start()
        if lane.cluster is not None and not waiting:
            lend(running, free)

    busy_at = time.monotonic()
    with stop:
        try:
            while waiting or running:
                if not stop.requested:
                    assign()
                if running:
                    busy_at = time.monotonic()
                elif stop.requested or lane.cluster is None:
                    return
                elif time.monotonic() - busy_at > _ABSENT_S:
                    raise WorkerError(
                        f"the cluster has had no GPU for the problems left for {_ABSENT_S:.0f} s; what was measured is "
                        "stored, and the same command goes on"
                    )
                try:
                    number, outcome = ended.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                del running[number]
                threads.pop(number).join()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield number, outcome
        except BaseException:  # that of a caller who wants no more, too
            stop.requested = stop.aborted = True
            for thread in threads.values():
                thread.join(_END_S)
            raise
