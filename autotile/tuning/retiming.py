"""Verification of stored results: configurations are checked and timed again, for the tuned problem or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotile.core.model import Config, Outcome, Problem, Trial, config_key
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database, StoredBest, database_location
from autotile.database.keys import key_of, space_hash
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.problem import resolve_problem
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import read_settings
from autotile.tuning import session
from autotile.tuning.candidate_check import CandidateCheck, judge
from autotile.tuning.options import TuneOptions
from autotile.tuning.result import TuneResult

MAX_RETIMED = 3
"""Maximum number of configurations that are measured again, besides the default."""


@dataclass(frozen=True, slots=True)
class TunedProblem:
    """A tuned problem with the best result of each of its studies, newest first; the studies differ in the compiler."""

    problem: Problem
    bests: Sequence[StoredBest]


def tuned_problems(
    kernel: Kernel,
    database: str | Path,
    *,
    problem: Problem | None = None,
    dtype: str | None = None,
    gpu_name: str | None = None,
    source: str = "cuda",
) -> list[TunedProblem]:
    """Return the problems that are tuned for the current version of a kernel, the newest first.

    Parameters
    ----------
    kernel
        Kernel in its current version.
    database
        Path or URL.
    problem
        The only problem to return; None for all.
    dtype
        Element type of the problems to return; None for all.
    gpu_name
        Name of the GPU that they are tuned on; None for any.
    source
        ``cuda`` for measured results, ``replayed`` for those from a recording.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such problem.
    """
    version = (kernel.source_hash, space_hash(kernel.spec), tuple(kernel.spec.options))
    opened = Database.open_readonly(database)
    bests: list[StoredBest] = []
    if opened is not None:
        with opened:
            bests = opened.best(kernel.name, dtype=problem.dtype if problem is not None else dtype, gpu_name=gpu_name)
    found: dict[str, TunedProblem] = {}
    for best in bests:
        key = best.key
        if (key.template_hash, key.space_hash, key.options) != version or (key.source, key.l2_mode) != (source, "cold"):
            continue
        tuned = resolve_problem(kernel.spec, key.sizes, key.dtype)
        if problem in (None, tuned):
            earlier = found.get(str(tuned))
            found[str(tuned)] = TunedProblem(tuned, [*(earlier.bests if earlier else ()), best])
    if not found:
        where = f" on {gpu_name}" if gpu_name else ""
        raise InputError(
            f"{problem or kernel.name} is not tuned{where}, so there is nothing to verify; run `autotile tune`"
        )
    return list(found.values())


def retime(
    kernel: Kernel, tuned: TunedProblem, served: Config, options: TuneOptions
) -> tuple[TuneResult | None, str, Mapping[str, str]]:
    """Check and time the best configurations of a problem and the default in one session.

    The session's winner becomes the best result of its study. Configurations that fail are refused in every study of
    the problem, whatever compiler the study used.

    Parameters
    ----------
    kernel, tuned
        Kernel in its current version, and the problem.
    served
        Configuration that is served for the problem.
    options
        Options of the session, its database included; those that select configurations are fixed here.

    Returns
    -------
    result
        Result of the session; None if every configuration failed for the same reason.
    fault
        That reason; empty otherwise.
    refused
        Configurations that failed, by `config_key`, with outcome and reason. They are no longer served.

    Raises
    ------
    DatabaseError
        The database cannot be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    database = database_location(options.database)
    candidates = _candidates(tuned, served, database)
    chosen = replace(
        options,
        fresh=True,
        sampler=BRUTE_FORCE,
        trials=None,
        budget_s=None,
        until=None,
        transfer=False,
        only=(*candidates, dict(kernel.spec.default)),
        finals=len(candidates) + 1,
        discard=False,
    )
    result, fault = None, ""
    try:
        result = session.tune(kernel, tuned.problem, read_settings(), chosen)
    except InputError as error:  # every configuration fails for the same reason
        fault = str(error)
    return result, fault, _refuse_failed(tuned, candidates, database)


