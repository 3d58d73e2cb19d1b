"""Bayesian optimisation over the rows of a search space; the method and what it was compared with: docs/search.md."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.ground.space import SearchSpace
from autotile.search.acquisition import log_expected_improvement
from autotile.search.embedding import Embedding
from autotile.search.expectation import Expectation
from autotile.search.history import History
from autotile.search.objectives import result_of, speed_of_loss
from autotile.search.row_sampler import RowSampler
from autotile.search.surrogate import Surrogate

_STARTUP = 6
"""Trials that end before a model is asked."""

_HEDGED_EVERY = 2
"""Of the proposals made with the help of other studies, one in so many is made without."""

_SWITCH = 2
"""Values of a parameter that other studies may have the wrong way round; each is tried at its best early on."""

_SPREAD_AMONG = 200
"""Rows drawn for each proposal before that; the one farthest from those that were proposed is taken."""

_GROWTH = 1.1
"""Hyperparameters are fitted anew when so many times the trials have ended."""

_SETTLED = 100
_SETTLED_GROWTH = 1.25
"""The same after so many trials: by then they change little, and a fit takes as long as twenty proposals."""

_PATIENCE = 10
"""Trials without a better one, after which the model's own doubts are set aside now and then."""

_GREEDY_EVERY = 3
"""Of the proposals made then, one in so many is the row expected to be best, however sure that is."""


class FeasibleGPSampler(RowSampler):
    """Proposes the row with the largest expected improvement under a Gaussian process.

    The first rows are spread over the space. Then a process over the parameters' logarithms, with a length scale each
    that is fitted as trials end, says what to expect of every row, or of the rows near the best ones and some from
    anywhere where there are many. The expected improvement is multiplied by the chance that the row does not fail,
    which a second target of the same process gives. Trials without a result yet lower the doubt around them, which
    keeps proposals made at the same time apart.

    It works in studies of any direction, and of several objectives, whose weights are drawn for each proposal.

    Parameters
    ----------
    space, seed, available
        As for `RowSampler`.
    expectation
        What other studies let one expect of the space: the search begins with what they promise most of, and then
        learns how this space differs.

    Examples
    --------
    >>> import numpy as np, optuna
    >>> from autotile.ground.space import SearchSpace
    >>> from autotile.ground.spec import Parameter
    >>> parameters = (Parameter("BM", (16, 32, 64, 128)), Parameter("TM", (1, 2, 4, 8)))
    >>> codes = np.array([[i, j] for i in range(4) for j in range(4)], np.uint8)
    >>> space = SearchSpace(parameters, codes, combinations=16, rules=(), limits=(), seconds=0.0)
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(sampler=FeasibleGPSampler(space, seed=1))
    >>> study.optimize(
    ...     lambda trial: (
    ...         abs(trial.suggest_categorical("BM", (16, 32, 64, 128)) - 64)
    ...         + abs(trial.suggest_categorical("TM", (1, 2, 4, 8)) - 4)
    ...     ),
    ...     n_trials=12,
    ... )
    >>> study.best_params
    {'BM': 64, 'TM': 4}
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        available: ArrayLike | None = None,
        *,
        expectation: Expectation | None = None,
    ) -> None:
        super().__init__(space, seed, available)
        self._expectation = expectation or None
        self._embedding = Embedding(space.parameters)
        self._history = History()
        self._surrogates: dict[Expectation | None, Surrogate] = {}

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        ended = len(self._history.results)
        if ended < _STARTUP or self._history.first_success == ended:
            row = self._first(rng)
        else:
            row = self._promising(study, rng)
        self._history.begun[number] = row
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        self._history.begun[number] = row

    def _learn(self, trial: FrozenTrial) -> None:
        if trial.state is not TrialState.FAIL:
            self._history.results[trial.number] = result_of(trial)

    def _first(self, rng: np.random.Generator) -> int:
        """A row to begin with: what other studies promise most of, with every switch on and off; else a far one."""
        if self._expectation is None:
            return self._farthest(rng)
        order = self._expectation.best
        promised = order[self.candidates.free[order]]
        if not len(promised):
            return self._farthest(rng)
        codes = self.candidates.space.codes
        unseen = [
            index
            for index, parameter in enumerate(self.candidates.space.parameters)
            if len(parameter.values) == _SWITCH
            and all(codes[row, index] == codes[order[0], index] for row in self._history.begun.values())
        ]
        flipped = [np.argmax(codes[promised, index] != codes[order[0], index]) for index in unseen]
        by_turns = len(self._history.begun) % 2 == 1
        return int(promised[min(flipped)]) if flipped and by_turns else int(promised[0])

    def _farthest(self, rng: np.random.Generator) -> int:
        """A row far from all that were proposed, so that the first ones show what each parameter does."""
        drawn = np.array([self.candidates.uniform(rng)])
        begun = np.array(list(self._history.begun.values()), np.int64)
        if not len(begun):
            return int(drawn[0])
        drawn = np.append(drawn, rng.integers(len(self.candidates.space), size=_SPREAD_AMONG))
        drawn = drawn[self.candidates.free[drawn]]
        codes = self.candidates.space.codes
        apart = self._embedding.of_each(codes[drawn])[:, None, :] - self._embedding.of_each(codes[begun])[None, :, :]
        return int(drawn[np.argmax(np.square(apart).sum(axis=2).min(axis=1))])

    def _promising(self, study: Study, rng: np.random.Generator) -> int:
        weights = rng.dirichlet(np.ones(len(study.directions)))
        outlook = self._model(study).outlook(self._history, weights)
        self.expected_gain = None
        if not len(outlook.rows):
            return self.candidates.uniform(rng)
        gain = log_expected_improvement(outlook.mean, outlook.deviation, outlook.best) + np.log(outlook.chance)
        speed = speed_of_loss(list(self._history.results.values()), study.directions)
        self.expected_gain = float(np.exp(gain.max())) * speed if speed is not None else None
        if outlook.since_best >= _PATIENCE and len(self._history.begun) % _GREEDY_EVERY == 0:
            return int(outlook.rows[np.argmin(outlook.mean)])
        return int(outlook.rows[np.argmax(gain)])

    def _model(self, study: Study) -> Surrogate:
        """The surrogate as of the last time that it was due to be fitted.

        Now and then what others promise is left aside, since this space may be unlike theirs where it matters.
        """
        hedged = len(self._history.begun) % _HEDGED_EVERY == 0
        expectation = None if hedged else self._expectation
        due = max(_due(len(self._history.results)), self._history.first_success + 1)
        surrogate = self._surrogates.get(expectation)
        if surrogate is None or surrogate.fitted != due:
            rng = np.random.default_rng((self._seed, due))
            surrogate = Surrogate(
                self.candidates,
                self._embedding,
                self._history,
                due,
                directions=study.directions,
                rng=rng,
                expectation=expectation,
            )
            self._surrogates[expectation] = surrogate
        return surrogate


def _due(ended: int) -> int:
    """The largest count of trials, up to those that have ended, at which hyperparameters are fitted."""
    due = _STARTUP
    while (after := max(due + 1, int(due * (_GROWTH if due < _SETTLED else _SETTLED_GROWTH)))) <= ended:
        due = after
    return due
