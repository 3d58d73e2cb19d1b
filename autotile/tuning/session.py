"""The tuning session: one study, opened; trials are compiled, verified, measured and stored, and the best are raced.

`Session` is opened by `open_session`, and then driven: `Session.run` is the search up to a verified winner;
`Session.evaluate`, `Session.ask` and `Session.tell` serve a search of the caller's own, between `Session.begin` and
`Session.finish`. Sessions of several processes may share a study: each claims what it tries, takes over the trials of
the others, and puts its times on the scale of the study.

A `Pipeline` takes each candidate from a row of the space to a trial, compiled ahead of the GPU.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.documents import attributes, decode_json, encode_json
from autotile.core.forks import fork_guard
from autotile.core.model import (
    SAME_CODE,
    Config,
    Measurement,
    Outcome,
    Problem,
    Sizes,
    Stopped,
    Trial,
    config_key,
    config_text,
    distinct_configs,
)
from autotile.core.text import time_text
from autotile.core.timeline import NO_TIMELINE, Timeline
from autotile.cuda.compiler import CompileJob, check_signatures, compile_job
from autotile.database.keys import TuningKey, key_of
from autotile.database.paths import check_output, write_output
from autotile.errors import ConfigError, DataWarning, InputError
from autotile.kernel.launch import LaunchData, LaunchPlan
from autotile.kernel.library import Kernel
from autotile.kernel.problem import Workrate, check_memory
from autotile.kernel.spec import computed_values
from autotile.search.samplers import BRUTE_FORCE, check_sampler, sampler_entry
from autotile.settings import Settings
from autotile.space.limits import check_config, compiled_steps
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.backend import choose_backend
from autotile.tuning.finals import FinalRules, Finals, choose_finalists, confirm_finals, measured_on
from autotile.tuning.lanes import Lane
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import (
    LoadReading,
    Observer,
    Progress,
    StoppingRules,
    StopRequest,
    TimeLeft,
    TrialLog,
    check_kernel_failure,
    check_until,
    measure_load,
)
from autotile.tuning.result import WORK, Recorded, TuneResult, measure_drift, pareto_front
from autotile.tuning.start import Scorer, SearchPlan, StepTimes, independent_groups, session_objective
from autotile.workers.compile_pool import Compiled, CompilePool, worker_count
from autotile.workers.gpu import Backend
from autotile.workers.jobs import Candidate, finals_limit_s

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.search.importance import ParameterEffects
    from autotile.search.search import Search, Shortlist


Proposer: TypeAlias = "Shortlist | GivenCandidates"
"""Source of candidates."""

_WAIT_S = 0.1
"""Interval at which a session that waits for compilers, or for the results of others, looks whether it is over."""
_INHERIT_S = 5.0
"""Interval at which it looks for claims of others that died, in seconds."""
_MOVED_S = 1.0
"""Change of the expected end of the finals, in seconds, that is reported."""
_CLAIMED_AT_ONCE = 16
"""Candidates that are claimed together at most: they are chosen before any of them runs."""
_SCALINGS = 3
"""Measurements of the default that put a session on the scale of its study, of which the median counts."""
_LOOK_S = 0.01
"""Interval at which a wait for the compilers looks for results of several GPUs, in seconds."""
_SAMPLE_LIMIT_S = 0.02
"""GPU time of the samples of one configuration of a recording, in seconds: a recording holds thousands of
configurations, so that more than nine samples are taken only of short kernels."""


def tune(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    observe: Observer = lambda _: None,
    *,
    lane: Lane | None = None,
) -> TuneResult:
    """Tune a kernel for a problem: search, verify, measure and store; then race the best and name the winner.

    An `InputError` is raised if the problem does not fit, the space is empty, the kernel is broken, or the database
    cannot be written, and a `ToolchainError` if NVRTC, CuPy or the driver does not work.
    """
    with open_session(kernel, problem, settings, options, observe, lane=lane) as session:
        return session.run()


def record(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    *,
    sample: int | None = None,
    output: Path | None = None,
    observe: Observer = lambda _: None,
) -> Recorded:
    """Measure configurations on the GPU, without pruning, and write them as a recording.

    Every trial is stored in the database as in tuning, so that an interrupted recording resumes. The sampler and the
    number of trials of the options are set here: those of a random sample, or of all configurations. In a folder, the
    file is named after its contents. Without a GPU an `InputError` is raised: a replay cannot be recorded.
    """
    from autotile.exchange.recording import RecordingHeader, recording_name, write_recording

    sampler = BRUTE_FORCE if sample is None else "random"
    options = replace(options, sampler=sampler, trials=sample, discard=False, finals=0, sample_limit_s=_SAMPLE_LIMIT_S)
    with open_session(kernel, problem, settings, options, observe) as session:
        if session.device.source == "replayed":
            raise InputError("a recording is measured on a CUDA device, not made from a replay; see `autotile doctor`")
        result, trials = session.run(), session.trials
        header = RecordingHeader(
            key=session.key,
            parameters=kernel.spec.parameters,
            device=session.device,
            driver=session.device.driver,
            settings={"sample_limit_s": options.sample_limit_s, "seed": options.seed, "host": platform.node()},
            valid_configs=result.valid,
            chosen="all" if len(trials) >= result.valid else f"{len(trials)} at random",
        )
        path = None
        if not result.interrupted:
            path = output or Path()
            is_folder = path.is_dir()
            path = path / recording_name(header) if is_folder else path
            write_recording(path, header, trials, follow_link=not is_folder)
        return Recorded(path, header, len(trials), result.seconds)


_MAX_READY = 16
"""Compile workers that are started ahead at most: a container may have fewer cores than it sees."""


@contextmanager
def open_session(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    observe: Observer = lambda _: None,
    *,
    lane: Lane | None = None,
) -> Iterator[Session]:
    """Open a session: its device, its space and its database.

    ``observe`` is called with the state of the session after each trial. Without a lane, the GPUs are those of the
    options, worker processes start and end here, and the user's interrupt is received here.
    """
    lane = lane or Lane()
    check_sampler(options.sampler, options.objectives)
    check_until(options)
    location = settings.database if options.database is None else options.database
    with ExitStack() as stack:
        chosen = choose_backend(kernel, problem, settings, options, lane)
        backend = stack.enter_context(closing(chosen))
        for sizes in (problem.sizes, *options.verify_sizes):
            check_memory(kernel.spec, replace(problem, sizes=sizes), backend.device)
        timeline = Timeline(is_recording=options.trace is not None)
        workers = worker_count(options.workers)
        # Two cores are the session's and the GPU worker's meanwhile. Sessions that share workers may open at the same
        # time, and would start as many each.
        is_alone = lane.worker_pool is None and options.replay is None and not options.scheduler
        compile_pool = CompilePool(
            settings,
            workers,
            options.compile_deadline_s,
            ready=is_alone * max(1, min(_MAX_READY, workers - 2, options.trial_target or workers)),
            worker_pool=lane.worker_pool,
            timeline=timeline,
            farm=backend.farm,
        )
        stack.enter_context(closing(compile_pool))
        pipeline = Pipeline(kernel, problem, backend, compile_pool, timeline, verify_sizes=options.verify_sizes)
        default = kernel.spec.default
        if not check_config(kernel.spec, default, problem, backend.device):
            pipeline.prefetch(default)  # with which a new study begins; it compiles during all that follows
        space = feasible_space(kernel.spec, problem, backend.device)
        with fork_guard.use():  # a child that is forked while a module is imported waits for it for ever
            from autotile.database.database import Database
            from autotile.database.engine import parse_location

        if options.trace is not None:
            for used in (options.replay, parse_location(location)):
                check_output(options.trace, *([used] if isinstance(used, str | Path) else []))
        database = stack.enter_context(Database.open(location))
        for config in options.tries:
            if reason := check_config(kernel.spec, config, problem, backend.device):
                raise ConfigError(f"{config_text(config)} cannot be tried: {reason}")
        backend.await_reference()  # behind all that begins at the same time; no budget includes it
        yield Session(pipeline, options, space=space, database=database, observe=observe, stop=lane.stop)


class Session:
    """A study of a kernel at a problem, opened for one run; see `open_session`."""

    def __init__(
        self,
        pipeline: Pipeline,
        options: TuneOptions,
        *,
        space: SearchSpace,
        database: Database,
        observe: Observer,
        stop: StopRequest | None,
    ) -> None:
        self._kernel = kernel = pipeline.kernel
        self._problem = problem = pipeline.problem
        self._backend = backend = pipeline.backend
        self._compile_pool, self._timeline = pipeline.compile_pool, pipeline.timeline
        self._options = options
        self._database = database
        self._observe = observe
        self._stopped: Stopped | None = None
        self._effects: ParameterEffects | None = None
        self._finals: Finals | None = None
        self._stop = stop or StopRequest()
        self._begun_s = time.monotonic()
        self._phases_s: dict[str, float] = {}
        """Wall time of each phase that was reached."""
        self._resources = ExitStack()
        self._reported = "starting"
        """Phase that was reported last."""
        self._waiting = ""
        backend.observe_wait = self._report_wait
        from autotile.database.runs import RunRecord

        self._record = RunRecord(database, self.key, backend.device)
        self._rate = Workrate.of(kernel.spec, problem)
        self._objective = session_objective(kernel.spec, options)
        self._scorer = Scorer(kernel.spec, problem, self._objective)
        workers = worker_count(options.workers)
        cores = workers + (backend.farm.slots if backend.farm is not None else 0)
        of, study = (kernel, problem, space, options), self._record.study_id
        self._plan = SearchPlan(*of, backend=backend, database=database, study_id=study, key=self.key, workers=cores)
        self._notices: tuple[str, ...] = tuple(filter(None, (backend.notice, *self._plan.notices, *database.notices)))
        if options.workers is not None and workers < options.workers:
            self._notices += (f"{workers} compile processes instead of {options.workers}: at most two a core",)
        self.space = space = self._plan.space
        self._log = TrialLog(space, map(self._scorer.scored, self._plan.earlier))
        self._rules = StoppingRules(options, self._log, self._elapsed_s, self._stop)
        self._time_left = TimeLeft(options, len(space))
        self._time_left.remember(self._log.trials)
        self._finals_end_s = 0.0
        """Expected end of the finals, in seconds since the session began."""
        self._shortlist: Shortlist | None = None  # of `run`
        self._cores_and_gpus = cores, backend.gpu_count
        self._load_readings: list[LoadReading] = []
        self._pipeline = pipeline
        pipeline.score = self._scorer.scored
        self._pipeline.remember(self._log.trials)
        self._chosen: list[Compiling] = []
        """Candidates that are about to be claimed and submitted to the device."""
        self._news: list[Trial] = []
        """Trials of other sessions that are in the log, and that the search does not know."""
        self._looked_at = time.monotonic()
        """Time of the last look for claims of sessions that died."""

    @property
    def device(self) -> DeviceProperties:
        """The device that candidates run on, or ran on when they were recorded."""
        return self._backend.device

    @property
    def key(self) -> TuningKey:
        """Key of the study."""
        return key_of(self._kernel, self._problem, self._backend.device, l2_mode=self._options.l2)

    @property
    def trials(self) -> list[Trial]:
        """Newest trial of each configuration, including those of earlier sessions."""
        return self._log.trials

    @property
    def best(self) -> Trial | None:
        """The fastest trial that was verified and measured to the end."""
        return self._log.best

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks for the user, those about machines that came and went included."""
        farm = self._backend.farm.notices if self._backend.farm is not None else ()
        uses = self._backend.uses
        left = sum(not use.lost for use in uses)
        lost = (
            f"{use.uuid or 'a GPU'} was given up, and its candidates went to the other {left}: {use.lost}"
            for use in uses
            if use.lost
        )
        return (*self._notices, *farm, *lost)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Measure the time of a phase, which the timeline takes up."""
        start_s = self._elapsed_s()
        try:
            with self._timeline.span("session", name):
                yield
        finally:
            self._phases_s[name] = round(self._elapsed_s() - start_s, 3)

    def run(self) -> TuneResult:
        """Search until a stopping rule holds, race the best candidates, and store the result.

        The first Ctrl-C ends the search and shortens the finals; the second aborts the session. Every trial that has
        ended is stored in either case. A `RescuedRunError` is raised if the database lost the run, or cannot store a
        trial.
        """
        aborted = False
        with self._stop:
            self._start_run()
            with self._resources:  # leaves the record, which ends the run in any case, and reads it back
                try:
                    with ExitStack() as searching:
                        self._report("starting")
                        with self._phase("start"):
                            with fork_guard.use():  # a fork waits for the imports, most of what a session needs
                                from autotile.search.search import Shortlist

                                search, trials = self._plan.make_search(self._log), self._log.trials
                                searching.callback(search.close)
                                lookahead = self._plan.lookahead
                                shortlist = Shortlist(search, lookahead, self.device.sm_count, earlier=trials)
                                self._shortlist = shortlist
                                is_timed = self._options.budget_s is not None  # which slow compilations would use up
                                learns = sampler_entry(search.sampler).learns
                                self._compile_pool.longest_first = not (learns or is_timed)
                                gaussian_process = import_module("autotile.search.gaussian_process")
                                searching.enter_context(gaussian_process.one_blas_thread())
                                untried = sum(self._log.find(config) is None for config in self._options.tries)
                                self._compile_ahead(untried)  # while the GPU worker starts
                                # what the first model needs, while the session waits for its first candidates
                                loading = Thread(target=fork_guard.use()(gaussian_process.load_scipy))
                                loading.start()
                                searching.callback(loading.join)
                            self._backend.wait()
                            self._align_scale()
                        with self._phase("search"):
                            self._search(shortlist)
                        self._hold_finals()
                except KeyboardInterrupt:
                    aborted = True
                finally:
                    self._close_workers()
                result = self._result(interrupted=aborted or self._stop.requested)
                if not aborted:
                    self._record.end(result.to_json())
                return result

    def begin(self) -> None:
        """Record the start of the run, and wait until candidates can be run; `finish` or `abort` comes last."""
        self._start_run()
        try:
            with self._phase("start"):
                self._backend.wait()
        except BaseException:
            self.abort()
            raise

    def evaluate(self, configs: Sequence[Config]) -> Iterator[Trial]:
        """Try configurations, and yield their trials: invalid ones first, then in the order in which they end.

        A configuration that has a trial is not run again. Those that only a heuristic excludes are valid.
        """
        for trial in self._end_all(None):  # an evaluation was interrupted
            self._learn(trial)
        valid: list[Config] = []
        for config in distinct_configs(configs):
            reason = check_config(self._kernel.spec, config, self._problem, self.device)
            known = self._log.find(config)
            if reason:
                yield Trial(dict(config), Outcome.INFEASIBLE, reason, "limits")
            elif known is not None:
                yield known
            else:
                valid.append(config)
        with self._timeline.span("session", "evaluate", configurations=len(valid)):
            tried = set()
            for trial in self._try(valid):
                tried.add(trial.config_key)
                self._learn(trial)
                yield trial
        for config in valid:
            found = self._log.find(config)
            if found is not None and config_key(config) not in tried:
                yield found  # another session has tried it

    def ask(self, count: int) -> list[Config]:
        """Return up to ``count`` configurations that the session's sampler proposes; fewer if no others are left.

        A configuration is proposed once. The sampler learns from every trial and every result that is told.
        """
        propose = self._search_to_ask().propose
        return [dict(one[1]) for _ in range(count) if (one := propose()) is not None]

    def tell(self, results: Iterable[tuple[Config, float | None]]) -> None:
        """Pass results that were measured elsewhere on to the sampler; they are neither stored nor served.

        A time is None if a configuration does not work. None is passed on if one is refused, as it is not in the space
        or has no value of the session's objective: an `InputError`.
        """
        told, space = list[Trial](), self._search_to_ask().space
        for config, time_us in results:
            if space.row_of(config) is None:
                raise InputError(f"{config_text(config)} is not in the space; tell times of valid configurations")
            measured = Measurement(time_us, time_us, time_us) if time_us is not None else None
            outcome = Outcome.OK if time_us is not None else Outcome.CRASHED
            told.append(self._scorer.scored(Trial(dict(config), outcome, measurement=measured)))
        for trial in told:
            self._learn(trial)

    def finish(self) -> TuneResult:
        """Race the best configurations and the default, store the result, and close the session."""
        try:
            for _ in self.evaluate([self._plan.default]):  # the winner is compared with it
                pass
            self._hold_finals()
            result = self._result(interrupted=False)
            self._record.end(result.to_json())
        finally:
            self.abort()
        return result

    def abort(self) -> None:
        """Close the session, without a result unless `finish` has stored one; its trials are stored."""
        with self._resources:
            self._close_workers()

    def _close_workers(self) -> None:
        self._compile_pool.close()
        self._backend.close()
        if self._options.trace is not None:
            path = Path(self._options.trace)
            try:  # the results do not depend on it
                write_output(path, encode_json(self._timeline.to_json()))
            except InputError as error:
                said = f"the timeline could not be written to {path}: {error}"
                self._notices += (said,)
                warnings.warn(said, DataWarning, stacklevel=2)  # what was shown of the session is shown by now

    def _start_run(self) -> None:
        settings, objective = self._options.to_json(self._database.location), self._objective
        if objective is not None:  # which the search-space file may state
            settings |= {"objective": objective.expression.text, "maximize": objective.maximize}
        others = self._record.start(
            sampler=self._options.sampler,
            seed=self._options.seed,
            settings=settings,
            driver=self._backend.device.driver,
            host=platform.node(),
            gates=self._log.gates,
            shares=not self._options.fresh,
        )
        self._resources.enter_context(self._record)
        if others:  # equal seeds would propose alike
            self._plan.seed += self._record.run_id

    def _search(self, shortlist: Shortlist) -> None:
        """Try what the user names, then what the search chooses; steps that share no parameters are tuned apart."""
        self._try_and_learn(self._options.tries)
        groups = independent_groups(self._kernel) if self._backend.source == "cuda" else []
        times = StepTimes(groups, self.space, self._plan.default, self._options.seed) if groups else None
        room, before = self._rules.room, len(self._log)
        if times is not None and (room is None or times.count <= room):  # else the search tries the better ones
            for configs in times.chunks(lambda: self.trials):
                if self._rules.stopped is not None:
                    break
                self._try_and_learn(configs)
            else:
                if len(self._log) > before:
                    self._notices += (times.notice(self._kernel.spec, len(self._log) - before),)
                self._stopped = Stopped("space")
        if self._stopped is None:
            for _ in self._measure(shortlist):
                pass
        if times is not None and not self._stop.requested:
            self._try_and_learn(times.best_configs(self.trials))

    def _measure(self, proposer: Proposer) -> Iterator[Trial]:
        """Try what a proposer chooses until a stopping rule holds or it has nothing left; yield what is stored.

        The proposer's first candidates are compiling. Candidates other than those of the search are ended by the user's
        interrupt alone. Trials of several GPUs that end at the same time are stored together, and as many are claimed
        together.
        """
        target, is_limited = self._options.trial_target, proposer is self._shortlist

        def reached() -> Stopped | None:
            interrupt = Stopped("interrupt") if self._stop.requested else None
            return self._rules.stopped if is_limited else interrupt

        while (stopped := reached()) is None or self._chosen:
            if is_limited and not self._chosen and (inherited := self._inherited()):
                yield from self._end_all(proposer)
                self._try_and_learn(inherited)
            candidate = self._pipeline.next_candidate(proposer, reached) if stopped is None else None  # -> cubin
            if candidate is not None:
                self._chosen.append(candidate)
            # one GPU waits for the first, and a failure is a result
            at_once = candidate is None or self._backend.gpu_count == 1 or len(self._chosen) >= _CLAIMED_AT_ONCE
            if self._chosen and (at_once or self._chosen[-1].trial().outcome is not Outcome.OK):
                # what may begin, but for what other sessions are trying
                room = target - len(self._log) - self._pipeline.running if is_limited and target is not None else None
                ours = self._claim([one.config for one in self._chosen], room)
                ended = []
                for one, is_ours in zip(self._chosen, ours, strict=True):  # -> load, verify, measure
                    limit_us = None
                    if self._options.drops_slow:
                        limit_us = self._scorer.time_limit_us(one.trial(), self._log.best)
                    if not is_ours:
                        proposer.leave(one.row)
                    elif (trial := self._pipeline.begin(one, limit_us)) is not None:
                        ended.append((one, trial))
                self._chosen.clear()
            elif candidate is None and self._pipeline.running:
                ended = self._end_running()
            elif candidate is None:
                stopped = reached() or Stopped("space")
                break
            else:
                ended = []
            yield from self._store(ended, proposer)  # -> database
            self._take_news()
            if is_limited:
                self._compile_ahead()
        yield from self._end_all(proposer)
        if is_limited and stopped is not None:
            self._stopped = stopped
            # what other sessions are trying is waited for, and what they died with is tried
            while stopped.rule in ("trials", "space") and not (self._stop.requested or self._rules.is_out_of_time):
                self._try_and_learn(self._inherited(now=True))
                self._take_news()
                if not self._record.others:
                    break
                time.sleep(_WAIT_S)

    def _compile_ahead(self, others: int = 0) -> None:
        """Start the compilation of what the search proposes, while as many trials as ``others`` begin besides."""
        shortlist, rules = self._shortlist, self._rules
        assert shortlist is not None
        room = rules.room
        self._pipeline.compile_ahead(shortlist, max(room - others, 0) if room is not None else None)
        rules.expected_gain = shortlist.expected_gain
        rules.ends_after = shortlist.trials_until(rules.least_gain) if rules.least_gain else None

    def _end_running(self) -> list[tuple[Compiling, Trial]]:
        """Wait for a trial that runs; of several GPUs, take all that have ended."""
        ended = [self._pipeline.end_next()]
        while self._backend.gpu_count > 1 and self._backend.has_result:
            ended.append(self._pipeline.end_next())
        return ended

    def _end_all(self, proposer: Proposer | None) -> Iterator[Trial]:
        """Wait for all that runs, store it, and yield it."""
        while self._pipeline.running:
            yield from self._store(self._end_running(), proposer)

    def _store(self, ended: Sequence[tuple[Compiling, Trial]], proposer: Proposer | None) -> Iterator[Trial]:
        """Commit trials, pass each on to the log, its proposer and the observer, and yield it."""
        if not ended:
            return
        if self._stop.aborted:
            raise KeyboardInterrupt
        with self._timeline.span("database", "store"):
            self._record.add(*(trial for _, trial in ended))
        for candidate, trial in ended:
            self._log.add(trial)
            gpu_s = sum(trial.seconds.get(stage, 0.0) for stage in ("load", "verify", "measure"))
            pool = self._compile_pool
            self._load_readings.append((time.perf_counter(), pool.busy_s, gpu_s, pool.begun_at))
            self._time_left.add(self._elapsed_s(), trial)
            if proposer is not None:
                with self._timeline.span("session", "tell"):
                    proposer.tell(candidate.row, trial)
            self._report("searching", trial)
            if proposer is not None and proposer is self._shortlist:
                default, source = self._log.find(self._plan.default), self._kernel.spec.source
                check_kernel_failure(source, self._log.outcomes, trial, default, self._plan.max_trials)
            yield trial

    def _try(self, configs: Iterable[Config]) -> Iterator[Trial]:
        """Try valid configurations that have no trial, and yield their trials; wait for those of other sessions."""
        untried = distinct_configs(dict(config) for config in configs if self._log.find(config) is None)
        given = GivenCandidates(untried, 2 * self._backend.gpu_count - 1)
        self._pipeline.compile_ahead(given)
        yield from self._measure(given)
        for config in untried:  # those left to another session have no trial yet
            while self._log.find(config) is None and not (self._stop.requested or self._rules.is_out_of_time):
                if all(self._claim([config])):  # the other session has died
                    yield from self._try([config])
                    break
                time.sleep(_WAIT_S)

    def _try_and_learn(self, configs: Iterable[Config]) -> None:
        """Try configurations that the search has not chosen, and let it learn from them."""
        for trial in self._try(configs):
            self._learn(trial)

    def _learn(self, trial: Trial) -> None:
        """Pass a trial that the search has not chosen on to it; what it is not asked for yet, it reads from the log."""
        if (proposer := self._shortlist or self._plan.search) is not None:
            proposer.add(trial)

    def _search_to_ask(self) -> Search:
        search = self._plan.search
        if search is None:
            search = self._plan.make_search(self._log)
            self._resources.callback(search.close)
            for trial in self._log.trials:
                search.add(trial)
        return search

    def _claim(self, configs: Sequence[Config], room: int | None = None) -> Sequence[bool]:
        """Return True if this session may try each of some configurations; no other one does so then.

        Where another one tries the default, this one waits, and then puts its times on the scale of the study. Nothing
        else runs yet: a search proposes the default first.
        """
        ours = self._record.claim(*configs, room=room)
        self._log_news()
        default = self._plan.default
        if self._backend.uuid and default in configs and not ours[place := configs.index(default)]:
            while self._log.find(default) is None and not ours[place] and not self._stop.requested:
                time.sleep(_WAIT_S)
                (ours[place],) = self._record.claim(default)  # the other session may have died
                self._log_news()
            if not self._pipeline.running:
                self._align_scale()
        return ours

    def _log_news(self) -> None:
        """Add to the log what other sessions have found."""
        for trial in self._record.take_news():
            if trial.outcome.has_time and not self._plan.has_values(trial):
                self._record.forget(trial)  # another objective did not need what this one needs
            elif self.space.row_of(trial.config) is not None and self._log.find(trial.config) is None:
                self._log.add(scored := self._scorer.scored(trial))
                self._news.append(scored)

    def _inherited(self, *, now: bool = False) -> list[Config]:
        """Return the candidates of sessions that died, which are now this session's; not often unless ``now``."""
        if not now and time.monotonic() - self._looked_at < _INHERIT_S:
            return []
        self._looked_at = time.monotonic()
        keys = self._record.inherit()
        self._log_news()
        found: list[Config] = []
        for key in keys:
            row = self.space.row_of(decode_json(key.encode(), dict))
            config = self.space.config(row) if row is not None else None
            if config is None or self._log.find(config) is not None:
                self._record.disclaim(key)  # it is not valid here, or was tried
            else:
                found.append(config)
        return found

    def _take_news(self) -> None:
        """Learn from what other sessions have found."""
        news, self._news = self._news, []
        for trial in news:
            self._pipeline.remember([trial])
            self._learn(trial)
            self._time_left.add(self._elapsed_s(), trial)
            self._report("searching", trial)
        self._rules.running = self._pipeline.running + len(self._chosen) + self._record.others

    def _align_scale(self) -> None:
        """Measure the default if another session did, on another GPU; call it while no candidate runs.

        GPUs of one model differ by some percent, by which a configuration would win or lose for the GPU that it was
        tried on. Every session begins with the default, which only one gets to claim. The others measure it, too, and
        multiply their times by the ratio of its stored time to their own, if it runs and its GPU is known.
        """
        reference, own = self._log.find(self._plan.default), self._backend.uuid
        if reference is None or reference.outcome is not Outcome.OK or reference.time_us is None:
            return
        if not own or not reference.gpu or reference.gpu == own:
            return
        given, times_us = self._pipeline.compile(reference.config).candidate(), list[float]()
        if given is not None:
            for _ in range(_SCALINGS):
                self._backend.submit(given)
                _, reading = self._backend.result()
                times_us += [reading.measurement.time_us] if reading.measurement is not None else []
        if times_us:
            own_us = float(np.median(times_us))
            self._pipeline.scale = scale = round(reference.time_us / own_us, 6)
            self._notices += (
                f"times are multiplied by {scale:.4f}: the default takes {time_text(own_us)} on {own}, and "
                f"{time_text(reference.time_us)} on {reference.gpu}, where the study began",
            )

    def _hold_finals(self) -> None:
        """Race the finalists, where any can and finals are not disabled, and store their trials; find the effects."""
        rules = FinalRules(
            self._plan.default,
            self._plan.incumbent,
            self._options.seed,
            hurried=self._stop.requested,
            precision=self._options.precision,
            scorer=self._scorer,
            observe=self._report_finals,
        )
        best = self._log.best
        if best is not None and best.time_us is not None and self._backend.source == "cuda":
            rules = replace(rules, limit_s=finals_limit_s(best.time_us, self._elapsed_s()))
        with self._phase("finals"):
            count = self._options.finals if self._plan.may_replace(self._log) else 0
            finalists = choose_finalists(self.trials, rules, count, self._options.tries) if count else []
            if any(trial.outcome is Outcome.OK for trial in finalists):
                self._report_finals(self._time_left.finals_s)
                if compiled := self._pipeline.recompile(finalists):
                    self._finals = finals = confirm_finals(compiled, self._backend, rules)
                    self._notices += finals.notices
                    for trial in finals.refused:  # before the winner, with which what is served changes
                        self._record.add(trial, phase="final")
                    for rank, trial in enumerate(finals.ranked, start=1):
                        self._record.add(measured_on(self._backend.uuid, trial), phase="final", rank=rank)
        self._notices += tuple(self._plan.served_still(best)) if self._finals is None else ()
        from autotile.search.importance import find_parameter_effects  # imports SciPy

        self._effects = find_parameter_effects(self.space, self.trials)

    def _report_finals(self, left_s: float) -> None:
        """Report the finals, at first and wherever what is left of them is not what was reported."""
        end_s = self._elapsed_s() + left_s
        if not self._finals_end_s or abs(end_s - self._finals_end_s) > _MOVED_S:
            self._finals_end_s = end_s
            self._report("finals")

    def _result(self, interrupted: bool) -> TuneResult:
        log, search = self._log, self._plan.search
        finals = self._finals or Finals((log.best,) if log.best is not None else (), log.find(self._plan.default))
        winner = finals.winner
        workrate = Workrate.of(self._kernel.spec, self._problem, winner.config if winner is not None else None)
        raced = {trial.config_key: trial for trial in (*finals.ranked, *finals.refused)}
        tried = (raced.get(config_key(config)) or log.find(config) for config in self._options.tries)
        default, failed_default = self._plan.default, None
        if finals.default is None:
            tried_default = raced.get(config_key(default)) or log.find(default)
            if tried_default is not None and not tried_default.outcome.has_time:
                failed_default = tried_default
            elif reason := check_config(self._kernel.spec, default, self._problem, self.device):
                failed_default = Trial(default, Outcome.INFEASIBLE, reason, "limits")
        return TuneResult(
            problem=self._problem,
            device=self._backend.device,
            combinations=self.space.combinations,
            valid=len(self.space),
            **attributes(log, "gates", "outcomes", "resumed"),
            **attributes(finals, "winner", "default", "speedup", "ties", "refused", "confirmation"),
            load=measure_load(self._load_readings, *self._cores_and_gpus),
            drift=measure_drift(log.trials),
            front=pareto_front([*log.trials, *raced.values()], self._options.objectives),
            stopped=self._stopped,
            insight=self._effects,
            seconds=self._elapsed_s(),
            phases=dict(self._phases_s),
            interrupted=interrupted,
            database=self._database.place,
            **attributes(workrate, *WORK),
            notices=self.notices,
            tried=tuple(filter(None, tried)),
            learnt_from=search.learnt_from if search is not None else (),
            not_learnt_from=search.misleading_sources if search is not None else (),
            gpus=self._backend.uses,
            failed_default=failed_default,
        )

    def _report_wait(self, text: str) -> None:
        """Report what the session waits for; an empty text when that is over."""
        self._waiting = text
        self._report(self._reported)

    def _report(self, phase: str, last: Trial | None = None) -> None:
        self._reported = phase
        log, elapsed_s = self._log, self._elapsed_s()
        left_s: float | None = None
        if phase == "finals":
            left_s = max(0.0, self._finals_end_s - elapsed_s)
        elif phase == "searching":
            search_s = self._time_left.search_s(len(log), elapsed_s, self._rules.ends_after)
            left_s = None if search_s is None else search_s + self._time_left.finals_s
        self._observe(
            Progress(
                phase=phase,
                problem=self._problem,
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
                rate=self._rate,
                last=last,
                notices=self.notices,
                waiting=self._waiting,
            )
        )


