"""A search over a space: its proposals, and its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray
from optuna.trial import TrialState

from autotile.core.model import TIME, Config, Trial
from autotile.errors import ConfigError
from autotile.search.row_sampler import RankingSampler
from autotile.search.samplers import check_sampler, make_sampler, resolve_sampler, sampler_entry
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
from autotile.search.transfer import Estimate, MisleadingSource, Source
from autotile.space.search_space import SearchSpace

_SETTLED_PROPOSALS = 256
"""Number of proposals of `Search.settled_gain`: some 128 trials where candidates are ranked."""


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
        Names of the objectives to minimise, of `autotile.core.model`; trials that ran have a value of each.
    sources
        Trials of other studies, used by samplers that transfer.
    estimate
        Function that estimates the time of each row, used by the default sampler where there are no sources.

    Attributes
    ----------
    sampler
        Name of the sampler, other than ``auto``.

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
        estimate: Estimate | None = None,
    ) -> None:
        check_sampler(sampler, objectives)
        self.sampler = resolve_sampler(sampler, space, available, trials)
        self._rows = make_sampler(
            self.sampler, space, seed, available, sources=sources, trials=trials, estimate=estimate
        )
        self._sources = tuple(source.name for source in sources) if sampler_entry(self.sampler).transfers else ()
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

    @property
    def misleading_sources(self) -> tuple[MisleadingSource, ...]:
        """Sources that the sampler ignores, as the results contradict them."""
        return self._rows.misleading_sources(self._study)

    @property
    def learnt_from(self) -> tuple[str, ...]:
        """Names of the other sources of a sampler that transfers."""
        misleading = {source.name for source in self.misleading_sources}
        return tuple(name for name in self._sources if name not in misleading)

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
                self._rows.remaining(self.study)  # the sampler sees each trial with the results known when it began
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
            self._rows.remaining(self._study)  # the sampler learns from it now

    def is_pending(self, row: int) -> bool:
        """Return whether a row was proposed and its trial was not told."""
        return row in self._pending

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
        return self.gain_of(self._ahead)

    @property
    def settled_gain(self) -> float | None:
        """The same of the last 256 proposals: small if the search has expected little for many trials."""
        return self.gain_of(_SETTLED_PROPOSALS)

    def gain_of(self, count: int) -> float | None:
        """Return the same of the last ``count`` proposals, at most 256."""
        last = list(self._gains)[-count:]
        known = [gain for gain in last if gain is not None]
        return sum(known) if len(known) == count else None

    def proposals_until(self, gain: float, count: int = _SETTLED_PROPOSALS) -> int | None:
        """Return after how many more proposals `gain_of` the last ``count`` is below ``gain``.

        Each is taken to add as much as the last quarter of them did. None if that is too much for it, or not known.
        """
        last = [np.nan if known is None else known for known in self._gains][-count:]
        window = np.array([np.nan] * (count - len(last)) + last)
        coming = window[-max(1, count // 4) :].mean()
        left = np.concatenate([np.cumsum(window[::-1])[::-1], [0.0]])  # of this window, after so many proposals
        below = np.flatnonzero(left + coming * np.arange(count + 1) < gain)
        return int(below[0]) if len(below) else None

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
