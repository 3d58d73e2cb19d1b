"""A family of an operation: times at sizes spread over it, and the model of time that is learned from them.

Each problem is one job of the GPU, `autotile.workers.jobs.Time` of a grid; the configurations of the next problem
compile meanwhile. Every result is stored as a trial of an ordinary study, so that a run that was killed goes on, and
what was measured is served. It is therefore verified as in a session of that study: at the ragged sizes, which are
those of the kernel's file, once for each code, at each problem before it is timed, and the fastest repeatedly.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.documents import JsonObject, attributes, to_document
from autotile.core.model import Config, Outcome, Problem, Sizes, Trial, distinct_configs
from autotile.core.text import Part, device_text, percent_text, plural
from autotile.cuda.compiler import CompileJob
from autotile.database.keys import TuningKey, key_of, library_key
from autotile.database.learned import save_model
from autotile.database.winners import UNVERIFIED_SAMPLER
from autotile.errors import InputError, ToolchainError
from autotile.exchange.shipped import shipped_winners
from autotile.families.family import Extent, Family, parse_family, spread_members
from autotile.families.operation_model import (
    CandidateKey,
    KernelSizes,
    ModelCandidate,
    OperationModel,
    fit_model,
    is_declared,
)
from autotile.kernel.operation import Library, Operation
from autotile.kernel.problem import Workrate, check_memory, resolve_problem, size_distance
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from autotile.space.time_estimate import estimate_times
from autotile.tuning.backend import workload_of
from autotile.tuning.family_session import FAULTS
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Observer, Progress, StopRequest
from autotile.tuning.result import ScheduleResult
from autotile.tuning.schedule import Schedule, open_gpu
from autotile.tuning.session import Compiling
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.jobs import LIBRARY_VERSION, Entry, Job, Reading, Time

_PROBLEMS = 400
"""Problems of each of the two rounds; with less time there are fewer."""
_MIN_PROBLEMS = 24
_DRAWN = 8
"""Problems that are drawn for each that is measured: many are too large, or computed by no kernel."""
_MAX_FLOPS = 2**41
"""Operations of a problem, where a kernel states them: 40 ms at 50 TFLOP/s."""
_FIRST_SHARE, _MEASURING_SHARE = 0.5, 0.85
"""Shares of the budget for the first round and for both; the rest is for learning the model."""
_TRIED, _RANDOM = 24, 6
"""Configurations at each problem: those expected to be the fastest, and others."""
_SEEDED_PROBLEMS, _SEEDS, _MAX_WINNERS = 10, 3, 32
"""Problems at which configurations are proposed by their estimated times, the number of them a kernel, and that of
earlier winners of a kernel."""
_ESTIMATED_ROWS = 200_000
_UNKNOWN_LOSS, _UNKNOWN_WEIGHT = 0.3, 0.05
"""Loss, in the logarithm, that is assumed of a configuration that was measured nowhere near."""
_MAX_LOSS = math.log(4.0)
_NEAR_DOUBLINGS, _FLAG_DOUBLINGS = 1.5, 3.0
"""Distance at which a measurement says less, and that of a flag, in doublings of a size."""
_MUTATED, _MUTATIONS = 40, 12
"""Problems, worst first, at which variants of the best configuration are tried, and their number at each."""
_LOSING = 0.98
"""Time of a library over that of the best configuration, below which variants of that are tried."""
_MIN_VERIFIED = 2
"""Problems at which a configuration must have been verified to be in the model."""
_SAMPLE_LIMIT_S = 2e-3
"""GPU time of the samples of a configuration beyond the first nine, in seconds."""
_SAMPLER = "family"
"""Name of these runs in the database; see `UNVERIFIED_SAMPLER` for those of earlier versions."""


@dataclass(frozen=True, slots=True)
class Losses:
    """How well a model chooses at problems that were held out while it was learned."""

    mean: float
    percentile_99: float
    worst: float
    """Time of what it chooses over that of the fastest that was measured, minus 1."""
    over_library: Mapping[str, float] | None
    """The ``geometric_mean``, the ``percentile_1`` and the ``worst`` of the library's time over that of what is chosen;
    None without a library."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class OperationFamilyResult(ScheduleResult):
    """Result of tuning a family of an operation."""

    operation: str
    dtype: str
    family: str
    """In its text form."""
    problems: int
    pairs: int
    """Number of problems, and of pairs of a problem and a configuration, that the model was learned from."""
    candidates: int
    """Number of configurations that the model chooses among; 0 if it was not learned."""
    losses: Losses | None
    """How well it chooses; None if it was not learned."""
    refused: int
    """Number of configurations that failed anywhere, which the model does not hold."""

    def _heading(self) -> str:
        return f"{self.operation} {self.family} {self.dtype} on {device_text(self.device)}"

    def _headline(self) -> str:
        mean = f"{percent_text(self.losses.mean)} mean loss" if self.losses is not None else ""
        return f"{self._heading()}: {mean or 'interrupted before there was a model'}"

    def _parts(self) -> Iterator[Part]:
        facts = [("measured", f"{plural(self.pairs, 'time')} at {plural(self.problems, 'problem')}")]
        if (one := self.losses) is not None:
            mean, at_99, worst_text = map(percent_text, (one.mean, one.percentile_99, one.worst))
            loss = f"{mean} on average, {at_99} at the 99th percentile, at most {worst_text}"
            facts += [
                ("model", f"chooses among {plural(self.candidates, 'configuration')}"),
                ("loss", f"{loss}, at problems that were held out"),
            ]
            if one.over_library is not None:
                average, low, worst = one.over_library.values()
                speed = f"{average:.3f}x its speed on average, {low:.3f}x at the 1st percentile"
                facts.append(("library", f"{speed}, at least {worst:.3f}x"))
        if self.refused:
            facts.append(("refused", f"{plural(self.refused, 'configuration')} that failed at a problem"))
        yield [*facts, *self._effort("problem")]

    def to_json(self) -> JsonObject:
        """Return the document that ``autotile tune --json`` prints."""
        return {
            **attributes(self, "operation", "family", "dtype"),
            "device": self.device.identity,
            **attributes(self, "problems", "pairs", "candidates", "refused"),
            "held_out_loss": to_document(self.losses),
            **self._ending(resumed=self.resumed),
        }


