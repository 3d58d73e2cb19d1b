"""Sessions of several problems at the same time, one a GPU; several GPUs a problem where few problems are left."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from autotile.tuning.options import TuneOptions
from autotile.tuning.stopping import StopRequest

Result = TypeVar("Result")
Ended_co = TypeVar("Ended_co", covariant=True)

_LOOK_S = 0.2
"""Interval at which the main thread looks for signals, in seconds."""
_END_S = 60.0
"""Time that sessions have to end after the user's second interrupt."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What a session may use.

    Attributes
    ----------
    devices
        CUDA indices of its GPUs; of simulated ones in replay.
    stop
        The user's interrupt, which all sessions share; None in the main thread, whose session takes it itself.
    """

    devices: tuple[int, ...]
    stop: StopRequest | None = None

    def options(self, options: TuneOptions) -> TuneOptions:
        """Return the options of the session."""
        if not self.devices:
            return options
        several = self.devices if len(self.devices) > 1 else ()
        index = options.device_index if options.replay is not None else self.devices[0]
        return replace(options, devices=several, device_index=index)


@dataclass(frozen=True, slots=True)
class Job(Generic[Ended_co]):
    """A problem to tune.

    Attributes
    ----------
    run
        Function that tunes it with the GPUs of a lane.
    devices
        GPUs that it may use, of one model; empty for any of the first model.
    """

    run: Callable[[Lane], Ended_co]
    devices: tuple[int, ...] = ()


def run_jobs(
    jobs: Sequence[Job[Result]], devices: Sequence[int], *, stop: StopRequest | None = None
) -> Generator[tuple[int, Result | Exception], None, None]:
    """Run jobs in their order, as many at once as there are GPUs; yield each one's number and result as it ends.

    With one GPU they run in this thread, one after the other, and it is up to the caller to go on after an interrupted
    one. After the user's interrupt no other job begins, and after
    a second one `KeyboardInterrupt` is raised, when the sessions have ended.

    Parameters
    ----------
    jobs
        The jobs.
    devices
        GPUs to share; fewer than two for no parallel sessions.
    stop
        The user's interrupt; None to receive it here.
    """
    if len(devices) < 2:
        for number, job in enumerate(jobs):
            outcome: Result | Exception
            try:
                outcome = job.run(Lane(tuple(devices) or job.devices[:1], stop=stop))
            except Exception as error:
                outcome = error
            yield number, outcome
            if stop is not None and stop.requested:
                return
        return
    own = stop is None
    stop = stop or StopRequest()
    if own:
        with stop:
            yield from _run_parallel(jobs, tuple(devices), stop)
    else:
        yield from _run_parallel(jobs, tuple(devices), stop)


def _run_parallel(
    jobs: Sequence[Job[Result]], devices: tuple[int, ...], stop: StopRequest
) -> Generator[tuple[int, Result | Exception], None, None]:
    ended: queue.Queue[tuple[int, tuple[int, ...], Result | BaseException]] = queue.Queue()
    waiting = dict(enumerate(jobs))
    free = list(devices)
    threads: dict[int, threading.Thread] = {}

    def begin(number: int, taken: tuple[int, ...]) -> None:
        lane = Lane(taken, stop)

        def work() -> None:
            outcome: Result | BaseException
            try:
                outcome = jobs[number].run(lane)
            except BaseException as error:
                outcome = error
            ended.put((number, taken, outcome))

        threads[number] = threading.Thread(target=work, name=f"problem {number}", daemon=True)
        threads[number].start()

    try:
        while waiting or threads:
            while not stop.requested and (chosen := _next(waiting, free, devices)) is not None:
                number, taken = chosen
                del waiting[number]
                free = [index for index in free if index not in taken]
                begin(number, taken)
            if not threads:
                return
            try:
                number, taken, outcome = ended.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            threads.pop(number).join()
            free = [index for index in devices if index in {*free, *taken}]
            if isinstance(outcome, Exception):
                yield number, outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                yield number, outcome
    except BaseException:  # that of a caller who wants no more, too
        stop.requested = stop.aborted = True
        for thread in threads.values():
            thread.join(_END_S)
        raise


def _next(
    waiting: dict[int, Job[Any]], free: Sequence[int], devices: Sequence[int]
) -> tuple[int, tuple[int, ...]] | None:
    """Return the first job for which a GPU is free, and the GPUs that it gets; None if there is none."""
    for number, job in waiting.items():
        allowed = [index for index in free if index in (job.devices or devices)]
        if allowed:
            rivals = sum(bool({*allowed} & {*(other.devices or devices)}) for other in waiting.values())
            return number, tuple(allowed[: max(1, len(allowed) // rivals)])
    return None