class GivenCandidates:
    """Proposes given configurations; they are measured in the order in which they have compiled.

    It has the methods of `autotile.search.search.Shortlist` that a session calls. Its row numbers are negative, so that
    they differ from those of a search that shares the pipeline. The device is given ``queued`` candidates beside the
    one that it runs.
    """

    def __init__(self, configs: Sequence[Config], queued: int) -> None:
        self._queued = queued
        self._unproposed = zip(range(-1, -1 - len(configs), -1), configs, strict=True)
        self._waiting: dict[int, None] = {}
        self._running: set[int] = set()

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next configuration to compile; None after the last."""
        found = next(self._unproposed, None)
        if found is not None:
            self._waiting[found[0]] = None
        return found

    def ready(self) -> list[int]:
        """Return the oldest candidate that waits; none while the device has enough."""
        return [] if len(self._running) > self._queued else list(self._waiting)[:1]

    def waiting(self) -> list[int]:
        """Return all candidates that wait."""
        return list(self._waiting)

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the oldest of the compiled candidates."""
        row = next(row for row in self._waiting if row in compiled)
        del self._waiting[row]
        self._running.add(row)
        return row

    def tell(self, row: int, trial: Trial) -> None:
        """Take note that the trial of a candidate has ended, or was rejected before it could run."""
        self.leave(row)

    def leave(self, row: int) -> None:
        """Leave a candidate that was chosen, or was ready and rejected, to another session."""
        self._waiting.pop(row, None)
        self._running.discard(row)


