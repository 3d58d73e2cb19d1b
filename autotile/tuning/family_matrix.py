"""What the studies of a family's points hold: which configurations are good where, and what each took everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autotile.ground.model import Config, Outcome, Trial, config_key
from autotile.ground.rule import RuleConfig
from autotile.store.keys import TuningKey

if TYPE_CHECKING:
    from autotile.store.database import Database

_BEST_OF_EACH = 3
"""Configurations that a point proposes. What is second at one point is often the best at its neighbours."""
_FAULTS = (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED, Outcome.TIMED_OUT)
"""Outcomes of a configuration that must not be served anywhere, when any point has seen them."""


@dataclass(frozen=True)
class FamilyMatrix:
    """Measured times, and what is known of the configurations.

    Attributes
    ----------
    points
        Sizes of the problems at which any of them ran.
    configs
        The configurations, each with what it was compiled to.
    measurements
        Time with its interval in microseconds, shape (points, configurations, 3); NaN where it cannot be served.
    proposed_by
        Whether a point proposed the configuration, shape (points, configurations).
    """

    points: tuple[Mapping[str, int], ...]
    configs: tuple[RuleConfig, ...]
    measurements: NDArray[np.float64]
    proposed_by: NDArray[np.bool_]

    @property
    def times_us(self) -> NDArray[np.float64]:
        """Shape (points, configurations)."""
        return np.asarray(self.measurements[:, :, 0])


def proposals(database: Database, keys: Sequence[TuningKey]) -> list[list[Config]]:
    """The best few configurations of each point's study, its winner first."""
    return [_best_of(database, key) for key in keys]


def union(proposed: Sequence[Sequence[Config]], default: Config) -> list[Config]:
    """Every proposed configuration once, and the default."""
    found = {config_key(config): config for configs in proposed for config in configs}
    return list({**found, config_key(default): default}.values())


def read_matrix(
    database: Database, keys: Sequence[TuningKey], proposed: Sequence[Sequence[Config]], configs: Sequence[Config]
) -> FamilyMatrix:
    """Times of configurations at all points; those that failed anywhere, and points where nothing ran, are left out."""
    studies = [_newest(database, key) for key in keys]
    wanted = [config_key(config) for config in configs]
    usable = [key for key in wanted if not any(_is_faulty(study.get(key)) for study in studies)]
    kept = [key for key in usable if any(_has_time(study.get(key)) for study in studies)]
    ran = [number for number, study in enumerate(studies) if any(_has_time(study.get(key)) for key in kept)]
    by_point = [{config_key(config) for config in proposed[number]} for number in ran]
    return FamilyMatrix(
        points=tuple(keys[number].sizes for number in ran),
        configs=tuple(_compiled(key, studies) for key in kept),
        measurements=np.array([[_times(studies[number].get(key)) for key in kept] for number in ran]),
        proposed_by=np.array([[key in found for key in kept] for found in by_point], np.bool_),
    )


def _best_of(database: Database, key: TuningKey) -> list[Config]:
    study_id = database.find_study(key)
    if study_id is None:
        return []
    winner = [best.trial.config for best in database.best(study_id=study_id)]
    ran = [trial for trial in _newest(database, key).values() if trial.outcome is Outcome.OK]
    ordered = [trial.config for trial in sorted(ran, key=lambda trial: trial.time_us or np.inf)]
    found = {config_key(config): config for config in [*winner, *ordered]}
    return list(found.values())[:_BEST_OF_EACH]


def _newest(database: Database, key: TuningKey) -> dict[str, Trial]:
    """Newest trial of each configuration in a study's searches, but what finals refused as they refused it."""
    study_id = database.find_study(key)
    if study_id is None:
        return {}
    searched = {config_key(trial.config): trial for trial in database.trials(study_id, phase="search")}
    finals = database.trials(study_id, phase="final")
    return {**searched, **{config_key(trial.config): trial for trial in finals if not trial.outcome.has_time}}


def _is_faulty(trial: Trial | None) -> bool:
    return trial is not None and trial.outcome in _FAULTS


def _has_time(trial: Trial | None) -> bool:
    return trial is not None and trial.outcome.has_time and trial.measurement is not None


def _times(trial: Trial | None) -> tuple[float, float, float]:
    if trial is None or trial.measurement is None or not trial.outcome.has_time:
        return np.nan, np.nan, np.nan
    return trial.measurement.time_us, trial.measurement.low_us, trial.measurement.high_us


def _compiled(key: str, studies: Sequence[Mapping[str, Trial]]) -> RuleConfig:
    """A configuration with what it was compiled to at the first point where it ran."""
    trial = next(study[key] for study in studies if _has_time(study.get(key)))
    return RuleConfig(trial.config, trial.resources, trial.occupancy.blocks_per_sm if trial.occupancy else 0)
