"""Times of configurations, study by study, without all else that a trial holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select

from autotile.ground.model import Outcome, config_key
from autotile.store.database import Database
from autotile.store.keys import TuningKey
from autotile.store.schema import TRIALS


@dataclass(frozen=True, slots=True)
class StudyTimes:
    """What was measured of one problem.

    Attributes
    ----------
    best
        `config_key` of the winner.
    times_us
        Newest time of each configuration that ran to its end, by `config_key`; the finals' goes before the search's.
    """

    key: TuningKey
    best: str
    times_us: Mapping[str, float]

    @property
    def best_us(self) -> float:
        """The winner's time."""
        return self.times_us[self.best]

    def loss(self, config: str) -> float | None:
        """Time of a configuration over the winner's, minus 1, at least 0; None where it was not measured."""
        time_us = self.times_us.get(config)
        return None if time_us is None else max(0.0, time_us / self.best_us - 1.0)


def study_times(database: Database, kernel: str) -> list[StudyTimes]:
    """Times of every study of a kernel that has a winner.

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
    query = (
        select(TRIALS.c.config_key, TRIALS.c.time_us)
        .where(TRIALS.c.study_id == study_id, TRIALS.c.outcome == str(Outcome.OK), TRIALS.c.time_us.is_not(None))
        .order_by(TRIALS.c.phase.desc(), TRIALS.c.id)  # the search's, then the finals'
    )
    with database.reading() as connection:
        return {row.config_key: row.time_us for row in connection.execute(query)}