class Compiling:
    """A configuration that is being compiled: for its problem, and for the others of its verification.

    These are the problem with ragged sizes and those of ``verify_sizes``, if their cubins differ and the configuration
    is valid for them; none in replay. ``submit`` starts a job, such as
    `autotile.workers.compile_pool.CompilePool.submit`; ``row`` is that of the proposer.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        config: Config,
        device: DeviceProperties,
        *,
        submit: Callable[[CompileJob], Future[Compiled]],
        verify_sizes: Sequence[Sizes] = (),
    ) -> None:
        def at(sizes: Sizes) -> Future[Compiled]:
            return submit(compile_job(kernel, config, problem.at(sizes), device.architecture))

        self._kernel, self._problem, self._device = kernel, problem, device
        self._trial: Trial | None = None
        self.config = config
        self.row = 0
        self.main = at(problem.sizes)
        spec = kernel.spec
        compiled_in = spec.compiled_names if device.source != "replayed" else ()
        self.others = [
            (sizes, at(sizes))
            for sizes in ((spec.ragged_sizes(problem.sizes), *verify_sizes) if compiled_in else ())
            if any(sizes[name] != problem.sizes[name] for name in compiled_in)
            and not check_config(spec, config, problem.at(sizes), device)
        ]

    @property
    def pending(self) -> list[Future[Compiled]]:
        """Its compilations that have not ended."""
        return [one for one in (self.main, *(other for _, other in self.others)) if not one.done()]

    def trial(self) -> Trial:
        """Wait, and return the trial up to the second gate; one that fails at another problem has failed.

        Any outcome but ``ok`` is final, and the candidate is not launched. If nothing can be compiled at all, a
        `ToolchainError` is raised; other errors are those of `gated_trial`.
        """
        if self._trial is None:
            compiled = self.main.result()
            for sizes, other in self.others:
                if compiled.cubin is not None and (found := other.result()).cubin is None:
                    reason = f"at {config_text(sizes)}: {found.reason}"
                    compiled = replace(found, reason=reason, seconds=compiled.seconds)
            self._trial = gated_trial(self._kernel, self._problem, self.config, compiled, self._device)
        return self._trial

    def candidate(self) -> Candidate | None:
        """Wait, and return the compiled configuration as a GPU takes it; None if it does not compile."""
        cubin = self.main.result().cubin
        if cubin is None:
            return None
        others = tuple(
            (sizes, str(other.path), other.symbols)
            for sizes, compilation in self.others
            if (other := compilation.result().cubin) is not None
        )
        computed = computed_values(self._kernel.spec.computed, self.config)
        return Candidate(self.config, str(cubin.path), cubin.symbols, computed, others)


@dataclass(eq=False)
class Pipeline:
    """Compilation of candidates in parallel, and their evaluation on the device, one after the other.

    The device is given the next candidate while it runs one, so that it does not wait for the search.

    In replay, the order of the trials does not depend on which compilation ends first: every candidate among which the
    next one is chosen is waited for, so that a search is repeatable. On a GPU, whose times vary anyway, as many
    candidates are waited for, but any of those that wait: a slow compilation does not hold up the others.

    Where sizes are compiled in, each candidate is compiled for each of the ``verify_sizes``, too. ``score`` adds the
    objective and the metrics to a trial that was measured, and ``scale`` is the factor of the device's times to those
    of the study, if any.
    """

    kernel: Kernel
    problem: Problem
    backend: Backend
    compile_pool: CompilePool
    timeline: Timeline = NO_TIMELINE
    verify_sizes: Sequence[Sizes] = ()
    scale: float | None = None
    score: Callable[[Trial], Trial] = lambda trial: trial
    _queue: dict[int, Compiling] = field(default_factory=dict)
    _prefetched: dict[str, Compiling] = field(default_factory=dict)
    _measured: dict[tuple[str, LaunchPlan, LaunchData], Trial] = field(default_factory=dict)
    _running: dict[int, tuple[Candidate, Compiling]] = field(default_factory=dict)
    """Candidates that were submitted to the device and have no result, by the ids of what it was given."""

    @property
    def running(self) -> int:
        """Number of candidates that the device was given and that have not ended."""
        return len(self._running)

    def compile(self, config: Config) -> Compiling:
        """Start the compilation of a configuration outside of a search."""
        of = self.kernel, self.problem, config, self.backend.device
        return Compiling(*of, submit=self.compile_pool.submit, verify_sizes=self.verify_sizes)

    def run(self, candidate: Compiling) -> Trial:
        """Wait for a candidate's compilation, and run it while nothing else runs."""
        trial = self.begin(candidate, None)
        return self.end_next()[1] if trial is None else trial

    def remember(self, trials: Iterable[Trial]) -> None:
        """Register earlier trials, so that identical code is not measured again; a replay looks all of it up anyway."""
        for trial in trials if self.backend.source == "cuda" else ():
            if trial.outcome.has_time and trial.cubin_hash and trial.geometry is not None and trial.stage == "measure":
                self._measured[self._launch_of(trial)] = trial

    def prefetch(self, config: Config) -> None:
        """Start the compilation of a configuration that is certain to be proposed."""
        self._prefetched[config_key(config)] = self.compile(config)

    def compile_ahead(self, proposer: Proposer, room: int | None = None) -> None:
        """Start the compilation of all candidates that are proposed while ``room`` trials may still begin."""
        while True:
            with self.timeline.span("session", "propose"):
                proposed = proposer.propose(room)
            if proposed is None:
                break
            row, config = proposed
            prefetched = self._prefetched.pop(config_key(config), None) if self._prefetched else None
            self._queue[row] = candidate = prefetched or self.compile(config)
            candidate.row = row
        if self.timeline.is_recording:
            compiling = sum(bool(queued.pending) for queued in self._queue.values())
            self.timeline.count("candidates", compiling=compiling, compiled=len(self._queue) - compiling)

    def next_candidate(self, proposer: Proposer, reached: Callable[[], object] = lambda: None) -> Compiling | None:
        """Wait for the candidates that are ready, and return one of them.

        None where none is ready, a result comes first, or ``reached``, which returns the rule that ends the search if
        any does, finds one. On a GPU, as many are waited for as are ready. A candidate that does not compile or does
        not fit on the device comes first, as it takes no time on the GPU. Errors are those of `Compiling.trial`.
        """
        is_live = self.backend.source != "replayed"
        with self.timeline.span("session", "wait for the compilers"):
            ready = proposer.ready()
            rows = proposer.waiting() if is_live and ready else ready
            while True:
                pending = {row: left for row in rows if (left := self._queue[row].pending)}
                if len(rows) - len(pending) >= len(ready):
                    break
                if reached() or (is_live and self._running and self.backend.has_result):
                    return None  # of a result, as another GPU waits for it, and the search learns from it
                limit_s = _LOOK_S if is_live and self._running else _WAIT_S
                wait([one for left in pending.values() for one in left], limit_s, return_when=FIRST_COMPLETED)
            compiled = {row: self._queue[row].trial() for row in rows if row not in pending}
        if not compiled:
            return None
        row = next((row for row, trial in compiled.items() if trial.outcome is not Outcome.OK), None)
        if row is None:
            with self.timeline.span("session", "choose", among=len(compiled)):
                row = proposer.choose(compiled)
        return self._queue.pop(row)

    def begin(self, candidate: Compiling, best_us: float | None) -> Trial | None:
        """Submit a candidate to the device, and return None; return its trial if there is nothing to measure.

        That is so if it failed before, or if its code and launch equal those of a measured one, whose result it takes
        over. ``best_us`` is that of `autotile.workers.jobs.Entry`.
        """
        trial = candidate.trial()
        if trial.outcome is not Outcome.OK:
            return trial
        twin = self._measured.get(self._launch_of(trial)) if self.backend.source == "cuda" else None
        if twin is not None:
            reason = f"the same code as {config_text(twin.config)}, which was measured"
            taken_over = attributes(twin, "outcome", "measurement", "telemetry", "gpu")
            return self.score(replace(trial, reason=reason, stage=SAME_CODE, **taken_over))
        given = candidate.candidate()
        assert given is not None
        if not Path(given.cubin_path).exists():  # trimmed from the cache while the candidate waited
            given = self.compile(trial.config).candidate() or given
        self._running[id(given)] = given, candidate
        limit_us = best_us / self.scale if best_us is not None and self.scale else best_us
        self.backend.submit(given, limit_us)
        return None

    def end_next(self) -> tuple[Compiling, Trial]:
        """Wait for a running candidate, of one GPU the oldest; return it with its trial. Errors are the backend's."""
        with self.timeline.span("session", "wait for the GPU"):
            given, found = self.backend.result()
        _, candidate = self._running.pop(id(given))
        reading = found.scaled(self.scale)
        start_s = reading.began_at
        if start_s and self.timeline.is_recording:  # its stages follow one another without a pause
            track = f"GPU worker {reading.gpu}" if self.backend.gpu_count > 1 else "GPU worker"
            for stage, seconds in reading.seconds.items():
                self.timeline.add(track, stage, start_s, start_s + seconds, config=config_text(candidate.config))
                start_s += seconds
        trial = reading.result_of(candidate.trial())
        if reading.captured:  # its outputs, for a check by a function of the user's
            assert self.kernel.inspection is not None
            with self.timeline.span("session", "inspect"):
                wrong, telemetry = self.kernel.inspection.inspect(trial.config, Path(reading.captured))
            trial = replace(trial, telemetry={**trial.telemetry, **telemetry})
            if wrong:
                trial = replace(trial, outcome=Outcome.WRONG_RESULT, reason=wrong, stage="verify", measurement=None)
        trial = self.score(trial)
        self.remember([trial])
        return candidate, trial

    def recompile(self, trials: Sequence[Trial]) -> list[tuple[Trial, Candidate]]:
        """Return finished trials with their compiled candidates; trials that no longer compile are left out.

        Candidates that still wait are discarded: no further trial can begin.
        """
        for queued in self._queue.values():
            for compilation in queued.pending:
                compilation.cancel()
        self._queue.clear()
        compilations = [self.compile(trial.config) for trial in trials]
        candidates = [compilation.candidate() for compilation in compilations]
        return [(trial, one) for trial, one in zip(trials, candidates, strict=True) if one is not None]

    def _launch_of(self, trial: Trial) -> tuple[str, LaunchPlan, LaunchData]:
        """Return all that distinguishes the launch of one configuration from that of another."""
        at = self.kernel.spec, trial.config, self.problem, self.backend.device
        return trial.cubin_hash, LaunchPlan.of(*at), LaunchData.of(*at)


def gated_trial(
    kernel: Kernel, problem: Problem, config: Config, compiled: Compiled, device: DeviceProperties
) -> Trial:
    """Return the trial of a configuration up to the second gate: its compiled resources fit on the device.

    A `SpecError` is raised if a function takes other parameters than the declared arguments.
    """
    plan = LaunchPlan.of(kernel.spec, config, problem, device)
    trial = Trial(
        config,
        compiled.outcome,
        compiled.reason,
        "compile",
        plan.main.geometry,
        source="replayed" if device.source == "replayed" else "cuda",
        seconds={"compile": round(compiled.seconds, 6)},
    )
    cubin = compiled.cubin
    if cubin is None:
        return trial
    check_signatures(kernel, problem.dtype, cubin)
    steps = compiled_steps(kernel.spec, plan, cubin.functions, device)
    main = steps[0]
    trial = replace(trial, resources=main.resources, occupancy=main.occupancy, cubin_hash=cubin.cubin_hash)
    fault = next((step.fault for step in steps if step.fault), "")
    return replace(trial, outcome=Outcome.RESOURCE_EXCEEDED, reason=fault, stage="resources") if fault else trial
