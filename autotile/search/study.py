"""Trials as an Optuna study, and a study as a file for Optuna's tools."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from scipy.special import ndtri
from sqlalchemy import URL, NullPool
from sqlalchemy.exc import DatabaseError

from autotile.core.model import OBJECTIVES, TIME, Trial, Value, objective_values
from autotile.errors import InputError
from autotile.kernel.spec import Parameter


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Suppress Optuna's log messages below errors, and two warnings.

    The warnings say that a feature is experimental, and that CMA-ES ignores constraints; it learns of failures from
    their values.
    """
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.filterwarnings("ignore", "Constraints have been set", UserWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


FAILED = "failed"
"""Constraint of every trial: 1 (violated) if the candidate failed, else 0."""

RELATIVE_ERROR = "relative_error"
"""User attribute of a measured trial: standard error of its time over its time."""

_COVERAGE = 0.95
_MIN_SAMPLES_OF_COVERAGE = 6
"""Coverage of an interval of a median with at least six samples, see `autotile.core.statistics.median_interval`."""

_VALUE_OF_FIRST_FAILURES = 1e6
"""Value of a failure while nothing has been measured: one second in microseconds, longer than most kernels take."""


class Objective:
    """Values of trials in a study: the time in microseconds, or for a failure more than any time so far.

    Optuna's samplers ignore failed trials, so a failed candidate is a complete trial in the study: its value is twice
    the longest time measured so far, for samplers that use values only, and the constraint `FAILED` is violated, which
    keeps it out of Optuna's best trial and among the bad trials in TPE. The value of a pruned candidate is its time.
    Only a candidate whose result cannot be known is a failed trial, which samplers ignore.

    Parameters
    ----------
    names
        Objectives to minimise, of `autotile.core.model`, each in its own unit.
    """

    def __init__(self, names: Sequence[str] = (TIME,)) -> None:
        self._names = tuple(names)
        self._worst = [0.0] * len(self._names)

    def result(self, trial: Trial) -> tuple[TrialState, list[float] | None]:
        """Return the state and values of a trial; to be called in the order in which trials ended."""
        if not trial.outcome.is_finding:
            return TrialState.FAIL, None
        values = objective_values(trial, self._names)
        if values is None:
            return TrialState.COMPLETE, [2 * worst or _VALUE_OF_FIRST_FAILURES for worst in self._worst]
        self._worst = [max(pair) for pair in zip(self._worst, values, strict=True)]
        return TrialState.COMPLETE, list(values)


def constraints_of(trial: Trial) -> dict[str, float]:
    """Return the constraints of a trial, see `FAILED`."""
    return {FAILED: float(objective_values(trial, [TIME]) is None)}


def distributions_of(parameters: Iterable[Parameter]) -> dict[str, CategoricalDistribution]:
    """Return the values of each parameter as choices, which Optuna's plots show."""
    return {parameter.name: CategoricalDistribution(parameter.values) for parameter in parameters}


def attributes_of(trial: Trial) -> dict[str, str | int | float]:
    """Return the user attributes of a trial, which Optuna's tables and dashboard show."""
    shown: dict[str, str | int | float] = {"outcome": str(trial.outcome), "source": trial.source}
    if trial.reason:
        shown |= {"reason": trial.reason, "stage": trial.stage}
    if trial.geometry is not None:
        shown |= {"threads": trial.geometry.threads, "dynamic_smem_bytes": trial.geometry.dynamic_smem_bytes}
    if trial.resources is not None:
        shown |= {
            "registers": trial.resources.registers,
            "spill_bytes": trial.resources.spill_bytes,
            "static_smem_bytes": trial.resources.static_smem_bytes,
        }
    if trial.occupancy is not None:
        shown |= {
            "occupancy": trial.occupancy.occupancy,
            "blocks_per_sm": trial.occupancy.blocks_per_sm,
            "limited_by": ", ".join(trial.occupancy.limited_by),
        }
    if trial.measurement is not None:
        shown |= {
            "low_us": trial.measurement.low_us,
            "high_us": trial.measurement.high_us,
            RELATIVE_ERROR: relative_error(trial),
        }
    return shown


def new_study(
    name: str | None = None, sampler: BaseSampler | None = None, objectives: Sequence[str] = (TIME,)
) -> optuna.Study:
    """Create a study in memory that minimises the time in microseconds, or several objectives."""
    with quiet_optuna():
        study = optuna.create_study(study_name=name, sampler=sampler, directions=["minimize"] * len(objectives))
        study.set_metric_names([OBJECTIVES[objective] for objective in objectives])
    return study


def finished_trial(
    trial: Trial, distributions: Mapping[str, CategoricalDistribution], objective: Objective
) -> FrozenTrial:
    """Return a trial as a finished trial of Optuna.

    Raises
    ------
    ValueError
        The configuration has a parameter or a value that ``distributions`` lacks.
    """
    return frozen_trial(trial, distributions, *objective.result(trial))


def begun_trial(trial: Trial, distributions: Mapping[str, CategoricalDistribution]) -> FrozenTrial:
    """Return a trial as a running trial of Optuna.

    Raises
    ------
    ValueError
        As for `finished_trial`.
    """
    return frozen_trial(trial, distributions, TrialState.RUNNING, None)


def study_of_trials(parameters: Sequence[Parameter], trials: Iterable[Trial], name: str | None = None) -> optuna.Study:
    """Build a study in memory from stored trials, for Optuna's plots or for `study_to_storage`.

    Parameters
    ----------
    parameters
        Parameters of the search space; values that occur only in the trials are added.
    trials
        The trials, oldest first.
    name
        Name of the study; None for one of Optuna's choice.
    """
    kept = list(trials)
    values: dict[str, dict[Value, None]] = {each.name: dict.fromkeys(each.values) for each in parameters}
    for trial in kept:
        for parameter, value in trial.config.items():
            values.setdefault(parameter, {})[value] = None
    distributions = {parameter: CategoricalDistribution(tuple(choices)) for parameter, choices in values.items()}
    objective = Objective()
    study = new_study(name)
    study.add_trials(finished_trial(trial, distributions, objective) for trial in kept)
    return study


def relative_error(trial: Trial) -> float:
    """Return the standard error of a median over the median, from the width of its interval; 0 without a measurement.

    With fewer than six samples, the interval spans all of them and covers the median with a probability of
    ``1 - 2 ** (1 - n)`` instead of 95 %.
    """
    measurement = trial.measurement
    if measurement is None:
        return 0.0
    samples = len(measurement.samples_us)
    coverage = 1 - 2.0 ** (1 - samples) if 1 < samples < _MIN_SAMPLES_OF_COVERAGE else _COVERAGE
    deviations = float(ndtri((1 + coverage) / 2))
    return (measurement.high_us - measurement.low_us) / (2 * deviations * measurement.time_us)


def frozen_trial(
    trial: Trial, distributions: Mapping[str, CategoricalDistribution], state: TrialState, values: list[float] | None
) -> FrozenTrial:
    """Return a trial as one of Optuna with a state and values, see `Objective.result`."""
    return create_trial(
        state=state,
        values=values,
        params=dict(trial.config),
        distributions={name: distributions[name] for name in trial.config if name in distributions},
        user_attrs=attributes_of(trial),
        constraints=constraints_of(trial),
    )


def study_to_storage(study: optuna.Study, path: Path) -> None:
    """Copy a study to an SQLite file, for ``optuna-dashboard`` and `optuna.load_study`.

    Parameters
    ----------
    study
        The study; its name, directions, attributes and trials are copied.
    path
        The file; it is created if it does not exist, else the study is added to it.

    Raises
    ------
    InputError
        The file is not an Optuna storage, cannot be written, or holds a study of that name.
    """
    try:
        with quiet_optuna():
            url = URL.create("sqlite", database=str(path)).render_as_string()
            # without a pool, no connection stays open if Optuna's constructor rejects the file
            storage = RDBStorage(url, engine_kwargs={"poolclass": NullPool})
            try:
                _copy(study, storage)
            finally:
                storage.remove_session()
                storage.engine.dispose()
    except DuplicatedStudyError as error:
        raise InputError(f"{path} holds a study named {study.study_name!r} already; name another file") from error
    except (DatabaseError, RuntimeError) as error:
        cause = getattr(error, "orig", None) or error
        raise InputError(f"{path} cannot be written as an Optuna storage: {cause}; name another file") from error


def _copy(study: optuna.Study, storage: RDBStorage) -> None:
    copy = optuna.create_study(storage=storage, study_name=study.study_name, directions=study.directions)
    if study.metric_names is not None:
        copy.set_metric_names(study.metric_names)
    for name, value in study.user_attrs.items():
        copy.set_user_attr(name, value)
    copy.add_trials(study.get_trials(deepcopy=False))
