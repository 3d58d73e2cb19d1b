"""One search over a space: propose a row, decide which compiled candidate is measured next, record results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray

from autotile.core.model import Config, Trial
from autotile.core.objectives import TIME
from autotile.errors import ConfigError
from autotile.search.embedding import features_of
from autotile.search.row_sampler import RankingSampler
from autotile.search.samplers import TRANSFERRING, check_sampler, make_sampler, resolve_sampler
from autotile.search.study import (
    Objective,
    attributes_of,
    begun_trial,
    constraints_of,
    distributions_of,
    finished_trial,
    new_study,
)
from autotile.search.transfer import Source
from autotile.space.search_space import SearchSpace

_BEFORE_A_MODEL = 6
"""Candidates that are measured before a model chooses any; what is proposed by then is proposed knowing nothing."""

_KEPT = 128
"""Most candidates that wait, compiled: each costs the model time at every choice, and old ones are hardly chosen."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How many candidates are proposed, and compiled, ahead of the one that is measured.

    It is part of the search, for it decides what is known when a candidate is proposed; so it must not depend on the
    machine where the sampler learns.

    Attributes
    ----------
    compiling
        The newest candidates, which have until then to compile, the one that is tried next included where all are
        tried.
    per_measured
        Candidates that are proposed for each that is measured; 1 where they are measured as they were proposed.
    kept
        Most candidates that wait to be chosen.
    """

    compiling: int
    per_measured: int = 1
    kept: int = _KEPT

    @property
    def ranks(self) -> bool:
        """Whether there is a choice."""
        return self.per_measured > 1

    def ready(self, measured: int) -> int:
        """Candidates to choose among when so many were measured, had none been set aside."""
        return 1 + (self.per_measured - 1) * measured

    def open(self, measured: int) -> int:
        """Candidates that are proposed and not tried then.

        Where there will be a choice, the first that compile are few: each was proposed knowing nothing.
        """
        compiling = self.compiling
        if self.ranks:
            compiling = min(compiling, _BEFORE_A_MODEL + 2 * max(0, measured + 1 - _BEFORE_A_MODEL))
        return self.ready(measured) + compiling - 1

    def useful(self, measured: int, room: int) -> int:
        """Of those, how many could still be chosen where so many more trials may begin."""
        return room - 1 + self.ready(measured + room - 1)


class Search:
    """Asks a sampler for rows and tells it their trials; no row is proposed twice.

    Parameters
    ----------
    space
        The valid configurations.
    sampler
        Name of the sampler, see `autotile.search.samplers`.
    seed
        Makes the search repeatable: the same seed and the same trials give the same proposals. Not negative.
    first
        Configurations to propose before any other, where they are rows that can be proposed.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.
    trials
        Trials that are granted in all, by which ``auto`` chooses, and by which some strategies of Kernel Tuner make
        their schedule; None where they are not counted.
    ahead
        Proposals that the caller makes before it tells the oldest of them. A search that is built again from stored
        trials then goes on as the first one would have: each of its proposals knows what it would have known.
    objectives
        What to minimise, of `autotile.core.objectives`; of a trial that ran, each is known.
    sources
        Trials of other studies, which a sampler that can learns from.

    Attributes
    ----------
    study
        The trials as an Optuna study, in the order of the proposals; it minimises the objectives.
    sampler
        Name of the sampler at work.
    learnt_from
        Names of the sources that it learns from.

    Raises
    ------
    InputError
        There is no such sampler, it needs a package that is not installed, it cannot follow several objectives, or
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
        self.learnt_from = tuple(source.name for source in sources) if self.sampler == TRANSFERRING else ()
        self.study: optuna.Study = new_study(sampler=self._rows, objectives=objectives)
        self._space = space
        self._distributions = distributions_of(space.parameters)
        self._first = deque(row for config in first if (row := space.row_of(config)) is not None)
        self._objective = Objective(objectives)
        self._pending: dict[int, optuna.Trial] = {}
        self._nominated: set[int] = set()
        self._ahead = ahead
        self._gains: deque[float | None] = deque(maxlen=ahead)
        self._begun = 0
        self._replayed: deque[tuple[int, int, Trial]] = deque()
        """Trials of earlier sessions that no proposal may know yet: place among the proposals, number, trial."""

    def replay(self, trials: Iterable[Trial]) -> int:
        """Learn from trials of earlier sessions, oldest first, and never propose them again.

        Trials of configurations that the space can no longer express are left out; those that it can, but that are
        not valid any more, are kept in the study and teach nothing.

        Returns
        -------
        int
            Trials that taught something.
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
        """The next row and its configuration, or None when every row was proposed."""
        self._tell_replayed()
        if not self._rows.left(self.study):
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
        """The next row to compile and its configuration, or None when every row was; no trial begins.

        `tell` says how it ended where it was measured. It is for a sampler that ranks, see `prefer`.
        """
        sampler = self._ranking
        if not sampler.left(self.study):
            self._gains.clear()
            return None
        first = next((row for row in self._first if sampler.candidates.free[row]), None)
        row = sampler.nominate(self.study, first)
        self._gains.append(sampler.expected_gain)
        self._nominated.add(row)
        return row, self._space.config(row)

    def describe(self, row: int, features: NDArray[np.float64]) -> None:
        """Say what a nominated row uses now that it is compiled, see `autotile.search.embedding.features_of`."""
        self._ranking.describe(row, features)

    def prefer(self, rows: Sequence[int]) -> int:
        """Which of these nominated rows to measure."""
        return self._ranking.prefer(self.study, rows)

    def set_aside(self, row: int) -> None:
        """Let a nominated row, which was not measured, be nominated again."""
        self._nominated.remove(row)
        self._ranking.candidates.give_back(row)

    def add(self, trial: Trial) -> None:
        """Learn from a trial that was not proposed here, where the space can express its configuration."""
        row = self._space.row_of(trial.config)
        if row is not None:
            self._nominated.discard(row)
        if self._can_express(trial.config):
            self.study.add_trial(finished_trial(trial, self._distributions, self._objective))

    def row_of(self, config: Config) -> int | None:
        """Row of a configuration; None where it is not valid."""
        return self._space.row_of(config)

    @property
    def expected_gain(self) -> float | None:
        """By how much the best speed is expected to rise with the last ``ahead`` proposals together, 0.01 for 1 %.

        Each was expected to gain what it adds to those before it, so that the sum is what all do, or a little more. It
        is the same in a search that is built again, for that makes the same proposals. None before so many were made
        with a model, and where no row is left.
        """
        known = [gain for gain in self._gains if gain is not None]
        return sum(known) if len(known) == self._ahead else None

    def tell(self, row: int, trial: Trial) -> None:
        """Say how a proposed row ended.

        Raises
        ------
        ConfigError
            The row was not proposed, or was told already.
        """
        if row in self._nominated:
            self.add(trial)
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
        """Tell the replayed trials that the next proposal would have known, had it been made in their session."""
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
