"""What it may have cost that something was served for want of an exact result.

Where the problem was tuned since, its study says: the time of what had been served, less the winner's. Otherwise the
time of a call is that of the nearest tuned problem, scaled by the work, and the part of it that is lost is what
serving in the same way would have lost at the problems that are tuned: each of them in turn is served as if it were
not. It is an estimate, and says nothing where too little is tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotile.core.model import Problem, config_key
from autotile.database.database import Database, StudyTimes, study_times
from autotile.database.family_store import FamilyStore
from autotile.database.keys import space_hash
from autotile.database.studies import StoredMiss
from autotile.database.winners import StoredRule
from autotile.kernel.expressions import Expression
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance


@dataclass(frozen=True, slots=True)
class MissCost:
    """Of one call.

    Attributes
    ----------
    call_us
        How long it takes.
    lost_us
        How much longer than the best would.
    measured
        Whether both were measured; they are estimated otherwise.
    """

    call_us: float
    lost_us: float
    measured: bool


class MissCosts:
    """Costs of what was missed of one kernel.

    Parameters
    ----------
    database
        Where it is tuned.
    kernel
        As it is now: results of other versions say nothing.
    """

    def __init__(self, database: Database, kernel: Kernel) -> None:
        version = (kernel.source_hash, space_hash(kernel.spec))
        self._kernel = kernel
        self._default = config_key(kernel.spec.default)
        self._studies = [
            study
            for study in study_times(database, kernel.name)
            if (study.key.template_hash, study.key.space_hash) == version and study.key.l2_mode == "cold"
        ]
        self._rules = [
            stored
            for stored in FamilyStore(database).rules(kernel.name)
            if (stored.key.template_hash, stored.key.space_hash) == version
        ]

    def of(self, miss: StoredMiss) -> MissCost | None:
        """Of one call of a missed problem; None where nothing is known."""
        alike = [study for study in self._studies if study.key.dtype == miss.problem.dtype]
        here = [study for study in alike if study.key.gpu_name == miss.gpu_name]
        own = next((study for study in here if dict(study.key.sizes) == dict(miss.problem.sizes)), None)
        if own is not None:
            loss = self._loss_at(own, miss.tier, alike)
            return MissCost(own.best_us * (1.0 + loss), own.best_us * loss, True) if loss is not None else None
        loss = self._expected_loss(miss, here, alike)
        nearest = _nearest(here, miss.problem)
        if loss is None or nearest is None:
            return None
        best_us = nearest.best_us * self._work_ratio(miss.problem, nearest.key.problem)
        return MissCost(best_us * (1.0 + loss), best_us * loss, False)

    def _expected_loss(self, miss: StoredMiss, here: Sequence[StudyTimes], alike: Sequence[StudyTimes]) -> float | None:
        if miss.tier == "family":
            return next((stored.rule.mean_held_out for stored in self._rules if _is_for(stored, miss)), None)
        losses = [loss for study in here if (loss := self._loss_at(study, miss.tier, alike)) is not None]
        return sum(losses) / len(losses) if losses else None

    def _loss_at(self, study: StudyTimes, tier: str, alike: Sequence[StudyTimes]) -> float | None:
        """What serving by a tier loses at a problem that is tuned, as if it were not."""
        if tier == "default":
            return study.loss(self._default)
        same_gpu = tier != "transferred"
        others = [
            other
            for other in alike
            if dict(other.key.sizes) != dict(study.key.sizes) and (other.key.gpu_name == study.key.gpu_name) == same_gpu
        ]
        served = _nearest(others, study.key.problem)
        return study.loss(served.best) if served is not None else None

    def _work_ratio(self, asked: Problem, tuned: Problem) -> float:
        """How many times the work it is, by operations or by bytes; by the sizes where the file states neither."""
        work = self._kernel.spec.work
        ratios = [
            _value(expression, asked) / _value(expression, tuned)
            for expression in (work.flops, work.bytes)
            if expression is not None and _value(expression, tuned) > 0
        ]
        return max(ratios) if ratios else _volume(asked) / _volume(tuned)


def _nearest(studies: Sequence[StudyTimes], problem: Problem) -> StudyTimes | None:
    return min(studies, key=lambda study: size_distance(study.key.sizes, problem.sizes), default=None)


def _is_for(stored: StoredRule, miss: StoredMiss) -> bool:
    return stored.key.gpu_name == miss.gpu_name and dict(miss.problem.sizes) in stored.rule.family


def _value(expression: Expression, problem: Problem) -> float:
    return float(expression.evaluate(problem.sizes))


def _volume(problem: Problem) -> float:
    product = 1.0
    for size in problem.sizes.values():
        product *= max(size, 1)
    return product
