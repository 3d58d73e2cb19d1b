"""Verification outside of a search: candidates that a user names, stored results, and what is served.

Each passes what a finalist of a session passes; see `autotile.tuning.finals.FinalistChecks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.documents import JsonObject, attributes, to_document
from autotile.core.model import Config, Outcome, Problem, Trial, config_key, config_text, distinct_configs
from autotile.core.statistics import Interval, raced_ratio, ratio_of_times
from autotile.core.text import Facts, Part, Result, device_text, interval_text, plural, time_text
from autotile.database.database import Database, StoredBest, database_location, open_existing
from autotile.database.keys import key_of, version_of
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_memory, resolve_problem
from autotile.settings import Settings, read_settings
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from autotile.tuning.backend import choose_backend
from autotile.tuning.finals import Contestant, FinalistChecks, FinalRules, hold_race
from autotile.tuning.options import TuneOptions, for_given
from autotile.tuning.result import TuneResult, trial_entry
from autotile.tuning.session import Pipeline, tune
from autotile.workers.compile_pool import CompilePool

CandidateVerdict = Literal["wrong", "slower", "equal", "faster", "right"]

_WORKERS = 2
"""The candidate and the winner compile at the same time."""
_CONFIRMING = 6
"""Configurations that are run, besides winner and default, to find two that agree where there is no reference."""
_CHECKS_S = 3.0
"""Time of the repeated verification of what is not the winner, in seconds."""


@dataclass(frozen=True, slots=True, repr=False)
class CandidateCheck(Result):
    """Judgement of a candidate: its trial and that of the winner, each with its time, or its outcome and the reason."""

    problem: Problem
    device: DeviceProperties
    candidate: Trial
    winner: Trial
    speedup: Interval | None
    """Time of the winner over time of the candidate, with a 95 % interval; None where they were not timed."""
    repeats: int
    """Number of times that the candidate was verified, with two launches each."""
    notices: tuple[str, ...] = ()
    """Checks that could not be made, one line each."""
    sanitized: tuple[str, ...] = ()
    """Tools of compute-sanitizer that ran the candidate and found nothing."""
    source: str = ""
    """Path of the candidate's source; empty where the kernel's own is checked."""
    tier: str = ""
    """How the winner's configuration was found, as for `autotile.best`: ``exact`` if it was tuned for the problem."""

    @property
    def verdict(self) -> CandidateVerdict:
        """``wrong``; ``slower``, ``equal`` or ``faster`` than the winner, by the interval; ``right`` without a race."""
        if not self.is_right:
            return "wrong"
        if self.speedup is None:
            return "right"
        return "equal" if self.speedup.contains(1.0) else "faster" if self.speedup.value > 1.0 else "slower"

    @property
    def is_right(self) -> bool:
        """Whether the candidate passed every check."""
        return self.candidate.outcome is Outcome.OK

    def to_json(self) -> JsonObject:
        """Return the document that ``autotile verify --json`` prints."""
        return {
            **self.problem.document(),
            "device": self.device.identity,
            **attributes(self, "source", "verdict"),
            "right": self.is_right,
            "candidate": {**trial_entry(self.candidate), "stage": self.candidate.stage},
            "winner": {**trial_entry(self.winner), "tier": self.tier},
            "speedup": to_document(self.speedup),
            "repeats": self.repeats,
            **to_document(attributes(self, "sanitized", "notices")),
        }

    def _headline(self) -> str:
        return f"{self._heading()}: {self.summary}"

    @property
    def summary(self) -> str:
        """Verdict with the ratio, or with what is wrong."""
        if not self.is_right:
            return f"wrong, {self.candidate.outcome}: {self.candidate.reason}"
        if self.speedup is None:
            return f"right, {time_text(self.candidate.time_us)}"
        ratio = f"{self.speedup.value:.3f}x, 95 % interval {self.speedup.low:.3f}x to {self.speedup.high:.3f}x"
        return f"right and {_WORDS[self.verdict]} the winner: {ratio}"

    def _heading(self) -> str:
        return f"{self.source} for {self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        facts: Facts = [
            ("verdict", self.summary),
            ("candidate", _timed(self.candidate)),
            ("winner", _timed(self.winner)),
            ("winner is", "tuned for this problem" if self.tier == "exact" else f"of tier {self.tier}"),
        ]
        if self.repeats:
            facts.append(("verified", f"{plural(self.repeats, 'time')}, two launches each"))
        if self.sanitized:
            facts.append(("sanitized", f"{', '.join(self.sanitized)} found nothing"))
        yield facts


