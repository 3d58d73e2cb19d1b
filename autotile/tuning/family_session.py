"""A family session: tune a few problems of a family, and learn a rule for all of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Problem, config_key, config_text
from autotile.core.text import NOTHING, Displayed, device_text, percent_text, plural, sizes_text, time_text
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.keys import TuningKey, key_of
from autotile.database.learned_store import FamilyState, FamilyStore
from autotile.errors import InputError
from autotile.families.family import Family, sample_members
from autotile.families.learning import LearnedRule, TrainingData, learn_rule
from autotile.families.rule import FamilyRule, RulePoint, Traits, list_features, meet_rules
from autotile.kernel.library import Kernel
from autotile.report.notebook import PageContent, Reported
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.tuning.family_study import FamilyMatrix, family_points, losses_without, proposals, read_matrix, union
from autotile.tuning.options import FamilyPlan, TuneOptions
from autotile.tuning.problem_queue import Job, Lane, open_lane, run_jobs
from autotile.tuning.progress_state import Observer, Place, Progress
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import worker_count

if TYPE_CHECKING:
    from autotile.database.database import Database


@dataclass(frozen=True, slots=True, repr=False)
class FamilyResult(Displayed, Reported):
    """Result of a family session.

    Attributes
    ----------
    kernel, dtype, family
        Name of the kernel, dtype, and the family in its text form.
    device
        Device that it was tuned for.
    rule
        Rule that was learned; None where the user interrupted, and the same command resumes. It is served from now on
        if it is in force (`FamilyRule.in_force`).
    candidates
        Number of configurations that were measured at every point.
    default_loss
        Mean loss of the default configuration over the points where it runs; None where it runs at none.
    seconds
        Wall time, including that of an earlier run that was resumed, in seconds.
    resumed
        Number of points that an earlier, unfinished run had tuned.
    database
        Location of the tuning database.
    notices
        Remarks for the user, one line each.
    """

    kernel: str
    dtype: str
    family: str
    device: DeviceProperties
    rule: FamilyRule | None
    candidates: int
    default_loss: float | None
    seconds: float
    resumed: int
    database: str
    notices: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the session before a rule was learned."""
        return self.rule is None

    def page_content(self) -> PageContent:
        """As for `Reported`."""
        return PageContent(self.database, self.kernel, {}, self.dtype, self.device.name)

    def _headline(self) -> str:
        rule = self.rule
        found = "interrupted before there was a rule"
        if rule is not None:
            found = f"{plural(len(rule.configs), 'configuration')}, {percent_text(rule.mean_loss)} mean loss"
            found += "" if rule.in_force else ", not in force"
        return f"{self.kernel} {self.family} {self.dtype} on {device_text(self.device)}: {found}"

    def _facts(self) -> Iterable[tuple[str, str]]:
        rule = self.rule
        if rule is not None:
            yield from ((f"#{number}", config_text(one.config)) for number, one in enumerate(rule.configs))
            worst = f"{percent_text(rule.worst.loss)} at {sizes_text(rule.worst.sizes)}"
            yield "loss at the points", f"{percent_text(rule.mean_loss)} on average, at most {worst}"
            yield "in force", in_force_text(rule)
        yield "database", self.database

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        points = self.rule.points if self.rule is not None else ()
        return ("point", "best", "loss", "loss when left out", "loss without the rule"), [point_row(p) for p in points]

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``autotile tune-family --json`` prints."""
        rule = self.rule
        held_out = rule.held_out_losses if rule is not None else []
        return {
            "kernel": self.kernel,
            "family": self.family,
            "dtype": self.dtype,
            "device": {"name": self.device.name, "source": self.device.source},
            "loss": {"mean": rule.mean_loss, "worst": rule.worst.loss, "worst_at": dict(rule.worst.sizes)}
            if rule is not None
            else None,
            "held_out_loss": {"mean": sum(held_out) / len(held_out), "worst": max(held_out)} if held_out else None,
            "default_loss": self.default_loss,
            "in_force": rule.in_force if rule is not None else None,
            "judgement": rule.judgement.to_json() if rule is not None and rule.judgement is not None else None,
            "candidates": self.candidates,
            "rule": rule.to_json() if rule is not None else None,
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "database": self.database,
            "notices": list(self.notices),
        }


def point_row(point: RulePoint) -> tuple[str, ...]:
    """Return the cells of a point of a rule: sizes, best time and losses."""
    others = (NOTHING if loss is None else percent_text(loss) for loss in (point.held_out, point.without))
    return sizes_text(point.sizes), time_text(point.best_us), percent_text(point.loss), *others


def in_force_text(rule: FamilyRule) -> str:
    """Return whether a rule that was just learned is served, and why."""
    return f"{'yes' if rule.in_force else 'no'}: {rule.verdict}"


_TUNING_SHARE = 0.8
"""Share of the budget for tuning the points; the rest is for measuring the best configurations of all points."""
_OVERHEAD_S = 6.0
"""Estimated time of a session besides its search (start, reference, finals), in seconds, until one was measured."""
_MIN_SEARCH_S = 1.0
"""Minimum wall time of the search at a point, in seconds."""


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
    run that was killed or interrupted resumes.

    Parameters
    ----------
    kernel, family, dtype
        Kernel, problems and dtype to tune for.
    settings, options
        As for `autotile.tuning.session.tune`, for each point; ``budget_s`` is for all points together.
    plan
        Number of points and of configurations.
    observe
        Called with the state of the session at a point after each trial.

    Raises
    ------
    InputError
        The family cannot be covered, nothing runs at any point, or as for `autotile.tuning.session.tune`.
    ToolchainError
        As for `autotile.tuning.session.tune`.
    """
    from autotile.database.database import Database

    plan = plan or FamilyPlan()
    with (
        open_lane(options) as lane,
        Database.open(settings.database if options.database is None else options.database) as database,
        WorkerPool(worker_count(options.workers)) as worker_pool,
    ):
        points = family_points(kernel, family, dtype, settings, options, count=plan.points, device=lane.device)
        session = _FamilySession(
            kernel, family, dtype, settings, options, plan, observe, *points, lane, database, worker_pool
        )
        return session.run()


