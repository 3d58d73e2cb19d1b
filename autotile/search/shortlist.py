"""The candidates of a search that are compiled and wait to be measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from autotile.core.model import Config, Trial
from autotile.search.embedding import features_of
from autotile.search.samplers import Lookahead
from autotile.search.search import Search


class Shortlist:
    """Candidates of a search that are compiled and wait to be measured; more are compiled than measured.

    A candidate is nominated by its parameters and compiled. Among the compiled candidates, the best one by the results
    and resources known by then becomes the next trial. The others wait; beyond a limit, the oldest are set aside and
    may be nominated again. A candidate that does not compile or does not fit the device becomes a trial at once, since
    it takes no GPU time.

    The set to choose from depends on the number of trials and not on the order in which candidates finish compiling,
    and a trial is chosen when exactly `Lookahead.queued` chosen ones have no result, so that a search is repeatable on
    any machine. The caller repeats: `propose` until None, `ready`, `tell` a rejected one of these if there is one, else
    `choose`; and while none is ready, `tell` the oldest of the chosen ones.

    Parameters
    ----------
    search
        Source of the candidates.
    lookahead
        Number of candidates that wait; it may rank only if the sampler does.
    sm_count
        Number of SMs of the device.
    earlier
        Trials of earlier sessions, oldest first. The search continues as that of the earlier session would have: the
        candidates that waited wait again.
    """

    def __init__(self, search: Search, lookahead: Lookahead, sm_count: int = 1, earlier: Iterable[Trial] = ()) -> None:
        self._search = search
        self._lookahead = lookahead
        self._sm_count = sm_count
        self._waiting: dict[int, Config] = {}
        """Candidates that were proposed and not chosen, the oldest first."""
        self._running: dict[int, None] = {}
        """Rows that were chosen and whose results were not told, the oldest first."""
        self._begun = 0
        """Number of candidates that were chosen, in this session and the earlier ones."""
        self._set_aside = 0
        self._described: set[int] = set()
        self._earlier: dict[int, Trial] = {}
        """Trials of earlier sessions that no choice may know yet, by row; by a negative number without a valid row."""
        self._again: dict[int, Config] = {}
        """Candidates that were nominated while trials were replayed, and that this session has not compiled."""
        if lookahead.ranks:
            for number, trial in enumerate(earlier):
                row = search.row_of(trial.config)
                self._earlier[-1 - number if row is None else row] = trial
        else:
            search.replay(earlier)

    @property
    def expected_gain(self) -> float | None:
        """Relative gain of the best speed that is expected of the last proposals together, see `Search`.

        Where candidates are ranked, these are 64, of which about 32 trials come.
        """
        return self._search.gain_of(self._expecting)

    @property
    def settled_gain(self) -> float | None:
        """As for `Search`."""
        return self._search.settled_gain

    def trials_until_expected(self, gain: float) -> float | None:
        """Return the number of trials after which `expected_gain` is below ``gain``; None if that is not foreseen."""
        return self._in_trials(self._search.proposals_until(gain, self._expecting))

    def trials_until_settled(self, gain: float) -> float | None:
        """Return the number of trials after which `settled_gain` is below ``gain``; None if that is not foreseen."""
        return self._in_trials(self._search.proposals_until(gain))

    @property
    def _expecting(self) -> int:
        """Number of proposals of `expected_gain`, whatever the number of GPUs."""
        return self._lookahead.per_measured * self._lookahead.compiling // self._lookahead.gpus

    def _in_trials(self, proposals: int | None) -> float | None:
        return None if proposals is None else proposals / self._lookahead.per_measured

    def close(self) -> None:
        """Release the resources of the sampler."""
        self._search.close()

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next row to compile, with its configuration; None if enough rows wait, or no row is left.

        Parameters
        ----------
        room
            Number of trials that may still begin; None for any number.
        """
        if room == 0:
            return None
        self._replay()
        if self._is_full:
            return None
        wanted = self._wanted(room)
        if self._again and len(self._waiting) - len(self._again) < wanted:
            row = next(iter(self._again))
            return row, self._again.pop(row)
        return self._propose(wanted)

    def ready(self) -> list[int]:
        """Return the rows to choose the next trial from, the oldest first; empty if none waits.

        It is also empty while more than `Lookahead.queued` chosen rows have no result.
        """
        self._replay()
        return [row for row in self._ready() if row not in self._again]

    def waiting(self) -> list[int]:
        """Return all rows that `propose` returned and that were not chosen, the oldest first; the ready ones included.

        Those of an earlier session that `propose` has yet to return are not among them.
        """
        return [row for row in self._waiting if row not in self._again]

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the row to measure, given rows that wait with the results of their compilation.

        They are those that are `ready`, or as many others that happen to have compiled first.
        """
        for row in compiled.keys() - self._described:
            self._describe(row, compiled[row])
        rows = list(compiled)
        row = self._search.select(rows) if self._lookahead.ranks else rows[0]
        self._begin(row)
        return row

    def tell(self, row: int, trial: Trial) -> None:
        """Record the trial of a row that was chosen, or that was ready and rejected."""
        if row in self._running:
            del self._running[row]
        else:
            del self._waiting[row]
            self._again.pop(row, None)
        self._describe(row, trial)
        self._search.tell(row, trial)
        while min(len(self._waiting), self._ready_count) > self._lookahead.max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._again.pop(oldest, None)
            self._search.set_aside(oldest)
            self._set_aside += 1

    def leave(self, row: int) -> None:
        """Leave a row that was chosen, or was ready and rejected, to another session; `add` takes its trial."""
        self._running.pop(row, None)
        self._waiting.pop(row, None)
        self._again.pop(row, None)

    def add(self, trial: Trial) -> None:
        """Learn from a trial that was not measured here."""
        row = self._search.row_of(trial.config)
        if row is not None and self._search.is_pending(row):
            self._waiting.pop(row, None)
            self._search.tell(row, trial)
            return
        if row is not None:
            self._waiting.pop(row, None)
            self._again.pop(row, None)
            self._describe(row, trial)
        self._search.add(trial)

    @property
    def _is_full(self) -> bool:
        """Whether a result must be told before the next trial may be chosen."""
        return len(self._running) > self._lookahead.queued

    def _wanted(self, room: int | None = None) -> int:
        """Return the number of candidates that should wait."""
        if not self._lookahead.ranks:
            wanted = self._lookahead.compiling - len(self._running)
            return wanted if room is None else min(wanted, room)
        wanted = self._lookahead.nominated(self._begun)
        if room is not None:
            wanted = min(wanted, self._lookahead.compiled(self._begun + room - 1))
        return wanted - self._begun - self._set_aside

    def _ready(self) -> list[int]:
        return [] if self._is_full else list(islice(self._waiting, self._ready_count))

    @property
    def _ready_count(self) -> int:
        """Number of candidates to choose among, if as many wait."""
        if not self._lookahead.ranks:
            return 1
        return max(1, self._lookahead.compiled(self._begun) - self._begun - self._set_aside)

    def _propose(self, wanted: int) -> tuple[int, Config] | None:
        """Propose a row if fewer than ``wanted`` wait."""
        if len(self._waiting) >= wanted:
            return None
        proposed = self._search.nominate() if self._lookahead.ranks else self._search.propose()
        if proposed is not None:
            self._waiting[proposed[0]] = proposed[1]
        return proposed

    def _begin(self, row: int) -> None:
        del self._waiting[row]
        self._again.pop(row, None)
        self._running[row] = None
        self._begun += 1
        if self._lookahead.ranks:
            self._search.begin(row)

    def _replay(self) -> None:
        """Repeat the nominations, choices and results of earlier sessions, up to the first choice that they lack.

        Results that this choice must not know are told after it, by a later call. A trial that was not ready when it is
        due is one of another sampler or seed.
        """
        while self._earlier:
            while not self._is_full and (proposed := self._propose(self._wanted())) is not None:
                self._again[proposed[0]] = proposed[1]
            ready = self._ready()
            due = next((row for row in ready if row in self._earlier and _rejected(self._earlier[row])), None)
            if due is None and not self._is_full:
                due = next((row for row in self._earlier if self._may_be_chosen(row)), None)
                if due is None:
                    return
                if due in self._waiting:
                    self._begin(due)
                    continue
            self._tell_replayed(next(iter(self._earlier)) if due is None else due)

    def _may_be_chosen(self, row: int) -> bool:
        """Return whether a replayed trial was chosen, rather than rejected, and is not running yet."""
        return row not in self._running and not _rejected(self._earlier[row])

    def _tell_replayed(self, row: int) -> None:
        trial = self._earlier.pop(row)
        if row in self._running or row in self._waiting:
            self.tell(row, trial)
            return
        self.add(trial)

    def _describe(self, row: int, trial: Trial) -> None:
        self._described.add(row)
        features = features_of(trial, self._sm_count) if self._lookahead.ranks else None
        if features is not None:
            self._search.describe(row, features)


def _rejected(trial: Trial) -> bool:
    """Return whether a trial ended before it could be measured."""
    return trial.stage in ("compile", "resources")
