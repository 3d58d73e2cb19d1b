"""One study as a report shows it, read from a database or a recording: trials, finals, gates, failures and roofline.

The roofline has the ceilings that were measured on the GPU, else those of its datasheet: S. Williams, A. Waterman and
D. Patterson, Roofline: an insightful visual performance model, CACM 52 (2009).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta
from sqlalchemy import select

from autotile.core.ceilings import ARITHMETIC, DeviceCeilings, datasheet_ceilings, unit_text
from autotile.core.device import DeviceProperties
from autotile.core.documents import Name, NonNegative, Text, convert
from autotile.core.forks import cached_property
from autotile.core.model import (
    OBJECTIVE,
    SAME_CODE,
    TIME,
    Config,
    Effect,
    Outcome,
    Stopped,
    Trial,
    Value,
    config_key,
    non_dominated,
    objective_values,
)
from autotile.core.statistics import Interval, raced_ratio, ratio_of_times
from autotile.core.text import bandwidth_text, flops_text, moment_text, percent_text
from autotile.database.database import (
    Database,
    StoredRun,
    StoredStudy,
    StoredTrial,
    StudySummary,
    parsed_rows,
    stored_trial,
)
from autotile.database.engine import TRIALS
from autotile.database.keys import TuningKey, space_hash
from autotile.database.learned import read_ceilings
from autotile.errors import DataError, InputError
from autotile.exchange.recording import Recording
from autotile.kernel.library import Kernel, load_named_kernel
from autotile.kernel.problem import Workrate

_Natural = Annotated[int, Meta(ge=0)]


class StoredRatio(msgspec.Struct):
    """A ratio with its interval, as a session stored it."""

    ratio: NonNegative
    interval: tuple[NonNegative, NonNegative]


class RunSummary(msgspec.Struct, frozen=True):
    """The part of a run's stored summary that a report shows; a field that a run does not state has its default."""

    speedup: StoredRatio | None = None
    ties: tuple[Config, ...] = ()
    default: dict[Name, Any] = {}
    """The configuration among other values."""
    gates: Mapping[Name, _Natural] = {}
    stopped: Stopped | None = None
    importance: tuple[Effect, ...] | None = None
    insight: Text | None = None
    notices: tuple[Text, ...] = ()
    flops: _Natural | None = None
    unit: Name | None = None
    passes: Annotated[int, Meta(ge=1, le=1024)] = 1
    bytes: _Natural | None = None


class RunSettings(msgspec.Struct, frozen=True):
    """The part of a run's stored settings that a report shows."""

    objectives: tuple[Name, ...] = (TIME,)
    objective: Text | None = None
    maximize: bool = False
    verify_sizes: tuple[Any, ...] = ()
    sanitize: bool = False
    trial_target: _Natural | None = None
    budget_s: NonNegative | None = None
    fresh: bool = False


Schema = TypeVar("Schema", RunSummary, RunSettings)


