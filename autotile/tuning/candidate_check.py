"""Candidates that a user names: rewritten kernels and configurations, verified and raced against the present winner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome, Problem, Trial, config_key, config_text
from autotile.core.statistics import Interval, median_interval, raced_ratio, ratio_of
from autotile.core.text import Facts, Part, Result, device_text, interval_text, time_text
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_memory
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from autotile.tuning.backend import Backend, choose_backend
from autotile.tuning.finals import FinalistChecks, hold_race, interval_of
from autotile.tuning.options import TuneOptions
from autotile.tuning.pipeline import GivenCandidates, Pipeline
from autotile.tuning.result import trial_entry
from autotile.workers.compile_pool import CompilePool
from autotile.workers.jobs import Candidate, Reading

CandidateVerdict = Literal["wrong", "slower", "equal", "faster", "right"]

_WORKERS = 2
"""The candidate and the winner compile at the same time."""
_CONFIRMING = 6
"""Configurations that are run, besides winner and default, to find two that agree where there is no reference."""


@dataclass(frozen=True, slots=True, repr=False)
class CandidateCheck(Result):
    """Judgement of a candidate.

    Attributes
    ----------
    problem, device
        Problem and device that it was verified and timed at.
    candidate, winner
        Trials of both, with configuration, resources and time; one that failed has its outcome and the reason.
    speedup
        Time of the winner over time of the candidate, with a 95 % interval; None where they were not timed.
    repeats
        Number of times that the candidate was verified, with two launches each.
    notices
        Checks that could not be made, one line each.
    sanitized
        Tools of compute-sanitizer that ran the candidate and found nothing.
    source
        Path of the candidate's source; empty where the kernel's own is checked.
    tier
        How the winner's configuration was found, as for `autotile.best`: ``exact`` if it was tuned for the problem.
    """

    problem: Problem
    device: DeviceProperties
    candidate: Trial
    winner: Trial
    speedup: Interval | None
    repeats: int
    notices: tuple[str, ...] = ()
    sanitized: tuple[str, ...] = ()
    source: str = ""
    tier: str = ""

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

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``autotile verify --json`` prints."""
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device.identity,
            "source": self.source,
            "verdict": self.verdict,
            "right": self.is_right,
            "candidate": {**trial_entry(self.candidate), "stage": self.candidate.stage},
            "winner": {**trial_entry(self.winner), "tier": self.tier},
            "speedup": self.speedup.to_json() if self.speedup is not None else None,
            "repeats": self.repeats,
            "sanitized": list(self.sanitized),
            "notices": list(self.notices),
        }

    def _headline(self) -> str:
        return f"{self.source} for {self.problem} on {device_text(self.device)}: {self.summary}"

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
        """Yield the verdict, and both kernels."""
        facts: Facts = [
            ("verdict", self.summary),
            ("candidate", _timed(self.candidate)),
            ("winner", _timed(self.winner)),
        ]
        facts.append(("winner is", "tuned for this problem" if self.tier == "exact" else f"of tier {self.tier}"))
        if self.repeats:
            facts.append(("verified", f"{self.repeats} times, two launches each"))
        if self.sanitized:
            facts.append(("sanitized", f"{', '.join(self.sanitized)} found nothing"))
        yield facts


def _timed(trial: Trial) -> str:
    measured = trial.measurement
    if measured is None:
        reason = f", {trial.reason}" if trial.outcome is not Outcome.OK else ""
        return f"{trial.outcome}{reason}: {config_text(trial.config)}"
    interval = interval_text(measured.low_us, measured.high_us)
    return f"{time_text(measured.time_us)} ({interval} us): {config_text(trial.config)}"


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
    """Verify a candidate, and race it against the winner.

    Parameters
    ----------
    kernel, candidate
        The kernel, and the same with the candidate's source.
    problem
        Problem to verify and time them at.
    configs
        Configurations of the candidate and of the winner.
    settings, options
        Settings of the installation; of the options, ``verify_sizes``, ``sanitize``, ``l2``, the timeouts and the
        device apply.
    may_replay
        Whether results of a recording do where there is no GPU.

    Raises
    ------
    InputError
        There is no GPU, the candidate's configuration is not valid, or the kernel has no reference and no two of its
        configurations agree.
    ToolchainError, WorkerError
        As for `autotile.tuning.session.tune`.
    """
    with ExitStack() as stack:
        backend = stack.enter_context(closing(choose_backend(kernel, problem, settings, options)))
        if backend.source != "cuda" and not may_replay:
            raise InputError("a candidate must run on a GPU, and launches are replayed here")
        check_memory(kernel.spec, problem, backend.device)
        for config, what in zip(configs, ("the candidate", "the winner"), strict=True):
            if reason := check_config(kernel.spec, config, problem.sizes, backend.device, problem.dtype):
                raise InputError(f"{what} cannot be launched: {reason}")
        compile_pool = stack.enter_context(closing(CompilePool(settings, _WORKERS, options.compile_deadline_s)))
        pipelines = [
            Pipeline(each, problem, backend, compile_pool, verify_sizes=options.verify_sizes)
            for each in (candidate, kernel)
        ]
        steps = Judge(backend, problem, pipelines, options.seed)
        if kernel.spec.reference.is_agreement:
            steps.confirm(_spread_configs(kernel, problem, backend.device, configs[1]))
        return steps.judge(configs)


