"""Candidates that the user names, in place of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autotile.core.model import Config, Trial, config_key

_QUEUED = 1
"""Candidates that the device is given beside the one that it runs."""


class GivenCandidates:
    """A proposer of given configurations, see `autotile.tuning.pipeline.Proposer`.

    They are measured in the order in which they have compiled. Their row numbers are negative, so that they differ from
    those of a search that shares the pipeline.

    Parameters
    ----------
    configs
        Valid configurations; of equal ones, the first counts.
    """

    def __init__(self, configs: Iterable[Config]) -> None:
        distinct = {config_key(config): dict(config) for config in configs}
        self._unproposed: dict[int, Config] = dict(
            zip(range(-1, -len(distinct) - 1, -1), distinct.values(), strict=True)
        )
        self._waiting: dict[int, Config] = {}
        self._running: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether a candidate has not ended."""
        return bool(self._unproposed or self._waiting or self._running)

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next configuration to compile; None after the last."""
        if not self._unproposed:
            return None
        row = next(iter(self._unproposed))
        self._waiting[row] = self._unproposed.pop(row)
        return row, self._waiting[row]

    def ready(self) -> list[int]:
        """Return the oldest candidate that waits; none while the device has enough."""
        return [] if len(self._running) > _QUEUED else list(self._waiting)[:1]

    def waiting(self) -> list[int]:
        """Return all candidates that wait."""
        return list(self._waiting)

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the oldest of the compiled candidates."""
        row = next(row for row in self._waiting if row in compiled)
        del self._waiting[row]
        self._running.add(row)
        return row

    def end(self, row: int) -> None:
        """Take note that the trial of a candidate has ended, or was rejected before it could run."""
        self._waiting.pop(row, None)
        self._running.discard(row)
