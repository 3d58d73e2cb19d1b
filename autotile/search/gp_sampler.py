"""Bayesian optimisation over the rows of a search space; method and comparison: docs/search.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.search.embedding import CompiledPoints, Embedding
from autotile.search.gaussian_process import log_expected_improvement, one_blas_thread
from autotile.search.row_sampler import RankingSampler, rows_to_look_at
from autotile.search.study import RELATIVE_ERROR
from autotile.search.surrogate import History, Outlook, Surrogate, result_of, speed_of_loss
from autotile.search.transfer import Expectation
from autotile.space.search_space import SearchSpace

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

_STARTUP = 6
"""Trials that end before a model is asked."""

_HEDGED_EVERY = 2
"""Of the proposals made with the help of other studies, one in so many is made without."""

_FROM_ANYWHERE = range(12, 32)
"""Among which proposals those made without other studies are rows from anywhere, as such a search begins: what is known
by then lies where the others promised much."""

_PROMISED = 512
"""Rows of which other studies promise most; a model looks at them in any case."""

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


class FeasibleGPSampler(RankingSampler):
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
    >>> from autotile.space.search_space import SearchSpace
    >>> from autotile.kernel.spec import Parameter
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
        self._features: dict[int, Floats] = {}
        self._offered: dict[int, None] = {}
        """Rows that were proposed or nominated, in that order."""
        self._models: dict[tuple[bool, Expectation | None], Surrogate] = {}

    def nominate(self, study: Study, row: int | None = None) -> int:
        """Choose a free row to compile, or take note that this one was chosen."""
        with self._lock, one_blas_thread():
            self._observe(study)
            chosen = self._next(study, np.random.default_rng((self._seed, len(self._offered)))) if row is None else row
            self.candidates.take(chosen)
            self._offered[chosen] = None
        return chosen

    def describe(self, row: int, features: Floats) -> None:
        """Learn what a row uses now that it is compiled."""
        self._features[row] = features

    def prefer(self, study: Study, rows: Sequence[int]) -> int:
        """Which of the compiled rows to measure: as one is chosen to compile, with what the compiler said."""
        with self._lock, one_blas_thread():
            self._observe(study)
            ended = len(self._history.results)
            if self._starting or len(rows) == 1:
                return rows[0]
            model = self._model(study, hedged=ended % _HEDGED_EVERY == 0, compiled=True)
            model.look_at(np.array(rows))
            rng = np.random.default_rng((self._seed, ended))
            return self._best(model.outlook(self._history, _weights(study, rng)), study, turn=ended)

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        row = self._next(study, rng)
        self._adopt(study, number, row, rng)
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        self._history.begun[number] = row
        self._offered[row] = None

    def _learn(self, trial: FrozenTrial) -> None:
        if trial.state is not TrialState.FAIL:
            self._history.results[trial.number] = result_of(trial)
            self._history.errors[trial.number] = trial.user_attrs.get(RELATIVE_ERROR, 0.0)

    @property
    def _starting(self) -> bool:
        """Whether too little is known for a model."""
        ended = len(self._history.results)
        return ended < _STARTUP or self._history.first_success == ended

    def _next(self, study: Study, rng: np.random.Generator) -> int:
        """The row to propose."""
        if self._starting:
            return self._first(rng)
        turn = len(self._offered)
        hedged = turn % _HEDGED_EVERY == 0
        if hedged and self._expectation is not None and turn in _FROM_ANYWHERE:
            return self._farthest(rng)
        outlook = self._model(study, hedged=hedged).outlook(self._history, _weights(study, rng))
        outlook = outlook.of_those(self.candidates.free[outlook.rows])
        self.expected_gain = None
        if not len(outlook.rows):
            return self.candidates.uniform(rng)
        return self._best(outlook, study, turn)

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
            and all(codes[row, index] == codes[order[0], index] for row in self._offered)
        ]
        flipped = [np.argmax(codes[promised, index] != codes[order[0], index]) for index in unseen]
        by_turns = len(self._offered) % 2 == 1
        return int(promised[min(flipped)]) if flipped and by_turns else int(promised[0])

    def _farthest(self, rng: np.random.Generator) -> int:
        """A row far from all that were proposed, so that the first ones show what each parameter does."""
        drawn = np.array([self.candidates.uniform(rng)])
        offered = np.array(list(self._offered), np.int64)
        if not len(offered):
            return int(drawn[0])
        drawn = np.append(drawn, rng.integers(len(self.candidates.space), size=_SPREAD_AMONG))
        drawn = drawn[self.candidates.free[drawn]]
        codes = self.candidates.space.codes
        apart = self._embedding.of_each(codes[drawn])[:, None, :] - self._embedding.of_each(codes[offered])[None, :, :]
        return int(drawn[np.argmax(np.square(apart).sum(axis=2).min(axis=1))])

    def _best(self, outlook: Outlook, study: Study, turn: int) -> int:
        """The row with the largest expected improvement, or now and then the one that is expected to be best."""
        gain = log_expected_improvement(outlook.mean, outlook.deviation, outlook.best) + np.log(outlook.chance)
        speed = speed_of_loss(list(self._history.results.values()), study.directions)
        self.expected_gain = float(np.exp(gain.max())) * speed if speed is not None else None
        if outlook.since_best >= _PATIENCE and turn % _GREEDY_EVERY == 0:
            return int(outlook.rows[np.argmin(outlook.mean)])
        return int(outlook.rows[np.argmax(gain)])

    def _model(self, study: Study, *, hedged: bool, compiled: bool = False) -> Surrogate:
        """The surrogate as of the last time that it was due to be fitted.

        Now and then, when ``hedged``, what others promise is left aside, since this space may be unlike theirs where
        it matters. A model of ``compiled`` rows knows what they use, and is to be told which to look at.
        """
        expectation = None if hedged else self._expectation
        due = max(_due(len(self._history.results)), self._history.first_success + 1)
        model = self._models.get((compiled, expectation))
        if model is None or model.fitted != due:
            points, groups = self._points, self._embedding.groups
            if compiled:
                fitted = self._history.rows(self._history.first_ended(due))
                points = CompiledPoints(points, groups, self._features, fitted)
                groups = points.groups
            directions = study.directions
            model = Surrogate(points, groups, self._history, due, directions=directions, expectation=expectation)
            if not compiled:
                model.look_at(self._rows_to_look_at(model))
            self._models[compiled, expectation] = model
        return model

    def _rows_to_look_at(self, model: Surrogate) -> Rows:
        rows = rows_to_look_at(self.candidates, model.best, np.random.default_rng((self._seed, model.fitted)))
        return rows if model.expectation is None else np.union1d(rows, model.expectation.best[:_PROMISED])

    def _points(self, rows: Rows) -> Floats:
        return self._embedding.of(self.candidates.space.codes[rows])


def _weights(study: Study, rng: np.random.Generator) -> Floats:
    """What each objective counts this time."""
    return rng.dirichlet(np.ones(len(study.directions)))


def _due(ended: int) -> int:
    """The largest count of trials, up to those that have ended, at which hyperparameters are fitted."""
    due = _STARTUP
    while (after := max(due + 1, int(due * (_GROWTH if due < _SETTLED else _SETTLED_GROWTH)))) <= ended:
        due = after
    return due