def _timed(trial: Trial) -> str:
    measured = trial.measurement
    if measured is None:
        reason = f", {trial.reason}" if trial.outcome is not Outcome.OK else ""
        return f"{trial.outcome}{reason}: {config_text(trial.config)}"
    return f"{time_text(measured.time_us)} ({interval_text(measured)} us): {config_text(trial.config)}"


_WORDS = {"faster": "faster than", "equal": "as fast as", "slower": "slower than"}


def judge(
    kernel: Kernel,
    candidate: Kernel,
    problem: Problem,
    *,
    configs: tuple[Config, Config],
    settings: Settings,
    options: TuneOptions,
    may_replay: bool = False,
) -> CandidateCheck:
    """Verify a candidate, the kernel with another source, and race it against the winner; each has a configuration.

    Of the options, ``verify_sizes``, ``sanitize``, ``l2``, the timeouts and the device apply. An `InputError` is raised
    if there is no GPU, and results of a recording do not do; if the candidate's configuration is not valid; or if the
    kernel has no reference and no two of its configurations agree. Other errors are those of
    `autotile.tuning.session.tune`.
    """
    with ExitStack() as stack:
        backend = stack.enter_context(closing(choose_backend(kernel, problem, settings, options)))
        if backend.source != "cuda" and not may_replay:
            raise InputError("a candidate must run on a GPU, and launches are replayed here")
        check_memory(kernel.spec, problem, backend.device)
        for config, what in zip(configs, ("the candidate", "the winner"), strict=True):
            if reason := check_config(kernel.spec, config, problem, backend.device):
                raise InputError(f"{what} cannot be launched: {reason}")
        compile_pool = stack.enter_context(closing(CompilePool(settings, _WORKERS, options.compile_deadline_s)))
        ours, theirs = (
            Pipeline(each, problem, backend, compile_pool, verify_sizes=options.verify_sizes)
            for each in (candidate, kernel)
        )
        if kernel.spec.reference.is_agreement:
            space = feasible_space(kernel.spec, problem, backend.device)
            rows = np.unique(np.linspace(0, len(space) - 1, _CONFIRMING).astype(int)).tolist()
            default = [dict(kernel.spec.default)] if space.row_of(kernel.spec.default) is not None else []
            tried = [configs[1], *default, *map(space.config, rows)]  # those of rows are from all parts of the space
            confirm_agreement(theirs, distinct_configs(tried))
        return judge_on((ours, theirs), configs, options.seed)


def confirm_agreement(pipeline: Pipeline, configs: Sequence[Config]) -> None:
    """Run a kernel without a reference until two of its configurations agree on the outputs; else an `InputError`."""
    compilations, backend = [pipeline.compile(config) for config in configs], pipeline.backend
    backend.wait()
    ran = [(pipeline.run(one), one.candidate()) for one in compilations]
    working = [Contestant(trial, one) for trial, one in ran if trial.outcome is Outcome.OK and one is not None]
    checks = FinalistChecks(backend, working, FinalRules(configs[0], limit_s=_CHECKS_S))
    if not any(checks.passes(one, ties=False) for one in working):
        raise InputError(
            "the kernel has no reference, and no two of its configurations agree, so there is nothing to verify a "
            "candidate against; add a reference"
        )


