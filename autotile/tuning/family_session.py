"""A family session: tune a few problems of a family, and learn a rule for all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import JsonObject, attributes, to_document
from autotile.core.model import Config, Outcome, Problem, Sizes, Trial, config_key, distinct_configs
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Part,
    ResultTable,
    device_text,
    percent_text,
    plural,
    sizes_text,
    time_text,
)
from autotile.database.keys import TuningKey, key_of, version_of
from autotile.database.learned import FamilyState, family_state, save_family_state, save_rule
from autotile.errors import InputError
from autotile.exchange.recording import list_recordings
from autotile.families.family import (
    UNSERVED_LOSS,
    Family,
    FamilyRule,
    RuleConfig,
    RulePoint,
    TrainingData,
    learn_rule,
    sample_members,
    select_points,
    select_points_from,
)
from autotile.families.features import Traits, list_features, meet_rules
from autotile.families.preference import FINALISTS, MAX_STUDIES, WITH_FINALISTS, Tuned, prefer
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_memory, resolve_problem, size_distance
from autotile.kernel.spec import KernelSpec
from autotile.report.notebook import PageContent, Reported
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from autotile.space.time_estimate import CONFIDENT_FACTOR, estimate_configs
from autotile.tuning.lanes import Lane
from autotile.tuning.options import FamilyPlan, TuneOptions, for_given
from autotile.tuning.progress_state import Observer, Place
from autotile.tuning.result import ScheduleResult, TuneResult
from autotile.tuning.schedule import Schedule

if TYPE_CHECKING:
    from autotile.database.database import Database


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class FamilyResult(ScheduleResult, Reported):
    """Result of a family session."""

    kernel: str
    dtype: str
    family: str
    """In its text form."""
    rule: FamilyRule | None
    """None where the user interrupted, and the same command resumes. It is served from now on if it is in force."""
    candidates: int
    """Number of configurations that were measured at every point."""
    default_loss: float | None
    """Mean loss of the default configuration over the points where it runs; None where it runs at none."""

    def page_content(self) -> PageContent:
        """As for `Reported`, of all problems of the family."""
        return self.database, self.kernel, {}, self.dtype, self.device.name

    def _heading(self) -> str:
        return f"{self.kernel} {self.family} {self.dtype} on {device_text(self.device)}"

    def _headline(self) -> str:
        rule, found = self.rule, "interrupted before there was a rule"
        if rule is not None:
            found = f"{plural(len(rule.configs), 'configuration')}, {percent_text(rule.mean_loss)} mean loss"
            found += "" if rule.in_force else ", not in force"
        return f"{self._heading()}: {found}"

    def _parts(self) -> Iterator[Part]:
        rule = self.rule
        if rule is None:
            yield [("interrupted", "before there was a rule")]
            return
        losses = (f"{RIGHT}{name}" for name in ("loss", "loss when left out", "loss without the rule"))
        rows = [
            (
                sizes_text(point.sizes),
                time_text(point.best_us),
                percent_text(point.loss),
                *(NOTHING if loss is None else percent_text(loss) for loss in (point.held_out, point.without)),
            )
            for point in rule.points
        ]
        yield ResultTable(("point", f"{RIGHT}best", *losses), rows)
        yield rule.facts()
        facts = [("loss", rule.loss_text()), ("in force", f"{'yes' if rule.in_force else 'no'}: {rule.verdict}")]
        if self.default_loss is not None:
            facts.append(("default", f"{percent_text(self.default_loss)} mean loss of the default configuration alone"))
        chosen = f"{plural(len(rule.configs), 'configuration')} of {self.candidates} measured at every point"
        yield [*facts, ("chosen", chosen), *self._effort("point", is_served=rule.in_force)]

    def to_json(self) -> JsonObject:
        """Return the document that ``autotile tune --json`` prints."""
        rule = self.rule
        loss = held_out = None
        if rule is not None:
            loss = {"mean": rule.mean_loss, "worst": rule.worst.loss, "worst_at": dict(rule.worst.sizes)}
            if losses := rule.held_out_losses:
                held_out = {"mean": sum(losses) / len(losses), "worst": max(losses)}
        return {
            **attributes(self, "kernel", "family", "dtype"),
            "device": self.device.identity,
            "loss": loss,
            "held_out_loss": held_out,
            "default_loss": self.default_loss,
            "in_force": rule.in_force if rule is not None else None,
            "judgement": to_document(rule.judgement) if rule is not None else None,
            "candidates": self.candidates,
            "rule": to_document(rule),
            **self._ending(resumed=self.resumed),
        }


_TUNING_SHARE = 0.8
"""Share of the budget for tuning the points; the rest is for measuring the best configurations of all points."""
_OVERHEAD_S = 6.0
"""Estimated time of a session besides its search (start, reference, finals), in seconds, until one was measured."""
_MIN_SEARCH_S = 1.0
"""Minimum wall time of the search at a point, in seconds."""
_BEST_OF_EACH = 3
"""Number of configurations that a point proposes: the second best at one point is often the best at its neighbours."""
FAULTS = (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED, Outcome.TIMED_OUT)
"""Outcomes that, at any point, exclude a configuration from what is learned."""


def tune_family(
    kernel: Kernel,
    family: Family,
    dtype: str,
    settings: Settings,
    options: TuneOptions,
    *,
    plan: FamilyPlan | None = None,
    observe: Observer = lambda _: None,
) -> FamilyResult:
    """Tune selected points of a family, measure the best configurations at all of them, learn a rule, and store it.

    Each point is a study like any other: its result is served exactly, and the next studies learn from its trials. A
    run that was killed or interrupted resumes. The options are those of the session at each point, but ``budget_s`` is
    for all points together. An `InputError` says that the family cannot be covered or that nothing runs at any point;
    other errors are those of `autotile.tuning.session.tune`.
    """
    plan = plan or FamilyPlan()
    if options.replay not in (None, "auto"):
        raise InputError("a family is replayed from the installed recordings, one a problem; leave the file's name out")
    with Schedule.open(settings, options, observe) as schedule:
        device, points = _points_of(kernel, family, dtype, schedule, plan.points)
        database, spec, count = schedule.database, kernel.spec, len(points)
        members = [spec.at(one, dtype) for one in sample_members(family)]
        meet_rules(spec, device, [spec.default], members)  # what has no value there is said before hours are spent
        Traits.of(spec, device, [spec.default], [1], members)

        def key_at(sizes: Sizes) -> TuningKey:
            return key_of(kernel, Problem(kernel.name, sizes, dtype), device, l2_mode=options.l2)

        document = {  # a run with another plan starts anew
            "points": [dict(sizes) for sizes in points],
            **attributes(options, "trials", "budget_s", "until"),
            "max_configs": plan.max_configs,
        }
        key, keys = key_at({}), [key_at(sizes) for sizes in points]
        stored = family_state(database, key, family)
        progress = stored if stored is not None and stored.plan == document else FamilyState(document)
        before_s, resumed, overhead_s = progress.seconds, progress.tuned, _OVERHEAD_S

        def elapsed_s() -> float:
            return before_s + schedule.elapsed_s

        def save(**done: Any) -> None:
            nonlocal progress
            progress = replace(progress, seconds=elapsed_s(), **done)
            save_family_state(database, key, family, device, progress)

        def share_s(share: float, left: int, without_s: float = 0.0) -> float | None:
            """Return one point's part of the remaining budget without some of it, in seconds; None without a budget."""
            if options.budget_s is None:
                return None
            rounds = math.ceil(left / schedule.lane.count)
            return max((share * options.budget_s - elapsed_s()) / rounds - without_s, _MIN_SEARCH_S)

        def at_points(
            phase: Literal["tuned", "measured"], numbers: Sequence[int], options_at: Callable[[int], TuneOptions]
        ) -> bool:
            """Hold a session at each point, at several at once on several GPUs; return False if the user interrupted.

            The points up to the first that is missing count as done when a later run resumes.
            """
            done: set[int] = set()
            unit = "tuning point" if phase == "tuned" else "measuring point"

            def run(number: int, lane: Lane) -> TuneResult:
                nonlocal overhead_s
                started_s, problem = schedule.elapsed_s, Problem(kernel.name, points[number], dtype)
                result = schedule.tune(kernel, problem, options_at(number), lane, Place(unit, number + 1, count))
                searched_s = sum(result.phases.get(name, 0.0) for name in ("start", "search"))
                overhead_s = schedule.elapsed_s - started_s - searched_s
                return result

            for place, result in schedule.run([partial(run, number) for number in numbers]):
                if not result.interrupted:
                    done.add(numbers[place])
                save(**{phase: next((number for number in numbers if number not in done), numbers[-1] + 1)})
            return len(done) == len(numbers)

        save()
        rule: FamilyRule | None = None
        matrix: FamilyMatrix | None = None
        is_tuned = at_points(
            "tuned",
            range(progress.tuned, count),
            lambda number: replace(options, budget_s=share_s(_TUNING_SHARE, count - number, overhead_s)),
        )
        if is_tuned:
            proposed = [_best_of(database, one, spec) for one in keys]
            candidates = distinct_configs([*itertools.chain(*proposed), spec.default])
            lacking = []  # points at which a valid candidate was not tried
            for number in range(progress.measured, count):
                problem, tried = spec.at(points[number], dtype), _newest(database, keys[number])
                untried = [config for config in candidates if config_key(config) not in tried]
                if any(not check_config(spec, config, problem, device) for config in untried):
                    lacking.append(number)
            chosen = for_given(options, candidates, finals=0, fresh=False)
            if at_points("measured", lacking, lambda number: replace(chosen, budget_s=share_s(1.0, count - number))):
                matrix = FamilyMatrix(database, keys, proposed, candidates)
                if not matrix.points:
                    raise InputError(f"no configuration of {kernel.name} ran at any point of {family}")
                rule = _learn(matrix, family, spec, dtype, device, max_configs=plan.max_configs)
                save_rule(database, key, device, rule)
        return FamilyResult(
            kernel=kernel.name,
            dtype=dtype,
            family=str(family),
            device=device,
            rule=rule,
            candidates=len(matrix.configs) if matrix is not None else 0,
            default_loss=matrix.mean_loss(spec.default) if matrix is not None else None,
            seconds=elapsed_s(),
            resumed=resumed,
            interrupted=rule is None,
            database=database.place,
            notices=tuple(schedule.notices),
        )


