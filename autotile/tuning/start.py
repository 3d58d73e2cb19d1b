"""The start of a session: what it minimises, what is known before its first trial, and what it searches.

Steps of a kernel that share no parameters are tuned apart, with the times of the steps in common trials: a trial gives
the time of each step, and that of a step depends on its own parameters only. So a trial can try another value for every
step at once, and the best of each step make up a configuration that is then verified and raced whole. Steps are taken
to be independent only if the search-space file and the source show it: a parameter that occurs outside of the functions
of the steps, or in what several of them use, ties all of these together.
"""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from autotile.core.documents import attributes
from autotile.core.model import (
    COST,
    METRIC,
    OBJECTIVE,
    STEP_TIME,
    TIME,
    Config,
    Outcome,
    Problem,
    Trial,
    Value,
    config_text,
    distinct_configs,
    objective_values,
)
from autotile.core.text import plural
from autotile.database.keys import TuningKey
from autotile.database.winners import UNVERIFIED_SAMPLER
from autotile.errors import InputError
from autotile.kernel.expressions import Location
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance
from autotile.kernel.sources import strip_comments
from autotile.kernel.spec import RUN_VALUES, KernelSpec, Objective, parse_objective
from autotile.search.samplers import lookahead_of, resolve_sampler
from autotile.space.limits import check_config, passes_otherwise
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.space.time_estimate import estimate_times
from autotile.tuning.options import TuneOptions

if TYPE_CHECKING:
    from autotile.database.database import Database, StudySummary
    from autotile.search.search import Search
    from autotile.search.transfer import Source
    from autotile.tuning.progress_state import TrialLog
    from autotile.workers.gpu import Backend

_LOWEST_US, _HIGHEST_US = 1e-3, 1e12
_HALVINGS = 60


def session_objective(spec: KernelSpec, options: TuneOptions) -> Objective | None:
    """Return the objective of a session: the expression that the user gives, else that of the search-space file.

    A `SpecError` is raised if the expression is malformed, uses an unknown name or no measured value.
    """
    if options.objective is None:
        return spec.objective
    location = Location("--objective")
    return parse_objective(options.objective, spec.metrics, spec.score_kinds, location, maximize=options.maximize)


def measures_energy(spec: KernelSpec, objective: Objective | None) -> bool:
    """Return True if the objective or a metric needs the energy of a run."""
    own = [objective.expression] if objective is not None else []
    return any("energy_mj" in expression.names for expression in (*spec.metrics.values(), *own))


