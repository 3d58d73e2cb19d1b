"""The study that a wrapped sampler sees: the trials of another study, by position in each parameter's values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from autotile.ground.spec import Parameter
from autotile.search.candidates import positions
from autotile.search.quiet import quiet_optuna

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
