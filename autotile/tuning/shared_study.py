"""A study that several sessions share: what each of them tries, and what the others have found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autotile.core.documents import decode_json
from autotile.core.model import Config, Trial
from autotile.database.run_record import RunRecord
from autotile.space.search_space import SearchSpace
from autotile.tuning.stopping import TrialLog

_INHERIT_S = 5.0
"""Interval at which a session looks for claims of others that died."""


class SharedStudy:
    """One session's view of the sessions that tune the same problem at the same time.

    Parameters
    ----------
    record
        The run, which claims configurations in the database.
    log
        Trials of the study, to which those of the other sessions are added.
    space
        Valid configurations.
    score
        Function that adds the objective and metrics to a trial.

    Attributes
    ----------
    others
        Number of configurations that other sessions are trying, by the last look.
    """

    def __init__(self, record: RunRecord, log: TrialLog, space: SearchSpace, score: Callable[[Trial], Trial]) -> None:
        self._record = record
        self._log = log
        self._space = space
        self._score = score
        self._news: list[Trial] = []
        self._looked_at = time.monotonic()
        self.others = 0

    def claim(self, *configs: Config, room: int | None = None) -> tuple[bool, ...]:
        """Return whether this session may try each of these configurations; no other does so then.

        Parameters
        ----------
        room
            Number of trials that may still begin besides those of this session that run; None for any number.
        """
        claimed = self._record.claim(*configs, room=room)
        self._learn(claimed.news)
        self.others = claimed.others
        return claimed.ours

    def inherit(self, *, now: bool = False) -> list[Config]:
        """Return the configurations that sessions that died were trying, which are now this session's.

        Parameters
        ----------
        now
            Whether to look even if it is not long since the last time.
        """
        if not now and time.monotonic() - self._looked_at < _INHERIT_S:
            return []
        self._looked_at = time.monotonic()
        keys, claimed = self._record.inherit()
        self._learn(claimed.news)
        self.others = claimed.others
        found: list[Config] = []
        for key in keys:
            row = self._space.row_of(decode_json(key.encode(), dict))
            config = self._space.config(row) if row is not None else None
            if config is None or self._log.find(config) is not None:
                self._record.disclaim(key)  # it is not valid here, or was tried
            else:
                found.append(config)
        return found

    def take_news(self) -> list[Trial]:
        """Return the trials of other sessions that were added to the log since the last call."""
        news, self._news = self._news, []
        return news

    def _learn(self, news: Sequence[Trial]) -> None:
        for trial in news:
            if self._space.row_of(trial.config) is not None and self._log.find(trial.config) is None:
                scored = self._score(trial)
                self._log.add(scored)
                self._news.append(scored)
