"""Optuna: its samplers, restricted to the rows of a search space, and trials as one of its studies."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseGASampler,
    BaseSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState, create_trial

from autotile.core import model
from autotile.core.documents import attributes
from autotile.core.model import OBJECTIVES, TIME, Value, objective_values
from autotile.errors import InputError
from autotile.kernel.spec import Parameter
from autotile.search.gaussian_process import positions
from autotile.search.row_sampler import Candidates, Result, RowSampler, relative_error
from autotile.space.search_space import SearchSpace

_quiet_lock = RLock()
os.register_at_fork(before=_quiet_lock.acquire, after_in_parent=_quiet_lock.release, after_in_child=_quiet_lock.release)


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Suppress Optuna's log messages below errors, and two warnings; one thread at a time, as both are of the process.

    They say that a feature is experimental, and that CMA-ES ignores constraints; it learns of failures by their values.
    """
    with _quiet_lock, warnings.catch_warnings():
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Constraints have been set", UserWarning)
        try:
            yield
        finally:
            optuna.logging.set_verbosity(before)


FAILED = "failed"
"""Constraint of every trial in a study: 1 (violated) if the candidate failed, else 0."""

_VALUE_OF_FIRST_FAILURES = 1e6
"""Value of a failure while nothing has been measured: one second in microseconds, longer than most kernels take."""


def values_in_study(objectives: int = 1) -> Callable[[Result], Sequence[float]]:
    """Return a function of results, in the order in which the trials end, that returns the values in a study.

    Optuna's samplers ignore failed trials, so a failed candidate is a complete trial in a study: its values are twice
    the worst so far, for samplers that use values only, and the constraint `FAILED` is violated, which keeps it out of
    Optuna's best trial and among the bad trials in TPE.
    """
    worst = [0.0] * objectives

    def values(result: Result) -> Sequence[float]:
        if result is None:
            return [2 * value or _VALUE_OF_FIRST_FAILURES for value in worst]
        worst[:] = map(max, worst, result)
        return result

    return values


class _Choices(CategoricalDistribution):
    """Choices that are compared by identity first.

    Optuna compares the distributions of all trials with each other, choice by choice, which would cost more than the
    sampling itself.
    """

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    __hash__ = CategoricalDistribution.__hash__


_KEEPS_STATE_IN_TRIALS = (BaseGASampler, CmaEsSampler)
"""Samplers that mark the trials they draw for with a generation, and learn from no others: they must draw once for
every trial, even if the draw is discarded."""