class Scorer:
    """Computes the objective and the metrics of trials.

    The cost is what a search minimises: the time, or the value of the objective, or its reciprocal if it is maximised;
    so costs are positive, and their ratios say how much better a configuration is.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, objective: Objective | None) -> None:
        self._metrics = spec.metrics
        self._names = spec.score_kinds.keys()
        self._of_problem = problem.names
        self._objective = objective
        used = objective.used(spec.metrics) if objective is not None else set()
        self._needs_run = bool(used & {*RUN_VALUES} - {"time_us"})

    def scored(self, trial: Trial) -> Trial:
        """Return a trial with its metrics, and its objective and cost if the session has one.

        An `InputError` is raised if the objective has no value, or not a positive one.
        """
        telemetry = {
            name: value
            for name, value in trial.telemetry.items()
            if name not in (COST, OBJECTIVE) and not name.startswith(METRIC)
        }
        if trial.time_us is not None:
            names = self._environment(trial, trial.time_us)
            telemetry |= {f"{METRIC}{name}": names[name] for name in self._metrics if name in names}
            if self._objective is not None:
                telemetry[OBJECTIVE], telemetry[COST] = self._scores(self._objective, trial.config, names)
        return replace(trial, telemetry=telemetry) if telemetry != trial.telemetry else trial

    def cost(self, trial: Trial, time_us: float) -> float:
        """Return the cost of a measured trial if it took another time."""
        if self._objective is None:
            return time_us
        return self._scores(self._objective, trial.config, self._environment(trial, time_us))[1]

    def known_cost(self, trial: Trial) -> float | None:
        """Return the cost of a trial of any session; None if it was not measured, or by what the objective needs."""
        with suppress(InputError):
            return None if trial.time_us is None else self.cost(trial, trial.time_us)
        return None

    def time_limit_us(self, trial: Trial, best: Trial | None) -> float | None:
        """Return the time at which a compiled candidate would cost as much as the best; None if that is not known."""
        if best is None or best.cost is None or self._objective is None:
            return best.time_us if best is not None else None
        if self._needs_run:
            return None
        low, high = _LOWEST_US, _HIGHEST_US
        try:
            if not self.cost(trial, low) < best.cost < self.cost(trial, high):
                return None
            for _ in range(_HALVINGS):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if self.cost(trial, middle) < best.cost else (low, middle)
        except InputError:
            return None
        return math.sqrt(low * high)

    @staticmethod
    def _scores(objective: Objective, config: Config, names: Mapping[str, Any]) -> tuple[float, float]:
        """Return the value of the objective, and the cost."""
        expression = objective.expression
        missing = sorted(expression.names - names.keys())
        if missing:
            raise InputError(f"the objective {expression.text!r} needs {missing[0]}, which has no value here")
        value = _number(expression.evaluate(names))
        if value is None or value <= 0:
            raise InputError(
                f"the objective {expression.text!r} is {value if value is not None else 'no finite real number'} with "
                f"{config_text(config)}; expected a positive number"
            )
        return value, 1 / value if objective.maximize else value

    def _environment(self, trial: Trial, time_us: float) -> dict[str, Any]:
        """Return the value of every name that is known of a trial."""
        names: dict[str, Any] = {**self._of_problem, "time_us": time_us}
        names |= {
            name: value if isinstance(value, float) else int(value)
            for name, value in trial.config.items()
            if name in self._names and not isinstance(value, str)  # which it may have been before
        }
        for part, own in (
            (trial.resources, ("registers", "spill_bytes", "static_smem_bytes")),
            (trial.geometry, ("dynamic_smem_bytes", "threads", "blocks")),
            (trial.occupancy, ("occupancy",)),
        ):
            names |= attributes(part, *own) if part is not None else {}
        names |= {name: trial.telemetry[name] for name in ("energy_mj", "max_error") if name in trial.telemetry}
        for name, metric in self._metrics.items():
            if metric.names <= names.keys() and (value := _number(metric.evaluate(names))) is not None:
                names[name] = value
        return names


def _number(value: Any) -> float | None:
    array = np.asarray(value)
    if array.size != 1 or np.iscomplexobj(array) or not np.isfinite(array).all():
        return None
    return float(array.reshape(()))


_MAX_SOURCES = 4
"""Maximum number of studies to transfer from: each needs a model, which takes some tenths of a second to fit."""
_MIN_TIMED_TRIALS = 6
"""Minimum number of trials with a time in a study to transfer from."""
_BEST_OF_EACH = 3
"""Configurations of each of these studies that are in the space even where its heuristics exclude them."""
CostAt = Callable[[Problem], Callable[[Trial], float | None]]


def find_sources(database: Database, studies: Iterable[StudySummary], key: TuningKey, cost_at: CostAt) -> list[Source]:
    """Return the trials of the nearest of a kernel's other studies of the same dtype, nearest first.

    Studies are ordered by GPU, then by architecture, then by size. A study without a size in common, such as an
    imported one with size names of its own, cannot be compared. Configurations of these trials may be invalid here: a
    model fitted to them predicts the rows of this space, and only these are proposed. Costs are those by ``cost_at`` a
    problem, as sessions may have had other objectives.
    """
    others = [
        study
        for study in studies
        if study.key != key
        and study.key.dtype == key.dtype
        and study.key.sizes.keys() & key.sizes.keys()
        and study.trials >= _MIN_TIMED_TRIALS
    ]
    others.sort(
        key=lambda study: (
            (study.key.gpu_name != key.gpu_name) + (study.key.compute_capability != key.compute_capability),
            *size_distance(study.key.sizes, key.sizes),
        )
    )
    sources: list[Source] = []
    for study in others[:_MAX_SOURCES]:
        other = study.key
        name = config_text(other.sizes)
        name += f" on {other.gpu_name}" if other.gpu_name != key.gpu_name else ""
        if other.version != key.version:
            name += " of another version"
        searched = database.trials(study.study_id, phase="search")
        newest = {trial.config_key: trial for trial in searched if trial.outcome.has_time and trial.time_us is not None}
        cost = cost_at(other.problem)
        timed = [(trial.config, found) for trial in newest.values() if (found := cost(trial)) is not None]
        if len(timed) >= _MIN_TIMED_TRIALS:
            sources.append((name, timed))
    return sources


def find_served(database: Database, study_id: int, options: TuneOptions) -> Config | None:
    """Return the configuration that was served when the study's first session began.

    A session that resumes it must repeat its proposals, although a trial of the study may be served by now.
    """
    if options.fresh:
        return options.served
    recorded = [run.settings["served"] for run in database.runs(study_id) if "served" in run.settings]
    return recorded[0] if recorded else options.served


class SearchPlan:
    """The results that a session knows before its first candidate, and the decisions about its search that follow.

    Of the earlier trials of the study, those that need to be repeated are left out: pruned ones if this session prunes
    nothing or had another objective, those that took too long by other deadlines, those about which changed limits of
    the file decide otherwise, those that lack a value of an objective, those whose compiler the system killed, and
    those of `UNVERIFIED_SAMPLER`. A trial that earlier finals refused has the outcome of that check.

    Results of a killed session do not count for the incumbent, the best configuration of earlier sessions: otherwise
    the resumed session could name another winner than an uninterrupted one.

    That no configuration is valid for one of the problems to verify is an `InputError`. A session that joins others
    changes the seed before `make_search`.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        space: SearchSpace,
        options: TuneOptions,
        *,
        backend: Backend,
        database: Database,
        study_id: int,
        key: TuningKey,
        workers: int,
    ) -> None:
        self._spec = spec = kernel.spec
        self._problem = problem
        self._options = options
        self._device = device = backend.device
        self.seed = options.seed
        self.default: Config = dict(spec.default)
        runs, searched = database.runs(study_id), database.stored_trials(study_id, phase="search")
        verified = {run.run_id: run for run in runs if run.sampler != UNVERIFIED_SAMPLER}
        self._objective = objective = session_objective(spec, options)
        self._scorer = scorer = Scorer(spec, problem, objective)
        now = attributes(options, "compile_deadline_s", "run_deadline_s")
        now["objective"] = objective.expression.text if objective is not None else None
        now["maximize"] = objective is not None and objective.maximize
        self.earlier: list[Trial] = []
        if not options.fresh:
            finals = database.trials(study_id, phase="final")
            refused = {trial.config_key: trial for trial in finals if not trial.outcome.has_time}
            for one in searched:
                trial, run = refused.get(one.trial.config_key, one.trial), verified.get(one.run_id)
                if run is None or trial.outcome is Outcome.NOT_COMPILED or passes_otherwise(spec, trial):
                    continue
                changed = {name for name, value in now.items() if run.settings.get(name, value) != value}
                if trial.outcome is Outcome.PRUNED and (not options.drops_slow or changed & {"objective", "maximize"}):
                    continue
                if trial.outcome is Outcome.TIMED_OUT and changed & {"compile_deadline_s", "run_deadline_s"}:
                    continue
                if self.has_values(trial) or not trial.outcome.has_time:
                    self.earlier.append(trial)
        same = attributes(key, "template_hash", "space_hash", "options")
        studies = database.studies(key.kernel)
        trials = sum(one.trials for one in studies if structs.replace(one.key, **same) == key != one.key)
        beside = (
            f"a new study begins, beside {plural(trials, 'trial')} of another version of the kernel: since then its "
            "code, the name of one of its files, or launch, arguments or reference of the search-space file changed"
        )
        self.notices = tuple(filter(None, (spec.reference.notice, "" if searched or not trials else beside)))
        confirmed = [best.trial.config for best in database.best(study_id=study_id) if best.confirmed]
        ended = {run_id for run_id, run in verified.items() if run.ended_at is not None}
        tried = [one.trial for one in searched if one.run_id in ended and one.trial.outcome is Outcome.OK]
        ran = [(cost, trial.config) for trial in tried if (cost := scorer.known_cost(trial)) is not None]
        fastest_ran = min(ran, key=itemgetter(0), default=(None, None))[1]
        self.confirmed = next(iter(confirmed), None)
        """The winner of earlier finals, which is served until others name another one."""
        self.incumbent = next(iter(confirmed), fastest_ran)
        self._served = find_served(database, study_id, options)
        self._sources = []
        if options.transfer:
            self._sources = find_sources(database, studies, key, lambda at: Scorer(spec, at, objective).known_cost)
        named = [self.default, *(options.only or ()), *options.tries, *(trial.config for trial in self.earlier)]
        named += [config for config in (self.incumbent, self._served) if config is not None]
        for _, timed in self._sources:  # the fastest few configurations of another study may be fast here, too
            named += [config for config, _ in sorted(timed, key=itemgetter(1))[:_BEST_OF_EACH]]
        outside = (config for config in named if space.row_of(config) is None)
        # with those that only the heuristics of the space exclude, not a rule or a limit
        valid = (config for config in outside if not check_config(spec, config, problem, device))
        self.space = space = space.including(valid)
        masks: list[NDArray[np.bool_]] = []
        for configs in (backend.recorded, options.only):
            if configs is not None:
                wanted = np.zeros(len(space), np.bool_)
                wanted[[row for config in configs if (row := space.row_of(config)) is not None]] = True
                masks.append(wanted)
        lenient = replace(spec, heuristics=())  # a configuration must be correct there, not fast
        at_sizes = (feasible_space(lenient, problem.at(sizes), device) for sizes in options.verify_sizes)
        masks += [space.rows_in(other) for other in at_sizes]
        self._available = np.logical_and.reduce(masks) if masks else None
        """Mask over the rows that the backend can run, the user allows, and all problems to verify permit."""
        candidates = len(space) if self._available is None else int(self._available.sum())
        granted = options.trial_target if options.until is None else None  # trials that are certain to be made
        self._sampler = resolve_sampler(options.sampler, space, self._available, granted)
        self.lookahead = lookahead_of(self._sampler, workers, backend.gpu_count)
        self.max_trials = min(candidates, options.trial_target or candidates)
        """Maximum number of trials that the study can hold."""
        self.search: Search | None = None
        """The search, after `make_search`."""

    def has_values(self, trial: Trial) -> bool:
        """Return True if a trial, maybe of a session with another objective, has the values that this one's needs."""
        return bool(objective_values(trial, self._options.objectives)) and self._scorer.known_cost(trial) is not None

    def served_still(self, best: Trial | None) -> Iterator[str]:
        """Yield a notice that what won earlier finals is still served, if that is not the best of a session."""
        if best is not None and self.confirmed not in (None, best.config):
            served = f"{config_text(self.confirmed)}, which won earlier ones, is still what is served"
            yield f"no finals were held, so {served}; to compare it with the winner, hold finals after a trial of it"

    def may_replace(self, log: TrialLog) -> bool:
        """Test whether finals may replace the winner of earlier ones: a search that has yet to try it holds none."""
        row = self.space.row_of(self.confirmed) if self.confirmed is not None and self.search is not None else None
        is_left_out = row is None or (self._available is not None and not self._available[row])
        return is_left_out or log.find(self.confirmed or {}) is not None

    def make_search(self, log: TrialLog) -> Search:
        """Return the search, which has not learned from trials yet."""
        from autotile.search.search import Search

        def estimated_us(space: SearchSpace) -> NDArray[np.float64] | None:
            found = estimate_times(self._spec, self._problem, self._device, space)
            return found.time_us if found is not None else None

        # the first two are always among them, so that a resumed search repeats the proposals of its first session
        new = self.incumbent if self.incumbent is not None and log.find(self.incumbent) is None else None
        seeded = [config for config in (self.default, self._served, new) if config is not None]
        by_time = self._options.objectives == (TIME,) and self._objective is None
        self.search = Search(
            self.space,
            self._sampler,
            self.seed,
            first=distinct_configs(seeded),
            available=self._available,
            trials=self._options.trial_target,
            objectives=self._options.objectives,
            sources=self._sources,
            estimate=estimated_us if by_time else None,
        )
        return self.search