def _candidates(tuned: TunedProblem, served: Config, database: str | Path) -> list[Config]:
    """Return the served configuration, then the fastest ones of each study, `MAX_RETIMED` in all."""
    found = {config_key(served): served}
    opened = Database.open_readonly(database)
    if opened is None:
        return [served]
    with opened:
        for best in tuned.bests:
            finals = [t for t in opened.trials(best.study_id, phase="final") if _ran(t)]
            searched = [t for t in opened.trials(best.study_id, phase="search") if _ran(t)]
            for trial in [best.trial, *sorted(finals, key=_cost), *sorted(searched, key=_cost)]:
                found.setdefault(config_key(trial.config), trial.config)
    return list(found.values())[:MAX_RETIMED]


def _refuse_failed(tuned: TunedProblem, candidates: Sequence[Config], database: str | Path) -> dict[str, str]:
    """Record the configurations that failed last as refused in every study of the problem; return why, by key."""
    with Database.open(database, set_damage_aside=False) as opened:
        newest = _newest_trials(opened, tuned)
        failed = {
            key: newest[key]
            for key in map(config_key, candidates)
            if key in newest and not newest[key].outcome.has_time
        }
        problem, gpu_name = tuned.problem, tuned.bests[0].key.gpu_name
        for best in opened.best(problem.kernel, dtype=problem.dtype, sizes=problem.sizes, gpu_name=gpu_name):
            _refuse(opened, best, failed)
    return {key: f"{trial.outcome}: {trial.reason}" for key, trial in failed.items()}


def _refuse(database: Database, best: StoredBest, failed: Mapping[str, Trial]) -> None:
    """Record failed trials in a study until its best configuration is none of them."""
    while (trial := failed.get(config_key(best.trial.config))) is not None:
        database.add_run(best.study_id, [trial], sampler="verify", driver=best.run.driver, phase="final")
        remaining = database.best(study_id=best.study_id)
        if not remaining:
            return
        best = remaining[0]


def _newest_trials(database: Database, tuned: TunedProblem) -> dict[str, Trial]:
    """Return the newest trial of each configuration of a problem in any of its studies, by `config_key`."""
    first = tuned.bests[0].key
    stored = [
        one
        for study in database.studies(first.kernel)
        if dict(study.key.sizes) == dict(first.sizes)
        and (study.key.dtype, study.key.gpu_name, study.key.source) == (first.dtype, first.gpu_name, first.source)
        for one in database.stored_trials(study.study_id)
    ]
    return {config_key(one.trial.config): one.trial for one in sorted(stored, key=lambda one: one.trial_id)}


def _ran(trial: Trial) -> bool:
    return trial.outcome is Outcome.OK and trial.time_us is not None


def _cost(trial: Trial) -> float:
    return trial.cost or 0.0


_UNCHECKED = (Outcome.NOT_AVAILABLE, Outcome.INFEASIBLE, Outcome.NOT_COMPILED)
"""Outcomes of configurations that did not run, and that serving excludes by itself."""


def check_served(
    kernel: Kernel, problem: Problem, config: Config, options: TuneOptions
) -> tuple[CandidateCheck | None, str]:
    """Verify a configuration as finals do, at the sizes of a problem, beside the default, and store the verdict.

    The verdict is stored without a time, so that the problem still counts as not tuned. A configuration that failed is
    not served for this problem again, unless a tuning measures it.

    Parameters
    ----------
    kernel, problem
        Kernel in its current version, and the problem.
    config
        Configuration that is served for the problem.
    options
        Options of the session, its database included.

    Returns
    -------
    check
        Judgement of the configuration; None if it could not be run.
    fault
        Reason why it failed or could not be run; empty if it is correct.

    Raises
    ------
    DatabaseError
        The database cannot be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    configs = config, dict(kernel.spec.default)
    try:
        check = judge(
            kernel, kernel, problem, configs=configs, settings=read_settings(), options=options, may_replay=True
        )
    except InputError as error:
        return None, str(error)
    trial, device = check.candidate, check.device
    if trial.outcome in _UNCHECKED:
        return None, trial.reason
    key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode=options.l2)
    verdict = replace(trial, measurement=None, stage="verify")
    with Database.open(database_location(options.database), set_damage_aside=False) as database:
        database.add_run(key, [verdict], sampler="verify", device=device, driver=device.driver or "", phase="final")
    return check, "" if trial.outcome.has_time else f"{trial.outcome}: {trial.reason}"