class FeasibleSampler(RowSampler):
    """Wraps an Optuna sampler so that it proposes only rows of a search space, each at most once.

    The wrapped sampler draws until a draw is a free row; after ``draws`` draws, the free row nearest to the last one is
    proposed. Each proposal has a new wrapped sampler, seeded by the seed and the number of trials. It sees a private
    study with the rows that were tried, so that it learns from these and not from its draws, with an integer for each
    value, since some samplers cannot handle choices (CMA-ES) or ignore their order. These integers are choices, or
    ``ordered`` as each parameter's values are.

    ``inner`` is the constructor of the wrapped sampler, None for TPE over the free rows. It is used when ``startup``
    trials have ended, at least one of them successfully. Until then, rows are drawn uniformly: without trials the
    wrapped sampler would draw uniformly from all combinations, and the rows nearest to these are not uniform. A draw
    takes a millisecond or more.
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        available: ArrayLike | None = None,
        objectives: int = 1,
        *,
        inner: Callable[..., BaseSampler] | None = None,
        startup: int = 10,
        draws: int = 8,
        ordered: bool = False,
    ) -> None:
        super().__init__(space, seed, available, objectives)
        self._inner, self._startup, self._draws = inner or partial(_tpe_over_rows, self.candidates), startup, draws
        self._storage = InMemoryStorage()
        with quiet_optuna():
            directions = [StudyDirection.MINIMIZE] * objectives
            self._private = optuna.create_study(storage=self._storage, directions=directions, sampler=RandomSampler())
        self._values = values_in_study(objectives)
        self._proxies: dict[int, Trial] = {}
        """The open trials of the private study, by the row of each."""
        self._axes: list[tuple[int, str, NDArray[np.int64], BaseDistribution]] = []
        """Index, name, integer of each code and distribution of each parameter with at least two values."""
        for index, parameter in enumerate(space.parameters):
            last = len(parameter.values) - 1
            if last > 0:
                ordinals = positions(parameter.values) if ordered else None
                distribution = IntDistribution(0, last) if ordered else _Choices(range(last + 1))
                of_code = np.arange(last + 1) if ordinals is None else ordinals
                self._axes.append((index, parameter.name, of_code, distribution))
        self._ended = 0
        self._succeeded = 0

    def _choose(self, rng: np.random.Generator) -> int:
        proxy = self._open_proxy(rng)
        if self._ended < self._startup or not self._succeeded:
            row = self.candidates.uniform(rng)
        else:
            for _ in range(self._draws):
                codes = self._draw(proxy)
                row = int(self.candidates.free_rows_of(codes[None])[0])
                if row >= 0:
                    break
            else:
                row = self.candidates.nearest(codes, rng)
        self._set_row(proxy, row)
        return row

    def _adopt(self, row: int, rng: np.random.Generator) -> None:
        self._set_row(self._open_proxy(rng), row)

    def tell(self, row: int, result: Result, error: float = 0.0) -> None:
        """Pass the values of a trial on to the wrapped samplers."""
        proxy = self._proxies.pop(row)
        proxy.set_constraint(FAILED, float(result is None))
        with quiet_optuna():
            self._private.tell(proxy, self._values(result))
        self._ended += 1
        self._succeeded += result is not None

    def withdraw(self, row: int) -> None:
        """End a trial as a failed one of Optuna, which is ignored."""
        with quiet_optuna():
            self._private.tell(self._proxies.pop(row), state=TrialState.FAIL)

    def _open_proxy(self, rng: np.random.Generator) -> Trial:
        """Open the proxy of a trial, for which a new wrapped sampler draws."""
        with quiet_optuna():
            self._private.sampler = self._inner(seed=int(rng.integers(2**31)))
        proxy = self._private.ask()
        if isinstance(self._private.sampler, _KEEPS_STATE_IN_TRIALS):
            self._draw(proxy)
        return proxy

    def _draw(self, proxy: Trial) -> NDArray[np.int64]:
        """Draw codes for an open proxy, shape (parameters,)."""
        study, trial = self._private, self._storage.get_trial(proxy._trial_id)
        inner = study.sampler
        drawn = inner.sample_relative(study, trial, inner.infer_relative_search_space(study, trial))
        codes = np.zeros(len(self.candidates.space.parameters), np.int64)
        for index, name, ordinals, distribution in self._axes:
            if name not in drawn:
                drawn[name] = inner.sample_independent(study, trial, name, distribution)
            codes[index] = np.flatnonzero(ordinals == int(drawn[name]))[0]
        return codes

    def _set_row(self, proxy: Trial, row: int) -> None:
        self._proxies[row] = proxy
        codes = self.candidates.space.codes[row]
        for index, name, ordinals, distribution in self._axes:
            self._storage.set_trial_param(proxy._trial_id, name, float(ordinals[codes[index]]), distribution)


_BATCH = 1024
"""Number of points drawn at once, enough to contain rows if one combination in a hundred is valid."""


class RowEstimator(_ParzenEstimator):
    """Parzen estimator over a space, whose samples are free rows if any are drawn."""

    def __init__(self, *given: Any, candidates: Candidates, **named: Any) -> None:
        super().__init__(*given, **named)
        self._candidates = candidates

    def sample(self, rng: np.random.RandomState, size: int) -> dict[str, NDArray[np.float64]]:
        """Draw points, of values by parameter, shape (size,) each."""
        parameters = self._candidates.space.parameters
        index = {each.name: position for position, each in enumerate(parameters) if len(each.values) > 1}
        points = super().sample(rng, _BATCH)
        codes = np.zeros((_BATCH, len(parameters)), np.int64)
        for name, values in points.items():
            codes[:, index[name]] = values
        free = np.flatnonzero(self._candidates.free_rows_of(codes) >= 0)
        kept = free[:size] if free.size else np.arange(size)
        return {name: values[kept] for name, values in points.items()}


def _tpe_over_rows(candidates: Candidates, seed: int) -> TPESampler:
    """Return the multivariate tree-structured Parzen estimator over the rows of a space.

    TPE draws points near the good trials and proposes the point with the largest ratio of the densities of good and bad
    trials. Here the points are free rows, so that no draw is wasted on invalid or tried configurations. Trials without
    a result count as bad ones, which spreads concurrent proposals.
    """
    sampler = TPESampler(n_startup_trials=1, multivariate=True, constant_liar=True, seed=seed)
    estimator: Any = partial(RowEstimator, candidates=candidates)
    sampler._parzen_estimator_cls = estimator  # Optuna's hook for another one
    return sampler


_POPULATION = 20
"""Trials of one generation: ten generations in 200 trials."""

tpe = partial(FeasibleSampler, draws=2)  # each is a whole batch
_gp = partial(GPSampler, n_startup_trials=1, warn_independent_sampling=False)
gp = partial(FeasibleSampler, inner=_gp, draws=1, ordered=True)  # a second draw would find the same maximum
_cmaes = partial(CmaEsSampler, warn_independent_sampling=False)
cmaes = partial(FeasibleSampler, inner=_cmaes, startup=1, ordered=True)
_nsga2 = partial(NSGAIISampler, population_size=_POPULATION)
nsga2 = partial(FeasibleSampler, inner=_nsga2, startup=_POPULATION)


def attributes_of(trial: model.Trial) -> dict[str, str | int | float]:
    """Return the user attributes of a trial, which Optuna's tables and dashboard show."""
    shown: dict[str, str | int | float] = {"outcome": str(trial.outcome), "source": trial.source}
    if trial.reason:
        shown |= {"reason": trial.reason, "stage": trial.stage}
    parts: tuple[tuple[object, tuple[str, ...]], ...] = (
        (trial.geometry, ("threads", "dynamic_smem_bytes")),
        (trial.resources, ("registers", "spill_bytes", "static_smem_bytes")),
        (trial.occupancy, ("occupancy", "blocks_per_sm")),
        (trial.measurement, ("low_us", "high_us")),
    )
    for part, names in parts:
        if part is not None:
            shown |= attributes(part, *names)
    if trial.occupancy is not None:
        shown["limited_by"] = ", ".join(trial.occupancy.limited_by)
    if trial.measurement is not None:
        shown["relative_error"] = relative_error(trial)
    return shown