def _spread_configs(kernel: Kernel, problem: Problem, device: DeviceProperties, winner: Config) -> list[Config]:
    """Return the winner, the default, and configurations from all parts of the space."""
    space = feasible_space(kernel.spec, problem.sizes, device, problem.dtype)
    rows = np.unique(np.linspace(0, len(space) - 1, _CONFIRMING).astype(int)).tolist()
    spread = [space.config(row) for row in rows]
    default = [dict(kernel.spec.default)] if space.row_of(kernel.spec.default) is not None else []
    return list({config_key(config): config for config in [winner, *default, *spread]}.values())


class Judge:
    """The steps of `judge`, on a backend.

    Parameters
    ----------
    backend, problem
        Device that both run on, and problem.
    pipelines
        Pipelines of the candidate and of the winner.
    seed
        Seed of the order within the rounds of the race.
    """

    def __init__(self, backend: Backend, problem: Problem, pipelines: Sequence[Pipeline], seed: int) -> None:
        self._backend = backend
        self._problem = problem
        self._pipelines = pipelines
        self._seed = seed

    def confirm(self, configs: Sequence[Config]) -> None:
        """Run the kernel until two of its configurations agree on the outputs, for a kernel without a reference.

        Raises
        ------
        InputError
            No two of them agree.
        """
        pipeline, given = self._pipelines[1], GivenCandidates(configs)
        pipeline.compile_ahead(given)
        self._backend.wait()
        working: list[Candidate] = []
        while given.is_open:
            compiled = pipeline.next_candidate(given)
            trial = pipeline.begin(compiled, None) if compiled is not None else None
            if compiled is None or trial is None:
                compiled, trial = pipeline.end_next()
            given.tell(compiled.row, trial)
            candidate = compiled.compilation.candidate()
            if trial.outcome is Outcome.OK and candidate is not None:
                working.append(candidate)
        checks = FinalistChecks(self._backend, working, hurried=False)
        if not any(checks.passes(index, ties=False) for index in range(len(working))):
            raise InputError(
                "the kernel has no reference, and no two of its configurations agree, so there is nothing to verify a "
                "candidate against; add a reference"
            )

    def judge(self, configs: tuple[Config, Config]) -> CandidateCheck:
        """Compile, verify and measure both; then race them, and verify the candidate as finals verify a winner."""
        given = [GivenCandidates([config]) for config in configs]
        for pipeline, one in zip(self._pipelines, given, strict=True):
            pipeline.compile_ahead(one)  # both compile at once
        self._backend.wait()
        (candidate, ours), (winner, theirs) = (
            self._tried(pipeline, one) for pipeline, one in zip(self._pipelines, given, strict=True)
        )
        if candidate.outcome is not Outcome.OK or ours is None:
            return CandidateCheck(self._problem, self._backend.device, candidate, winner, None, 0)
        checks = FinalistChecks(self._backend, [ours], hurried=False)
        checks.sanitize()
        raced: dict[int, Reading] | None = None
        notices: list[str] = []
        if winner.outcome is Outcome.OK and theirs is not None:
            raced = hold_race(self._backend, [(candidate, ours), (winner, theirs)], [0, 1], self._seed, hurried=False)
            if raced is None and self._backend.source == "cuda":
                notices.append("the race broke: a launch failed or overwrote the data of the other")
        else:
            notices.append(f"the winner does not run now, so there is no ratio: {winner.outcome}: {winner.reason}")
        if raced is not None and raced[0].outcome is not Outcome.OK:
            checks.refuse(0, raced[0].outcome, raced[0].reason, "finals")
        checks.passes(0, wins=True)
        refused = checks.refused([candidate])
        speedup = None
        if not refused and raced is not None:
            speedup = raced_ratio(raced[0].rounds_us, raced[1].rounds_us)
        elif not refused and self._backend.source != "cuda" and winner.outcome is Outcome.OK:
            speedup = ratio_of(interval_of(candidate), interval_of(winner))
        return CandidateCheck(
            self._problem,
            self._backend.device,
            candidate=refused[0] if refused else _with_times(candidate, raced, 0),
            winner=_with_times(winner, raced, 1),
            speedup=speedup,
            repeats=checks.repeats(0),
            notices=(*notices, *checks.notices),
            sanitized=checks.sanitized.get(0, ()),
        )

    def _tried(self, pipeline: Pipeline, given: GivenCandidates) -> tuple[Trial, Candidate | None]:
        """Return the trial of the only candidate, with its compiled code where there is some."""
        compiled = pipeline.next_candidate(given)
        assert compiled is not None
        trial = pipeline.begin(compiled, None)
        if trial is None:
            compiled, trial = pipeline.end_next()
        return trial, compiled.compilation.candidate()


def _with_times(trial: Trial, raced: dict[int, Reading] | None, index: int) -> Trial:
    if raced is None or trial.measurement is None:
        return trial
    times_us = raced[index].rounds_us
    time = median_interval(times_us)
    measurement = replace(
        trial.measurement, time_us=time.value, low_us=time.low, high_us=time.high, samples_us=times_us
    )
    return replace(trial, stage="finals", measurement=measurement)
