"""Optuna's samplers over the rows of a search space."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.samplers import BaseGASampler, BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator
from optuna.storages import InMemoryStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from autotile.kernel.spec import Parameter
from autotile.search.row_sampler import Candidates, RowSampler, positions
from autotile.search.study import quiet_optuna
from autotile.space.search_space import SearchSpace

_NAME = "mirror"


class _Choices(CategoricalDistribution):
    """Choices that are compared by identity first.

    Optuna compares the distributions of every trial with each other, choice by choice, which would cost more than the
    sampling itself.
    """

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    __hash__ = CategoricalDistribution.__hash__


class _Axis:
    """One parameter with two values or more, as the wrapped sampler sees it."""

    def __init__(self, index: int, parameter: Parameter, ordered: bool) -> None:
        self.index = index
        self.name = parameter.name
        last = len(parameter.values) - 1
        places = positions(parameter.values) if ordered else None
        self.place_of_code = np.arange(last + 1) if places is None else places
        self.code_of_place = np.argsort(self.place_of_code)
        self.distribution = IntDistribution(0, last) if ordered else _Choices(range(last + 1))


class Mirror:
    """A private study with the same trials as another one.

    It shows a wrapped sampler what it can use and nothing else: trials that are rows of the space, with a number for
    each value, so that a sampler that cannot handle choices (CMA-ES) or their order has integers to work with.

    Parameters
    ----------
    parameters
        Of the space.
    directions
        Of the study that is mirrored.
    ordered
        Show integers in the order of the values; otherwise choices without an order.
    """

    def __init__(self, parameters: Sequence[Parameter], directions: Sequence[StudyDirection], ordered: bool) -> None:
        self._storage = InMemoryStorage()
        with quiet_optuna():
            self._study = optuna.create_study(
                storage=self._storage, study_name=_NAME, directions=list(directions), sampler=RandomSampler()
            )
        self._study_id = self._storage.get_study_id_from_name(_NAME)
        self._width = len(parameters)
        self._axes = [_Axis(i, each, ordered) for i, each in enumerate(parameters) if len(each.values) > 1]
        self._open: dict[int, Trial] = {}

    def begin(self, number: int, inner: BaseSampler) -> None:
        """Open the mirror of a trial, for ``inner`` to draw its parameters."""
        self._study.sampler = inner
        self._open[number] = self._study.ask()

    def draw(self, number: int) -> NDArray[np.int64]:
        """Draw codes for an open trial, shape (parameters,); they count only when they are placed."""
        study, inner = self._study, self._study.sampler
        trial = self._storage.get_trial(self._trial_id(number))
        drawn = inner.sample_relative(study, trial, inner.infer_relative_search_space(study, trial))
        codes = np.zeros(self._width, np.int64)
        for axis in self._axes:
            if axis.name not in drawn:
                drawn[axis.name] = inner.sample_independent(study, trial, axis.name, axis.distribution)
            codes[axis.index] = axis.code_of_place[int(drawn[axis.name])]
        return codes

    def place(self, number: int, codes: NDArray[np.integer]) -> None:
        """Settle the parameters of an open trial."""
        trial_id = self._trial_id(number)
        for axis in self._axes:
            place = float(axis.place_of_code[codes[axis.index]])
            self._storage.set_trial_param(trial_id, axis.name, place, axis.distribution)

    def end(self, trial: FrozenTrial) -> None:
        """Close the mirror of a trial, with its values, its intermediate values and its constraints."""
        mirrored = self._open.pop(trial.number)
        for name, violation in trial.constraints.items():
            mirrored.set_constraint(name, violation)
        for step, value in trial.intermediate_values.items():
            mirrored.report(value, step)
        with quiet_optuna():
            self._study.tell(mirrored, trial.values if trial.state is TrialState.COMPLETE else None, trial.state)

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, self._open[number].number)


_KEEPS_STATE_IN_TRIALS = (BaseGASampler, CmaEsSampler)
"""Samplers that mark the trials they draw for with a generation, and learn from no others: they draw once for every
trial, whether the draw counts or not."""


class FeasibleSampler(RowSampler):
    """Wraps an Optuna sampler so that it proposes only rows of a search space, each at most once.

    The wrapped sampler draws until a draw is a row that was not tried; after ``draws`` of them the row nearest to
    the last one is taken. It is made anew for each proposal, from the seed and the number of trials, and sees a
    private study with the rows that were really tried, so that it learns from what happened and not from what it
    drew.

    Parameters
    ----------
    space
        The configurations.
    inner
        Makes the wrapped sampler; called as ``inner(seed=...)``. A sampler's class will do.
    seed
        Makes the proposals repeatable.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.
    startup
        So many trials are to end, one of them well, before the wrapped sampler's draws count; rows are drawn
        uniformly until then. A sampler that knows nothing draws uniformly from all combinations, and the rows nearest
        to those are not uniform.
    draws
        Draws before the nearest row is taken; each costs a millisecond or more.
    ordered
        Show the wrapped sampler integers in the order of each parameter's values instead of choices.

    Examples
    --------
    >>> import numpy as np, optuna
    >>> from autotile.space.search_space import SearchSpace
    >>> from autotile.kernel.spec import Parameter
    >>> parameters = (Parameter("BM", (32, 64, 128)), Parameter("TM", (4, 8)))
    >>> codes = np.array([[0, 0], [1, 0], [1, 1], [2, 1]], np.uint8)  # four of the six combinations are valid
    >>> space = SearchSpace(parameters, codes, combinations=6, rules=(), limits=(), seconds=0.0)
    >>> sampler = FeasibleSampler(space, optuna.samplers.NSGAIISampler, seed=1)
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(sampler=sampler)
    >>> study.optimize(
    ...     lambda trial: trial.suggest_categorical("BM", (32, 64, 128)) * trial.suggest_categorical("TM", (4, 8))
    ... )
    >>> len(study.trials), study.best_params
    (4, {'BM': 32, 'TM': 4})
    """

    def __init__(
        self,
        space: SearchSpace,
        inner: Callable[..., BaseSampler],
        seed: int,
        *,
        available: ArrayLike | None = None,
        startup: int = 10,
        draws: int = 8,
        ordered: bool = False,
    ) -> None:
        super().__init__(space, seed, available)
        self._inner = inner
        self._startup = startup
        self._draws = draws
        self._ordered = ordered
        self._mirror: Mirror | None = None
        self._ended = 0
        self._ended_well = 0

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        mirror = self._open_mirror(study, number, rng)
        row = self._draw(mirror, number, rng)
        mirror.place(number, self.candidates.space.codes[row])
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        self._open_mirror(study, number, rng).place(number, self.candidates.space.codes[row])

    def _learn(self, trial: FrozenTrial) -> None:
        assert self._mirror is not None
        self._mirror.end(trial)
        if trial.state is not TrialState.FAIL:
            self._ended += 1
            self._ended_well += all(violation <= 0 for violation in trial.constraints.values())

    def _open_mirror(self, study: Study, number: int, rng: np.random.Generator) -> Mirror:
        if self._mirror is None:
            self._mirror = Mirror(self.candidates.space.parameters, study.directions, self._ordered)
        with quiet_optuna():
            inner = self._inner(seed=int(rng.integers(2**31)))
        self._mirror.begin(number, inner)
        if isinstance(inner, _KEEPS_STATE_IN_TRIALS):
            self._mirror.draw(number)
        return self._mirror

    def _draw(self, mirror: Mirror, number: int, rng: np.random.Generator) -> int:
        if self._ended < self._startup or not self._ended_well:
            return self.candidates.uniform(rng)
        for _ in range(self._draws):
            codes = mirror.draw(number)
            row = int(self.candidates.free_rows_of(codes[None])[0])
            if row >= 0:
                return row
        return self.candidates.nearest(codes, rng)


_BATCH = 1024
"""Points drawn at once; where one combination in a hundred is valid, some rows are among them."""

_DRAWS = 2
"""Batches drawn before the row nearest to a point is taken instead."""


class FeasibleTPESampler(FeasibleSampler):
    """The multivariate tree-structured Parzen estimator over the rows of a space.

    TPE draws points where good trials lie and proposes the one that is likeliest to be good rather than bad. Here
    the points that are compared are free rows, so that neither the comparison nor the draw is wasted on others.
    Proposals that have no result yet count as bad ones, which keeps those made at the same time apart.

    Parameters
    ----------
    space, seed, available
        As for `FeasibleSampler`.
    """

    def __init__(self, space: SearchSpace, seed: int, available: ArrayLike | None = None) -> None:
        super().__init__(space, self._tpe, seed, available=available, draws=_DRAWS)
        self._estimator = _estimator_over(self.candidates)

    def _tpe(self, seed: int) -> TPESampler:
        sampler = TPESampler(n_startup_trials=1, multivariate=True, constant_liar=True, seed=seed)
        sampler._parzen_estimator_cls = self._estimator  # where Optuna lets its estimator be replaced
        return sampler


def _estimator_over(candidates: Candidates) -> type[_ParzenEstimator]:
    """A Parzen estimator whose samples are free rows, where it finds any."""
    index = {
        parameter.name: position
        for position, parameter in enumerate(candidates.space.parameters)
        if len(parameter.values) > 1
    }

    class RowEstimator(_ParzenEstimator):
        def sample(self, rng: np.random.RandomState, size: int) -> dict[str, NDArray[np.float64]]:
            if self._search_space.keys() != index.keys():
                return super().sample(rng, size)
            points = super().sample(rng, _BATCH)
            codes = np.zeros((_BATCH, len(candidates.space.parameters)), np.int64)
            for name, values in points.items():
                codes[:, index[name]] = values
            free = np.flatnonzero(candidates.free_rows_of(codes) >= 0)
            kept = free[:size] if free.size else np.arange(size)
            return {name: values[kept] for name, values in points.items()}

    return RowEstimator
