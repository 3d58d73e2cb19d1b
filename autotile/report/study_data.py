"""One study as a report shows it: trials, finals, gates and failures, read from a database or a recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from autotile.core.ceilings import ARITHMETIC, DeviceCeilings
from autotile.core.device import DeviceProperties
from autotile.core.documents import Finite, Name, NonNegative, Text
from autotile.core.forks import cached_property
from autotile.core.model import (
    OBJECTIVE,
    SAME_CODE,
    TIME,
    Config,
    Outcome,
    Problem,
    Trial,
    config_key,
    non_dominated,
    objective_values,
)
from autotile.core.statistics import Interval, raced_ratio, ratio_of
from autotile.database.database import StoredRun, StoredTrial
from autotile.database.keys import TuningKey, space_hash
from autotile.errors import InputError
from autotile.kernel.library import Kernel, load_named_kernel
from autotile.kernel.problem import Workrate
from autotile.report.failures import FailureGroup, group_failures
from autotile.report.roofline import Bound, Roofline, roofline_of


class _Ratio(msgspec.Struct):
    ratio: NonNegative
    interval: tuple[NonNegative, NonNegative]


class _Entry(msgspec.Struct):
    config: Config


class StopReason(msgspec.Struct, frozen=True):
    """Why a search ended, and what its model expected of more trials; see `autotile.tuning.progress_state.Stopped`."""

    rule: Name = ""
    expected_gain: Finite | None = None
    more_trials: int | None = None


class EffectEntry(msgspec.Struct, frozen=True):
    """Share of a parameter in the differences between trials, as a session stored it."""

    parameter: Name
    share: Finite = 0.0
    alone: Finite = 0.0
    matters: bool = True
    favoured: tuple[Any, ...] = ()


class RunSummary(msgspec.Struct, frozen=True):
    """The part of a run's stored summary that a report shows; whatever a run does not state has its default."""

    speedup: _Ratio | None = None
    ties: tuple[Config, ...] = ()
    winner: _Entry | None = None
    default: _Entry | None = None
    gates: Mapping[Name, Annotated[int, Meta(ge=0)]] = {}
    stopped: StopReason | None = None
    importance: tuple[EffectEntry, ...] | None = None
    insight: Text | None = None
    notices: tuple[Text, ...] = ()
    seconds: NonNegative = 0.0
    phases: Mapping[Name, NonNegative] = {}
    resumed: Annotated[int, Meta(ge=0)] = 0
    interrupted: bool = False
    flops: Annotated[int, Meta(ge=0)] | None = None
    unit: Name | None = None
    passes: Annotated[int, Meta(ge=1, le=1024)] = 1
    bytes: Annotated[int, Meta(ge=0)] | None = None


class RunSettings(msgspec.Struct, frozen=True):
    """The part of a run's stored settings that a report shows."""

    objectives: tuple[Name, ...] = (TIME,)
    objective: Text | None = None
    maximize: bool = False
    verify_sizes: tuple[Any, ...] = ()
    sanitize: bool = False
    finals: int = 0
    trial_target: Annotated[int, Meta(ge=0)] | None = None
    budget_s: NonNegative | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class RunData:
    """One run of a study, with the checked parts of its settings and its summary."""

    run: StoredRun
    settings: RunSettings
    summary: RunSummary

    @property
    def is_running(self) -> bool:
        """Whether the run has not ended; a killed one never does."""
        return self.run.ended_at is None


@dataclass(frozen=True, slots=True)
class Finalist:
    """One configuration of the finals.

    Attributes
    ----------
    rank
        Place, 1 for the winner.
    trial
        Its trial, with its time in the race.
    ratio
        Its time, or cost, over the winner's, with its interval; None where an interval is missing.
    is_default, is_tie
        Whether it is the default configuration, and whether it cannot be distinguished from the winner.
    """

    rank: int
    trial: Trial
    ratio: Interval | None
    is_default: bool
    is_tie: bool


