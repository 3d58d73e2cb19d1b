"""Misses: calls of problems for which no exact result was stored, and the time that the fallbacks may have cost.

If the problem has been tuned since, its study gives the cost: time of the configuration that was served, minus time of
the winner. Otherwise the cost is estimated. The time of a call is that of the nearest tuned problem, scaled by the
work. The fraction of it that is lost is the mean of what the same kind of fallback loses at the tuned problems, each
of which in turn is served as if it were not tuned. There is no estimate if too little is tuned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotile.core.model import Outcome, Problem, config_key
from autotile.database.database import Database
from autotile.database.keys import TuningKey, space_hash
from autotile.database.queries import StoredMiss
from autotile.database.winners import StoredRule
from autotile.kernel.expressions import Expression
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance


@dataclass(frozen=True, slots=True)
class MissCost:
    """Cost of one missed call.

    Attributes
    ----------
    call_us
        Time of the call, in microseconds.
    lost_us
        Part of it that the best configuration would have saved, in microseconds.
    measured
        Whether both times were measured at this problem rather than estimated from others.
    """

    call_us: float
    lost_us: float
    measured: bool


class MissCostEstimator:
    """Costs of the misses of one kernel.

    Parameters
    ----------
    kernel
        Kernel in its current version; studies and rules of other versions are ignored.
    studies
        Measured times of the kernel's studies.
    rules
        Rules of the kernel's families, newest first.
    """

    def __init__(self, kernel: Kernel, studies: Iterable[StudyTimes], rules: Iterable[StoredRule]) -> None:
        version = (kernel.source_hash, space_hash(kernel.spec))
        self._kernel = kernel
        self._default = config_key(kernel.spec.default)
        self._studies = [
            study
            for study in studies
            if (study.key.template_hash, study.key.space_hash) == version and study.key.l2_mode == "cold"
        ]
        self._rules = [rule for rule in rules if (rule.key.template_hash, rule.key.space_hash) == version]

    def cost(self, miss: StoredMiss) -> MissCost | None:
        """Return the cost of one call of a missed problem; None if too little is tuned to tell."""
        same_dtype = [study for study in self._studies if study.key.dtype == miss.problem.dtype]
        same_gpu = [study for study in same_dtype if study.key.gpu_name == miss.gpu_name]
        own = next((study for study in same_gpu if dict(study.key.sizes) == dict(miss.problem.sizes)), None)
        if own is not None:
            loss = self._loss_at(own, miss.tier, same_dtype)
            return MissCost(own.best_us * (1.0 + loss), own.best_us * loss, True) if loss is not None else None
        loss = self._expected_loss(miss, same_gpu, same_dtype)
        nearest = _nearest(same_gpu, miss.problem)
        if loss is None or nearest is None:
            return None
        best_us = nearest.best_us * self._work_ratio(miss.problem, nearest.key.problem)
        return MissCost(best_us * (1.0 + loss), best_us * loss, False)

    def _expected_loss(
        self, miss: StoredMiss, same_gpu: Sequence[StudyTimes], same_dtype: Sequence[StudyTimes]
    ) -> float | None:
        """Return the mean relative loss of a fallback of this tier; None if unknown."""
        if miss.tier == "family":
            return next((stored.rule.mean_held_out for stored in self._rules if _applies(stored, miss)), None)
        losses = [loss for study in same_gpu if (loss := self._loss_at(study, miss.tier, same_dtype)) is not None]
        return sum(losses) / len(losses) if losses else None

    def _loss_at(self, study: StudyTimes, tier: str, same_dtype: Sequence[StudyTimes]) -> float | None:
        """Return the relative loss of a fallback at a tuned problem, as if that problem were not tuned."""
        if tier == "default":
            return study.loss(self._default)
        wants_same_gpu = tier != "transferred"
        others = [
            other
            for other in same_dtype
            if dict(other.key.sizes) != dict(study.key.sizes)
            and (other.key.gpu_name == study.key.gpu_name) == wants_same_gpu
        ]
        served = _nearest(others, study.key.problem)
        return study.loss(served.best) if served is not None else None

    def _work_ratio(self, asked: Problem, tuned: Problem) -> float:
        """Return the ratio of the work of two problems.

        It is the larger of the ratios of operations and of bytes, or the ratio of the products of the sizes if the
        search-space file states neither.
        """
        work = self._kernel.spec.work
        ratios = [
            self._value(expression, asked) / self._value(expression, tuned)
            for expression in (work.flops, work.bytes)
            if expression is not None and self._value(expression, tuned) > 0
        ]
        return max(ratios) if ratios else _volume(asked) / _volume(tuned)

    def _value(self, expression: Expression, problem: Problem) -> float:
        """Return the work of a problem, in the default configuration if it depends on parameters."""
        return float(expression.evaluate({**self._kernel.spec.default, **problem.sizes}))


def _nearest(studies: Sequence[StudyTimes], problem: Problem) -> StudyTimes | None:
    return min(studies, key=lambda study: size_distance(study.key.sizes, problem.sizes), default=None)


def _applies(stored: StoredRule, miss: StoredMiss) -> bool:
    return stored.key.gpu_name == miss.gpu_name and dict(miss.problem.sizes) in stored.rule.family


def _volume(problem: Problem) -> float:
    return float(math.prod(max(size, 1) for size in problem.sizes.values()))


@dataclass(frozen=True, slots=True)
class StudyTimes:
    """Times of one problem's configurations.

    Attributes
    ----------
    best
        `config_key` of the winner.
    times_us
        Newest time of each successful configuration, by `config_key`; a time of the finals precedes one of the search.
    """

    key: TuningKey
    best: str
    times_us: Mapping[str, float]

    @property
    def best_us(self) -> float:
        """Time of the winner."""
        return self.times_us[self.best]

    def loss(self, config: str) -> float | None:
        """Return the time of a configuration over the winner's, minus 1, at least 0; None if it was not measured."""
        time_us = self.times_us.get(config)
        return None if time_us is None else max(0.0, time_us / self.best_us - 1.0)


def study_times(database: Database, kernel: str) -> list[StudyTimes]:
    """Return the times of every study of a kernel that has a winner.

    Raises
    ------
    DatabaseError
        The database cannot be read.
    """
    return [
        StudyTimes(best.key, config_key(best.trial.config), _times(database, best.study_id))
        for best in database.best(kernel)
        if best.trial.time_us is not None
    ]


def _times(database: Database, study_id: int) -> dict[str, float]:
    trials = (stored.trial for stored in database.standing_trials(study_id))
    return {config_key(t.config): t.time_us for t in trials if t.outcome is Outcome.OK and t.time_us is not None}