@dataclass(eq=False, slots=True)
class SweptProblem:
    """A problem of a family, and what was measured at it: the trial of each configuration, the time of each library."""

    problem: Problem
    sizes: Sizes
    """Sizes and flags, without the conditions."""
    kernels: Mapping[str, Problem]
    """The same problem of each kernel that computes it, by the kernel's name."""
    trials: dict[CandidateKey, Trial] = field(default_factory=dict)
    libraries: dict[str, float] = field(default_factory=dict)

    @property
    def kernel_sizes(self) -> KernelSizes:
        """Sizes and flags of each kernel."""
        return {name: own.sizes for name, own in self.kernels.items()}

    @property
    def times_us(self) -> dict[CandidateKey, float]:
        """Time of each configuration that has one, in microseconds."""
        return {key: time_us for key, trial in self.trials.items() if (time_us := trial.time_us)}


@dataclass
class Sweep:
    """Times at the problems of a family of an operation, which it stores, and the model that is learned from them.

    The libraries are those that the operation file names. An `InputError` is raised if the reference of a kernel cannot
    be computed in the GPU worker alone.
    """

    operation: Operation
    dtype: str
    libraries: Sequence[Library]
    family: Family
    schedule: Schedule
    device: DeviceProperties
    compile_pool: CompilePool
    run_job: Callable[[Job], list[Reading]]
    measured: list[SweptProblem] = field(default_factory=list)
    candidates: dict[CandidateKey, ModelCandidate] = field(default_factory=dict)
    """Configurations to measure."""
    banned: set[CandidateKey] = field(default_factory=set)
    """Configurations that failed at any problem."""
    _compiled: dict[str, Future[Compiled]] = field(default_factory=dict)
    _model: OperationModel | None = None

    def __post_init__(self) -> None:
        members = (one for one in self.operation.members if self.dtype in one.dtypes)
        self.kernels = {member.name: member.load() for member in members}
        self.specs = {name: kernel.spec for name, kernel in self.kernels.items()}
        for spec in self.specs.values():
            reference = spec.reference
            if reference.function is not None or reference.comparison is not None or reference.is_agreement:
                raise InputError(
                    f"{spec.source}: a family of an operation needs references that are expressions or kernels"
                )
        self.database, options = self.schedule.database, self.schedule.options
        self.options = replace(options, sample_limit_s=_SAMPLE_LIMIT_S, captured=None)

    def at(self, problem: Problem) -> SweptProblem:
        """Return a problem with the kernels that compute it, each with its sizes and flags."""
        kernels = {
            member.name: Problem(member.name, resolve_problem(spec, sizes, problem.dtype).sizes, problem.dtype)
            for member, sizes in self.operation.fitting(problem, self.device)
            if (spec := self.specs.get(member.name)) is not None
        }
        return SweptProblem(problem, self.operation.without_conditions(problem), kernels)

    def prepare(
        self, one: SweptProblem, candidates: Sequence[ModelCandidate]
    ) -> list[tuple[ModelCandidate, Compiling]]:
        """Start the compilation of the configurations that are valid for a problem, best first.

        One of the same code, of another problem too, is not started again.
        """

        def submit(job: CompileJob) -> Future[Compiled]:
            if job.key not in self._compiled:
                self._compiled[job.key] = self.compile_pool.submit(job)
            return self._compiled[job.key]

        begun = []
        for each in self.valid(one, candidates):
            of = self.kernels[each.kernel], one.kernels[each.kernel], each.config, self.device
            begun.append((each, Compiling(*of, submit=submit)))
        return begun

    def valid(self, one: SweptProblem, candidates: Iterable[ModelCandidate]) -> list[ModelCandidate]:
        """Return the candidates that may run at a problem."""
        return [
            each
            for each in candidates
            if (own := one.kernels.get(each.kernel)) is not None
            and each.key not in self.banned
            and not check_config(self.specs[each.kernel], each.config, own, self.device)
        ]

    def run(self, one: SweptProblem, begun: Sequence[tuple[ModelCandidate, Compiling]]) -> bool:
        """Measure configurations at a problem, and store the results.

        Return False if it cannot be laid out or nothing was measured; then it has no results.
        """
        trials: dict[CandidateKey, Trial] = {}
        ready: list[tuple[CandidateKey, Trial]] = []
        of = self.schedule.settings, self.options
        workloads = tuple(workload_of(self.kernels[name], own, *of) for name, own in one.kernels.items())
        places = {name: place for place, name in enumerate(one.kernels)}
        entries = [Entry(library=replace(one.problem, kernel=each.name), problem=0) for each in self.libraries]
        for each, compilation in begun:
            trial, candidate = compilation.trial(), compilation.candidate()
            if trial.outcome is Outcome.OK and candidate is not None:
                ready.append((each.key, trial))
                entries.append(Entry(candidate, problem=places[each.kernel]))
            else:
                trials[each.key] = trial
        try:
            readings = self.run_job(Time(tuple(entries), grid=True, workloads=workloads))
        except InputError:  # it does not fit in memory
            return False
        timed = dict(zip(self.libraries, readings, strict=False))
        for library, reading in timed.items():
            self._check_version(library, reading)
        own_readings = readings[len(timed) :]
        measured = {key: own.result_of(trial) for (key, trial), own in zip(ready, own_readings, strict=True)}
        trials |= measured
        self.banned |= {key for key, trial in measured.items() if trial.outcome in FAULTS}
        if not any(trial.outcome.has_time for trial in measured.values()) and not timed:
            return False
        add = partial(self.database.add_run, sampler=_SAMPLER, device=self.device, host=platform.node())
        for name, own in one.kernels.items():  # in one transaction a kernel
            if stored := [trial for (kernel, _), trial in trials.items() if kernel == name]:
                add(self._key(own), stored)
        for library, reading in timed.items():
            if reading.measurement is not None:
                one.libraries[library.name] = reading.measurement.time_us
                trial = reading.result_of(Trial({}, Outcome.OK))
                add(self._library_key(one.problem, library), [trial], phase="final", is_ranked=True)
        one.trials |= trials
        return True

    def read(self, one: SweptProblem, studies: Mapping[str, int]) -> bool:
        """Read the results of an earlier run at a problem; return False if there are none.

        ``studies`` are the ids of the studies in the database, by the digest of their keys.
        """
        trials: dict[CandidateKey, Trial] = {}
        swept = False
        for name, own in one.kernels.items():
            study_id = studies.get(self._key(own).digest)
            if study_id is None:
                continue
            samplers = {run.run_id: run.sampler for run in self.database.runs(study_id)}
            swept = swept or _SAMPLER in samplers.values()
            for stored in self.database.stored_trials(study_id):  # the last of each configuration counts
                if samplers.get(stored.run_id) != UNVERIFIED_SAMPLER:
                    trials[name, stored.trial.config_key] = stored.trial
        self.banned |= {key for key, trial in trials.items() if trial.outcome in FAULTS}
        if not swept:
            return False
        one.trials |= trials
        for library in self.libraries:
            digest = self._library_key(one.problem, library).digest
            for best in self.database.best(digest=digest) if digest in studies else ():
                if best.trial.time_us is not None:
                    one.libraries[library.name] = best.trial.time_us
        return True

    @staticmethod
    def _check_version(library: Library, reading: Reading) -> None:
        """Raise if another machine has another version of a library: their times are not comparable."""
        version = reading.telemetry.get(LIBRARY_VERSION)
        if version is not None and version != library.version:
            raise ToolchainError(
                f"the GPU's machine has {library.name} {version or 'not installed'}, and the session {library.version}"
            )

    def _key(self, problem: Problem) -> TuningKey:
        return key_of(self.kernels[problem.kernel], problem, self.device, l2_mode=self.options.l2)

    def _library_key(self, problem: Problem, library: Library) -> TuningKey:
        of = self.operation, problem, self.device, library.name, library.version
        return library_key(*of, l2_mode=self.options.l2)

    def cover(self) -> OperationFamilyResult:
        """Measure where the fastest nearby say what to try, learn, measure what the model proposes, and learn again."""
        database = self.database
        self._random = np.random.default_rng(self.options.seed)
        resumed = 0
        losses: Losses | None = None
        with StopRequest() as self._stop, suppress(KeyboardInterrupt):
            problems = self._problems(self.options.trials or 2 * _PROBLEMS)
            names = [*self.kernels, *(f"{self.operation.name}:{name}" for name in self.operation.libraries)]
            studies = {one.key.digest: one.study_id for name in names for one in database.studies(name)}
            self.measured = [one for one in problems if studies and self.read(one, studies)]  # of an earlier run
            for one in self.measured:
                for (name, _), trial in one.trials.items():
                    self._add(name, trial.config)
            resumed = len(self.measured)
            self._seed(problems)
            first = max(_MIN_PROBLEMS, len(problems) // 2)
            self._measure(problems[:first], _FIRST_SHARE)
            if self._has_time(_FIRST_SHARE + 0.1) and not self._stop.requested and len(self.measured) >= first // 2:
                self._learn()
                self._measure(problems[first:], _MEASURING_SHARE - 0.1)
                self._try_variants()
            if not self._stop.requested:
                learnt = self._learn()
                assert self._model is not None
                save_model(database, self.operation.name, self.dtype, self.device, self._model.to_json())
                losses = learnt
        return OperationFamilyResult(
            operation=self.operation.name,
            dtype=self.dtype,
            family=str(self.family),
            device=self.device,
            problems=len(self.measured),
            pairs=sum(len(one.trials) + len(one.libraries) for one in self.measured),
            candidates=len(self._model.candidates) if losses is not None and self._model is not None else 0,
            losses=losses,
            refused=len(self.banned),
            seconds=self.schedule.elapsed_s,
            resumed=resumed,
            interrupted=losses is None,
            database=database.place,
        )

    def _has_time(self, share: float) -> bool:
        budget_s = self.options.budget_s
        return budget_s is None or self.schedule.elapsed_s < share * budget_s

    def _problems(self, count: int) -> list[SweptProblem]:
        """Return problems in an order in which the first ones, however many, cover the family evenly."""
        found: list[SweptProblem] = []
        for sizes in spread_members(self.family, _DRAWN * count):
            one = self.at(self.operation.resolve(sizes, self.dtype))
            if not one.kernels:
                continue
            name, own = next(iter(one.kernels.items()))
            try:
                check_memory(self.specs[name], own, self.device)
            except InputError:
                continue
            flops = Workrate.of(self.specs[name], own).flops
            if flops is None or flops <= _MAX_FLOPS:
                found.append(one)
                if len(found) == count:
                    break
        if not found:
            raise InputError(f"no kernel of {self.operation.name} computes a problem of {self.family}")
        return found

    def _seed(self, problems: Sequence[SweptProblem]) -> None:
        """Collect configurations: defaults, earlier winners, and those with the best estimates at some problems."""
        for name, spec in self.specs.items():
            self._add(name, spec.default)
            winners = [best.trial.config for best in self.database.best(name, dtype=self.dtype)]
            winners += [one.config for one in shipped_winners(name, self.dtype)]
            distinct = distinct_configs(config for config in winners if is_declared(spec, config))
            for place in np.linspace(0, len(distinct) - 1, min(len(distinct), _MAX_WINNERS)).astype(int):
                self._add(name, distinct[place])
        for problem in problems[:_SEEDED_PROBLEMS] if not self.measured else ():
            for name, own in problem.kernels.items():
                try:
                    space = feasible_space(self.specs[name], own, self.device)
                except InputError:
                    continue
                if len(space) > _ESTIMATED_ROWS:
                    space = space.select(self._random.choice(len(space), _ESTIMATED_ROWS, replace=False))
                estimate = estimate_times(self.specs[name], own, self.device, space)
                if estimate is None:
                    rows: Any = self._random.choice(len(space), min(_SEEDS, len(space)), replace=False)
                else:
                    rows = np.argsort(estimate.time_us)[:_SEEDS]
                for row in rows:
                    self._add(name, space.config(int(row)))

    def _add(self, name: str, config: Config) -> ModelCandidate:
        one = ModelCandidate(name, dict(config))
        return self.candidates.setdefault(one.key, one)

    def _measure(self, problems: Sequence[SweptProblem], share: float) -> None:
        """Measure problems that were not, until a share of the budget is used; the next one compiles meanwhile."""
        left = (one for one in problems if one not in self.measured)
        jobs = ((one, self.prepare(one, self._chosen(one))) for one in left)
        job = next(jobs, None)
        while job is not None and self._has_time(share) and not self._stop.requested:
            following = next(jobs, None)
            if self.run(*job):
                self.measured.append(job[0])
            self._report("measuring", job[0].problem)
            job = following

    def _report(self, phase: Literal["measuring", "learning"], problem: Problem | None = None) -> None:
        progress = Progress(
            phase,
            problem,
            self.device,
            done=len(self.measured),
            elapsed_s=self.schedule.elapsed_s,
            budget_s=self.options.budget_s,
            outcomes={Outcome.OK: sum(len(one.trials) + len(one.libraries) for one in self.measured)},
            rate=Workrate(None, None, self.dtype),
        )
        self.schedule.observe(progress)

    def _chosen(self, problem: SweptProblem) -> list[ModelCandidate]:
        """Return the configurations to measure at a problem: those expected to be the fastest, then others.

        Without a model, the expected loss is the mean of the losses nearby, weighted by distance.
        """
        valid = self.valid(problem, self.candidates.values())
        numbers = {one.key: number for number, one in enumerate(valid)}
        total = np.full(len(valid), _UNKNOWN_WEIGHT * _UNKNOWN_LOSS)
        weights = np.full(len(valid), _UNKNOWN_WEIGHT)
        for near in self.measured:
            differing, doublings = size_distance(problem.sizes, near.sizes)
            weight = math.exp(-(doublings + _FLAG_DOUBLINGS * differing) / _NEAR_DOUBLINGS)
            timed = near.times_us
            best_us = min(timed.values(), default=math.nan)
            for key, time_us in timed.items():
                if (number := numbers.get(key)) is not None:
                    total[number] += weight * min(math.log(time_us / best_us), _MAX_LOSS)
                    weights[number] += weight
        losses = total / weights
        order = list(losses)
        if self._model is not None:
            ranked, _, of = self._model.rank(problem.sizes, problem.kernel_sizes, self.specs, self.device)
            expected = {of(number).candidate.key: place for place, number in enumerate(ranked)}
            order = [expected.get(one.key, len(expected) + losses[place]) for place, one in enumerate(valid)]
        ordered = [valid[number] for number in np.argsort(order, kind="stable")]
        best, others = ordered[:_TRIED], ordered[_TRIED:]
        rest = self._random.permutation(len(others))[:_RANDOM]
        return [*best, *(others[int(number)] for number in rest)]

    def _learn(self) -> Losses:
        """Learn the model from everything that was measured, and return how well it chooses where it was held out."""
        self._report("learning")
        tried = [item for one in self.measured for item in one.trials.items()]
        verified = Counter(key for key, trial in tried if trial.outcome.has_time)
        resources = {key: trial.resources for key, trial in reversed(tried) if trial.resources is not None}
        kept = {
            key: replace(one, resources=resources[key])
            for key, one in self.candidates.items()
            if key not in self.banned and key in resources and verified[key] >= _MIN_VERIFIED
        }
        libraries = {name: ModelCandidate(name, {}) for one in self.measured for name in one.libraries}
        candidates = [*kept.values(), *libraries.values()]
        problems = []
        for one in self.measured:
            times_us = {key: time_us for key, time_us in one.times_us.items() if key in kept}
            times_us |= {libraries[name].key: time_us for name, time_us in one.libraries.items()}
            if times_us:
                problems.append((one.sizes, one.kernel_sizes, times_us))
        of = self.operation.name, self.dtype, self.device, self.specs
        self._model, held_out = fit_model(*of, candidates=candidates, problems=problems, flags=self.operation.flags)
        # what the networks choose at problems that they were not fitted to
        all_candidates, times, log2_us, _ = held_out
        chosen_by = np.where(np.isfinite(times), log2_us, np.inf)
        rows = np.flatnonzero(np.isfinite(chosen_by).any(axis=1))
        times = times[rows]
        served_us = times[np.arange(len(rows)), np.argmin(chosen_by[rows], axis=1)]
        losses = served_us / np.nanmin(times, axis=1) - 1.0
        over: dict[str, float] | None = None
        if library := [number for number, one in enumerate(all_candidates) if one.is_library]:
            library_us = np.where(np.isfinite(times[:, library]), times[:, library], np.inf).min(axis=1)
            ratios = (library_us / served_us)[np.isfinite(library_us)]
            if ratios.size:
                low = float(np.percentile(ratios, 1))
                mean = float(np.exp(np.log(ratios).mean()))
                over = {"geometric_mean": mean, "percentile_1": low, "worst": float(ratios.min())}
        return Losses(float(losses.mean()), float(np.percentile(losses, 99)), float(losses.max()), over)

    def _try_variants(self) -> None:
        """Try neighbours of the best configuration in one parameter, in random order, where a library is faster."""
        losing = []
        for one in self.measured:
            timed = [(t.time_us, key) for key, t in one.trials.items() if t.outcome is Outcome.OK and t.time_us]
            if timed and one.libraries:
                (best_us, key), library_us = min(timed), min(one.libraries.values())
                if library_us < _LOSING * best_us:
                    losing.append((best_us / library_us, key, one))
        losing.sort(key=lambda item: -item[0])
        for _, key, one in losing[:_MUTATED]:
            if not self._has_time(_MEASURING_SHARE) or self._stop.requested:
                return
            best = self.candidates[key]
            own, spec, found = one.kernels[best.kernel], self.specs[best.kernel], []
            for parameter in spec.parameters:
                values = list(parameter.values)
                place = values.index(best.config[parameter.name])
                for neighbour in values[max(0, place - 1) : place + 2]:
                    config = {**best.config, parameter.name: neighbour}
                    if neighbour != values[place] and not check_config(spec, config, own, self.device):
                        found.append(config)
            chosen = self._random.permutation(len(found))[:_MUTATIONS]
            variants = [self._add(best.kernel, found[int(number)]) for number in chosen]
            self.run(one, self.prepare(one, [best, *variants]))
            self._report("measuring", one.problem)


def operation_family(operation: Operation, words: Iterable[str], dtype: str) -> Family:
    """Return a family of an operation; a flag that is not given takes both values if inputs are laid out by it."""
    words = list(words)
    family = parse_family(operation, words, (*operation.flags, *operation.conditions))
    given = {word.partition("=")[0] for word in words}
    left = [name for name in operation.flags if name not in given]
    mixed = {name: Extent(((0, 1),)) for name in left if _changes_layout(operation, name, dtype)}
    return Family({**family.extents, **mixed})


def _changes_layout(operation: Operation, flag: str, dtype: str) -> bool:
    sizes = {name: 64 + 16 * place for place, name in enumerate(operation.proper_sizes)}
    plain = {name: operation.sizes[name] for name in (*operation.flags, *operation.conditions)}
    shapes = []
    for value in (0, 1):
        problem = operation.resolve({**sizes, **plain, flag: value}, dtype)
        found: dict[tuple[str, str], Any] = {}
        for member, own in operation.fitting(problem):
            spec = member.load().spec
            for buffer in spec.buffers if not spec.shaping else ():
                if buffer.is_initialized:
                    found[member.name, buffer.name] = buffer.extents(spec.at({**spec.sizes, **own}, dtype).names)
        shapes.append(found)
    return any(shapes[0][name] != shapes[1][name] for name in shapes[0].keys() & shapes[1].keys())


def tune_operation_family(
    operation: Operation,
    family: Family,
    dtype: str,
    settings: Settings,
    options: TuneOptions,
    *,
    libraries: Sequence[Library] = (),
    observe: Observer = lambda _: None,
) -> OperationFamilyResult:
    """Measure many configurations at sizes spread over a family, learn a model of time from them, and store it.

    Of the options, ``budget_s`` is the wall time of everything, and ``trials`` the number of problems. The libraries
    are those that the operation file names. Of a cluster's GPUs, one is used.

    An `InputError` says that there is no GPU, no kernel computes any problem of the family, too few problems were
    measured, or the database cannot be written.
    """
    with Schedule.open(settings, options, observe) as schedule:
        lane, device = schedule.lane, schedule.device
        if device is None:
            raise InputError("a family of an operation is measured on a GPU, and there is none here")
        farm = lane.cluster.compilers if lane.cluster is not None else None
        with closing(schedule.compilers(farm=farm)) as pool, open_gpu(lane, options) as run_job:
            named = tuple(one for one in libraries if one.call is None)
            return Sweep(operation, dtype, named, family, schedule, device, pool, run_job).cover()