def study_of_trials(
    parameters: Sequence[Parameter],
    trials: Iterable[model.Trial],
    name: str | None = None,
    storage: BaseStorage | None = None,
) -> optuna.Study:
    """Build a study from stored trials, oldest first, for Optuna's plots and tools.

    It minimises the time in microseconds. Values of the parameters that occur only in the trials are added. Without a
    name, Optuna chooses one; without a storage, it is in memory.
    """
    kept = list(trials)
    choices: dict[str, dict[Value, None]] = {each.name: dict.fromkeys(each.values) for each in parameters}
    for trial in kept:
        for parameter, value in trial.config.items():
            choices.setdefault(parameter, {})[value] = None
    distributions = {parameter: CategoricalDistribution(tuple(each)) for parameter, each in choices.items()}
    values_of = values_in_study()
    with quiet_optuna():
        study = optuna.create_study(study_name=name, storage=storage)
        study.set_metric_names([OBJECTIVES[TIME]])
        for trial in kept:
            result, is_known = objective_values(trial, [TIME]), trial.outcome.is_finding
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if is_known else TrialState.FAIL,
                    values=values_of(result) if is_known else None,
                    params=dict(trial.config),
                    distributions={each: distributions[each] for each in trial.config},
                    user_attrs=attributes_of(trial),
                    constraints={FAILED: float(result is None)},
                )
            )
    return study


def write_study(path: Path, parameters: Sequence[Parameter], trials: Iterable[model.Trial], name: str) -> None:
    """Write trials to an SQLite file as a study, for ``optuna-dashboard`` and `optuna.load_study`.

    The file is created if it does not exist, else the study is added to it. Raise `InputError` if the file is not an
    Optuna storage, cannot be written, or holds a study of that name.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy import URL, NullPool
    from sqlalchemy.exc import DatabaseError

    url = URL.create("sqlite", database=str(path)).render_as_string()
    try:
        with quiet_optuna():
            # without a pool, no connection stays open if Optuna's constructor rejects the file
            storage = RDBStorage(url, engine_kwargs={"poolclass": NullPool})
        try:
            study_of_trials(parameters, trials, name, storage)
        finally:
            storage.remove_session()
            storage.engine.dispose()
    except optuna.exceptions.DuplicatedStudyError as error:
        raise InputError(f"{path} holds a study named {name!r} already; name another file") from error
    except (DatabaseError, RuntimeError) as error:
        cause = getattr(error, "orig", None) or error
        raise InputError(f"{path} cannot be written as an Optuna storage: {cause}; name another file") from error
