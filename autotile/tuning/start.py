"""What a session begins with: what was measured before, and what may be tried."""

from __future__ import annotations

from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from autotile.ground.model import Config, Outcome, Trial
from autotile.ground.space import SearchSpace
from autotile.store.database import Database
from autotile.tuning.backend import Backend
from autotile.tuning.options import TuneOptions


def earlier_trials(database: Database, study_id: int, options: TuneOptions) -> list[Trial]:
    """What need not be measured again; where nothing is to be dropped early, what was dropped must be."""
    if options.fresh:
        return []
    stored = database.trials(study_id, phase="search")
    return [trial for trial in stored if options.discard or trial.outcome is not Outcome.PRUNED]


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


def rows_to_try(space: SearchSpace, backend: Backend, options: TuneOptions) -> NDArray[np.bool_] | None:
    """Rows that can be run and that the user wants tried; None for all."""
    runnable = backend.available(space)
    if options.only is None:
        return runnable
    wanted = np.zeros(len(space), dtype=np.bool_)
    wanted[[row for config in options.only if (row := space.row_of(config)) is not None]] = True
    return wanted if runnable is None else wanted & runnable
