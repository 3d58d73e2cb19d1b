"""What a session begins with: what was measured before, and what may be tried."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotile.ground.model import Outcome, Trial
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


def rows_to_try(space: SearchSpace, backend: Backend, options: TuneOptions) -> NDArray[np.bool_] | None:
    """Rows that can be run and that the user wants tried; None for all."""
    runnable = backend.available(space)
    if options.only is None:
        return runnable
    wanted = np.zeros(len(space), dtype=np.bool_)
    wanted[[row for config in options.only if (row := space.row_of(config)) is not None]] = True
    return wanted if runnable is None else wanted & runnable
