"""Tuning sessions: what each needs is opened, and its run begins; see `autotile.tuning.session_run`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TypeVar

from autotile.core.forks import fork_guard
from autotile.core.model import Problem, config_text
from autotile.errors import ConfigError, InputError
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_memory
from autotile.search.samplers import check_sampler
from autotile.settings import Settings, user_path
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from autotile.tuning.backend import choose_backend
from autotile.tuning.options import TuneOptions
from autotile.tuning.problem_queue import Lane
from autotile.tuning.result import TuneResult
from autotile.tuning.session_run import Observer, Session
from autotile.tuning.stopping import check_until
from autotile.workers.child import WorkerPool

SessionClass = TypeVar("SessionClass", bound="Session")


def tune(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    observe: Observer = lambda _: None,
    *,
    worker_pool: WorkerPool | None = None,
    lane: Lane | None = None,
) -> TuneResult:
    """Tune a kernel for a problem: search, verify, measure and store; then race the best and name the winner.

    Parameters
    ----------
    kernel, problem
        Kernel, and problem to tune it for.
    settings
        Settings of the installation: the folders of caches and recordings.
    options
        Options of the session.
    observe
        Called with the state of the session after each trial.
    worker_pool
        Worker processes to share with other sessions; None to start and end them here.
    lane
        GPUs of a cluster, and the user's interrupt, which sessions in several threads share; None for the GPUs that the
        options name, and to receive the interrupt here.

    Raises
    ------
    InputError
        The problem does not fit, the space is empty, the kernel is broken, or the database cannot be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    with open_session(
        kernel, problem, settings, options, observe, worker_pool=worker_pool, lane=lane, session_class=Session
    ) as session:
        if lane is not None and lane.stop is not None:
            session.share_stop(lane.stop)
        return session.run()


@contextmanager
def open_session(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    observe: Observer,
    *,
    worker_pool: WorkerPool | None = None,
    lane: Lane | None = None,
    session_class: type[SessionClass],
) -> Iterator[SessionClass]:
    """Open a session of a class: its device, its space and its database. Parameters and errors are those of `tune`."""
    check_sampler(options.sampler, options.objectives)
    check_until(options)
    if options.trace is not None and not user_path(options.trace, "a timeline").absolute().parent.is_dir():
        raise InputError(f"{options.trace}: the folder of the timeline does not exist; make it, or name another")
    with ExitStack() as stack:
        chosen = choose_backend(kernel, problem, settings, options, worker_pool, lane=lane)
        backend = stack.enter_context(closing(chosen))
        for sizes in (problem.sizes, *options.verify_sizes):
            check_memory(kernel.spec, replace(problem, sizes=sizes), backend.device)
        space = feasible_space(kernel.spec, problem.sizes, backend.device, problem.dtype)
        with fork_guard.use():  # a child that is forked while a module is imported waits for it for ever
            from autotile.database.database import Database

        database = stack.enter_context(
            Database.open(settings.database if options.database is None else options.database)
        )
        for config in options.tries:
            if reason := check_config(kernel.spec, config, problem.sizes, backend.device, problem.dtype):
                raise ConfigError(f"{config_text(config)} cannot be tried: {reason}")
        yield session_class(
            kernel=kernel,
            problem=problem,
            settings=settings,
            options=options,
            backend=backend,
            space=space,
            database=database,
            observe=observe,
            worker_pool=worker_pool,
        )
