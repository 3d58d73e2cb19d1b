"""Candidates between their proposal and their trial: which of those that were compiled is measured next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from autotile.ground.model import Config, Trial
from autotile.search.compiled import features_of
from autotile.search.lookahead import Lookahead
from autotile.search.search import Search


class Shortlist:
    """The candidates of a search that wait: more are compiled than measured.

    A candidate is nominated with what its parameters let one expect, and compiled. Of all that are compiled, the one
    that is best by what is known by then, what the compiler said of it included, becomes a trial. The others wait; the
    oldest of many are set aside, and may be nominated again as if they never had been. What does not compile, or does
    not fit the device, is a trial at once: it costs no time on the GPU.

    Which candidates there are to choose from depends on how many were tried and not on which compiled first, so that a
    search repeats on any machine.

    Parameters
    ----------
    search
        Proposes.
    lookahead
        How many wait; more than one for each that is measured only where the search can rank.
    sm_count
        SMs of the device.
    earlier
        Trials of earlier sessions, oldest first. A search goes on as it would have gone on, had it not ended: the
        candidates that waited wait again.
    """

    def __init__(self, search: Search, lookahead: Lookahead, sm_count: int = 1, earlier: Iterable[Trial] = ()) -> None:
        self._search = search
        self._lookahead = lookahead
        self._sm_count = sm_count
        self._waiting: dict[int, Config] = {}
        """Proposed and not tried, the oldest first."""
        self._measured = 0
        self._set_aside = 0
        self._described: set[int] = set()
        self._earlier: deque[Trial] = deque(earlier if lookahead.ranks else ())
        self._again: deque[tuple[int, Config]] = deque()
        if not lookahead.ranks:
            search.replay(earlier)

    @property
    def expected_gain(self) -> float | None:
        """As for `autotile.search.search.Search`."""
        return self._search.expected_gain

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """The next row to compile with its configuration; None where enough wait, or where no row is left.

        Parameters
        ----------
        room
            Trials that may still begin; None for any number.
        """
        if room == 0:
            return None
        self._go_through_again()
        wanted = self._lookahead.open(self._measured)
        if room is not None:
            wanted = min(wanted, self._lookahead.useful(self._measured, room))
        if self._again and len(self._waiting) - len(self._again) < wanted - self._set_aside:
            return self._again.popleft()
        return self._propose(wanted)

    def ready(self) -> list[int]:
        """Rows of which one is to be tried next, the oldest first; empty where none waits."""
        most = self._lookahead.ready(self._measured) - self._set_aside
        return list(self._waiting)[: max(1, most)]

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """The row to measure, given the rows that are ready as far as they came when they were compiled."""
        rows = list(compiled)
        if not self._lookahead.ranks:
            return rows[0]
        for row in compiled.keys() - self._described:
            self._describe(row, compiled[row])
        return self._search.prefer(rows)

    def tell(self, row: int, trial: Trial) -> None:
        """Say how a row that was ready ended."""
        del self._waiting[row]
        self._measured += not _rejected(trial)
        self._describe(row, trial)
        self._search.tell(row, trial)
        while len(self.ready()) > self._lookahead.kept:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._search.set_aside(oldest)
            self._set_aside += 1

    def _propose(self, wanted: int) -> tuple[int, Config] | None:
        """One more, where fewer than are wanted wait."""
        if len(self._waiting) >= wanted - self._set_aside:
            return None
        proposed = self._search.nominate() if self._lookahead.ranks else self._search.propose()
        if proposed is not None:
            self._waiting[proposed[0]] = proposed[1]
        return proposed

    def _go_through_again(self) -> None:
        """Nominate what was nominated between the trials that are replayed."""
        if not self._earlier:
            return
        while self._earlier:
            trial = self._earlier.popleft()
            while self._propose(self._lookahead.open(self._measured)) is not None:
                pass
            row = self._search.row_of(trial.config)
            if row is not None and row in self.ready():
                self.tell(row, trial)
                continue
            if row is not None:  # a trial of another sampler or seed
                self._waiting.pop(row, None)
                self._describe(row, trial)
            self._search.add(trial)
        self._again.extend(self._waiting.items())

    def _describe(self, row: int, trial: Trial) -> None:
        self._described.add(row)
        features = features_of(trial, self._sm_count) if self._lookahead.ranks else None
        if features is not None:
            self._search.describe(row, features)


def _rejected(trial: Trial) -> bool:
    """Whether it ended before it could have been measured."""
    return trial.stage in ("compile", "resources")