def judge_on(pipelines: tuple[Pipeline, Pipeline], configs: tuple[Config, Config], seed: int) -> CandidateCheck:
    """Compile, verify and measure a candidate and the winner; race them, and verify the candidate as a winner is.

    Pipelines and configurations are those of the candidate and of the winner, on the same GPU.
    """
    problem, backend = pipelines[0].problem, pipelines[0].backend
    compilations = [pipeline.compile(config) for pipeline, config in zip(pipelines, configs, strict=True)]
    backend.wait()
    candidate, winner = (pipeline.run(one) for pipeline, one in zip(pipelines, compilations, strict=True))
    ours, theirs = (one.candidate() for one in compilations)
    if candidate.outcome is not Outcome.OK or ours is None:
        return CandidateCheck(problem, backend.device, candidate, winner, None, 0)
    own, other = Contestant(candidate, ours), None
    checks = FinalistChecks(backend, [own], FinalRules(configs[1], limit_s=_CHECKS_S))
    checks.sanitize()
    notices: list[str] = []
    if winner.outcome is Outcome.OK and theirs is not None:
        other = Contestant(winner, theirs)
        if not hold_race(backend, [own, other], FinalRules(configs[1], seed=seed)) and backend.source == "cuda":
            notices.append("the race broke: a launch failed or overwrote the data of the other")
        if other.race is not None and not other.race.rounds_us:
            fault = f"{other.race.outcome}: {other.race.reason}"
            notices.append(f"the winner failed before the race, so there is no ratio: {fault}")
    else:
        notices.append(f"the winner does not run now, so there is no ratio: {winner.outcome}: {winner.reason}")
    if own.race is not None and own.race.outcome is not Outcome.OK:
        checks.refuse(own, replace(own.race, stage="finals"))
    checks.passes(own, wins=True)
    refused = checks.refused
    speedup = None
    if not refused and other is not None and own.race is not None and other.race is not None and other.race.rounds_us:
        speedup = raced_ratio(own.race.rounds_us, other.race.rounds_us)
    elif not refused and backend.source != "cuda" and candidate.measurement and winner.measurement:
        speedup = ratio_of_times(candidate.measurement, winner.measurement)
    repeats = int(checks.readings[own].telemetry.get("repeats", 0))
    told, sanitized = (*notices, *checks.notices), checks.sanitized.get(own, ())
    candidate, winner = refused[0] if refused else own.trial, other.trial if other is not None else winner
    return CandidateCheck(problem, backend.device, candidate, winner, speedup, repeats, told, sanitized)


MAX_RETIMED = 3
"""Maximum number of configurations that are measured again, besides the default."""


def tuned_problems(
    kernel: Kernel,
    database: str | Path,
    *,
    problem: Problem | None = None,
    dtype: str | None = None,
    gpu_name: str | None = None,
    source: str = "cuda",
) -> list[tuple[Problem, list[StoredBest]]]:
    """Return the problems that are tuned for the current version of a kernel, the newest first.

    Each has the best result of its studies, newest first; the studies differ in the compiler. ``source`` is that of
    measured results, or ``replayed`` for those from a recording. An `InputError` is raised if the database cannot be
    read, or there is no such problem.
    """
    version = (*version_of(kernel), tuple(kernel.spec.options))
    dtype = problem.dtype if problem is not None else dtype
    with Database.open_readonly(database) or nullcontext() as opened:
        bests = opened.best(kernel.name, dtype=dtype, gpu_name=gpu_name) if opened is not None else []
    found: dict[str, tuple[Problem, list[StoredBest]]] = {}
    for best in bests:
        key = best.key
        if (*key.version, key.options) != version or (key.source, key.l2_mode) != (source, "cold"):
            continue
        tuned = resolve_problem(kernel.spec, key.sizes, key.dtype)
        if problem in (None, tuned):
            found.setdefault(str(tuned), (tuned, []))[1].append(best)
    if not found:
        where = f" on {gpu_name}" if gpu_name else ""
        raise InputError(
            f"{problem or kernel.name} is not tuned{where}, so there is nothing to verify; run `autotile tune`"
        )
    return list(found.values())