def _points_of(
    kernel: Kernel, family: Family, dtype: str, schedule: Schedule, count: int
) -> tuple[DeviceProperties, Sequence[Sizes]]:
    """Select the points of a family to tune, and return the device of the sessions with them."""
    options, device = schedule.options, schedule.device
    if device is not None:
        at = dtype, device
        return device, select_points(family, count, lambda sizes: is_possible(kernel.spec, sizes, *at))
    # in replay, the points are selected from the problems of the family that were recorded
    version = kernel.name, dtype, options.l2, version_of(kernel)
    fields = attrgetter("kernel", "dtype", "l2_mode", "version")
    headers = [one for _, one in list_recordings(schedule.settings.recording_folders) if not isinstance(one, str)]
    recorded = [(one.device, one.problem) for one in headers if one.device and fields(one.key) == version]
    members = [(on, problem.sizes) for on, problem in recorded if problem.sizes in family]
    if not members:
        known = "; ".join(str(problem) for _, problem in recorded) or "none"
        raise InputError(
            f"launches are replayed, and no problem of the family {family} is recorded of {kernel.name} as it "
            f"is now; recorded are: {known}"
        )
    first = members[0][0]
    points = select_points_from(family, [sizes for on, sizes in members if on == first], count)
    return structs.replace(first, source="replayed"), points