_WORD = re.compile(r"\w+")
_OWN_INCLUDE = re.compile(r'#\s*include\s*"')
_TOGETHER = 16
"""Trials between two looks at the stopping rules, which keeps the compilers busy."""
_KEPT = 2
"""Best settings of each group that are combined, as the time of a step is less certain than that of a call."""


StepGroup = tuple[tuple[int, ...], tuple[str, ...]]
"""Indices of steps that share parameters with each other, and with no other step; and these parameters."""


def independent_groups(kernel: Kernel) -> list[StepGroup]:
    """Return groups of steps that share no parameters, at least two; an empty list if there are none."""
    spec = kernel.spec
    if len(spec.steps) < 2 or spec.computed or spec.objective is not None or _OWN_INCLUDE.search(kernel.source):
        return []
    source = strip_comments(kernel.source)
    spans: dict[str, tuple[int, int]] = {}
    for entry in spec.entries:
        name = entry.partition("<")[0].rpartition("::")[2].strip()
        starts = [match.start() for match in re.finditer(rf"\b{re.escape(name)}\s*\(", source)]
        spanned = [span for start in starts if (span := _definition(source, start)) is not None]
        if len(spanned) != 1:
            return []
        spans[entry] = spanned[0]
    bodies = {entry: set(_WORD.findall(source[start:end])) for entry, (start, end) in spans.items()}
    rest = source
    for start, end in sorted({*spans.values()}, reverse=True):
        rest = f"{rest[:start]} {rest[end:]}"
    outside = set(_WORD.findall(rest))
    parameters = set(spec.default)
    used = []  # the names that each step depends on: those of its launch, and of its code
    for step in spec.steps:
        launch = step.launch
        optional = (launch.dynamic_smem_bytes, launch.static_smem_bytes, launch.min_registers, step.when, step.times)
        expressions = [*launch.block, *launch.grid, *launch.cluster, *(each for each in optional if each is not None)]
        for name in step.arguments:
            argument = spec.argument(name)
            expressions += argument.expressions
            for target in argument.targets:
                expressions += spec.argument(target).expressions
        names = {name for expression in expressions for name in expression.names}
        used.append(names | set(_WORD.findall(step.entry)) | bodies[step.entry])
    tied = [spec.build.names.union(spec.shaping, outside)]
    tied += [rule.expression.names for rule in (*spec.rules, *spec.heuristics)]
    pending = [({index}, parameters & names) for index, names in enumerate(used)]
    pending += [(set[int](), names) for each in tied if (names := parameters & each)]
    groups: list[tuple[set[int], set[str]]] = []
    for steps, names in pending:  # unite what shares a parameter
        touching = [group for group in groups if group[1] & names]
        groups = [group for group in groups if not group[1] & names]
        groups.append((steps.union(*(group[0] for group in touching)), names.union(*(group[1] for group in touching))))
    free = sorted((tuple(sorted(steps)), tuple(sorted(names))) for steps, names in groups if names)
    return free if len(free) > 1 and all(steps for steps, _ in free) else []