def retime(
    kernel: Kernel, problem: Problem, bests: Sequence[StoredBest], served: Config, options: TuneOptions
) -> tuple[TuneResult | None, str, Mapping[str, str]]:
    """Check and time the best configurations of a problem and the default in one session.

    The session's winner becomes the best result of its study. Configurations that fail are refused in every study of
    the problem, whatever compiler the study used: they are no longer served. Of the options, those that select
    configurations are fixed here.

    Return the result, or None and the reason for which every configuration failed; and the configurations that failed,
    by `config_key`, with outcome and reason.
    """
    database = database_location(options.database)
    found = {config_key(served): served}  # then the fastest ones of each study
    with open_existing(database) as opened:
        for best in bests:
            stored = [opened.trials(best.study_id, phase=phase) for phase in ("final", "search")]
            ran = [[t for t in each if t.outcome is Outcome.OK and t.time_us is not None] for each in stored]
            for trial in [best.trial, *(t for each in ran for t in sorted(each, key=lambda t: t.cost or 0.0))]:
                found.setdefault(trial.config_key, trial.config)
    candidates = list(found.values())[:MAX_RETIMED]
    own = {"fresh": True, "budget_s": None, "finals": len(candidates) + 1, "discard": False}
    chosen = for_given(options, (*candidates, dict(kernel.spec.default)), **own)
    result, fault = None, ""
    try:
        result = tune(kernel, problem, read_settings(), chosen)
    except InputError as error:
        fault = str(error)
    with Database.open(database, set_damage_aside=False) as writable:  # refuse what failed last in every study
        identity = attrgetter("sizes", "dtype", "gpu_name", "source")
        first = bests[0].key
        of_problem = [
            one
            for study in writable.studies(first.kernel)
            if identity(study.key) == identity(first)
            for one in writable.stored_trials(study.study_id)
        ]
        newest = {one.trial.config_key: one.trial for one in sorted(of_problem, key=lambda one: one.trial_id)}
        failed = {
            key: newest[key]
            for key in map(config_key, candidates)
            if key in newest and not newest[key].outcome.has_time
        }
        of_gpu = writable.best(problem.kernel, dtype=problem.dtype, sizes=problem.sizes, gpu_name=first.gpu_name)
        for best in of_gpu:
            left = [best]  # until the best configuration of the study is none of the failed ones
            while left and (fallen := failed.get(left[0].trial.config_key)) is not None:
                writable.add_run(best.study_id, [fallen], sampler="verify", driver=left[0].run.driver, phase="final")
                left = writable.best(study_id=best.study_id)
    return result, fault, {key: f"{trial.outcome}: {trial.reason}" for key, trial in failed.items()}


_UNCHECKED = (Outcome.NOT_AVAILABLE, Outcome.INFEASIBLE, Outcome.NOT_COMPILED)
"""Outcomes of configurations that did not run, and that serving excludes by itself."""


def check_served(
    kernel: Kernel, problem: Problem, config: Config, options: TuneOptions
) -> tuple[CandidateCheck | None, str]:
    """Verify a configuration as finals do, at the sizes of a problem, beside the default, and store the verdict.

    The verdict is stored without a time, so that the problem still counts as not tuned. A configuration that failed is
    not served for this problem again, unless a tuning measures it.

    Return its judgement, None if it could not be run, and why it failed or could not be run; empty if it is correct.
    """
    configs = config, dict(kernel.spec.default)
    of = kernel, kernel, problem
    try:
        check = judge(*of, configs=configs, settings=read_settings(), options=options, may_replay=True)
    except InputError as error:
        return None, str(error)
    trial, device = check.candidate, check.device
    if trial.outcome in _UNCHECKED:
        return None, trial.reason
    key = key_of(kernel, problem, device, l2_mode=options.l2)
    verdict = replace(trial, measurement=None, stage="verify")
    with Database.open(database_location(options.database), set_damage_aside=False) as database:
        database.add_run(key, [verdict], sampler="verify", device=device, phase="final")
    return check, "" if trial.outcome.has_time else f"{trial.outcome}: {trial.reason}"
