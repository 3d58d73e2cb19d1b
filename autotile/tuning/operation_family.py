"""A family of an operation: times at sizes spread over it, and the model of time that is learned from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome, Problem, Resources, config_key
from autotile.database.learned import save_model
from autotile.errors import InputError
from autotile.exchange.shipped import shipped_winners
from autotile.families.family import Extent, Family, parse_family, spread_members
from autotile.families.operation_model import Fitted, MeasuredProblem, ModelCandidate, OperationModel, fit_model
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Library, Operation
from autotile.kernel.problem import Workrate, check_memory
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from autotile.space.time_estimate import estimate_times
from autotile.tuning.operation_result import Losses, OperationFamilyResult
from autotile.tuning.operation_sweep import (
    CandidateKey,
    Sweep,
    SweptProblem,
    grid_gpu,
    problem_of,
)
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Observer, Progress
from autotile.tuning.schedule import Lane, Schedule, device_of
from autotile.tuning.stopping import StopRequest
from autotile.workers.compile_pool import CompilePool, worker_count

if TYPE_CHECKING:
    from autotile.families.operation_model import OperationModel

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
_MIN_VERIFIED = 2
"""Problems at which a configuration must have been verified to be in the model."""


def operation_family(operation: Operation, words: Iterable[str], dtype: str) -> Family:
    """Return a family of an operation; a flag that is not given takes both values if it changes how inputs are stored.

    Raises
    ------
    ProblemError
        As for `autotile.families.family.parse_family`.
    """
    words = list(words)
    family = parse_family(operation, words, (*operation.flags, *operation.conditions))
    given = {word.partition("=")[0] for word in words}
    mixed = {
        name: Extent(((0, 1),))
        for name in operation.flags
        if name not in given and _changes_layout(operation, name, dtype)
    }
    return Family({**family.extents, **mixed})


def _changes_layout(operation: Operation, flag: str, dtype: str) -> bool:
    """Return whether the shape of an input depends on a flag."""
    sizes = {name: 64 + 16 * place for place, name in enumerate(operation.proper_sizes)}
    plain = {name: operation.sizes[name] for name in (*operation.flags, *operation.conditions)}
    shapes = []
    for value in (0, 1):
        problem = operation.resolve({**sizes, **plain, flag: value}, dtype)
        found: dict[str, Any] = {}
        for member, own in operation.fitting(problem):
            spec = member.load().spec
            full = {**spec.sizes, **own}
            found |= {
                f"{member.name}.{b.name}": b.extents(full)
                for b in spec.buffers
                if b.is_initialized and not spec.shaping
            }
        shapes.append(found)
    common = shapes[0].keys() & shapes[1].keys()
    return any(shapes[0][name] != shapes[1][name] for name in common)


def tune_operation_family(
    operation: Operation,
    family: Family,
    dtype: str,
    settings: Settings,
    options: TuneOptions,
    *,
    libraries: Sequence[Library] = (),
    observe: Observer = lambda _: None,
    lane: Lane | None = None,
) -> OperationFamilyResult:
    """Measure many configurations at sizes spread over a family, learn a model of time from them, and store it.

    Half of the time goes to a first round, at sizes that cover the family evenly, with the configurations that were the
    fastest nearby, and others; in the second the model chooses the configurations, and variants of them are tried where
    the library is faster. Every time is stored as a trial. A run that was killed goes on where it stopped.

    Parameters
    ----------
    operation, family, dtype
        Operation, its problems, and element type.
    settings, options
        As for `autotile.tuning.operation_session.tune_operation`; ``budget_s`` is the wall time of everything, and
        ``trials`` the number of problems.
    libraries
        Libraries that the operation file names.
    observe
        Called with the state after each problem.
    lane
        GPUs of a cluster, of which one is used; None for that of the options.

    Raises
    ------
    InputError
        There is no GPU, no kernel computes any problem of the family, too few problems were measured, or the database
        cannot be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    lane = lane or Lane(options.devices)
    device = device_of(options, lane)
    if device is None:
        raise InputError("a family of an operation is measured on a GPU, and there is none here")
    kernels = {member.name: member.load() for member in operation.members if dtype in member.dtypes}
    farm = lane.cluster.compilers if lane.cluster is not None else None
    named = tuple(one for one in libraries if one.call is None)
    with Schedule.open(settings, options, observe, lane) as schedule:
        pool = CompilePool(
            settings,
            worker_count(options.workers),
            options.compile_deadline_s,
            worker_pool=schedule.worker_pool,
            farm=farm,
        )
        with closing(pool), closing(grid_gpu(lane, schedule.worker_pool, options)) as gpu:
            sweep = Sweep(
                operation,
                dtype,
                kernels,
                named,
                settings=settings,
                options=options,
                device=device,
                database=schedule.database,
                compile_pool=pool,
                gpu=gpu,
            )
            return _Coverage(operation, family, dtype, kernels, device, schedule, sweep).run()


