"""Schedules: several sessions of one command, one after the other or one a GPU, and what they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.cuda.driver import device_count, live_device
from autotile.kernel.library import Kernel
from autotile.settings import Settings
from autotile.tuning.lanes import Ended, GpuName, Lane, run_jobs
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Observer, Place, Progress
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import CompilePool, worker_count
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Job, Race, Reading

if TYPE_CHECKING:
    from autotile.database.database import Database


@contextmanager
def open_lane(options: TuneOptions, *, is_of_one_model: bool = True) -> Iterator[Lane]:
    """Open the GPUs that the options name: of this machine, or of a cluster, of one model unless it may be of several.

    An `InputError` is raised if the scheduler cannot be reached, or has no GPU, or GPUs of several models.
    """
    if not options.scheduler:
        yield Lane(options.devices)
        return
    from autotile.tuning.cluster.gpus import ClusterLane

    with closing(ClusterLane(options, is_of_one_model=is_of_one_model)) as lane:
        yield lane


@contextmanager
def open_gpu(lane: Lane, options: TuneOptions) -> Iterator[Callable[[Job], list[Reading]]]:
    """Yield a function that runs jobs whose entries have problems of their own, as `autotile.workers.gpu.Gpu` does.

    They run on the GPU that the options name, or on one of a cluster. A `WorkerError` says that a race broke.
    """
    if lane.cluster is None:
        pool, index = lane.worker_pool, options.device_index
        with closing(Gpu(None, options.run_deadline_s, worker_pool=pool, device_index=index)) as gpu:
            yield lambda job: gpu.raced(job) if isinstance(job, Race) else gpu.run(job)
        return
    from autotile.tuning.cluster.gpus import jobs_on_cluster  # imports Dask

    with jobs_on_cluster(lane, options.run_deadline_s) as run:
        yield run


@dataclass
class Schedule:
    """Sessions that share GPUs, worker processes, a database, an observer and the user's interrupt; see `open`."""

    settings: Settings
    options: TuneOptions
    observer: Observer
    lane: Lane
    database: Database
    begun_s: float
    """Of the monotonic clock."""
    notices: dict[str, None] = field(default_factory=dict)
    """Remarks of the sessions for the user, each once."""
    interrupted: bool = False
    """Whether the user ended a session, or others before they began."""
    _sharing: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    @contextmanager
    def open(
        cls, settings: Settings, options: TuneOptions, observe: Observer, lane: Lane | None = None
    ) -> Iterator[Self]:
        """Open the database, the GPUs of the options or the lane, and the worker processes unless the lane has some.

        An `InputError` is raised if the GPUs cannot be reached, or the database cannot be written.
        """
        from autotile.database.database import Database

        location = settings.database if options.database is None else options.database
        with ExitStack() as stack:
            lane = lane or stack.enter_context(open_lane(options))
            database = stack.enter_context(Database.open(location))
            lane.worker_pool = lane.worker_pool or stack.enter_context(WorkerPool(worker_count(options.workers)))
            yield cls(settings, options, observe, lane, database, time.monotonic())

    @property
    def device(self) -> DeviceProperties | None:
        """The device of the sessions, of a cluster or of this machine; None where launches are replayed."""
        if self.lane.device is not None or self.options.replay is not None or device_count() == 0:
            return self.lane.device
        return live_device(self.options.device_index)

    @property
    def elapsed_s(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self.begun_s

    def compilers(self, workers: int | None = None, **given: Any) -> CompilePool:
        """Return compilers, one a core or as the options say, that share the worker processes; the caller closes them.

        ``given`` are other arguments of `CompilePool`.
        """
        of = self.settings, workers or worker_count(self.options.workers), self.options.compile_deadline_s
        return CompilePool(*of, worker_pool=self.lane.worker_pool, **given)

    def observe(self, progress: Progress, *places: Place) -> None:
        """Report the state of a session at its places in schedules, the innermost first; of one at a time."""
        with self._sharing:
            self.observer(replace(progress, path=(*reversed(places), *progress.path)))

    def tune(self, kernel: Kernel, problem: Problem, options: TuneOptions, lane: Lane, place: Place) -> TuneResult:
        """Hold a session with the GPUs of a lane; errors as for `autotile.tuning.session.tune`."""
        of = kernel, problem, self.settings, lane.options(options), lambda progress: self.observe(progress, place)
        result = tune(*of, lane=lane)
        self.notices.update(dict.fromkeys(result.notices))
        self.interrupted = self.interrupted or result.interrupted
        return result

    def run(
        self, steps: Sequence[Callable[[Lane], Ended]], allows: Callable[[int, GpuName], bool] = lambda _, __: True
    ) -> Iterator[tuple[int, Ended]]:
        """Run steps, several at once on several GPUs; yield each one's number and result as it ends.

        After an interrupt no other step begins. The error of a step is raised, when those that run have ended.
        """
        begun = 0
        with closing(run_jobs(steps, self.lane, allows)) as ended:
            for number, outcome in ended:
                begun += 1
                yield number, outcome
                if self.interrupted and not self.lane.is_parallel:
                    return
        self.interrupted = self.interrupted or begun < len(steps)