def _definition(source: str, name_at: int) -> tuple[int, int] | None:
    """Return the extent of the ``__global__`` function whose name begins here, to its last brace; None if none does."""
    start = source.rfind("__global__", 0, name_at)
    if start < 0 or any(mark in source[start:name_at] for mark in ";{}"):
        return None
    body = source.find("{", name_at)
    if body < 0 or ";" in source[name_at:body]:
        return None
    depth = 0
    for match in re.finditer(r"[{}]", source[body:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start, body + match.end()
    return None


class StepTimes:
    """The settings of each group, in an order by the seed, the default first, and the times of its steps."""

    def __init__(self, groups: Sequence[StepGroup], space: SearchSpace, default: Config, seed: int) -> None:
        self._groups = groups
        self._space = space
        self._default = default
        self._settings: list[list[dict[str, Value]]] = []
        """Values of the parameters of each group."""
        generator = np.random.default_rng(seed)
        column_of = {parameter.name: column for column, parameter in enumerate(space.parameters)}
        for _, names in groups:
            columns = [column_of[name] for name in names]
            own = [space.parameters[column] for column in columns]
            rows = generator.permutation(np.unique(space.codes[:, columns], axis=0))
            settings = [{one.name: one.values[int(code)] for one, code in zip(own, row, strict=True)} for row in rows]
            first = {name: default[name] for name in names}
            self._settings.append([first, *(setting for setting in settings if setting != first)])

    @property
    def count(self) -> int:
        """Trials in which every setting of every group is tried."""
        return max(len(settings) for settings in self._settings)

    def first_configs(self) -> Iterator[Config]:
        """Yield configurations that together have every setting of every group; shorter groups repeat their default."""
        return self._valid(zip_longest(*self._settings, fillvalue=dict[str, Value]()))

    def chunks(self, trials: Callable[[], Iterable[Trial]]) -> Iterator[list[Config]]:
        """Yield the configurations that time every setting, some at a time; ``trials`` returns all trials so far."""
        for configs in (self.first_configs, lambda: self.untimed_configs(trials())):
            waiting = list(configs())
            for start in range(0, len(waiting), _TOGETHER):
                yield waiting[start : start + _TOGETHER]

    def untimed_configs(self, trials: Iterable[Trial]) -> list[Config]:
        """Return the default with each setting that has no time because another group's setting failed."""
        timed = [[setting for _, setting in known] for known in self._times(trials)]
        pairs = zip(self._settings, timed, strict=True)
        return list(self._valid([one] for settings, known in pairs for one in settings if one not in known))

    def best_configs(self, trials: Iterable[Trial]) -> list[Config]:
        """Return combinations of the best few settings of each group, best first."""
        combined = product(*(known[:_KEPT] for known in self._times(trials)))
        ordered = sorted(combined, key=lambda chosen: sum(time_us for time_us, _ in chosen))
        return list(self._valid([setting for _, setting in chosen] for chosen in ordered))

    def _valid(self, combined: Iterable[Iterable[dict[str, Value]]]) -> Iterator[Config]:
        """Yield the valid ones among the default with settings in place of its own."""
        for settings in combined:
            config = {**self._default, **ChainMap(*settings)}
            if self._space.row_of(config) is not None:
                yield config

    def _times(self, trials: Iterable[Trial]) -> list[list[tuple[float, dict[str, Value]]]]:
        """Return the settings of each group that have a time, with the shortest one, the fastest first."""
        measured = [trial for trial in trials if any(name.startswith(STEP_TIME) for name in trial.telemetry)]
        found = []
        for indices, names in self._groups:
            steps = tuple(f"{STEP_TIME}{step}." for step in indices)
            shortest: dict[tuple[Value, ...], float] = {}
            for trial in measured:  # a step that was not launched took no time
                time_us = sum(float(value) for name, value in trial.telemetry.items() if name.startswith(steps))
                values = tuple(trial.config[name] for name in names)
                shortest[values] = min(time_us, shortest.get(values, time_us))
            ordered = sorted(shortest.items(), key=itemgetter(1))
            found.append([(time_us, dict(zip(names, values, strict=True))) for values, time_us in ordered])
        return found

    def notice(self, spec: KernelSpec, trials: int) -> str:
        """Return one line for the user."""
        parts = (
            f"{' and '.join(spec.steps[step].entry for step in steps)} ({', '.join(names)})"
            for steps, names in self._groups
        )
        return (
            f"steps that share no parameters were tuned apart in {plural(trials, 'trial')}, by their own times: "
            f"{'; '.join(parts)}; the best of each were combined"
        )
