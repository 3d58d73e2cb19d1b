"""The run of a tuning session: from a search space to a verified winner, from top to bottom."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.core.device import DeviceProperties
from autotile.core.forks import fork_guard
from autotile.core.model import Config, Outcome, Problem, Trial
from autotile.core.timeline import Timeline
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.keys import TuningKey, key_of
from autotile.kernel.library import Kernel
from autotile.kernel.problem import Workrate
from autotile.settings import Settings
from autotile.space.search_space import SearchSpace
from autotile.tuning.backend import Backend
from autotile.tuning.candidate_check import GivenCandidates
from autotile.tuning.finals import Finals, choose_finalists
from autotile.tuning.gpu_comparison import Confirmation, confirm_finals, gpu_notices, measured_on
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.independent_steps import StepTimes, independent_groups
from autotile.tuning.options import TuneOptions
from autotile.tuning.parameter_effects import ParameterEffects, find_parameter_effects
from autotile.tuning.pipeline import CompiledCandidate, LoadMeter, Pipeline
from autotile.tuning.result import Progress, TuneResult, measure_drift, newest_trials, pareto_front, write_trace
from autotile.tuning.scoring import Scorer, session_objective
from autotile.tuning.shared_study import SharedStudy
from autotile.tuning.start import SearchPlan, extend_space, read_prior_results
from autotile.tuning.stopping import Clock, Stopped, StoppingRules, StopRequest, TrialLog, check_kernel_failure
from autotile.tuning.study_scale import StudyScale
from autotile.tuning.time_left import TimeLeft
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import CompilePool, worker_count

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.search.shortlist import Shortlist


Observer = Callable[[Progress], None]
Ended = tuple[CompiledCandidate, Trial]
"""A candidate whose trial has ended."""

_WAIT_S = 0.1
"""Interval at which a session looks for the results of others that it waits for, in seconds."""
_MOVED_S = 1.0
"""Change of the expected end of the finals, in seconds, that is reported."""
_CLAIMED_AT_ONCE = 16
"""Candidates that are claimed together at most: they are chosen before any of them runs."""


class Session:
    """The state of one tuning session, which runs once; see `tune` for its parameters."""

    _shortlist: Shortlist

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
        worker_pool: WorkerPool | None,
    ) -> None:
        self._kernel = kernel
        self._problem = problem
        self._options = options
        self._backend = backend
        self._database = database
        self._observe = observe
        self._stopped: Stopped | None = None
        self._step_times: StepTimes | None = None
        self._effects: ParameterEffects | None = None
        self._confirmation: Confirmation | None = None
        self._stop = StopRequest()
        self._receives_stop = True
        self._clock = Clock()
        self._reported = "starting"
        """Phase that was reported last."""
        self._waiting = ""
        if isinstance(backend, GpuGroup):
            backend.observe_wait = self._report_wait
        self._notices = tuple(filter(None, (backend.notice, kernel.spec.reference.notice, *database.notices)))
        from autotile.database.run_record import RunRecord

        self._record = RunRecord(database, self.key, backend.device)
        self._scorer = Scorer(kernel.spec, problem, session_objective(kernel.spec, options))
        prior = read_prior_results(database, self._record.study_id, self.key, options, kernel.spec.default)
        prior = prior._replace(trials=[self._scorer.scored(trial) for trial in prior.trials])
        self._space = space = extend_space(space, kernel, problem, backend.device, prior.configs)
        self._log = TrialLog(space, prior.trials)
        self._rules = StoppingRules(options, self._log, self._clock, self._stop)
        self._time_left = TimeLeft(options, len(space))
        self._time_left.remember(self._log.trials)
        self._finals_end_s = 0.0
        """Expected end of the finals, in seconds since the session began."""
        self._timeline = Timeline(is_recording=options.trace is not None)
        workers = worker_count(options.workers)
        if options.workers is not None and workers < options.workers:
            self._notices += (f"{workers} compile processes instead of {options.workers}: at most two a core",)
        cores = workers + (backend.farm.slots if backend.farm is not None else 0)
        self._plan = SearchPlan(kernel, problem, space, options, backend=backend, prior=prior, workers=cores)
        self._compile_pool = CompilePool(
            settings.cache,
            settings.cache_limit_bytes,
            workers,
            options.compile_deadline_s,
            worker_pool=worker_pool,
            timeline=self._timeline,
            farm=backend.farm,
        )
        self._chosen: list[CompiledCandidate] = []
        """Candidates that are about to be claimed and submitted to the device."""
        self._load = LoadMeter(self._compile_pool, cores, backend.gpu_count)
        self._pipeline = Pipeline(
            kernel,
            problem,
            backend,
            self._compile_pool,
            self._timeline,
            score=self._scorer.scored,
            verify_sizes=options.verify_sizes,
        )
        self._pipeline.remember(self._log.trials)
        self._shared = SharedStudy(self._record, self._log, space, self._scorer.scored)
        self._scale = StudyScale(
            self._pipeline, backend, self._plan.default, log=self._log, shared=self._shared, rules=self._rules
        )

    @property
    def device(self) -> DeviceProperties:
        """The device that candidates run on, or ran on when they were recorded."""
        return self._backend.device

    @property
    def key(self) -> TuningKey:
        """Key of the study."""
        nvrtc, l2 = nvrtc_version(), self._options.l2
        return key_of(self._kernel, self._problem, self._backend.device, nvrtc_version=nvrtc, l2_mode=l2)

    @property
    def trials(self) -> list[Trial]:
        """Newest trial of each configuration, including those of earlier sessions."""
        return self._log.trials

    @property
    def _all_notices(self) -> tuple[str, ...]:
        """Remarks for the user, those about machines that came and went included."""
        farm = self._backend.farm.notices if self._backend.farm is not None else ()
        return (*self._notices, *self._scale.notices, *farm, *gpu_notices(self._backend.uses))

    def share_stop(self, stop: StopRequest) -> None:
        """Take the user's interrupt from the main thread, before `run`."""
        self._stop = self._rules.stop = stop
        self._receives_stop = False

    def run(self) -> TuneResult:
        """Search until a stopping rule holds, race the best candidates, and store the result.

        The first Ctrl-C ends the search and shortens the finals; the second aborts the session. Every trial that has
        ended is stored in either case.

        Raises
        ------
        RescuedRunError
            The database lost the run, or cannot store a trial.
        """
        self._start_run()
        with self._record:  # reads the run back
            return self._run()

    def _run(self) -> TuneResult:
        finals: Finals | None = None
        aborted = False
        with ExitStack() as self._resources:
            if self._receives_stop:
                self._resources.enter_context(self._stop)
            try:
                self._report("starting")
                with self._phase("start"):
                    self._start_search()
                    self._backend.wait()
                    self._scale.align()
                with self._phase("search"):
                    self._try_all(self._options.tries)
                    is_complete = self._tune_steps_apart()
                    for ended in self._trials() if not is_complete else ():
                        self._store(ended)  # -> database
                    self._combine_steps()
                with self._phase("finals"):
                    finals = self._hold_finals()
                self._effects = find_parameter_effects(self._space, self.trials)
            except KeyboardInterrupt:
                aborted = True
            finally:
                self._compile_pool.close()
                self._backend.close()
                self._write_trace()
        result = self._result(finals, interrupted=aborted or self._stop.requested)
        if not aborted:
            self._record.end(result.to_json())
        return result

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._clock.phase(name), self._timeline.span("session", name):
            yield

    def _write_trace(self) -> None:
        if self._options.trace is not None:
            self._notices += write_trace(self._timeline, Path(self._options.trace))

    def _start_run(self) -> None:
        others = self._record.start(
            sampler=self._options.sampler,
            seed=self._options.seed,
            settings=self._options.to_json(self._database.location),
            driver=self._backend.device.driver,
            host=platform.node(),
            gates=self._log.gates,
            shares=not self._options.fresh,
        )
        if others:  # equal seeds would propose alike
            self._plan.seed += self._record.run_id

    def _start_search(self) -> None:
        """Create the search, and start the first compilations while the GPU worker starts.

        It imports most of what a session needs, which a fork waits for.
        """
        with fork_guard.use():
            self._import_and_start_search()

    def _import_and_start_search(self) -> None:
        if self._rules.room != 0 and self._log.find(self._plan.default) is None:
            self._pipeline.prefetch(self._plan.default)  # compiles while the search is imported
        self._shortlist = self._resources.enter_context(closing(self._plan.begin(self._log)))
        self._resources.enter_context(import_module("autotile.search.gaussian_process").one_blas_thread())
        self._compile_ahead()
        import_module("autotile.search.importance")  # imports SciPy, while compilers and GPU worker start

    def _compile_ahead(self) -> None:
        """Take proposals from the search, valid by rules and static limits, and start their compilation."""
        self._pipeline.compile_ahead(self._shortlist, self._rules.room)
        self._rules.observe(self._shortlist)

    def _tune_steps_apart(self) -> bool:
        """Try every setting of steps that share no parameters in common trials; return whether that was all."""
        groups = independent_groups(self._kernel) if self._backend.source == "cuda" else []
        if not groups:
            return False
        self._step_times = times = StepTimes(groups, self._space, self._plan.default, self._options.seed)
        room = self._rules.room
        if room is not None and times.count > room:
            return False  # the search tries the better ones
        before = len(self._log)
        for configs in times.chunks(lambda: self.trials):
            if self._rules.stopped is not None:
                return False
            self._try_all(configs)
        if len(self._log) > before:
            self._notices += (times.notice(self._kernel.spec, len(self._log) - before),)
        self._stopped = Stopped("space")
        return True

    def _combine_steps(self) -> None:
        """Try the best settings of independent steps together."""
        if self._step_times is not None and not self._stop.requested:
            self._try_all(self._step_times.best_configs(self.trials))

    def _trials(self) -> Iterator[list[Ended]]:
        """Yield the trials as they end, until a stopping rule holds or every configuration was tried.

        Those of several GPUs that end at the same time come together, and as many are claimed together.
        """
        while (stopped := self._rules.stopped) is None or self._chosen:
            if not self._chosen and (inherited := self._shared.inherit()):
                while self._pipeline.running:
                    yield self._end_running()
                self._try_all(inherited)
            candidate = self._pipeline.next_candidate(self._shortlist) if stopped is None else None  # -> cubin
            if candidate is not None:
                self._chosen.append(candidate)
            if self._chosen and (candidate is None or self._begins_at_once(candidate)):
                if ended := self._begin_chosen():  # -> load -> verify -> measure
                    yield ended
            elif candidate is None and self._pipeline.running:
                yield self._end_running()
            elif candidate is None:
                stopped = Stopped("space")
                break
            self._take_news()
            self._compile_ahead()
        self._stopped = stopped
        while self._pipeline.running:
            yield self._end_running()
        if stopped.rule in ("trials", "space"):
            self._await_others()

    def _begins_at_once(self, last: CompiledCandidate) -> bool:
        """Return whether the chosen ones are claimed now: one GPU waits for the first, and a failure is a result."""
        several = self._backend.gpu_count > 1 and len(self._chosen) < _CLAIMED_AT_ONCE
        return not several or last.trial.outcome is not Outcome.OK

    def _begin_chosen(self) -> list[Ended]:
        """Claim candidates and submit them to the device; return those that need not be measured, with their trials."""
        ended: list[Ended] = []
        ours = self._scale.claim([candidate.trial.config for candidate in self._chosen], self._room)
        for candidate, is_ours in zip(self._chosen, ours, strict=True):
            if not is_ours:
                self._shortlist.leave(candidate.row)
            elif (trial := self._pipeline.begin(candidate, self._limit_us(candidate))) is not None:
                ended.append((candidate, trial))
        self._chosen.clear()
        return ended

    @property
    def _room(self) -> int | None:
        """Number of trials that may begin, but for what other sessions are trying; None for any number."""
        target = self._options.trial_target
        return None if target is None else target - len(self._log) - self._pipeline.running

    def _await_others(self) -> None:
        """Wait for what other sessions are trying, and try what they died with."""
        while not self._stop.requested and not self._rules.is_out_of_time:
            self._try_all(self._shared.inherit(now=True))
            self._take_news()
            if not self._shared.others:
                return
            time.sleep(_WAIT_S)

    def _try_all(self, configs: Sequence[Config]) -> None:
        """Try configurations that the search has not chosen, and let it learn from them."""
        for trial in self._trials_of(configs):
            self._shortlist.add(trial)

    def _take_news(self) -> None:
        """Learn from what other sessions have found."""
        for trial in self._shared.take_news():
            self._pipeline.remember([trial])
            self._shortlist.add(trial)
            self._time_left.add(self._clock.elapsed_s, trial)
            self._report("searching", trial)
        self._count_running()

    def _count_running(self) -> None:
        """Let the stopping rules count what runs or is about to."""
        self._rules.running = self._pipeline.running + len(self._chosen) + self._shared.others

    def _end_running(self) -> list[Ended]:
        """Wait for a trial that runs; of several GPUs, take all that have ended."""
        ended = [self._pipeline.end_next()]
        while self._backend.gpu_count > 1 and self._backend.has_result:
            ended.append(self._pipeline.end_next())
        self._count_running()
        return ended

    def _limit_us(self, candidate: CompiledCandidate) -> float | None:
        """Return the time at which a candidate would be as good as the best so far; None if none is pruned."""
        return self._scorer.time_limit_us(candidate.trial, self._log.best) if self._options.drops_slow else None

    def _store(self, ended: Sequence[Ended]) -> None:
        """Commit trials, and pass each on to the log, the search and the observer."""
        self._commit(*(trial for _, trial in ended))
        for candidate, trial in ended:
            self._count(trial)
            with self._timeline.span("session", "tell"):
                self._shortlist.tell(candidate.row, trial)
            self._report("searching", trial)
            check_kernel_failure(self._kernel.spec.source, self._log, trial, self._plan.default, self._plan.max_trials)

    def _commit(self, *trials: Trial) -> None:
        if self._stop.aborted:
            raise KeyboardInterrupt
        with self._timeline.span("database", "store"):
            self._record.add(*trials)

    def _count(self, trial: Trial) -> None:
        self._log.add(trial)
        self._load.add(trial)
        self._time_left.add(self._clock.elapsed_s, trial)

    def _trials_of(self, configs: Sequence[Config]) -> Iterator[Trial]:
        """Try valid configurations that have no trial yet, and yield their trials as they are stored.

        One that another session is trying is waited for.
        """
        elsewhere: list[Config] = []
        given = GivenCandidates((c for c in configs if self._log.find(c) is None), 2 * self._backend.gpu_count - 1)
        self._pipeline.compile_ahead(given)
        while given.is_open:
            candidate = self._pipeline.next_candidate(given)
            if candidate is None:
                candidate, trial = self._pipeline.end_next()
            elif not all(self._shared.claim(candidate.trial.config)):
                given.end(candidate.row)
                elsewhere.append(candidate.trial.config)
                continue
            elif (begun := self._pipeline.begin(candidate, self._limit_us(candidate))) is None:
                continue
            else:
                trial = begun
            given.end(candidate.row)
            self._commit(trial)
            self._count(trial)
            self._report("searching", trial)
            yield trial
        for config in elsewhere:
            while (found := self._log.find(config)) is None and not (
                self._stop.requested or self._rules.is_out_of_time
            ):
                if all(self._shared.claim(config)):
                    yield from self._trials_of([config])
                    break
                time.sleep(_WAIT_S)
            if found is not None:
                yield found

    def _hold_finals(self) -> Finals | None:
        """Race the finalists and store their trials; None where finals are disabled or no candidate can race."""
        plan, hurried = self._plan, self._stop.requested
        if not self._options.finals:
            return None
        finalists = choose_finalists(
            self.trials, plan.default, plan.incumbent, self._options.finals, tries=self._options.tries, hurried=hurried
        )
        if not any(trial.outcome is Outcome.OK for trial in finalists):
            return None
        self._report_finals(self._time_left.finals_s)
        compiled = self._pipeline.recompile(finalists)
        if not compiled:
            return None
        finals, self._confirmation = confirm_finals(
            compiled,
            self._backend,
            default=plan.default,
            incumbent=plan.incumbent,
            seed=self._options.seed,
            hurried=hurried,
            scorer=self._scorer,
            observe=self._report_finals,
        )
        self._notices += finals.notices
        for rank, trial in enumerate(finals.ranked, start=1):
            self._record.add(measured_on(self._backend.uuid, trial), phase="final", rank=rank)
        for trial in finals.refused:
            self._record.add(trial, phase="final")
        return finals

    def _report_finals(self, left_s: float) -> None:
        """Report the finals, at first and wherever what is left of them is not what was reported."""
        end_s = self._clock.elapsed_s + left_s
        if not self._finals_end_s or abs(end_s - self._finals_end_s) > _MOVED_S:
            self._finals_end_s = end_s
            self._report("finals")

    def _result(self, finals: Finals | None, interrupted: bool) -> TuneResult:
        log = self._log
        winner = finals.winner if finals is not None else log.best
        workrate = Workrate.of(self._kernel.spec, self._problem, winner.config if winner is not None else None)
        return TuneResult(
            problem=self._problem,
            device=self._backend.device,
            combinations=self._space.combinations,
            valid=len(self._space),
            gates=log.gates,
            outcomes=log.outcomes,
            winner=winner,
            default=finals.default if finals is not None else log.find(self._plan.default),
            speedup=finals.speedup if finals is not None else None,
            ties=finals.ties if finals is not None else (),
            refused=finals.refused if finals is not None else (),
            load=self._load.read(),
            drift=measure_drift(log.trials),
            front=pareto_front(log.trials, finals, self._options.objectives),
            stopped=self._stopped,
            insight=self._effects,
            seconds=self._clock.elapsed_s,
            phases=self._clock.phases_s,
            resumed=log.resumed,
            interrupted=interrupted,
            database=self._database.location,
            flops=workrate.flops,
            bytes=workrate.bytes,
            unit=workrate.unit,
            passes=workrate.passes,
            notices=self._all_notices,
            tried=newest_trials(self._options.tries, log, finals),
            learnt_from=self._plan.learnt_from,
            not_learnt_from=self._plan.misleading_sources,
            gpus=self._backend.uses,
            confirmation=self._confirmation,
        )

    def _report_wait(self, text: str) -> None:
        """Report what the session waits for; an empty text when that is over."""
        self._waiting = text
        self._report(self._reported)

    def _report(self, phase: str, last: Trial | None = None) -> None:
        self._reported = phase
        log, elapsed_s = self._log, self._clock.elapsed_s
        left_s: float | None = None
        if phase == "finals":
            left_s = max(0.0, self._finals_end_s - elapsed_s)
        elif phase == "searching":
            search_s = self._time_left.search_s(len(log), elapsed_s, self._rules.ends_after)
            left_s = None if search_s is None else search_s + self._time_left.finals_s
        self._observe(
            Progress(
                phase=phase,
                device=self._backend.device,
                done=len(log) - log.resumed,
                target=self._options.trial_target,
                elapsed_s=elapsed_s,
                remaining_s=left_s,
                may_end_earlier=self._options.until is not None and self._rules.ends_after is None,
                budget_s=self._options.budget_s,
                outcomes=log.outcomes,
                gates=log.gates,
                best=log.best,
                last=last,
                notices=self._all_notices,
                waiting=self._waiting,
            )
        )