@dataclass(frozen=True, slots=True)
class FinalsData:
    """Finals of one run: finalists by rank, those that failed the checks, and the speed-up over the default."""

    run_id: int
    ranked: tuple[Finalist, ...]
    refused: tuple[Trial, ...]
    speedup: Interval | None


@dataclass(frozen=True, slots=True)
class GateCount:
    """Number of configurations that are left after a gate."""

    name: str
    label: str
    count: int


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A measured configuration, its value for each objective, and whether no other dominates it."""

    trial: Trial
    values: tuple[float, ...]
    is_on_front: bool


@dataclass(frozen=True)
class StudyData:
    """One study as a report shows it.

    Attributes
    ----------
    key
        Key of the study.
    device
        Device that it was tuned on; None if an imported result does not state it.
    location
        Database or recording that it was read from.
    runs
        Runs, oldest first.
    trials
        Trials of the search, oldest first.
    final_trials
        Trials of finals and verifications, oldest first.
    ceilings
        Ceilings that were measured on such a GPU; None if none were.
    study_id
        Id in the database; 0 for a recording.
    valid
        Number of valid configurations, if no run states it; 0 if unknown.
    """

    key: TuningKey
    device: DeviceProperties | None
    location: str
    runs: tuple[RunData, ...]
    trials: tuple[StoredTrial, ...]
    final_trials: tuple[StoredTrial, ...]
    ceilings: DeviceCeilings | None = None
    study_id: int = 0
    valid: int = 0

    @property
    def problem(self) -> Problem:
        """Kernel, sizes and element type."""
        return self.key.problem

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of the search space."""
        return tuple(self.trials[-1].trial.config) if self.trials else ()

    @cached_property
    def newest(self) -> tuple[StoredTrial, ...]:
        """The newest trial of each configuration, in the order of the first."""
        return tuple({config_key(one.trial.config): one for one in self.trials}.values())

    @cached_property
    def current_run(self) -> RunData | None:
        """The newest run with trials of a search, or else the newest run."""
        searched = {one.run_id for one in self.trials}
        return next((run for run in reversed(self.runs) if run.run.run_id in searched), (self.runs or (None,))[-1])

    @property
    def is_running(self) -> bool:
        """Whether the newest run has not ended."""
        return bool(self.runs) and self.runs[-1].is_running

    @cached_property
    def summary(self) -> RunSummary:
        """Summary of the newest run that has one."""
        found = (run.summary for run in reversed(self.runs) if run.run.summary)
        return next(found, RunSummary())

    @cached_property
    def settings(self) -> RunSettings:
        """Settings of the newest search."""
        return self.current_run.settings if self.current_run is not None else RunSettings()

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the objectives, time first."""
        return self.settings.objectives or (TIME,)

    @property
    def has_own_objective(self) -> bool:
        """Whether the search minimised or maximised an expression instead of the time."""
        return bool(self.settings.objective)

    def score(self, trial: Trial) -> float | None:
        """Return the objective of the search: the time in microseconds, or the value of the user's expression."""
        if not self.has_own_objective:
            return trial.time_us
        value = trial.telemetry.get(OBJECTIVE)
        return float(value) if trial.measurement is not None and isinstance(value, int | float) else None

    @cached_property
    def finals(self) -> FinalsData | None:
        """Finals of the newest run that held them; None without finals."""
        ranked = [one for one in self.final_trials if one.rank is not None and one.trial.measurement is not None]
        sizes = Counter(one.run_id for one in ranked)  # a contest of kernels has one finalist of each
        if not ranked:
            return None
        run_id = next((one.run_id for one in reversed(ranked) if sizes[one.run_id] > 1), ranked[-1].run_id)
        last = sorted((one for one in ranked if one.run_id == run_id), key=lambda one: one.rank or 0)
        refused = tuple(one.trial for one in self.final_trials if one.run_id == run_id and one.is_refusal)
        summary = next((run.summary for run in self.runs if run.run.run_id == run_id), RunSummary())
        default = config_key(self.default_config) if self.default_config is not None else ""
        ties = {config_key(config) for config in summary.ties}
        finalists = [
            Finalist(
                place,
                one.trial,
                cost_ratio(last[0].trial, one.trial),
                config_key(one.trial.config) == default,
                config_key(one.trial.config) in ties,
            )
            for place, one in enumerate(last, start=1)
        ]
        return FinalsData(run_id, tuple(finalists), refused, self._speedup(summary, finalists))

    def _speedup(self, summary: RunSummary, finalists: Sequence[Finalist]) -> Interval | None:
        if summary.speedup is not None:
            return Interval(summary.speedup.ratio, *summary.speedup.interval)
        return next((one.ratio for one in finalists if one.is_default), None)

    @cached_property
    def default_config(self) -> Config | None:
        """The default configuration, as a session stored it or the kernel's file states it."""
        stored = next((run.summary.default for run in reversed(self.runs) if run.summary.default is not None), None)
        if stored is not None:
            return stored.config
        return self.kernel.spec.default if self.kernel is not None else None

    @cached_property
    def winner(self) -> Trial | None:
        """Winner of the newest finals, else the best trial of the search; None if nothing was measured.

        It is what is served, as `autotile.database.engine.BEST` chooses it.
        """
        ended = {run.run.run_id for run in self.runs if not run.is_running}
        first = [one for one in self.final_trials if one.rank == 1 and one.run_id in ended]
        if first:
            return first[-1].trial
        refused = {config_key(one.trial.config): one.trial_id for one in self.final_trials if one.is_refusal}
        usable = [
            one.trial
            for one in self.newest
            if one.trial.outcome is Outcome.OK
            and one.trial.cost is not None
            and refused.get(config_key(one.trial.config), -1) < one.trial_id
        ]
        return min(usable, key=lambda trial: trial.cost or 0.0, default=None)

    @cached_property
    def default(self) -> Trial | None:
        """Trial of the default configuration, with its time in the finals if it took part; None if it did not run."""
        raced = next((one.trial for one in self.finals.ranked if one.is_default), None) if self.finals else None
        if raced is not None or self.default_config is None:
            return raced
        wanted = config_key(self.default_config)
        return next((one.trial for one in reversed(self.trials) if config_key(one.trial.config) == wanted), None)

    @property
    def speedup(self) -> Interval | None:
        """Time of the default over that of the winner, with its interval; None where one is missing."""
        if self.finals is not None and self.finals.speedup is not None:
            return self.finals.speedup
        return cost_ratio(self.winner, self.default) if self.winner is not None and self.default is not None else None

    @cached_property
    def gates(self) -> tuple[GateCount, ...]:
        """Number of configurations after each gate; those before the search are known from a session only."""
        stated = next((run.summary.gates or run.run.gates for run in reversed(self.runs) if run.run.gates), {})
        before = [("combinations", "combinations"), ("rules", "meet the rules"), ("limits", "fit the device")]
        counts = [GateCount(name, label, stated[name]) for name, label in before if isinstance(stated.get(name), int)]
        if not counts and self.valid:
            counts = [GateCount("limits", "valid", self.valid)]
        return (*counts, *self._tried_gates())

    def _tried_gates(self) -> Iterable[GateCount]:
        trials = [one.trial for one in self.newest if one.trial.outcome is not Outcome.NOT_AVAILABLE]
        failed = Counter(trial.stage for trial in trials if not trial.outcome.has_time)
        left = len(trials)
        yield GateCount("tried", "tried", left)
        for name, label, stages in _TRIAL_GATES:
            left -= sum(failed.pop(stage, 0) for stage in stages)
            yield GateCount(name, label, left)
        yield GateCount("verified", "correct", left - failed.total())
        yield GateCount("ok", "timed to the end", sum(trial.outcome is Outcome.OK for trial in trials))
        if self.finals is not None:
            yield GateCount("finals", "in the finals", len(self.finals.ranked) + len(self.finals.refused))

    @cached_property
    def failures(self) -> tuple[FailureGroup, ...]:
        """Failures by reason, the most frequent first."""
        refused = (one.trial for one in self.final_trials if one.is_refusal)
        return group_failures([*(one.trial for one in self.newest), *refused])

    @cached_property
    def front(self) -> tuple[FrontPoint, ...]:
        """Measured configurations with a value for each of several objectives; empty where time is the only one."""
        if len(self.objectives) < 2:
            return ()
        newest = {config_key(one.trial.config): one.trial for one in (*self.trials, *self.final_trials)}
        reached = [(trial, found) for trial in newest.values() if (found := objective_values(trial, self.objectives))]
        kept = non_dominated([values for _, values in reached]) if reached else ()
        return tuple(FrontPoint(trial, values, bool(best)) for (trial, values), best in zip(reached, kept, strict=True))

    @cached_property
    def elapsed_s(self) -> tuple[float, ...]:
        """Seconds of tuning at the end of each trial; time between runs does not count."""
        started = {run.run.run_id: run.run.started_at for run in self.runs}
        offset_s = within_s = 0.0
        current: int | None = None
        found = []
        for one in self.trials:
            if one.run_id != current:
                offset_s, within_s, current = offset_s + within_s, 0.0, one.run_id
            if one.run_id in started:
                within_s = max(within_s, (one.created_at - started[one.run_id]).total_seconds())
            else:  # of a recording, which states the time of each trial
                within_s += sum(one.trial.seconds.values())
            found.append(offset_s + within_s)
        return tuple(found)

    @cached_property
    def kernel(self) -> Kernel | None:
        """The kernel that was tuned, if it is installed in the version that was tuned."""
        try:
            loaded = load_named_kernel(self.key.kernel)
        except (InputError, OSError):
            return None
        return loaded if space_hash(loaded.spec) == self.key.space_hash else None

    def work_of(self, trial: Trial | None) -> Workrate:
        """Return the operations and bytes of one run of a configuration, as far as they are known."""
        config = trial.config if trial is not None else None
        if self.kernel is not None:
            return Workrate.of(self.kernel.spec, self.problem, config)
        found = self.summary
        unit = found.unit if found.unit in ARITHMETIC else None
        return Workrate(found.flops, found.bytes, self.key.dtype, unit, found.passes)

    @cached_property
    def roofline(self) -> Roofline:
        """Ceilings of the device for the element type."""
        return roofline_of(self.key.dtype, self.device, self.ceilings)

    def bound(self, trial: Trial | None) -> Bound | None:
        """Return the ceiling that binds a trial; None if that is not known."""
        return self.roofline.bound(self.work_of(trial), trial.time_us) if trial is not None else None


