"""Verification of a configuration for a problem that it is served for, but was not tuned for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autotile.core.model import Config, Outcome, Problem, Trial, config_key
from autotile.database.database import Database, database_location
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import read_settings
from autotile.tuning import session
from autotile.tuning.options import TuneOptions
from autotile.tuning.result import TuneResult

_UNCHECKED = (Outcome.NOT_AVAILABLE, Outcome.INFEASIBLE)
"""Outcomes of configurations that did not run, and that serving excludes by itself."""


@dataclass(frozen=True, slots=True)
class ServedCheck:
    """Outcome of verifying a served configuration.

    Attributes
    ----------
    trial
        Trial of the configuration, with its time if it is correct; None if it could not be run.
    result
        Result of the session that ran it and the default; None if both failed for the same reason.
    fault
        Reason why the configuration failed or could not be run; empty if it is correct.
    """

    trial: Trial | None
    result: TuneResult | None
    fault: str

    @property
    def refused(self) -> bool:
        """Whether the configuration is wrong for the problem, and is no longer served for it."""
        return self.trial is not None and not self.trial.outcome.has_time


def check_served(kernel: Kernel, problem: Problem, config: Config, options: TuneOptions) -> ServedCheck:
    """Verify a configuration as finals do, at the sizes of a problem, and store the verdict.

    The verdict is stored without a time, so that the problem still counts as not tuned. A configuration that failed is
    not served for this problem again, unless a tuning measures it.

    Parameters
    ----------
    kernel, problem
        Kernel in its current version, and the problem.
    config
        Configuration that is served for the problem.
    options
        Options of the session, its database included; those that select configurations are fixed here.

    Raises
    ------
    DatabaseError
        The database cannot be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    chosen = replace(
        options,
        sampler=BRUTE_FORCE,
        trials=None,
        budget_s=None,
        until=None,
        transfer=False,
        only=(config, dict(kernel.spec.default)),
        finals=2,
        discard=False,
    )
    result: TuneResult | None = None
    fault = ""
    with _empty_database() as scratch:
        try:
            result = session.tune(kernel, problem, read_settings(), replace(chosen, database=str(scratch)))
        except InputError as error:  # every configuration fails for the same reason
            fault = str(error)
        if result is not None and result.interrupted:
            return ServedCheck(None, result, "interrupted")
        with Database.open(scratch) as database:
            trial = _newest_trial(database, config)
            if trial is not None and trial.outcome not in _UNCHECKED:
                _store(database, trial, database_location(options.database))
                return ServedCheck(trial, result, "" if trial.outcome.has_time else f"{trial.outcome}: {trial.reason}")
    return ServedCheck(None, result, fault or (trial.reason if trial is not None else "it was not tried"))


@contextmanager
def _empty_database() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="autotile-") as folder:
        yield Path(folder) / "check.db"


def _newest_trial(database: Database, config: Config) -> Trial | None:
    """Return the trial of a configuration in a database of one session; one of the finals is the newest."""
    stored = [one for study in database.studies() for one in database.stored_trials(study.study_id)]
    own = [one for one in stored if config_key(one.trial.config) == config_key(config)]
    return max(own, key=lambda one: one.trial_id).trial if own else None


def _store(scratch: Database, trial: Trial, location: str | Path) -> None:
    """Record the verdict in the problem's study."""
    (study,) = scratch.studies()
    with Database.open(location, set_damage_aside=False) as database:
        study_id = database.study(study.key, study.device)
        driver = study.device.driver if study.device is not None else ""
        run_id = database.start_run(study_id, sampler="verify", driver=driver)
        database.add_trial(study_id, run_id, replace(trial, measurement=None, stage="verify"), phase="final")
        database.end_run(run_id)
