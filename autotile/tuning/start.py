"""What a session begins with: what was measured before, and what may be tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.files.library import Kernel
from autotile.ground.config_check import check_config
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Config, Outcome, Problem, Trial, config_key
from autotile.ground.objectives import objective_values
from autotile.ground.space import SearchSpace, feasible_space
from autotile.search.expectation import Source
from autotile.store.keys import TuningKey
from autotile.tuning.backend import Backend
from autotile.tuning.ledger import Ledger
from autotile.tuning.options import TuneOptions
from autotile.tuning.transfer import best_of, sources_of

if TYPE_CHECKING:
    from autotile.store.database import Database

Mask = NDArray[np.bool_]


class Known(NamedTuple):
    """What a session begins with.

    Attributes
    ----------
    trials
        Of earlier sessions of the study.
    incumbent
        What they found; None where none has ended.
    sources
        Other studies that teach.
    configs
        The default, and all configurations that these and the user name.
    """

    trials: list[Trial]
    incumbent: Config | None
    sources: list[Source]
    configs: list[Config]


def known_before(database: Database, study_id: int, key: TuningKey, options: TuneOptions, default: Config) -> Known:
    """What is known before the first trial; the default is tried in any case."""
    trials, best = earlier_trials(database, study_id, options), incumbent(database, study_id)
    sources = sources_of(database, key) if options.transfer else []
    named = [*(options.only or ()), *(trial.config for trial in trials), *([best] if best else [])]
    return Known(trials, best, sources, [dict(default), *named, *best_of(sources)])


def earlier_trials(database: Database, study_id: int, options: TuneOptions) -> list[Trial]:
    """What need not be measured again: neither what was dropped, where nothing is to be, nor what lacks an objective.

    Those that the finals of an earlier session refused come as they were refused.
    """
    if options.fresh:
        return []
    finals = database.trials(study_id, phase="final")
    refused = {config_key(trial.config): trial for trial in finals if not trial.outcome.has_time}
    stored = [refused.get(config_key(trial.config), trial) for trial in database.trials(study_id, phase="search")]
    kept = [trial for trial in stored if options.drops_slow or trial.outcome is not Outcome.PRUNED]
    return [trial for trial in kept if not trial.outcome.has_time or objective_values(trial, options.objectives)]


def incumbent(database: Database, study_id: int) -> Config | None:
    """The best configuration of the sessions that ended, which a new winner must beat; None where none has.

    What a killed session had found by then is not it: the same command would name another winner than if it had not
    been killed.
    """
    confirmed = [best.trial.config for best in database.best(study_id=study_id) if best.confirmed]
    if confirmed:
        return confirmed[0]
    ended = {run.run_id for run in database.runs(study_id) if run.ended_at is not None}
    tried = [stored.trial for stored in database.stored_trials(study_id, phase="search") if stored.run_id in ended]
    ran = [
        (trial.time_us, trial.config) for trial in tried if trial.outcome is Outcome.OK and trial.time_us is not None
    ]
    return min(ran, key=itemgetter(0))[1] if ran else None


def reopened(
    space: SearchSpace, kernel: Kernel, problem: Problem, device: DeviceProperties, configs: Iterable[Config]
) -> SearchSpace:
    """The space with those of the configurations that are only pruned: what was named, tried or taught is in it."""
    outside = [config for config in configs if space.row_of(config) is None]
    return space.including(
        config for config in outside if not check_config(kernel.spec, config, problem.sizes, device, problem.dtype)
    )


def first_to_try(default: Config, incumbent: Config | None, ledger: Ledger) -> list[Config]:
    """What a search begins with: the default, and what is served so far where this study has not tried it.

    The default is named in any case, so that a search that goes on retraces how it began.
    """
    return [default] if incumbent is None or ledger.find(incumbent) is not None else [default, incumbent]


def rows_to_try(kernel: Kernel, dtype: str, space: SearchSpace, backend: Backend, options: TuneOptions) -> Mask | None:
    """Rows that can be run, that the user wants tried, and that are valid for every problem to be right on.

    Returns
    -------
    numpy.ndarray or None
        bool, shape (rows,); None for all.

    Raises
    ------
    InputError
        No configuration is valid for one of the problems.
    """
    masks = [mask for mask in (backend.available(space),) if mask is not None]
    if options.only is not None:
        wanted = np.zeros(len(space), dtype=np.bool_)
        wanted[[row for config in options.only if (row := space.row_of(config)) is not None]] = True
        masks.append(wanted)
    valid = replace(kernel.spec, pruning=())  # they must be right there, not fast
    masks += [space.rows_in(feasible_space(valid, sizes, backend.device, dtype)) for sizes in options.verify_sizes]
    return np.logical_and.reduce(masks) if masks else None