def _learn(
    matrix: FamilyMatrix, family: Family, spec: KernelSpec, dtype: str, device: DeviceProperties, *, max_configs: int
) -> FamilyRule:
    """Learn the rule from the times, and state at each point what it loses, when the point is left out too."""
    configs, resident = [one.config for one in matrix.configs], [one.blocks_per_sm for one in matrix.configs]
    measured_at, others_at = ([spec.at(one, dtype) for one in each] for each in (matrix.points, sample_members(family)))
    measured, others = (Traits.of(spec, device, configs, resident, at) for at in (measured_at, others_at))
    valid = meet_rules(spec, device, configs, others_at)
    data = TrainingData(matrix.times_us, matrix.proposed_by, measured, others, valid)
    columns, tree, losses, held_out = learn_rule(data, list_features(spec, max_configs), max_configs)
    chosen = list(columns)
    points = tuple(
        RulePoint(
            sizes=dict(sizes),
            times_us=tuple(
                (time_us, low_us, high_us) if math.isfinite(time_us) else None
                for time_us, low_us, high_us in matrix.measurements[row, chosen].tolist()
            ),
            best_us=float(np.nanmin(matrix.times_us[row])),
            loss=float(losses[row]),
            held_out=float(held_out[row]) if np.isfinite(held_out[row]) else None,
            without=loss_without(spec, device, dtype, matrix, row),
        )
        for row, sizes in enumerate(matrix.points)
    )
    return FamilyRule(family, tuple(matrix.configs[column] for column in chosen), tree, points)


def is_possible(spec: KernelSpec, sizes: Sizes, dtype: str, device: DeviceProperties) -> bool:
    """Return True if a problem fits in the device's memory and any configuration is valid for it."""
    try:
        problem: Problem = resolve_problem(spec, sizes, dtype)
        check_memory(spec, problem, device)
        return not check_config(spec, spec.default, problem, device) or bool(len(feasible_space(spec, problem, device)))
    except InputError:
        return False