@dataclass
class _Coverage:
    """Times at the problems of a family, and the model that is learned from them."""

    operation: Operation
    family: Family
    dtype: str
    kernels: Mapping[str, Kernel]
    device: DeviceProperties
    schedule: Schedule
    sweep: Sweep
    measured: list[SweptProblem] = field(default_factory=list)
    candidates: dict[CandidateKey, ModelCandidate] = field(default_factory=dict)
    _model: OperationModel | None = None
    _resumed: int = 0
    _seeded: int = 0

    def run(self) -> OperationFamilyResult:
        """Measure, learn, measure what the model proposes, and learn again."""
        self.options, self.database = self.schedule.options, self.schedule.database
        self._random = np.random.default_rng(self.options.seed)
        count = self.options.trials or 2 * _PROBLEMS
        interrupted = False
        losses: Losses | None = None
        with StopRequest() as self._stop:
            try:
                problems = self._problems(count)
                self._resume(problems)
                self._seed(problems)
                first = max(_MIN_PROBLEMS, len(problems) // 2)
                self._measure(problems[:first], _FIRST_SHARE)
                if self._has_time(_FIRST_SHARE + 0.1) and not self._stop.requested and len(self.measured) >= first // 2:
                    self._learn()
                    self._measure(problems[first:], _MEASURING_SHARE - 0.1)
                    self._try_variants()
                interrupted = self._stop.requested
                if not interrupted:
                    losses = self._learn()
                    assert self._model is not None
                    save_model(self.database, self.operation.name, self.dtype, self.device, self._model.to_json())
            except KeyboardInterrupt:
                interrupted = True
        return OperationFamilyResult(
            operation=self.operation.name,
            dtype=self.dtype,
            family=str(self.family),
            device=self.device,
            problems=len(self.measured),
            pairs=self._pairs,
            candidates=len(self._model.candidates) if losses is not None and self._model is not None else 0,
            losses=losses,
            refused=len(self.sweep.banned),
            seconds=self.schedule.elapsed_s,
            resumed=self._resumed,
            interrupted=interrupted,
            database=self.database.location,
        )

    @property
    def _pairs(self) -> int:
        return sum(len(one.trials) + len(one.libraries) for one in self.measured)

    def _has_time(self, share: float) -> bool:
        budget_s = self.options.budget_s
        return budget_s is None or self.schedule.elapsed_s < share * budget_s

    def _problems(self, count: int) -> list[tuple[Problem, dict[str, dict[str, int]]]]:
        """Return problems in an order in which the first ones, however many, cover the family evenly."""
        found = []
        for sizes in spread_members(self.family, _DRAWN * count):
            problem = self.operation.resolve(sizes, self.dtype)
            kernels = problem_of(self.operation, self.kernels, problem, self.device)
            if kernels and self._is_affordable(kernels):
                found.append((problem, kernels))
                if len(found) == count:
                    break
        if not found:
            raise InputError(f"no kernel of {self.operation.name} computes a problem of {self.family}")
        return found

    def _is_affordable(self, kernels: Mapping[str, Mapping[str, int]]) -> bool:
        name, sizes = next(iter(kernels.items()))
        spec, problem = self.kernels[name].spec, Problem(name, sizes, self.dtype)
        try:
            check_memory(spec, problem, self.device)
        except InputError:
            return False
        flops = Workrate.of(spec, problem).flops
        return flops is None or flops <= _MAX_FLOPS

    def _resume(self, problems: Sequence[tuple[Problem, dict[str, dict[str, int]]]]) -> None:
        """Read what an earlier run has measured."""
        names = [*self.kernels, *(f"{self.operation.name}:{name}" for name in self.operation.libraries)]
        studies = {one.key.digest: one.study_id for name in names for one in self.database.studies(name)}
        if not studies:
            return
        for problem, kernels in problems:
            stored = self.sweep.stored(problem, kernels, studies)
            if stored is not None:
                self.measured.append(stored)
                for (name, key), trial in stored.trials.items():
                    self.candidates.setdefault((name, key), ModelCandidate(name, trial.config))
        self._resumed = len(self.measured)

    def _seed(self, problems: Sequence[tuple[Problem, dict[str, dict[str, int]]]]) -> None:
        """Collect configurations: defaults, earlier winners, and those with the best estimates at some problems."""
        for name, kernel in self.kernels.items():
            self._add(name, kernel.spec.default)
            winners = [best.trial.config for best in self.database.best(name, dtype=self.dtype)]
            winners += [one.config for one in shipped_winners(name, self.dtype)]
            distinct = list(
                {config_key(config): config for config in winners if self._is_known(kernel, config)}.values()
            )
            for place in np.linspace(0, len(distinct) - 1, min(len(distinct), _MAX_WINNERS)).astype(int):
                self._add(name, distinct[place])
        for _, kernels in problems[:_SEEDED_PROBLEMS] if not self.measured else ():
            for name, sizes in kernels.items():
                for config in self._estimated(name, sizes):
                    self._add(name, config)

    def _add(self, name: str, config: Config) -> None:
        one = ModelCandidate(name, dict(config))
        self.candidates.setdefault(one.key, one)

    @staticmethod
    def _is_known(kernel: Kernel, config: Config) -> bool:
        """Return whether a configuration, maybe of another version of the kernel, has the values of this one."""
        values = {parameter.name: parameter.values for parameter in kernel.spec.parameters}
        return config.keys() == values.keys() and all(config[name] in values[name] for name in values)

    def _estimated(self, name: str, sizes: Mapping[str, int]) -> list[Config]:
        """Return the configurations with the best estimated times at a problem."""
        spec = self.kernels[name].spec
        try:
            space = feasible_space(spec, sizes, self.device, self.dtype)
        except InputError:
            return []
        if len(space) > _ESTIMATED_ROWS:
            space = space.select(self._random.choice(len(space), _ESTIMATED_ROWS, replace=False))
        estimate = estimate_times(spec, sizes, self.device, space, self.dtype)
        if estimate is None:
            rows: Any = self._random.choice(len(space), min(_SEEDS, len(space)), replace=False)
        else:
            rows = np.argsort(estimate.time_us)[:_SEEDS]
        return [space.config(int(row)) for row in rows]

    def _measure(self, problems: Sequence[tuple[Problem, dict[str, dict[str, int]]]], share: float) -> None:
        """Measure problems that were not, until a share of the budget is used; the next one compiles meanwhile."""
        known = {tuple(one.sizes.items()) for one in self.measured}
        left = iter([one for one in problems if tuple(self._proper(one[0]).items()) not in known])
        following = next(left, None)
        job = self.sweep.prepare(*following, self._chosen(*following)) if following is not None else None
        while job is not None and self._has_time(share) and not self._stop.requested:
            current, following = job, next(left, None)
            job = self.sweep.prepare(*following, self._chosen(*following)) if following is not None else None
            self._run(current)

    def _run(self, job: Any) -> None:
        swept = self.sweep.run(job)
        if swept is not None:
            self.measured.append(swept)
        self._report("measuring", job.problem)

    def _report(self, phase: Literal["measuring", "learning"], problem: Problem | None = None) -> None:
        self.schedule.observe(
            Progress(
                phase=phase,
                problem=problem,
                device=self.device,
                done=len(self.measured),
                target=None,
                elapsed_s=self.schedule.elapsed_s,
                budget_s=self.options.budget_s,
                outcomes={Outcome.OK: self._pairs},
                gates={},
                best=None,
                rate=Workrate(None, None, self.dtype),
            )
        )

    def _proper(self, problem: Problem) -> dict[str, int]:
        return {name: size for name, size in problem.sizes.items() if name not in self.operation.conditions}

    def _chosen(self, problem: Problem, kernels: Mapping[str, Mapping[str, int]]) -> list[ModelCandidate]:
        """Return the configurations to measure at a problem: those expected to be the fastest, then others."""
        ordered = self._ranked(problem, kernels)
        best, others = ordered[:_TRIED], ordered[_TRIED:]
        rest = self._random.permutation(len(others))[:_RANDOM]
        return [*best, *(others[int(number)] for number in rest)]

    def _ranked(self, problem: Problem, kernels: Mapping[str, Mapping[str, int]]) -> list[ModelCandidate]:
        valid = [
            one
            for one in self.candidates.values()
            if one.kernel in kernels
            and one.key not in self.sweep.banned
            and not check_config(
                self.kernels[one.kernel].spec, one.config, kernels[one.kernel], self.device, self.dtype
            )
        ]
        losses = self._nearby_losses(self._proper(problem), [one.key for one in valid])
        if self._model is not None:
            specs = {name: kernel.spec for name, kernel in self.kernels.items()}
            ranking = self._model.rank(self._proper(problem), kernels, specs, self.device)
            expected = {ranking.candidates[number].key: place for place, number in enumerate(ranking.order)}
            order = [expected.get(one.key, len(expected) + losses[place]) for place, one in enumerate(valid)]
        else:
            order = list(losses)
        return [valid[number] for number in np.argsort(order, kind="stable")]

    def _nearby_losses(self, sizes: Mapping[str, int], keys: Sequence[CandidateKey]) -> NDArray[np.float64]:
        """Return the expected loss of configurations: the mean of the losses nearby, weighted by distance."""
        total = np.full(len(keys), _UNKNOWN_WEIGHT * _UNKNOWN_LOSS)
        weights = np.full(len(keys), _UNKNOWN_WEIGHT)
        numbers = {key: number for number, key in enumerate(keys)}
        for one in self.measured:
            weight = math.exp(-self._distance(sizes, one.sizes) / _NEAR_DOUBLINGS)
            timed = {key: trial.time_us for key, trial in one.trials.items() if trial.time_us is not None}
            best_us = min(timed.values(), default=math.nan)
            for key, time_us in timed.items():
                if (number := numbers.get(key)) is not None:
                    total[number] += weight * min(math.log(time_us / best_us), _MAX_LOSS)
                    weights[number] += weight
        return np.asarray(total / weights)

    def _distance(self, a: Mapping[str, int], b: Mapping[str, int]) -> float:
        flags = self.operation.flags
        return sum(
            _FLAG_DOUBLINGS * (a[name] != b[name]) if name in flags else abs(math.log2(a[name] / b[name])) for name in a
        )

    def _learn(self) -> Losses:
        """Learn the model from everything that was measured, and return how well it chooses where it was held out."""
        self._report("learning")
        usable = {
            key: one
            for key, one in self.candidates.items()
            if key not in self.sweep.banned and key in self.sweep.resources
        }
        self._model, losses = learn_model(
            self.operation,
            self.dtype,
            device=self.device,
            kernels=self.kernels,
            measured=self.measured,
            usable=usable,
            resources=self.sweep.resources,
        )
        return losses

    def _try_variants(self) -> None:
        """Try variants of the best configuration in one parameter, where a library is faster."""
        losing = []
        for one in self.measured:
            timed = [(t.time_us, key) for key, t in one.trials.items() if t.outcome is Outcome.OK and t.time_us]
            if timed and one.libraries and min(one.libraries.values()) < 0.98 * min(timed)[0]:
                losing.append((min(timed)[0] / min(one.libraries.values()), min(timed)[1], one))
        losing.sort(key=lambda item: -item[0])
        for _, key, one in losing[:_MUTATED]:
            if not self._has_time(_MEASURING_SHARE) or self._stop.requested:
                return
            best = self.candidates[key]
            variants = [
                ModelCandidate(best.kernel, config) for config in self._variants(best, one.kernels[best.kernel])
            ]
            for variant in variants:
                self.candidates.setdefault(variant.key, variant)
            problem = self.operation.resolve(one.sizes, self.dtype)
            again = self.sweep.run(self.sweep.prepare(problem, one.kernels, [best, *variants]))
            if again is not None:
                merged = replace(
                    one, trials={**one.trials, **again.trials}, libraries={**one.libraries, **again.libraries}
                )
                self.measured[self.measured.index(one)] = merged
            self._report("measuring", problem)

    def _variants(self, one: ModelCandidate, sizes: Mapping[str, int]) -> list[Config]:
        """Return valid neighbours of a configuration in one parameter, in random order."""
        spec, found = self.kernels[one.kernel].spec, []
        for parameter in spec.parameters:
            values = list(parameter.values)
            place = values.index(one.config[parameter.name])
            for neighbour in values[max(0, place - 1) : place + 2]:
                config = {**one.config, parameter.name: neighbour}
                if neighbour != values[place] and not check_config(spec, config, sizes, self.device, self.dtype):
                    found.append(config)
        return [found[int(number)] for number in self._random.permutation(len(found))[:_MUTATIONS]]


def learn_model(
    operation: Operation,
    dtype: str,
    *,
    device: DeviceProperties,
    kernels: Mapping[str, Kernel],
    measured: Sequence[SweptProblem],
    usable: Mapping[CandidateKey, ModelCandidate],
    resources: Mapping[CandidateKey, Resources],
) -> tuple[OperationModel, Losses]:
    """Learn the model of an operation; return it with its losses at problems that were held out.

    Parameters
    ----------
    operation, dtype, device, kernels
        What was measured, and where.
    measured
        Problems with their results.
    usable
        Configurations that failed at no problem.
    resources
        Resources of each of them.

    Raises
    ------
    InputError
        Too few problems were measured.
    """
    verified = Counter(key for one in measured for key, trial in one.trials.items() if trial.outcome.has_time)
    kept = [key for key in usable if verified[key] >= _MIN_VERIFIED]
    numbers = {key: number for number, key in enumerate(kept)}
    timed = dict.fromkeys(name for one in measured for name in one.libraries)
    library_numbers = {name: len(kept) + place for place, name in enumerate(timed)}
    candidates = [
        *(ModelCandidate(key[0], usable[key].config, resources[key]) for key in kept),
        *(ModelCandidate(name, {}) for name in library_numbers),
    ]
    problems = []
    for one in measured:
        times_us = {
            numbers[key]: trial.time_us
            for key, trial in one.trials.items()
            if key in numbers and trial.time_us is not None
        }
        times_us |= {library_numbers[name]: time_us for name, time_us in one.libraries.items()}
        if times_us:
            problems.append(MeasuredProblem(one.sizes, one.kernels, times_us))
    specs = {name: kernel.spec for name, kernel in kernels.items()}
    what = operation.name, dtype, device, specs
    fitted = fit_model(*what, candidates=candidates, problems=problems, flags=operation.flags)
    return fitted.model, _held_out_losses(fitted)


def _held_out_losses(fitted: Fitted) -> Losses:
    """Return the losses of what the networks choose at problems that they were not fitted to."""
    held_out, candidates = fitted.held_out, fitted.candidates
    times_us = np.asarray(held_out.times_us)
    chosen_by = np.where(np.isfinite(times_us), held_out.log2_us, np.inf)
    rows = np.flatnonzero(np.isfinite(chosen_by).any(axis=1))
    chosen = np.argmin(chosen_by[rows], axis=1)
    served_us = times_us[rows, chosen]
    losses = served_us / np.nanmin(times_us[rows], axis=1) - 1.0
    library = [number for number, one in enumerate(candidates) if one.is_library]
    over: tuple[float, float, float] | None = None
    if library:
        library_us = np.nanmin(
            np.where(np.isfinite(times_us[rows][:, library]), times_us[rows][:, library], np.inf), axis=1
        )
        ratios = (library_us / served_us)[np.isfinite(library_us)]
        if ratios.size:
            over = float(np.exp(np.log(ratios).mean())), float(np.percentile(ratios, 1)), float(ratios.min())
    return Losses(float(losses.mean()), float(np.percentile(losses, 99)), float(losses.max()), over)