@dataclass
class _FamilySession:
    """The state of one family session."""

    kernel: Kernel
    family: Family
    dtype: str
    settings: Settings
    options: TuneOptions
    plan: FamilyPlan
    observe: Observer
    device: DeviceProperties
    points: Sequence[Mapping[str, int]]
    lane: Lane
    database: Database
    worker_pool: WorkerPool
    _notices: dict[str, None] = field(default_factory=dict)
    _overhead_s: float = _OVERHEAD_S
    _observing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a session of any thread is observed."""

    def run(self) -> FamilyResult:
        """Resume where the last run with the same plan stopped, and go on to the rule."""
        self._begun = time.monotonic()
        stored, document = FamilyStore(self.database).state(self.key, self.family), self._plan_document
        self._progress = stored if stored is not None and stored.plan == document else FamilyState(document)
        self._before_s, resumed = self._progress.seconds, self._progress.tuned
        self._save()
        keys = [self._key_at(sizes) for sizes in self.points]
        if not self._tune_points():
            return self._result(None, None, resumed)
        proposed = proposals(self.database, keys)
        candidates = union(proposed, self.kernel.spec.default)
        if not self._measure(candidates):
            return self._result(None, None, resumed)
        matrix = read_matrix(self.database, keys, proposed, candidates)
        if not matrix.points:
            raise InputError(f"no configuration of {self.kernel.name} ran at any point of {self.family}")
        rule = self._learn(matrix)
        FamilyStore(self.database).save_rule(self.key, self.device, rule)
        return self._result(rule, matrix, resumed)

    @property
    def key(self) -> TuningKey:
        """Key of the rule."""
        return self._key_at({})

    def _key_at(self, sizes: Mapping[str, int]) -> TuningKey:
        nvrtc, l2 = nvrtc_version(), self.options.l2
        return key_of(self.kernel, self._problem(sizes), self.device, nvrtc_version=nvrtc, l2_mode=l2)

    @property
    def _plan_document(self) -> dict[str, object]:
        """The plan as it is stored with the progress; a run with another plan starts anew."""
        options = self.options
        effort = {"trials": options.trials, "budget_s": options.budget_s, "until": options.until}
        return {"points": [dict(sizes) for sizes in self.points], **effort, "max_configs": self.plan.max_configs}

    @property
    def _elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._begun

    def _problem(self, sizes: Mapping[str, int]) -> Problem:
        return Problem(self.kernel.name, sizes, self.dtype)

    def _tune_points(self) -> bool:
        """Tune the points that are left; return False if the user interrupted."""
        count = len(self.points)

        def tune_point(number: int, lane: Lane) -> TuneResult:
            share_s = self._share_s(_TUNING_SHARE, count - number)
            search_s = None if share_s is None else max(share_s - self._overhead_s, _MIN_SEARCH_S)
            started = time.monotonic()
            result = self._session("tuning", number, replace(self.options, budget_s=search_s), lane)
            searched_s = sum(result.phases.get(phase, 0.0) for phase in ("start", "search"))
            self._overhead_s = time.monotonic() - started - searched_s
            return result

        return self._at_points(range(self._progress.tuned, count), tune_point, "tuned")

    def _at_points(
        self, numbers: Sequence[int], run: Callable[[int, Lane], TuneResult], counter: Literal["tuned", "measured"]
    ) -> bool:
        """Hold a session at each point, at several at once on several GPUs; return False if the user interrupted.

        The points up to the first that is missing count as done when a later run resumes.
        """
        done: set[int] = set()
        jobs = [Job(partial(run, number)) for number in numbers]
        with closing(run_jobs(jobs, self.lane)) as ended:
            for place, result in ended:
                if isinstance(result, Exception):
                    raise result
                if result.interrupted and not self.lane.is_parallel:
                    return False
                done |= {numbers[place]} - ({numbers[place]} if result.interrupted else set())
                finished = next((number for number in numbers if number not in done), numbers[-1] + 1)
                progress = self._progress
                is_tuned = counter == "tuned"
                self._progress = replace(progress, tuned=finished) if is_tuned else replace(progress, measured=finished)
                self._save()
        return len(done) == len(numbers)

    def _measure(self, candidates: Sequence[Config]) -> bool:
        """Measure all candidates at every point; return False if the user interrupted."""
        count = len(self.points)
        left = range(self._progress.measured, count)
        numbers = [number for number in left if self._lacks_measurements(candidates, self.points[number])]

        def measure(number: int, lane: Lane) -> TuneResult:
            options = replace(
                self.options,
                sampler=BRUTE_FORCE,
                trials=None,
                until=None,
                budget_s=self._share_s(1.0, count - number),
                only=tuple(candidates),
                finals=0,
                transfer=False,
                fresh=False,
            )
            return self._session("measuring", number, options, lane)

        return self._at_points(numbers, measure, "measured")

    def _lacks_measurements(self, candidates: Sequence[Config], sizes: Mapping[str, int]) -> bool:
        """Return whether any candidate that is valid at a point was not tried there."""
        study_id = self.database.find_study(self._key_at(sizes))
        tried = self.database.tried(study_id) if study_id is not None else {}
        left = [config for config in candidates if config_key(config) not in tried]
        return any(not check_config(self.kernel.spec, config, sizes, self.device, self.dtype) for config in left)

    def _share_s(self, share: float, left: int) -> float | None:
        """Return one point's part of the remaining budget, in seconds; None without a budget."""
        if self.options.budget_s is None:
            return None
        rounds = math.ceil(left / self.lane.count)
        return max((share * self.options.budget_s - self._elapsed_s) / rounds, _MIN_SEARCH_S)

    def _session(
        self, phase: Literal["tuning", "measuring"], number: int, options: TuneOptions, lane: Lane
    ) -> TuneResult:
        problem, count = self._problem(self.points[number]), len(self.points)

        def observe(progress: Progress) -> None:
            with self._observing:
                self.observe(progress.within(Place(f"{phase} point", number + 1, count)))

        result = tune(
            self.kernel,
            problem,
            self.settings,
            lane.options(options),
            observe,
            worker_pool=self.worker_pool,
            lane=lane,
        )
        self._notices.update(dict.fromkeys(result.notices))
        return result

    def _save(self) -> None:
        self._progress = replace(self._progress, seconds=self._elapsed_s)
        FamilyStore(self.database).save_state(self.key, self.family, self.device, self._progress)

    def _learn(self, matrix: FamilyMatrix) -> FamilyRule:
        spec, max_configs = self.kernel.spec, self.plan.max_configs
        configs, resident = [one.config for one in matrix.configs], [one.blocks_per_sm for one in matrix.configs]

        def traits(problems: Sequence[Mapping[str, int]]) -> Traits:
            return Traits.of(spec, self.device, configs, resident, problems)

        members = sample_members(self.family)
        valid = meet_rules(spec, self.device, configs, members)
        data = TrainingData(matrix.times_us, matrix.proposed_by, traits(matrix.points), traits(members), valid)
        learned = learn_rule(data, list_features(spec, max_configs), max_configs)
        chosen = tuple(matrix.configs[column] for column in learned.chosen)
        without = losses_without(spec, self.device, self.dtype, matrix)
        return FamilyRule(self.family, chosen, learned.tree, _rule_points(matrix, learned, without))

    def _result(self, rule: FamilyRule | None, matrix: FamilyMatrix | None, resumed: int) -> FamilyResult:
        return FamilyResult(
            kernel=self.kernel.name,
            dtype=self.dtype,
            family=str(self.family),
            device=self.device,
            rule=rule,
            candidates=len(matrix.configs) if matrix is not None else 0,
            default_loss=_mean_loss(matrix, self.kernel.spec.default) if matrix is not None else None,
            seconds=self._elapsed_s,
            resumed=resumed,
            database=self.database.location,
            notices=tuple(self._notices),
        )