def lenient(value: Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Parse the settings or the summary of a run field by field; one that does not match its schema has its default."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(schema):
        if field.name in value:
            try:
                found[field.name] = convert(value[field.name], field.type)
            except DataError:
                continue
    return schema(**found)


class Finalist(NamedTuple):
    """One configuration of the finals, with its time in the race.

    The ratio is its time, or cost, over the winner's; None where an interval is missing. A tie cannot be told apart
    from the winner.
    """

    rank: int
    trial: Trial
    ratio: Interval | None
    is_default: bool
    is_tie: bool

    @property
    def times_us(self) -> tuple[float, float, float]:
        """Time in the race, and the bounds of its interval."""
        measured = self.trial.measurement
        assert measured is not None
        return measured.time_us, measured.low_us, measured.high_us


@dataclass(frozen=True)
class StudyData:
    """One study as a report shows it: its runs and its trials, oldest first.

    An imported result may not state its device, and a recording has the id 0.
    """

    key: TuningKey
    device: DeviceProperties | None
    location: str
    runs: tuple[StoredRun, ...]
    stored: tuple[StoredTrial, ...]
    ceilings: DeviceCeilings | None = None
    """Those that were measured on such a GPU."""
    study_id: int = 0
    valid: int = 0
    """Number of valid configurations, if no run states it; 0 if unknown."""

    @cached_property
    def trials(self) -> tuple[StoredTrial, ...]:
        """Trials of the search; those of finals where `autotile db clean` left nothing else."""
        return tuple(one for one in self.stored if one.phase == "search") or self.stored

    @cached_property
    def final_trials(self) -> tuple[StoredTrial, ...]:
        """Trials of finals and verifications."""
        return tuple(one for one in self.stored if one.phase == "final")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of the search space."""
        return tuple(self.trials[-1].trial.config) if self.trials else ()

    @cached_property
    def newest(self) -> tuple[StoredTrial, ...]:
        """The newest trial of each configuration, in the order of the first."""
        return tuple({config_key(one.trial.config): one for one in self.trials}.values())

    @property
    def is_running(self) -> bool:
        """Whether the newest run has not ended; a killed one never does."""
        return bool(self.runs) and self.runs[-1].ended_at is None

    @cached_property
    def summary(self) -> RunSummary:
        """Summary of the newest run that has one."""
        return lenient(next((run.summary for run in reversed(self.runs) if run.summary), {}), RunSummary)

    @cached_property
    def settings(self) -> RunSettings:
        """Settings of the newest run with trials of a search, or else of the newest run."""
        searched = {one.run_id for one in self.trials}
        runs = [*reversed(self.runs)]
        found = next((run for run in runs if run.run_id in searched), runs[0] if runs else None)
        return lenient(found.settings if found is not None else {}, RunSettings)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the objectives, time first."""
        return self.settings.objectives or (TIME,)

    @property
    def has_own_objective(self) -> bool:
        """Whether the winner is the best by the user's expression; ratios to it are of that, not of times."""
        return self.winner is not None and OBJECTIVE in self.winner.scores

    @cached_property
    def _expressions(self) -> dict[int, str | None]:
        """The objective of each run that is an expression, by its id."""
        return {run.run_id: lenient(run.settings, RunSettings).objective for run in self.runs}

    def score(self, one: StoredTrial) -> float | None:
        """Return the objective of the search: the time in microseconds, or the value of the user's expression.

        None if the trial was not measured, or in a session with another expression.
        """
        trial, expression = one.trial, self.settings.objective
        if not expression:
            return trial.time_us
        value = trial.telemetry.get(OBJECTIVE) if self._expressions.get(one.run_id) == expression else None
        return float(value) if trial.measurement is not None and isinstance(value, int | float) else None

    def ranked(self, *outcomes: Outcome) -> list[tuple[float, Trial]]:
        """Return the newest trials of some outcomes, each with its cost by that objective, the least first."""
        by_time = not self.settings.objective
        scored = [one.trial for one in self.newest if one.trial.outcome in outcomes and self.score(one) is not None]
        costs = [(trial.time_us if by_time else trial.cost, trial) for trial in scored]
        return sorted(((cost, trial) for cost, trial in costs if cost), key=itemgetter(0))

    @cached_property
    def _finals_run(self) -> int | None:
        """Id of the newest run that held finals; None without finals."""
        runs = [one.run_id for one in self.final_trials if one.rank is not None and one.trial.measurement is not None]
        sizes = Counter(runs)  # a contest of kernels has one finalist of each
        return next((run_id for run_id in reversed(runs) if sizes[run_id] > 1), runs[-1] if runs else None)

    @cached_property
    def _finals_summary(self) -> RunSummary:
        return lenient(next((run.summary for run in self.runs if run.run_id == self._finals_run), {}), RunSummary)

    @cached_property
    def finals(self) -> tuple[Finalist, ...]:
        """Finalists of the newest run that held finals, by rank; none without finals."""
        held = [one for one in self.final_trials if one.run_id == self._finals_run and one.rank is not None]
        ranked = [one.trial for one in sorted(held, key=lambda one: one.rank or 0) if one.trial.measurement is not None]
        keys = [config_key(trial.config) for trial in ranked]
        default = config_key(self.default_config) if self.default_config is not None else ""
        ties = {config_key(config) for config in self._finals_summary.ties}
        return tuple(
            Finalist(place, trial, cost_ratio(ranked[0], trial), key == default, key in ties)
            for place, (trial, key) in enumerate(zip(ranked, keys, strict=True), start=1)
        )

    @cached_property
    def refused(self) -> tuple[Trial, ...]:
        """Trials of those that failed the checks of these finals."""
        return tuple(one.trial for one in self.final_trials if one.run_id == self._finals_run and one.is_refusal)

    @cached_property
    def default_config(self) -> Config | None:
        """The default configuration, as a session stored it or the kernel's file states it."""
        for run in reversed(self.runs):
            with suppress(DataError):  # none is stored, or one that cannot be read
                return convert(lenient(run.summary, RunSummary).default.get("config"), dict[Name, Value])
        return self.kernel.spec.default if self.kernel is not None else None

    @cached_property
    def winner(self) -> Trial | None:
        """Winner of the newest finals, else the best trial of the search; None if nothing was measured.

        It is what is served, as `autotile.database.engine.BEST` chooses it.
        """
        ended = {run.run_id for run in self.runs if run.ended_at is not None}
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
        raced = next((one.trial for one in self.finals if one.is_default), None)
        if raced is not None or self.default_config is None:
            return raced
        wanted = config_key(self.default_config)
        return next((one.trial for one in reversed(self.trials) if config_key(one.trial.config) == wanted), None)

    @property
    def speedup(self) -> Interval | None:
        """Time of the default over that of the winner, with its interval; None where one is missing."""
        if (stated := self._finals_summary.speedup) is not None:
            return Interval(stated.ratio, *stated.interval)
        raced = next((one.ratio for one in self.finals if one.is_default), None)
        if raced is not None:
            return raced
        return cost_ratio(self.winner, self.default) if self.winner is not None and self.default is not None else None

    @cached_property
    def gates(self) -> tuple[tuple[str, int], ...]:
        """Number of configurations after each gate, by its label; those before the search only of a session."""
        run = next((run for run in reversed(self.runs) if run.gates), None)
        stated = lenient(run.summary, RunSummary).gates or run.gates if run is not None else {}
        before = {"combinations": "combinations", "rules": "meet the rules", "limits": "fit the device"}
        counts = [(label, stated[name]) for name, label in before.items() if isinstance(stated.get(name), int)]
        if not counts and self.valid:
            counts = [("valid", self.valid)]
        trials = [one.trial for one in self.newest if one.trial.outcome is not Outcome.NOT_AVAILABLE]
        failed = Counter(trial.stage for trial in trials if not trial.outcome.has_time)
        left = len(trials)
        counts.append(("tried", left))
        for label, stages in _TRIAL_GATES.items():
            left -= sum(failed.pop(stage, 0) for stage in stages)
            counts.append((label, left))
        counts.append(("correct", left - failed.total()))
        counts.append(("timed to the end", sum(trial.outcome is Outcome.OK for trial in trials)))
        if self.finals:
            counts.append(("in the finals", len(self.finals) + len(self.refused)))
        return tuple(counts)

    @cached_property
    def failures(self) -> tuple[FailureGroup, ...]:
        """Failures of the trials that failed for a reason of their own, by reason, the most frequent first."""
        groups: dict[tuple[Outcome, str, str], FailureGroup] = {}
        refused = (one.trial for one in self.final_trials if one.is_refusal)
        for trial in (*(one.trial for one in self.newest), *refused):
            if not trial.outcome.has_time and trial.outcome.is_finding:
                add_failure(groups, trial)
        return most_frequent(groups)

    @cached_property
    def front(self) -> tuple[tuple[Trial, tuple[float, ...], bool], ...]:
        """Measured configurations, their values for each of several objectives, and whether no other dominates them.

        Empty where time is the only objective.
        """
        if len(self.objectives) < 2:
            return ()
        newest = {config_key(one.trial.config): one.trial for one in (*self.trials, *self.final_trials)}
        reached = [(trial, found) for trial in newest.values() if (found := objective_values(trial, self.objectives))]
        kept = non_dominated([values for _, values in reached]) if reached else ()
        return tuple((trial, values, bool(best)) for (trial, values), best in zip(reached, kept, strict=True))

    @cached_property
    def elapsed_s(self) -> tuple[float, ...]:
        """Seconds of tuning at the end of each trial; time between runs does not count."""
        started = {run.run_id: run.started_at for run in self.runs}
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
            return Workrate.of(self.kernel.spec, self.key.problem, config)
        found = self.summary
        unit = found.unit if found.unit in ARITHMETIC else None
        return Workrate(found.flops, found.bytes, self.key.dtype, unit, found.passes)

    @property
    def roofs_origin(self) -> str:
        """When and how the ceilings of the roofline were found; what to do where they are not those of this GPU."""
        if self.ceilings is not None:
            return f"measured on {self.ceilings.gpu_name} on {moment_text(self.ceilings.measured_at)}"
        hint = "not measured on this GPU; `autotile devices --measure` measures the ceilings"
        return hint if self.device is None else f"figures of the datasheet, {hint}"

    @cached_property
    def _known_ceilings(self) -> DeviceCeilings | None:
        """Those that were measured, else those of the datasheet."""
        return self.ceilings or (datasheet_ceilings(self.device) if self.device is not None else None)

    @property
    def _suffix(self) -> str:
        return "" if self.ceilings is not None else " (datasheet)"

    @cached_property
    def memory_roof(self) -> Roof | None:
        """The rate of DRAM, which is the slope of the roofline."""
        found = self._known_ceilings.memory if self._known_ceilings is not None else None
        if found is None:
            return None
        return Roof(found.label if self.ceilings is not None else f"DRAM{self._suffix}", found.value, True)

    def roofs_of(self, trial: Trial | None) -> tuple[Roof, ...] | None:
        """Return the rates that bound the operations of a run, slowest first; None if those of its unit are unknown.

        A kernel that states no unit may use any of its element type.
        """
        work, ceilings = self.work_of(trial), self._known_ceilings
        if work.unit is None:
            found = ceilings.compute(self.key.dtype) if ceilings is not None else ()
            roofs = (Roof(f"{one.label}{self._suffix}", one.value, False) for one in found)
            return tuple(sorted(roofs, key=lambda roof: roof.rate))
        unit = ceilings.find(work.unit) if ceilings is not None and work.unit in ARITHMETIC else None
        if unit is None:
            return None
        label = unit.label.replace(unit_text(work.unit, 1), unit_text(work.unit, work.passes))
        return (Roof(f"{label}{self._suffix}", unit.value / work.passes, False),)

    def bound(self, trial: Trial | None) -> Roof | None:
        """Return the ceiling that binds a trial, with the rate that it reached; None if that is not known."""
        work, memory, roofs = self.work_of(trial), self.memory_roof, self.roofs_of(trial)
        if trial is None or trial.time_us is None or (roofs is None and work.flops):
            return None
        found = []
        if memory is not None and work.bytes:
            found.append(memory._replace(reached=work.bytes / trial.time_us * 1e6))
        if roofs and work.flops:
            rate = work.flops / trial.time_us * 1e6
            reached = [roof for roof in roofs if rate <= _EXCEEDED * roof.rate]
            found.append((reached or roofs)[0 if reached else -1]._replace(reached=rate))
        return max(found, key=lambda roof: roof.share, default=None)


_TRIAL_GATES = {"compiled": ("limits", "compile"), "fit once compiled": ("resources",), "launched": (SAME_CODE, "load")}
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
    times = ratio_of_times(first, second)
    scale = (other.cost / winner.cost) / times.value  # an objective of its own is proportional to the time
    return Interval(times.value * scale, times.low * scale, times.high * scale)


def read_study(database: Database, study: StudySummary | StoredStudy, known: Sequence[StoredTrial] = ()) -> StudyData:
    """Return a study with all trials that are stored now, of which the ``known`` ones, oldest first, are not read."""
    last = known[-1].trial_id if known else 0
    newer = select(TRIALS).where(TRIALS.c.study_id == study.study_id, TRIALS.c.id > last).order_by(TRIALS.c.id)
    with database.reading() as connection:
        trials = [*known, *parsed_rows(connection, newer, stored_trial)]
    return study_with(database, study, trials)


def study_with(database: Database, study: StudySummary | StoredStudy, trials: Iterable[StoredTrial]) -> StudyData:
    """Return a study with some trials: its device, its runs and the newest ceilings of such a GPU."""
    return StudyData(
        key=study.key,
        device=study.device,
        location=database.location,
        runs=tuple(database.runs(study.study_id)),
        stored=tuple(trials),
        ceilings=next(iter(read_ceilings(database, study.key.gpu_name)), None),
        study_id=study.study_id,
    )


def study_of_recording(recording: Recording, location: str) -> StudyData:
    """Return a recording as a study: each configuration is a trial, in the order of the recording."""
    header = recording.header
    trials = tuple(
        StoredTrial(row + 1, 0, 0, "search", None, header.created_at, recording.trial(row))
        for row in range(len(recording))
    )
    return StudyData(header.key, header.device, location, (), trials, valid=header.valid_configs)


_EXAMPLES = 3
"""Configurations that are shown of a group of failures."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_MAX_GROUPS = 1000
"""Groups that are kept apart, which bounds the memory; a kernel has a handful."""
_MAX_REASON = 4000
"""Characters of a reason that tell groups apart, and that are kept of it."""
_OTHERS = "other reasons"


@dataclass(slots=True)
class FailureGroup:
    """Failed configurations with one reason, whose numbers may differ, and some of them as examples.

    The reason is in the compiler's, the verification's or the sanitizer's words for the first of them.
    """

    outcome: Outcome
    stage: str
    reason: str
    count: int = 0
    examples: tuple[Config, ...] = ()


def add_failure(groups: dict[tuple[Outcome, str, str], FailureGroup], trial: Trial) -> FailureGroup:
    """Add a failed trial to its group, by outcome, stage and reason, and return that.

    Memory does not grow with the number of trials.
    """
    reason = trial.reason[:_MAX_REASON]
    same = (trial.outcome, trial.stage, _NUMBER.sub("#", reason))
    if same not in groups and len(groups) >= _MAX_GROUPS:
        reason, same = _OTHERS, (trial.outcome, "", _OTHERS)
    group = groups.setdefault(same, FailureGroup(same[0], same[1], reason))
    group.count += 1
    if group.count <= _EXAMPLES:
        group.examples += (trial.config,)
    return group


def most_frequent(groups: Mapping[Any, FailureGroup]) -> tuple[FailureGroup, ...]:
    """Return groups of failures, the most frequent first."""
    return tuple(sorted(groups.values(), key=lambda group: -group.count))


_EXCEEDED = 1.02
"""Share of a ceiling above which a kernel does not use the units that it is of."""


class Roof(NamedTuple):
    """A rate that bounds a kernel, in bytes or floating-point operations per second, and what a run reached of it."""

    label: str
    rate: float
    is_memory: bool
    reached: float = 0.0
    """Rate of the run."""

    @property
    def share(self) -> float:
        """Rate of the run over this one, 0.9 for 90 %."""
        return self.reached / self.rate

    @property
    def text(self) -> str:
        """Label and rate: ``"DRAM, copy 4,276 GB/s"``; of a run ``"28.7 TFLOP/s, 48.5 % of fp32 FMA 59.2 TFLOP/s"``."""
        shown = bandwidth_text if self.is_memory else flops_text
        own = f"{self.label} {shown(self.rate)}"
        return f"{shown(self.reached)}, {percent_text(self.share)} of {own}" if self.reached else own