class FamilyMatrix:
    """Measured times of configurations at the points of a family.

    Configurations that are faulty at any point are left out, and points where none ran. ``keys`` are those of the
    points, and ``proposed`` the configurations that each of them proposed. ``measurements`` are the times and the ends
    of their intervals, shape (points, configurations, 3); NaN where a configuration did not run.
    """

    def __init__(
        self,
        database: Database,
        keys: Sequence[TuningKey],
        proposed: Sequence[Sequence[Config]],
        every: Iterable[Config],
    ) -> None:
        studies = [_newest(database, key) for key in keys]
        timed = [
            {key: trial for key, trial in study.items() if trial.outcome.has_time and trial.measurement}
            for study in studies
        ]
        faulty = {key for study in studies for key, trial in study.items() if trial.outcome in FAULTS}
        kept = [key for key in map(config_key, every) if key not in faulty and any(key in study for study in timed)]
        ran = [number for number, study in enumerate(timed) if any(key in study for key in kept)]
        by_point = [{config_key(config) for config in proposed[number]} for number in ran]
        first = {key: next(study[key] for study in timed if key in study) for key in kept}
        self.points = tuple(keys[number].sizes for number in ran)
        self.configs = tuple(
            RuleConfig(one.config, one.occupancy.blocks_per_sm if one.occupancy else 0, one.resources)
            for one in first.values()
        )
        self.measurements = np.full((len(ran), len(kept), 3), np.nan)
        for row, column in itertools.product(range(len(ran)), range(len(kept))):
            trial = timed[ran[row]].get(kept[column])
            if trial is not None and (measured := trial.measurement) is not None:
                self.measurements[row, column] = measured.time_us, measured.low_us, measured.high_us
        self.times_us: NDArray[np.float64] = self.measurements[:, :, 0]
        self.proposed_by = np.array([[key in found for key in kept] for found in by_point], np.bool_)

    def mean_loss(self, config: Config) -> float | None:
        """Return the mean loss of a configuration over the points where it runs; None where it runs at none."""
        configs, times_us = [one.config for one in self.configs], self.times_us
        if config not in configs:
            return None
        return float(np.nanmean(times_us[:, configs.index(config)] / np.nanmin(times_us, axis=1) - 1.0))


def _best_of(database: Database, key: TuningKey, spec: KernelSpec) -> list[Config]:
    """Return the best few configurations of a point's study, its winner first."""
    winner = [best.trial.config for best in database.best(digest=key.digest)]
    ran = [trial for trial in _newest(database, key).values() if trial.outcome is Outcome.OK]
    ordered = [trial.config for trial in sorted(ran, key=lambda trial: trial.time_us or np.inf)]
    return distinct_configs(filter(spec.declares, [*winner, *ordered]))[:_BEST_OF_EACH]


def _newest(database: Database, key: TuningKey) -> dict[str, Trial]:
    """Return the newest trial of each configuration in a study; a refusal by the finals replaces the search's trial."""
    study_id = database.find_study(key)
    if study_id is None:
        return {}
    searched = {trial.config_key: trial for trial in database.trials(study_id, phase="search")}
    finals = database.trials(study_id, phase="final")
    return {**searched, **{trial.config_key: trial for trial in finals if not trial.outcome.has_time}}


def loss_without(spec: KernelSpec, device: DeviceProperties, dtype: str, matrix: FamilyMatrix, point: int) -> float:
    """Return the loss at a point of what would be served there without a rule, had the point not been tuned.

    This is what serving chooses from the other points: the default, or the one that is estimated to be far faster,
    unless a result of a near point is expected to be faster still by more than the doubt.
    """
    times_us, sizes = matrix.times_us, matrix.points[point]
    runs = np.isfinite(times_us)
    configs = [one.config for one in matrix.configs]
    others = [row for row in range(len(matrix.points)) if row != point]
    others.sort(key=lambda row: size_distance(matrix.points[row], sizes))
    known = [
        column
        for column in np.flatnonzero(runs[point]).tolist()
        if matrix.proposed_by[others, column].any() or not matrix.proposed_by[:, column].any()
    ]
    studies = []
    for place, row in enumerate(others[:MAX_STUDIES]):
        fastest = sorted((column for column in known if runs[row, column]), key=lambda column: times_us[row, column])
        measured = {config_key(configs[column]): float(times_us[row, column]) for column in fastest}
        served = fastest[: FINALISTS if place < WITH_FINALISTS else 1]
        tried = {config_key(configs[column]): configs[column] for column in served}
        studies.append(Tuned(matrix.points[row], device, tried, measured))
    default = next((configs[column] for column in known if configs[column] == spec.default), None)
    base = default
    if default is not None:  # serving estimates the whole space; of the others, the time at the point is not known
        ordered = [default, *(configs[column] for column in known if configs[column] is not default)]
        found = estimate_configs(spec, spec.at(sizes, dtype), device, ordered)
        if found is not None and found.is_declared and not found.time_us[0] < CONFIDENT_FACTOR * found.time_us.min():
            base = ordered[int(np.argmin(found.time_us))]
    if base is None:
        base = next((config for tuned in studies for config in tuned.configs.values()), None)
    elif (best := prefer(spec, spec.at(sizes, dtype), device, base, studies)) is not None and best.is_faster:
        base = studies[best.study].configs[best.key]
    if base is None:
        return UNSERVED_LOSS
    return float(times_us[point, configs.index(base)] / np.nanmin(times_us[point]) - 1.0)
