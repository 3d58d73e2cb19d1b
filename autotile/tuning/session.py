"""Tune: the pipeline from a search space to a winner, readable from top to bottom."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, Problem, Trial
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.keys import TuningKey, key_of
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_memory
from autotile.search.samplers import check_sampler
from autotile.settings import Settings, available_cores
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.backend import Backend, Evaluator, choose_backend
from autotile.tuning.finals import Finals, choose_finalists, run_finals
from autotile.tuning.options import TuneOptions
from autotile.tuning.parameter_effects import Insight, insight_of
from autotile.tuning.pipeline import LoadMeter, Pipeline
from autotile.tuning.result import Progress, TuneResult, drift_of, front_of
from autotile.tuning.start import SearchPlan, known_before, reopened
from autotile.tuning.stopping import Bounds, Clock, Stopped, StopRequest, check_until
from autotile.tuning.trial_log import Ledger, check_kernel
from autotile.workers.child import Shelf
from autotile.workers.compile_pool import CompilePool

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.search.search import Shortlist


Observer = Callable[[Progress], None]


def tune(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    observe: Observer = lambda _: None,
    *,
    shelf: Shelf | None = None,
) -> TuneResult:
    """Search, verify, measure and persist; then race the best and name the winner.

    Parameters
    ----------
    kernel, problem
        What to tune.
    settings
        Where the caches and recordings lie.
    options
        How to tune.
    observe
        Called as the session goes on.
    shelf
        Workers of earlier sessions, and for later ones; None: they are started and ended here.

    Raises
    ------
    InputError
        The problem does not fit, the space is empty, the kernel is broken, or the database cannot be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    with open_session(kernel, problem, settings, options, observe, shelf=shelf) as session:
        return session.run()


@contextmanager
def open_session(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    observe: Observer,
    *,
    shelf: Shelf | None = None,
) -> Iterator[Session]:
    """A session with its device, space and open database; parameters and errors as for `tune`."""
    check_sampler(options.sampler, options.objectives)
    check_until(options)
    with ExitStack() as stack:
        backend = stack.enter_context(closing(choose_backend(kernel, problem, settings, options, shelf)))
        for sizes in (problem.sizes, *options.verify_sizes):
            check_memory(kernel.spec, replace(problem, sizes=sizes), backend.device)
        space = feasible_space(kernel.spec, problem.sizes, backend.device, problem.dtype)
        from autotile.database.database import Database

        database = stack.enter_context(Database.open(options.database or settings.database))
        yield Session(
            kernel=kernel,
            problem=problem,
            settings=settings,
            options=options,
            backend=backend,
            space=space,
            database=database,
            observe=observe,
            shelf=shelf,
        )


