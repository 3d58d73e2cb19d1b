"""Measure tuned results again: the best three of a problem against the default, verified anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotile.api.tuning import tune_problem
from autotile.core.model import Config, Outcome, Problem, Trial, config_key
from autotile.cuda.driver import device_count, live_device
from autotile.database.database import Database
from autotile.database.keys import space_hash
from autotile.database.studies import StoredBest
from autotile.errors import InputError
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.ops.targets import check_device_index
from autotile.report.verification import VerifiedProblem, VerifyReport
from autotile.serving.dispatcher import find_best_kernel, forget_served
from autotile.settings import read_settings
from autotile.tuning.options import BRUTE_FORCE, TuneOptions
from autotile.tuning.result import TuneResult

_RETIMED = 3
"""Configurations that are measured again, beside the default."""

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Tuned:
    """A tuned problem: its studies, which differ in what they were compiled with, the newest first."""

    problem: Problem
    bests: Sequence[StoredBest]


def verify_results(
    kernel: str,
    sizes: Mapping[str, int] | None = None,
    *,
    aged_only: bool = False,
    dtype: str | None = None,
    options: TuneOptions | None = None,
    announce: Announce = lambda _: None,
) -> VerifyReport:
    """Verify and time the best configurations of tuned problems again, with the driver and compiler of today.

    The fastest of those that are still right is served from then on; among those that cannot be told apart, the one
    that was served before. A configuration that is found wrong is served no more, whatever it was compiled with.

    Parameters
    ----------
    kernel
        Name, or path of a search-space file.
    sizes
        Of one problem; None for all that are tuned on this GPU.
    aged_only
        Leave out what was measured with the present driver and compiler.
    dtype
        Only this element type; None for all, or for the kernel's first where sizes are given.
    options
        Which device and database, whether to sanitize; what else there is of options is chosen here.
    announce
        Called with a line for the user as the work goes on.

    Raises
    ------
    InputError
        There is no GPU, or nothing is tuned that could be verified.
    """
    options = options or TuneOptions()
    if options.replay is None:
        if device_count() == 0:
            raise InputError("verifying runs kernels, and there is no CUDA device here; see `autotile doctor`")
        check_device_index(options.device_index)
    loaded = load_kernel(kernel)
    location = options.database or read_settings().database
    asked = resolve_problem(loaded.spec, sizes, dtype) if sizes is not None else None
    rows = []
    for tuned in _tuned(loaded, asked, dtype, location, options):
        if aged_only and not _served(kernel, tuned.problem, location, options).choice.aged:
            continue
        announce(f"{tuned.problem}: the best {_RETIMED} and the default are measured again")
        rows.append(_verify(kernel, loaded, tuned, location, options))
    return VerifyReport(rows)


def _tuned(
    kernel: Kernel, asked: Problem | None, dtype: str | None, location: str, options: TuneOptions
) -> list[_Tuned]:
    """What is tuned on the device of this very version of the kernel."""
    version = (kernel.source_hash, space_hash(kernel.spec), tuple(kernel.spec.options))
    source = "replayed" if options.replay is not None else "cuda"
    gpu_name = live_device(options.device_index).name if options.replay is None else None
    opened = Database.open_readonly(location)
    bests: list[StoredBest] = []
    if opened is not None:
        with opened:
            bests = opened.best(kernel.name, dtype=asked.dtype if asked is not None else dtype, gpu_name=gpu_name)
    found: dict[str, list[StoredBest]] = {}
    for best in bests:
        key = best.key
        if (key.template_hash, key.space_hash, key.options) != version or (key.source, key.l2_mode) != (source, "cold"):
            continue
        problem = resolve_problem(kernel.spec, key.sizes, key.dtype)
        if asked is None or problem == asked:
            found.setdefault(str(problem), []).append(best)
    if not found:
        where = f" on {gpu_name}" if gpu_name else ""
        raise InputError(
            f"{asked or kernel.name} is not tuned{where}, so there is nothing to verify; run `autotile tune`"
        )
    return [_Tuned(resolve_problem(kernel.spec, same[0].key.sizes, same[0].key.dtype), same) for same in found.values()]


def _verify(asked_as: str, kernel: Kernel, tuned: _Tuned, location: str, options: TuneOptions) -> VerifiedProblem:
    before = _served(asked_as, tuned.problem, location, options)
    candidates = _candidates(tuned, before.config, location)
    chosen = replace(
        options,
        sampler=BRUTE_FORCE,
        trials=None,
        budget_s=None,
        until=None,
        fresh=True,
        transfer=False,
        only=(*candidates, dict(kernel.spec.default)),
        finals=len(candidates) + 1,
        discard=False,
    )
    result: TuneResult | None = None
    fault = ""
    try:
        result = tune_problem(kernel, tuned.problem, chosen)
    except InputError as error:  # all of them fail, for the same reason
        fault = str(error)
    wrong = _demote(tuned, candidates, location)
    forget_served()
    after = _served(asked_as, tuned.problem, location, options)
    demoted = wrong.get(config_key(before.config), "")
    return VerifiedProblem(
        problem=tuned.problem,
        device=before.device.name,
        aged=before.choice.aged,
        before=before.config,
        before_measurement=before.measurement,
        after=after.config if after.tier != "default" else None,
        after_measurement=after.measurement if after.tier != "default" else None,
        speedup=result.speedup if result is not None else None,
        reason=demoted or fault,
        demoted=bool(demoted),
        tied=result is not None and any(_same(config, before.config) for config in result.ties),
        interrupted=result is not None and result.interrupted,
    )


def _candidates(tuned: _Tuned, served: Config, location: str) -> list[Config]:
    """What is served, then the fastest of each study, three in all."""
    found = {config_key(served): served}
    opened = Database.open_readonly(location)
    if opened is None:
        return [served]
    with opened:
        for best in tuned.bests:
            finals = [t for t in opened.trials(best.study_id, phase="final") if _ran(t)]
            searched = [t for t in opened.trials(best.study_id, phase="search") if _ran(t)]
            for trial in [best.trial, *sorted(finals, key=_time_us), *sorted(searched, key=_time_us)]:
                found.setdefault(config_key(trial.config), trial.config)
    return list(found.values())[:_RETIMED]


def _demote(tuned: _Tuned, candidates: Sequence[Config], location: str) -> dict[str, str]:
    """Refuse in every study of the problem what was found wrong just now; reasons by configuration."""
    with Database.open(location, set_damage_aside=False) as database:
        newest = _newest_trials(database, tuned)
        wrong = {
            config_key(config): newest[config_key(config)]
            for config in candidates
            if config_key(config) in newest and not newest[config_key(config)].outcome.has_time
        }
        for best in database.best(tuned.problem.kernel, dtype=tuned.problem.dtype, sizes=tuned.problem.sizes):
            if best.key.gpu_name != tuned.bests[0].key.gpu_name:
                continue
            while (refused := wrong.get(config_key(best.trial.config))) is not None:
                run = database.start_run(best.study_id, sampler="verify", driver=best.run.driver)
                database.add_trial(best.study_id, run, refused, phase="final")
                database.end_run(run)
                left = database.best(study_id=best.study_id)
                if not left:
                    break
                best = left[0]  # noqa: PLW2901 - what the study would serve next may be wrong as well
    return {key: f"{trial.outcome}: {trial.reason}" for key, trial in wrong.items()}


def _newest_trials(database: Database, tuned: _Tuned) -> dict[str, Trial]:
    """The newest trial of each configuration of a problem, in whichever study."""
    first = tuned.bests[0].key
    stored = [
        one
        for study in database.studies(first.kernel)
        if dict(study.key.sizes) == dict(first.sizes)
        and (study.key.dtype, study.key.gpu_name, study.key.source) == (first.dtype, first.gpu_name, first.source)
        for one in database.stored_trials(study.study_id)
    ]
    return {config_key(one.trial.config): one.trial for one in sorted(stored, key=lambda one: one.created_at)}


def _served(asked_as: str, problem: Problem, location: str, options: TuneOptions) -> Any:
    device: int | str | None = options.device_index if options.replay is None else None
    return find_best_kernel(asked_as, problem.dtype, device, location, problem.sizes)


def _ran(trial: Trial) -> bool:
    return trial.outcome is Outcome.OK and trial.time_us is not None


def _time_us(trial: Trial) -> float:
    return trial.time_us or 0.0


def _same(a: Config, b: Config) -> bool:
    return config_key(a) == config_key(b)
