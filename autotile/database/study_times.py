"""Times of the configurations of tuned problems, from which the cost of a miss is estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotile.core.model import Outcome, config_key
from autotile.database.database import Database
from autotile.database.keys import TuningKey


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
    found = database.stored_trials(study_id)
    found.sort(key=lambda stored: stored.phase == "final")  # times of the finals replace those of the search
    trials = (stored.trial for stored in found)
    return {config_key(t.config): t.time_us for t in trials if t.outcome is Outcome.OK and t.time_us is not None}