def _rule_points(matrix: FamilyMatrix, learned: LearnedRule, without: Sequence[float]) -> tuple[RulePoint, ...]:
    chosen = list(learned.chosen)
    return tuple(
        RulePoint(
            sizes=dict(sizes),
            times_us=tuple(_time_with_interval(triple) for triple in matrix.measurements[row, chosen]),
            best_us=float(np.nanmin(matrix.times_us[row])),
            loss=float(learned.losses[row]),
            held_out=float(learned.held_out[row]) if np.isfinite(learned.held_out[row]) else None,
            without=without[row],
        )
        for row, sizes in enumerate(matrix.points)
    )


def _time_with_interval(triple: Sequence[float]) -> tuple[float, float, float] | None:
    time_us, low_us, high_us = (float(value) for value in triple)
    return (time_us, low_us, high_us) if np.isfinite(time_us) else None


def _mean_loss(matrix: FamilyMatrix, config: Config) -> float | None:
    """Return the mean loss of one configuration over the points where it runs; None where it runs at none."""
    column = next((c for c, one in enumerate(matrix.configs) if config_key(one.config) == config_key(config)), None)
    if column is None:
        return None
    times_us = matrix.times_us
    return float(np.nanmean(times_us[:, column] / np.nanmin(times_us, axis=1) - 1.0))
