"""A search over a space: what it proposes and learns from, and the candidates that wait to be measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike

from autotile.core.model import TIME, Config, Trial, objective_values
from autotile.errors import ConfigError
from autotile.search.gaussian_process import features_of
from autotile.search.gp_sampler import FeasibleGPSampler
from autotile.search.row_sampler import relative_error
from autotile.search.samplers import Lookahead, check_sampler, resolve_sampler, sampler_entry
from autotile.search.transfer import Estimate, MisleadingSource, Source
from autotile.space.search_space import SearchSpace

_EXPECTED_PROPOSALS = 256
"""Number of proposals of an expected gain: some 128 trials where candidates are ranked; see docs/search.md."""


class Search:
    """A sampler of rows: it proposes them, and learns from their trials; no row is proposed twice.

    The same seed and the same trials give the same proposals. The configurations of ``first`` are proposed first if
    they are available rows; ``available`` is a mask over the rows, shape (rows,), None for all. By the number of
    ``trials`` granted in total, None for any, ``auto`` is resolved, and some strategies of Kernel Tuner schedule their
    search. Trials that ran have a value of each of the objectives to minimise, of `autotile.core.model`. Samplers that
    transfer use the trials of ``sources``; the default one, where there are none, the estimated time of each row.

    Errors are those of `check_sampler`, and an `InputError` if the seed is negative.
    """

    def __init__(
        self,
        space: SearchSpace,
        sampler: str = "auto",
        seed: int = 0,
        *,
        first: Iterable[Config] = (),
        available: ArrayLike | None = None,
        trials: int | None = None,
        objectives: Sequence[str] = (TIME,),
        sources: Sequence[Source] = (),
        estimate: Estimate | None = None,
    ) -> None:
        check_sampler(sampler, objectives)
        self.sampler = resolve_sampler(sampler, space, available, trials)
        entry = sampler_entry(self.sampler)
        self._rows = entry.make(
            space, seed, available, len(objectives), sources=sources, trials=trials, estimate=estimate
        )
        self._sources = tuple(name for name, _ in sources) if "sources" in entry.takes else ()
        self.space = space
        self._objectives = tuple(objectives)
        self._first = [row for config in first if (row := space.row_of(config)) is not None]
        self._pending: dict[int, bool] = {}
        """Rows that were proposed, or are replayed, and not told, with whether one was only nominated."""
        self._begun = 0
        self._replayed: deque[tuple[int, int, Trial]] = deque()
        """Trials of earlier sessions whose results no proposal may know yet, with the number of proposals before the
        first that may, and their rows."""

    @property
    def expected_gain(self) -> float | None:
        """Gain that was expected of the last proposal, see `RowSampler.expected_gain`."""
        return self._rows.expected_gain

    @property
    def misleading_sources(self) -> tuple[MisleadingSource, ...]:
        """Sources that the sampler ignores, as the results contradict them."""
        return self._rows.misleading_sources()

    @property
    def learnt_from(self) -> tuple[str, ...]:
        """Names of the other sources of a sampler that transfers."""
        misleading = {source.name for source in self.misleading_sources}
        return tuple(name for name in self._sources if name not in misleading)

    def replay(self, trials: Iterable[Trial], ahead: int = 1) -> int:
        """Learn from trials of earlier sessions, oldest first; they are not proposed again.

        ``ahead`` is the number of proposals that these sessions, and this one, make before they tell the result of the
        oldest, so that the search continues as the original would have. Trials whose configuration is not valid any
        more are ignored. Return the number of the others.
        """
        begun = self._begun
        for trial in trials:
            if (row := self.space.row_of(trial.config)) is not None:
                self._tell_replayed()  # the sampler knows the results that were known when this one began
                self._replayed.append((self._begun + ahead, row, trial))
                self._pending[self._rows.propose(row)] = False
                self._begun += 1
        return self._begun - begun

    def propose(self) -> tuple[int, Config] | None:
        """Propose a row; return it with its configuration, or None if no row is left."""
        self._tell_replayed()
        return self._ask(self._rows.propose)

    def nominate(self) -> tuple[int, Config] | None:
        """Choose a row to compile; return it with its configuration, or None if no row is left. No trial begins.

        This is for samplers that rank, see `ranking`. `tell` records the result if the row is measured.
        """
        return self._ask(self.ranking.nominate, is_nominated=True)

    def _ask(self, choose: Callable[[int | None], int], *, is_nominated: bool = False) -> tuple[int, Config] | None:
        candidates = self._rows.candidates
        if not candidates.remaining:
            return None
        row = choose(next((row for row in self._first if candidates.free[row]), None))
        self._pending[row] = is_nominated
        self._begun += not is_nominated
        return row, self.space.config(row)

    def set_aside(self, row: int) -> None:
        """Make a nominated row that was not measured available again."""
        del self._pending[row]
        self.ranking.candidates.release(row)

    def close(self) -> None:
        """Release the resources of the sampler."""
        self._rows.close()

    def add(self, trial: Trial) -> None:
        """Learn from a trial that was not measured here, if its configuration is in the space."""
        row = self.space.row_of(trial.config)
        if row is None:
            return
        if self._pending.get(row, True):  # it was not proposed here, or only nominated
            self._pending[self._rows.propose(row)] = False
        self.tell(row, trial)

    def tell(self, row: int, trial: Trial) -> None:
        """Learn from the trial of a proposed row.

        Raise `ConfigError` if the row was not proposed, or was told already.
        """
        if row not in self._pending:
            raise ConfigError(f"row {row} was not proposed or was told already; tell each proposal once")
        is_nominated = self._pending.pop(row)
        if not trial.outcome.is_finding:
            self._rows.withdraw(row)
            return
        if is_nominated:
            self.ranking.begin(row)
        self._rows.tell(row, objective_values(trial, self._objectives), relative_error(trial))

    def _tell_replayed(self) -> None:
        """Tell the replayed trials that the next proposal would have known in their session."""
        while self._replayed and self._replayed[0][0] <= self._begun:
            _, row, trial = self._replayed.popleft()
            if row in self._pending:  # else another trial of the row was added meanwhile
                self.tell(row, trial)

    @property
    def ranking(self) -> FeasibleGPSampler:
        """The sampler, which takes note of compiled rows and of those that are being measured.

        Raise `ConfigError` if it cannot rank what was compiled.
        """
        if not isinstance(self._rows, FeasibleGPSampler):
            raise ConfigError(f"the sampler {self.sampler!r} cannot rank what was compiled; propose and tell instead")
        return self._rows


_REJECTED_IN = ("compile", "resources")
"""Stages in which a trial ends before it could be measured."""


class Shortlist:
    """Candidates of a search that are compiled and wait to be measured; more are compiled than measured.

    The best of those that are `ready`, by the results and resources known by then, becomes the next trial, and one that
    does not compile or does not fit the device becomes one at once. Which are ready depends on the number of trials and
    not on the order in which they finish compiling, so that a search is repeatable on any machine (docs/search.md). The
    caller repeats: `propose` until None, `ready`, `tell` a rejected one of these if there is one, else `choose`; and
    while none is ready, `tell` the oldest of the chosen ones.

    The ``lookahead`` may rank only if the sampler of the search does. After trials of ``earlier`` sessions, oldest
    first, it continues as that of the earlier session would have: the candidates that waited wait again.
    """

    def __init__(self, search: Search, lookahead: Lookahead, sm_count: int = 1, earlier: Iterable[Trial] = ()) -> None:
        self._search = search
        self._lookahead = lookahead
        self._sm_count = sm_count
        self._waiting: dict[int, Config | None] = {}
        """Rows that were proposed and not chosen, the oldest first; with the configuration of each that was nominated
        while trials were replayed, and that this session has not compiled."""
        self._running: dict[int, None] = {}
        """Rows that were chosen and whose results were not told, the oldest first."""
        self._begun = 0
        """Number of candidates that were chosen, in this session and the earlier ones."""
        self._set_aside = 0
        self._gains: deque[float | None] = deque(maxlen=_EXPECTED_PROPOSALS)
        """Gains that were expected of the last proposals, see `Search.expected_gain`."""
        self._described: set[int] = set()
        self._earlier: dict[int, Trial] = {}
        """Trials of earlier sessions that no choice may know yet, by row; by a negative number without a valid row."""
        if lookahead.ranks:
            for number, trial in enumerate(earlier):
                row = search.space.row_of(trial.config)
                self._earlier[-1 - number if row is None else row] = trial
        else:
            search.replay(earlier, lookahead.compiling)

    @property
    def expected_gain(self) -> float | None:
        """Relative gain of the best speed, 0.01 for 1 %, that is expected of the last 256 proposals together.

        It is the sum of the gains that each was expected to add to the earlier ones, and slightly overestimates their
        joint gain. None until as many proposals were made with a model, and if no row is left.
        """
        known = [gain for gain in self._gains if gain is not None]
        return sum(known) if len(known) == _EXPECTED_PROPOSALS else None

    def trials_until(self, gain: float) -> float | None:
        """Return the number of trials after which `expected_gain` is below ``gain``.

        Each proposal is taken to add less than the one before, as those of the last quarter did than those of the
        quarter before. None if it would be more than eight times as many proposals, or is not known.
        """
        count, quarter = _EXPECTED_PROPOSALS, _EXPECTED_PROPOSALS // 4
        window = np.array([None] * (count - len(self._gains)) + [*self._gains], np.float64)  # NaN for None
        coming, before = window[-quarter:].mean(), window[-2 * quarter : -quarter].mean()
        decay = min(1.0, coming / before) ** (1 / quarter) if before > 0 else 1.0
        added = np.concatenate([[0.0], np.cumsum(coming * decay ** np.arange(1, 8 * count + 1))])
        left = np.concatenate([np.cumsum(window[::-1])[::-1], np.zeros(7 * count + 1)])  # of this window
        left += added - np.concatenate([np.zeros(count), added[:-count]])
        below = np.flatnonzero(left < gain)
        return int(below[0]) / self._lookahead.per_measured if len(below) else None

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next row to compile, with its configuration; None if enough rows wait, or no row is left.

        ``room`` is the number of trials that may still begin; None for any number.
        """
        if room == 0:
            return None
        self._replay()
        if self._is_full:
            return None
        wanted = self._wanted(room)
        again = {row: config for row, config in self._waiting.items() if config is not None}
        if again and len(self._waiting) - len(again) < wanted:
            row = next(iter(again))
            self._waiting[row] = None
            return row, again[row]
        return self._propose(wanted)

    def ready(self) -> list[int]:
        """Return the rows to choose the next trial from, the oldest first; empty if none waits.

        It is also empty while more than `Lookahead.held` chosen rows have no result.
        """
        self._replay()
        return [row for row in self._ready() if self._waiting[row] is None]

    def waiting(self) -> list[int]:
        """Return all rows that `propose` returned and that were not chosen, the oldest first; the ready ones included.

        Those of an earlier session that `propose` has yet to return are not among them.
        """
        return [row for row, config in self._waiting.items() if config is None]

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the row to measure, given rows that wait with the results of their compilation.

        They are those that are `ready`, or as many others that happen to have compiled first.
        """
        for row in compiled.keys() - self._described:
            self._describe(row, compiled[row])
        rows = list(compiled)
        row = self._search.ranking.select(rows) if self._lookahead.ranks else rows[0]
        self._begin(row)
        return row

    def tell(self, row: int, trial: Trial) -> None:
        """Record the trial of a row that was chosen, or that was ready and rejected."""
        if row in self._running:
            del self._running[row]
        else:
            del self._waiting[row]
        self._describe(row, trial)
        self._search.tell(row, trial)
        while min(len(self._waiting), self._ready_count) > self._lookahead.max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._search.set_aside(oldest)
            self._set_aside += 1

    def leave(self, row: int) -> None:
        """Leave a row that was chosen, or was ready and rejected, to another session; `add` takes its trial."""
        self._running.pop(row, None)
        self._waiting.pop(row, None)

    def add(self, trial: Trial) -> None:
        """Learn from a trial that was not measured here."""
        row = self._search.space.row_of(trial.config)
        if row is not None:
            self._waiting.pop(row, None)
            self._describe(row, trial)
        self._search.add(trial)

    @property
    def _is_full(self) -> bool:
        """Whether a result must be told before the next trial may be chosen."""
        return len(self._running) > self._lookahead.held(self._begun)

    def _wanted(self, room: int | None = None) -> int:
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
        if not self._lookahead.ranks:
            return 1
        return max(1, self._lookahead.compiled(self._begun) - self._begun - self._set_aside)

    def _propose(self, wanted: int) -> tuple[int, Config] | None:
        """Propose a row if fewer than ``wanted`` wait."""
        if len(self._waiting) >= wanted:
            return None
        proposed = self._search.nominate() if self._lookahead.ranks else self._search.propose()
        if proposed is None:
            self._gains.clear()
        else:
            self._waiting[proposed[0]] = None
            self._gains.append(self._search.expected_gain)
        return proposed

    def _begin(self, row: int) -> None:
        del self._waiting[row]
        self._running[row] = None
        self._begun += 1
        if self._lookahead.ranks:
            self._search.ranking.begin(row)

    def _replay(self) -> None:
        """Repeat the nominations, choices and results of earlier sessions, up to the first choice that they lack.

        Results that this choice must not know are told after it, by a later call. A trial that was not ready when it is
        due is one of another sampler or seed.
        """
        while self._earlier:
            while not self._is_full and (proposed := self._propose(self._wanted())) is not None:
                self._waiting[proposed[0]] = proposed[1]
            ready = self._ready()
            earlier = self._earlier
            due = next((row for row in ready if row in earlier and earlier[row].stage in _REJECTED_IN), None)
            if due is None and not self._is_full:
                chosen = (row for row, trial in earlier.items() if trial.stage not in _REJECTED_IN)
                due = next((row for row in chosen if row not in self._running), None)
                if due is None:
                    return
                if due in self._waiting:
                    self._describe(due, earlier[due])  # as `choose` did: models know what is being measured
                    self._begin(due)
                    continue
            row = next(iter(earlier)) if due is None else due
            trial = earlier.pop(row)
            if row in self._running or row in self._waiting:
                self.tell(row, trial)
            else:
                self.add(trial)

    def _describe(self, row: int, trial: Trial) -> None:
        self._described.add(row)
        features = features_of(trial, self._sm_count) if self._lookahead.ranks else None
        if features is not None:
            self._search.ranking.describe(row, features)
