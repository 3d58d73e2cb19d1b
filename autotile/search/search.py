"""A search over a space: its proposals, the choice of the next candidate to measure, and its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray
from optuna.trial import TrialState

from autotile.core.model import Config, Trial
from autotile.core.objectives import TIME
from autotile.errors import ConfigError
from autotile.search.embedding import features_of
from autotile.search.row_sampler import RankingSampler
from autotile.search.samplers import Lookahead, check_sampler, make_sampler, resolve_sampler, sampler_entry
from autotile.search.study import (
    Objective,
    attributes_of,
    begun_trial,
    constraints_of,
    distributions_of,
    finished_trial,
    frozen_trial,
    new_study,
    relative_error,
)
from autotile.search.transfer import Source
from autotile.space.search_space import SearchSpace

_SETTLED_PROPOSALS = 192
"""Number of proposals of `Search.settled_gain`: some 96 trials, as two are proposed per trial where they are ranked."""


class Search:
    """A sampler with its study: it proposes rows and records their trials; no row is proposed twice.

    Parameters
    ----------
    space
        The valid configurations.
    sampler
        Name of the sampler, see `autotile.search.samplers`.
    seed
        Seed of the proposals, not negative: the same seed and the same trials give the same proposals.
    first
        Configurations to propose first, if they are available rows.
    available
        Rows that may be proposed, bool, shape (rows,); None for all.
    trials
        Number of trials granted in total, by which ``auto`` is resolved and some strategies of Kernel Tuner schedule
        their search; None if it is not limited.
    ahead
        Number of proposals that the caller makes before it tells the result of the oldest. With it, a search that is
        rebuilt from stored trials continues as the original would have: each proposal knows the same results.
    objectives
        Names of the objectives to minimise, of `autotile.core.objectives`; trials that ran have a value of each.
    sources
        Trials of other studies, used by samplers that transfer.

    Attributes
    ----------
    sampler
        Name of the sampler, other than ``auto``.
    learnt_from
        Names of the sources that the sampler learns from.

    Raises
    ------
    InputError
        There is no such sampler, it requires a package that is not installed, it cannot minimise several objectives, or
        the seed is negative.
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
        ahead: int = 1,
        objectives: Sequence[str] = (TIME,),
        sources: Sequence[Source] = (),
    ) -> None:
        check_sampler(sampler, objectives)
        self.sampler = resolve_sampler(sampler, space, available, trials)
        self._rows = make_sampler(self.sampler, space, seed, available, sources=sources, trials=trials)
        self.learnt_from = tuple(source.name for source in sources) if sampler_entry(self.sampler).transfers else ()
        self._study = new_study(sampler=self._rows, objectives=objectives)
        self._unlisted: list[tuple[Trial, TrialState, list[float] | None]] = []
        """Trials of nominated rows that the study does not hold yet: adding one takes longer than learning from it."""
        self._space = space
        self._distributions = distributions_of(space.parameters)
        self._first = deque(row for config in first if (row := space.row_of(config)) is not None)
        self._objective = Objective(objectives)
        self._pending: dict[int, optuna.Trial] = {}
        self._nominated: set[int] = set()
        self._ahead = ahead
        self._gains: deque[float | None] = deque(maxlen=max(ahead, _SETTLED_PROPOSALS))
        self._begun = 0
        self._replayed: deque[tuple[int, int, Trial]] = deque()
        """Trials of earlier sessions whose results no proposal may know yet: position among the proposals, number,
        trial."""

    @property
    def study(self) -> optuna.Study:
        """The trials as an Optuna study, in the order of the proposals; it minimises the objectives."""
        for trial, state, values in self._unlisted:
            self._study.add_trial(frozen_trial(trial, self._distributions, state, values))
        self._unlisted.clear()
        return self._study

    def replay(self, trials: Iterable[Trial]) -> int:
        """Learn from trials of earlier sessions, oldest first; they are not proposed again.

        Trials whose configuration the space cannot express any more are ignored; trials that it can express, but that
        are not valid any more, are kept in the study without being learned from.

        Returns
        -------
        int
            Number of trials that were learned from.
        """
        begun = self._begun
        for trial in trials:
            if self._space.row_of(trial.config) is not None:
                self._tell_replayed()
                self._replayed.append((self._begun, len(self.study.get_trials(deepcopy=False)), trial))
                self.study.add_trial(begun_trial(trial, self._distributions))
                self._begun += 1
            else:
                self.add(trial)
        return self._begun - begun

    def propose(self) -> tuple[int, Config] | None:
        """Propose a row; return it with its configuration, or None if no row is left."""
        self._tell_replayed()
        if not self._rows.remaining(self.study):
            self._gains.clear()
            return None
        while self._first:
            row = self._first.popleft()
            if self._rows.candidates.free[row]:
                self.study.enqueue_trial(self._space.config(row))
                break
        asked = self.study.ask(dict(self._distributions))
        config = asked.params
        proposed = self._space.row_of(config)
        assert proposed is not None
        self._pending[proposed] = asked
        self._gains.append(self._rows.expected_gain)
        self._begun += 1
        return proposed, config

    def nominate(self) -> tuple[int, Config] | None:
        """Choose a row to compile; return it with its configuration, or None if no row is left. No trial begins.

        This is for samplers that rank, see `select`. `tell` records the result if the row is measured.
        """
        sampler = self._ranking
        if not sampler.remaining(self._study):
            self._gains.clear()
            return None
        first = next((row for row in self._first if sampler.candidates.free[row]), None)
        row = sampler.nominate(self._study, first)
        self._gains.append(sampler.expected_gain)
        self._nominated.add(row)
        return row, self._space.config(row)

    def describe(self, row: int, features: NDArray[np.float64]) -> None:
        """Record the resources of a compiled row, see `autotile.search.embedding.features_of`."""
        self._ranking.describe(row, features)

    def select(self, rows: Sequence[int]) -> int:
        """Return which of these nominated rows to measure."""
        return self._ranking.select(self._study, rows)

    def begin(self, row: int) -> None:
        """Take note that a nominated row is being measured; later choices avoid its surroundings until it is told."""
        self._ranking.begin(self._study, row)

    def set_aside(self, row: int) -> None:
        """Make a nominated row that was not measured available again."""
        self._nominated.remove(row)
        self._ranking.candidates.release(row)

    def close(self) -> None:
        """Release the resources of the sampler."""
        self._rows.close()

    def add(self, trial: Trial) -> None:
        """Learn from a trial that was not proposed here, if the space can express its configuration."""
        row = self._space.row_of(trial.config)
        if row is not None:
            self._nominated.discard(row)
        if self._can_express(trial.config):
            self.study.add_trial(finished_trial(trial, self._distributions, self._objective))

    def row_of(self, config: Config) -> int | None:
        """Return the row of a configuration; None if it is not valid."""
        return self._space.row_of(config)

    @property
    def expected_gain(self) -> float | None:
        """Relative gain of the best speed that is expected of the last ``ahead`` proposals together, 0.01 for 1 %.

        It is the sum of the gains that each was expected to add to the earlier ones, and slightly overestimates their
        joint gain. A rebuilt search has the same, since it makes the same proposals. None until ``ahead`` proposals
        were made with a model, and if no row is left.
        """
        return self._gain_of(self._ahead)

    @property
    def settled_gain(self) -> float | None:
        """The same of the last 192 proposals: small if the search has expected little for many trials."""
        return self._gain_of(_SETTLED_PROPOSALS)

    def _gain_of(self, count: int) -> float | None:
        last = list(self._gains)[-count:]
        known = [gain for gain in last if gain is not None]
        return sum(known) if len(known) == count else None

    def tell(self, row: int, trial: Trial) -> None:
        """Record the trial of a proposed row.

        Raises
        ------
        ConfigError
            The row was not proposed, or was told already.
        """
        if row in self._nominated:
            self._nominated.remove(row)
            state, values = self._objective.result(trial)
            if state is not TrialState.FAIL:
                failed = max(constraints_of(trial).values()) > 0
                result = None if failed or values is None else tuple(values)
                self._ranking.tell(self._study, row, result, relative_error(trial))
            self._unlisted.append((trial, state, values))
            return
        asked = self._pending.pop(row, None)
        if asked is None:
            raise ConfigError(f"row {row} was not proposed or was told already; tell each proposal once")
        for name, value in attributes_of(trial).items():
            asked.set_user_attr(name, value)
        for name, violation in constraints_of(trial).items():
            asked.set_constraint(name, violation)
        state, values = self._objective.result(trial)
        self.study.tell(asked, values, state)

    def _tell_replayed(self) -> None:
        """Tell the replayed trials that the next proposal would have known in their session."""
        while self._replayed and self._replayed[0][0] <= self._begun - self._ahead:
            _, number, trial = self._replayed.popleft()
            state, values = self._objective.result(trial)
            self.study.tell(number, values, state)

    @property
    def _ranking(self) -> RankingSampler:
        if not isinstance(self._rows, RankingSampler):
            raise ConfigError(f"the sampler {self.sampler!r} cannot rank what was compiled; propose and tell instead")
        return self._rows

    def _can_express(self, config: Config) -> bool:
        return config.keys() == self._distributions.keys() and all(
            value in self._distributions[name].choices for name, value in config.items()
        )


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
        """As for `Search`."""
        return self._search.expected_gain

    @property
    def settled_gain(self) -> float | None:
        """As for `Search`."""
        return self._search.settled_gain

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
        """Return all rows that were proposed and not chosen, the oldest first; those that are ready are among them."""
        return list(self._waiting)

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
        if row >= 0:
            self._waiting.pop(row, None)
            self._again.pop(row, None)
            self._describe(row, trial)
        self._search.add(trial)

    def _describe(self, row: int, trial: Trial) -> None:
        self._described.add(row)
        features = features_of(trial, self._sm_count) if self._lookahead.ranks else None
        if features is not None:
            self._search.describe(row, features)


def _rejected(trial: Trial) -> bool:
    """Return whether a trial ended before it could be measured."""
    return trial.stage in ("compile", "resources")