class Session:
    """The state of one tuning session; it runs once."""

    def __init__(
        self,
        *,
        kernel: Kernel,
        problem: Problem,
        settings: Settings,
        options: TuneOptions,
        backend: Backend,
        space: SearchSpace,
        database: Database,
        observe: Observer,
        shelf: Shelf | None,
    ) -> None:
        self._kernel = kernel
        self._problem = problem
        self._options = options
        self._backend = backend
        self._database = database
        self._observe = observe
        self._stopped: Stopped | None = None
        self._insight: Insight | None = None
        self._stop = StopRequest()
        self._clock = Clock()
        self._notices = tuple(notice for notice in (backend.notice, *database.notices) if notice)
        self._study_id = database.study(self.key, backend.device)
        known = known_before(database, self._study_id, self.key, options, kernel.spec.default)
        self._space = space = reopened(space, kernel, problem, backend.device, known.configs)
        self._ledger = Ledger(space, known.trials)
        self._bounds = Bounds(options, self._ledger, self._clock, self._stop)
        workers = options.workers or available_cores()
        self._plan = SearchPlan(kernel, problem, space, options, backend=backend, known=known, workers=workers)
        self._pool = CompilePool(
            settings.cache, settings.cache_limit_bytes, workers, options.compile_deadline_s, shelf=shelf
        )
        self._load = LoadMeter(self._pool, workers)
        self._pipeline = Pipeline(kernel, problem, backend.device, self._pool)
        self._pipeline.recall(self._ledger.trials)

    @property
    def device(self) -> DeviceProperties:
        """The device that candidates run on, or ran on when they were recorded."""
        return self._backend.device

    @property
    def key(self) -> TuningKey:
        """What the study's results belong to."""
        nvrtc, l2 = nvrtc_version(), self._options.l2
        return key_of(self._kernel, self._problem, self._backend.device, nvrtc_version=nvrtc, l2_mode=l2)

    @property
    def trials(self) -> list[Trial]:
        """Newest trial of each configuration, earlier sessions' too."""
        return self._ledger.trials

    def run(self) -> TuneResult:
        """Search until the trials, the budget or the space run out, then hold the finals.

        The first Ctrl-C ends the search and hurries the finals; the second ends the session at once. What ended is
        stored in either case.
        """
        run_id = self._start_run()
        evaluator: Evaluator | None = None
        finals: Finals | None = None
        broken_off = False
        with self._stop:
            try:
                self._report("starting")
                with self._clock.phase("start"):
                    if self._bounds.room != 0 and self._ledger.find(self._plan.default) is None:
                        self._pipeline.start(self._plan.default)  # compiles while the search is imported
                    shortlist = self._plan.begin(self._ledger)
                    self._fill(shortlist)  # compiles while the worker starts
                    evaluator = self._backend.open()
                with self._clock.phase("search"):
                    self._stopped = self._search(shortlist, run_id, evaluator)
                with self._clock.phase("finals"):
                    finals = self._finals(run_id, evaluator)
                self._insight = insight_of(self._space, self.trials)
            except KeyboardInterrupt:
                broken_off = True
            finally:
                self._pool.close()
                if evaluator is not None:
                    evaluator.close()
        result = self._result(finals, interrupted=broken_off or self._stop.requested)
        if not broken_off:
            self._database.end_run(run_id, result.to_json())
        return result

    def _search(self, shortlist: Shortlist, run_id: int, evaluator: Evaluator) -> Stopped:
        """Try candidates; every trial is committed as it ends."""
        while (stopped := self._bounds.stopped) is None:
            rival_us = self._ledger.best_us if self._options.drops_slow else None
            pair = self._pipeline.next_trial(shortlist, evaluator, rival_us)
            if pair is None:
                return Stopped("space")
            row, trial = pair
            self._database.add_trial(self._study_id, run_id, trial)
            self._ledger.add(trial)
            self._load.add(trial)
            shortlist.tell(row, trial)
            self._report("searching", trial)
            check_kernel(self._kernel.spec.source, self._ledger, trial, self._plan.default, self._plan.most)
            self._fill(shortlist)
        return stopped

    def _fill(self, shortlist: Shortlist) -> None:
        self._pipeline.fill(shortlist, self._bounds.room)
        self._bounds.expected_gain = shortlist.expected_gain

    def _finals(self, run_id: int, evaluator: Evaluator) -> Finals | None:
        if not self._options.finals:
            return None
        hurried = self._stop.requested
        finalists = choose_finalists(
            self.trials, self._plan.default, self._plan.incumbent, self._options.finals, hurried=hurried
        )
        if not any(trial.outcome is Outcome.OK for trial in finalists):
            return None
        self._report("finals")
        racing = self._pipeline.compile_again(finalists)
        if not racing:
            return None
        finals = run_finals(
            racing,
            evaluator,
            default=self._plan.default,
            incumbent=self._plan.incumbent,
            seed=self._options.seed,
            hurried=hurried,
        )
        self._notices += finals.notices
        for rank, trial in enumerate(finals.ranked, start=1):
            self._database.add_trial(self._study_id, run_id, trial, phase="final", rank=rank)
        for trial in finals.refused:
            self._database.add_trial(self._study_id, run_id, trial, phase="final")
        return finals

    def _result(self, finals: Finals | None, interrupted: bool) -> TuneResult:
        fastest = self._ledger.best
        work = self._kernel.spec.work
        sizes = self._problem.sizes
        return TuneResult(
            problem=self._problem,
            device=self._backend.device,
            combinations=self._space.combinations,
            valid=len(self._space),
            gates=self._ledger.gates,
            outcomes=self._ledger.outcomes,
            winner=finals.winner if finals is not None else fastest,
            default=finals.default if finals is not None else self._ledger.find(self._plan.default),
            speedup=finals.speedup if finals is not None else None,
            ties=finals.ties if finals is not None else (),
            refused=finals.refused if finals is not None else (),
            load=self._load.read(),
            drift=drift_of(self._ledger.trials),
            front=front_of(self._ledger.trials, finals, self._options.objectives),
            stopped=self._stopped,
            insight=self._insight,
            seconds=self._clock.elapsed_s,
            phases=self._clock.phases_s,
            resumed=self._ledger.resumed,
            interrupted=interrupted,
            database=self._database.location,
            flops=int(work.flops.evaluate(sizes)) if work.flops is not None else None,
            bytes=int(work.bytes.evaluate(sizes)) if work.bytes is not None else None,
            notices=self._notices,
            learnt_from=self._plan.learnt_from,
        )

    def _start_run(self) -> int:
        return self._database.start_run(
            self._study_id,
            sampler=self._options.sampler,
            seed=self._options.seed,
            settings=self._options.to_json(self._database.location),
            driver=self._backend.device.driver,
            host=platform.node(),
            gates=self._ledger.gates,
        )

    def _report(self, phase: str, last: Trial | None = None) -> None:
        self._observe(
            Progress(
                phase=phase,
                device=self._backend.device,
                done=len(self._ledger) - self._ledger.resumed,
                target=self._options.trial_target,
                elapsed_s=self._clock.elapsed_s,
                budget_s=self._options.budget_s,
                outcomes=self._ledger.outcomes,
                gates=self._ledger.gates,
                best=self._ledger.best,
                last=last,
                notices=self._notices,
            )
        )
