"""Schedules: several sessions of one command, one after the other or one a GPU, and what they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.cuda.driver import device_count, has_driver, live_device
from autotile.kernel.library import Kernel
from autotile.settings import Settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.problem_queue import Job, Lane, open_lane, run_jobs
from autotile.tuning.progress_state import Observer, Place, Progress
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import worker_count

if TYPE_CHECKING:
    from autotile.database.database import Database

Result = TypeVar("Result")


class Schedule:
    """Sessions that share GPUs, worker processes, a database, an observer and the user's interrupt; see `open`.

    Attributes
    ----------
    settings, options
        Settings of the installation, and options of the command.
    lane, worker_pool, database
        What the sessions share.
    notices
        Remarks of the sessions for the user, each once.
    interrupted
        Whether the user ended a session, or others before they began.
    """

    def __init__(
        self,
        settings: Settings,
        options: TuneOptions,
        observe: Observer,
        *,
        lane: Lane,
        database: Database,
        worker_pool: WorkerPool,
    ) -> None:
        self.settings, self.options = settings, options
        self.lane, self.database, self.worker_pool = lane, database, worker_pool
        self.notices: dict[str, None] = {}
        self.interrupted = False
        self._observe = observe
        self._sharing = threading.Lock()
        self._begun_s = time.monotonic()

    @classmethod
    @contextmanager
    def open(
        cls, settings: Settings, options: TuneOptions, observe: Observer, lane: Lane | None = None
    ) -> Iterator[Self]:
        """Open the database and the worker processes, and the GPUs that the options name unless a lane is given.

        Raises
        ------
        InputError
            The scheduler of the GPUs cannot be reached, or the database cannot be written.
        """
        from autotile.database.database import Database

        location = settings.database if options.database is None else options.database
        with ExitStack() as stack:
            lane = lane or stack.enter_context(open_lane(options))
            database = stack.enter_context(Database.open(location))
            worker_pool = stack.enter_context(WorkerPool(worker_count(options.workers)))
            yield cls(settings, options, observe, lane=lane, database=database, worker_pool=worker_pool)

    @property
    def device(self) -> DeviceProperties | None:
        """The device of the sessions, of a cluster or of this machine; None where launches are replayed."""
        return device_of(self.options, self.lane)

    @property
    def elapsed_s(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self._begun_s

    def observe(self, progress: Progress, *places: Place) -> None:
        """Report the state of a session at its place in the schedule; of one at a time."""
        for place in places:
            progress = progress.within(place)
        with self._sharing:
            self._observe(progress)

    def tune(self, kernel: Kernel, problem: Problem, options: TuneOptions, lane: Lane, place: Place) -> TuneResult:
        """Hold a session with the GPUs of a lane; errors as for `autotile.tuning.session.tune`."""

        def observe(progress: Progress) -> None:
            self.observe(progress, place)

        of = kernel, problem, self.settings, lane.options(options), observe
        result = tune(*of, worker_pool=self.worker_pool, lane=lane)
        self.notices.update(dict.fromkeys(result.notices))
        self.interrupted = self.interrupted or result.interrupted
        return result

    def run(self, steps: Sequence[Callable[[Lane], Result] | Job[Result]]) -> Iterator[tuple[int, Result]]:
        """Run steps, several at once on several GPUs; yield each one's number and result as it ends.

        After an interrupt no other step begins.

        Raises
        ------
        Exception
            The error of a step; those that run are ended.
        """
        begun = 0
        jobs = [step if isinstance(step, Job) else Job(step) for step in steps]
        with closing(run_jobs(jobs, self.lane)) as ended:
            for number, outcome in ended:
                begun += 1
                if isinstance(outcome, Exception):
                    raise outcome
                yield number, outcome
                if self.interrupted and not self.lane.is_parallel:
                    return
        self.interrupted = self.interrupted or begun < len(jobs)


def device_of(options: TuneOptions, lane: Lane) -> DeviceProperties | None:
    """Return the device of a cluster's lane, or that of this machine; None where launches are replayed."""
    if lane.device is not None or options.replay is not None or not has_driver() or device_count() == 0:
        return lane.device
    return live_device(options.device_index)