_TRIAL_GATES = (
    ("compiled", "compiled", ("limits", "compile")),
    ("resources", "fit once compiled", ("resources",)),
    ("launched", "launched", (SAME_CODE, "load")),
)
"""Gates of trials, each with the stages whose failures it holds back; all other stages are of the verification."""


def cost_ratio(winner: Trial, other: Trial) -> Interval | None:
    """Return the cost of a trial over that of the winner; None where one was not measured.

    Times of the rounds of a race are compared in pairs, others by their intervals.
    """
    first, second = winner.measurement, other.measurement
    if first is None or second is None:
        return None
    if winner is other:
        return Interval(1.0, 1.0, 1.0)
    rounds = min(len(first.samples_us), len(second.samples_us))
    raced = winner.stage == other.stage == "finals" and rounds > 1
    by_time = winner.cost == winner.time_us and other.cost == other.time_us
    if raced and by_time:
        return raced_ratio(first.samples_us, second.samples_us)
    if first.low_us <= 0.0 or not winner.cost or not other.cost:
        return None
    times = ratio_of(
        Interval(first.time_us, first.low_us, first.high_us), Interval(second.time_us, second.low_us, second.high_us)
    )
    scale = (other.cost / winner.cost) / times.value  # an objective of its own is proportional to the time
    return Interval(times.value * scale, times.low * scale, times.high * scale)
