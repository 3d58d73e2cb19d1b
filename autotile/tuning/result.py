"""The result of a tuning session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotile.core.device import DeviceProperties
from autotile.core.documents import JsonObject, attributes, to_document
from autotile.core.model import (
    OBJECTIVE,
    OBJECTIVES,
    TIME,
    Config,
    Outcome,
    Problem,
    Stopped,
    Trial,
    config_key,
    config_text,
    non_dominated,
    objective_values,
    timed_config,
)
from autotile.core.statistics import Interval, is_tie
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Facts,
    Part,
    Result,
    ResultTable,
    device_text,
    duration_text,
    energy_text,
    funnel_text,
    interval_text,
    occupancy_text,
    percent_text,
    plural,
    time_text,
)
from autotile.kernel.problem import Workrate
from autotile.report.notebook import Reported, StudyPlots, newest_study
from autotile.tuning.finals import Confirmation
from autotile.tuning.progress_state import Load
from autotile.workers.gpu import GpuUse

if TYPE_CHECKING:
    from autotile.exchange.recording import RecordingHeader
    from autotile.report.study import StudyData
    from autotile.search.importance import ParameterEffects
    from autotile.search.transfer import MisleadingSource

_PARTS = ("learnt_from", "not_learnt_from", "load", "gpus", "confirmation", "drift", "stopped")
"""Fields of a result whose JSON is that of their values."""
WORK = ("flops", "bytes", "unit", "passes")
"""Fields of a result that are those of its `Workrate`."""
_EFFECT_KEYS = ("importance", "thresholds", "insight")
"""Keys of `ParameterEffects.to_json`, stated for an aborted session too."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Drift of the GPU during a session, seen by the reference kernel."""

    reference_us: Mapping[str, float]
    """The ``first``, the ``least`` and the ``greatest`` time of the reference kernel."""
    spread: float
    """Relative excess of the greatest over the least, 0.02 for 2 %."""
    clock_limits: tuple[str, ...] = ()
    """Limits that lowered the clock beside the greatest time, such as that of the power, as far as NVML states them."""


def measure_drift(trials: Iterable[Trial]) -> Drift | None:
    """Return the greatest drift of a GPU over trials, oldest first; None if none timed the reference kernel."""
    times: dict[str, list[tuple[float, tuple[str, ...]]]] = {}
    for trial in trials:
        if time_us := trial.telemetry.get("reference_us"):
            times.setdefault(trial.gpu, []).append((float(time_us), trial.clock_limits))
    if not times:
        return None
    most = max(times.values(), key=lambda own: max(own)[0] / min(own)[0])
    (first, _), (least, _), (greatest, clock_limits) = most[0], min(most), max(most)
    reference_us = {"first": first, "least": least, "greatest": greatest}
    return Drift(reference_us, round(greatest / least - 1.0, 5), clock_limits)


@dataclass(frozen=True, slots=True)
class Front:
    """Pareto front by objectives, time among them: the trials that no other trial dominates, fastest first."""

    objectives: tuple[str, ...]
    trials: tuple[Trial, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The objectives, where an expression has the place of the time."""
        has_own = any(OBJECTIVE in trial.scores for trial in self.trials)
        return tuple(OBJECTIVE if has_own and name == TIME else name for name in self.objectives)

    def values(self, trial: Trial) -> tuple[float, ...]:
        """Return the value of each of the ``names`` for a trial."""
        pairs = zip(self.names, objective_values(trial, self.objectives) or (), strict=True)
        return tuple(trial.scores[name] if name == OBJECTIVE else value for name, value in pairs)

    def table(self, winner: Config) -> ResultTable:
        """Return at most ten configurations, from the fastest to the slowest."""
        rows = []
        count, shown = len(self.trials), min(len(self.trials), _MAX_FRONT_SHOWN)  # evenly spaced, with both ends
        indices = sorted({round(number * (count - 1) / max(1, shown - 1)) for number in range(shown)})
        for trial in (self.trials[index] for index in indices):
            values = zip(self.names, self.values(trial), strict=True)
            figures = (_OBJECTIVE_TEXTS[name](value) for name, value in values)
            label = "winner" if config_key(winner) == trial.config_key else ""
            rows.append((label, *figures, config_text(trial.config)))
        objectives = f"{', '.join(self.names[:-1])} and {self.names[-1]}"
        caption = f"front of {objectives}: {plural(len(self.trials), 'configuration')}"
        if len(rows) < len(self.trials):
            caption += f", {len(rows)} shown; --json lists all"
        headings = ("", *(f"{RIGHT}{name}" for name in self.names), "configuration")
        return ResultTable(headings, rows, ("configuration",), caption=caption)

    def to_json(self) -> JsonObject:
        """Return a plain dictionary."""
        keys = [OBJECTIVES.get(name, name) for name in self.names]
        entries = [
            {"config": dict(one.config), "time_us": one.time_us, **dict(zip(keys, self.values(one), strict=True))}
            for one in self.trials
        ]
        return {"objectives": list(self.objectives), "front": entries}


def pareto_front(trials: Iterable[Trial], objectives: Sequence[str]) -> Front | None:
    """Return the Pareto front of the newest trial of each configuration; None where time is the only objective.

    With those of the finals at the end, finalists enter with their times there, and those that failed are left out.
    """
    if len(objectives) == 1:
        return None
    newest = {trial.config_key: trial for trial in trials}
    reached = [(values, trial) for trial in newest.values() if (values := objective_values(trial, objectives))]
    kept = non_dominated([values for values, _ in reached]) if reached else ()
    best = [pair for pair, is_kept in zip(reached, kept, strict=True) if is_kept]
    return Front(tuple(objectives), tuple(trial for _, trial in sorted(best, key=lambda pair: pair[0])))


def trial_entry(trial: Trial) -> JsonObject:
    """Return configuration, outcome and time of a trial as JSON values."""
    resources, occupancy = trial.resources, trial.occupancy
    return {
        "outcome": str(trial.outcome),
        "reason": trial.reason,
        **timed_config(trial.config, trial.measurement),
        "registers": resources.registers if resources is not None else None,
        "spill_bytes": resources.spill_bytes if resources is not None else None,
        "occupancy": occupancy.occupancy if occupancy is not None else None,
        "limited_by": list(occupancy.limited_by) if occupancy is not None else [],
    }


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class ScheduleResult(Result):
    """Result of a session, or of those of a schedule."""

    device: DeviceProperties
    """Device that was tuned for."""
    seconds: float
    """Wall time; that of an earlier run of a family which was resumed is included."""
    interrupted: bool
    """Whether the user ended the sessions before there was a result."""
    database: str
    """Location of the tuning database."""
    notices: tuple[str, ...] = ()
    """Remarks for the user, one line each."""
    call: str = ""
    """Line of Python that serves the result; empty where it is not known."""
    resumed: int = 0
    """Number of trials, points or problems that earlier sessions had measured."""

    def _effort(self, resumed: str = "", *, is_served: bool = False) -> Iterator[tuple[str, str]]:
        """Yield the last facts; ``resumed`` is the unit of what is counted."""
        more = f", {plural(self.resumed, resumed)} resumed" if self.resumed else ""
        yield "took", duration_text(self.seconds) + more
        yield "saved in", self.database
        if is_served and self.call:
            yield "serve it", self.call

    def _ending(self, **more: Any) -> JsonObject:
        found = {"seconds": round(self.seconds, 3), **more, "interrupted": self.interrupted, "database": self.database}
        return {**found, "notices": list(self.notices), **({"call": self.call} if self.call else {})}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TuneResult(ScheduleResult, Reported, StudyPlots):
    """Result of a tuning session.

    Its methods ``plot_...`` return charts of the study, and ``to_pandas`` its trials; see
    `autotile.report.notebook.StudyPlots`. It has the attributes of `ScheduleResult`, too.

    Attributes
    ----------
    problem
        Problem that was tuned.
    combinations, valid
        Number of combinations of the parameters' values, and of valid configurations.
    gates
        Number of candidates left or rejected by each gate: ``combinations``, ``rules`` and ``limits`` (left after
        each), ``compile_rejected``, ``resources_rejected``, ``same_code`` (not launched, as another candidate has the
        same code), ``launched``.
    outcomes
        Number of trials of the study by outcome, including those of earlier sessions.
    winner, default
        The configuration to serve, and the default, as trials; None where they did not run.
    failed_default
        The default as a trial without a time, where it failed or a rule or a limit forbids it; else None.
    speedup
        Time of the default over time of the winner; None without finals, or where the default does not run.
    ties
        Configurations whose times cannot be distinguished from the winner's.
    flops, bytes
        Operations and bytes moved of one run, where the kernel states them.
    unit, passes
        Arithmetic unit that does the operations, where the kernel states it, and its operations for each of them.
    phases
        Seconds of ``start``, ``search`` and ``finals``, for the phases that were reached.
    refused
        Finalists that failed the checks.
    tried
        Trials of the configurations that the user named, with their times in the finals where they took part.
    learnt_from, not_learnt_from
        Other studies that the search learned from, nearest first, and those that it ignored, as its first trials
        contradict them.
    load
        Utilization of the GPU and the compilers; None for fewer than two trials.
    drift
        Drift of the GPU, where it was measured.
    front
        Pareto front; None where time is the only objective.
    stopped
        Reason for the end of the search; None where the session was aborted.
    insight
        Effects of the parameters; None where the session was aborted.
    gpus
        What each GPU did, where several shared the session.
    confirmation
        The winner on a second GPU; None where there is none, or it could not be raced there.
    """

    problem: Problem
    combinations: int
    valid: int
    gates: Mapping[str, int]
    outcomes: Mapping[Outcome, int]
    winner: Trial | None
    default: Trial | None
    speedup: Interval | None
    ties: tuple[Config, ...]
    flops: int | None
    bytes: int | None
    unit: str | None = None
    passes: int = 1
    phases: Mapping[str, float] = field(default_factory=dict)
    refused: tuple[Trial, ...] = ()
    tried: tuple[Trial, ...] = ()
    learnt_from: tuple[str, ...] = ()
    not_learnt_from: tuple[MisleadingSource, ...] = ()
    load: Load | None = None
    drift: Drift | None = None
    front: Front | None = None
    stopped: Stopped | None = None
    insight: ParameterEffects | None = None
    gpus: tuple[GpuUse, ...] = ()
    confirmation: Confirmation | None = None
    failed_default: Trial | None = None

    @property
    def summary(self) -> str:
        """Time of the winner and its ratio to that of the default, as text."""
        if self.winner is None:
            return "interrupted before a configuration ran" if self.interrupted else "no configuration ran"
        ratio = f", {self.speedup.value:.3f}x over the default" if self.speedup is not None else ""
        if self.default is not None and self.winner.config == self.default.config:
            ratio = ", the default configuration"
        return f"{time_text(self.winner.time_us)}{ratio}{', interrupted' if self.interrupted else ''}"

    def _headline(self) -> str:
        return f"{self._heading()}: {self.summary}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        if self.winner is not None:
            scores = list(self.winner.scores)
            rate = Workrate(self.flops, self.bytes, self.problem.dtype, self.unit, self.passes)
            rows: list[tuple[str, ...]] = []
            for label, trial in (
                ("best so far" if self.interrupted else "winner", self.winner),
                ("default", self.default or self.failed_default),
            ):
                measured = trial.measurement if trial is not None else None
                if trial is None or measured is None:
                    outcome = str(trial.outcome) if trial is not None else "not run"
                    rows.append((label, NOTHING, NOTHING, outcome, *("" for _ in scores)))
                    continue
                interval = interval_text(measured)
                values = [f"{trial.scores[name]:.6g}" if name in trial.scores else NOTHING for name in scores]
                speed = rate.text(measured.time_us, self.device)
                rows.append((label, time_text(measured.time_us), interval, speed, *values))
            headings = ("", f"{RIGHT}time", "95 % interval, us", "rate", *(f"{RIGHT}{name}" for name in scores))
            yield ResultTable(headings, rows, is_wrapped=True)
            if self.front is not None:
                yield self.front.table(self.winner.config)
        yield self._facts()

    def _facts(self) -> Facts:
        winner, default, load, drift = self.winner, self.default or self.failed_default, self.load, self.drift
        facts: Facts = []
        label = "best so far" if self.interrupted else "winner"
        fault = f": {default.outcome}, {default.reason}" if default is not None and not default.outcome.has_time else ""
        if self.interrupted:
            tried = plural(sum(self.outcomes.values()), "configuration")
            compared = "" if self.speedup is not None else ", before the best were timed side by side"
            facts.append(("interrupted", f"the search was cut short after {tried}{compared}"))
        facts += [
            (label, config_text(winner.config) if winner is not None else "none: no configuration ran"),
            ("occupancy", occupancy_text(self.device, winner.occupancy) if winner and winner.occupancy else ""),
            ("default", config_text(default.config) + fault if default is not None else ""),
        ]
        if self.speedup is not None:
            ratio = self.speedup
            is_scored = winner is not None and OBJECTIVE in winner.scores  # it may take longer than the default then
            over = "better than" if is_scored else "over"
            text = f"{ratio.value:.3f}x {over} the default, 95 % interval {ratio.low:.3f}x to {ratio.high:.3f}x"
            if winner is not None and default is not None and winner.config == default.config:
                text = "none: the default configuration is the winner"
            elif is_tie(ratio):
                text += ": not told apart from the default"
            facts.append(("objective" if is_scored else "speed-up", text))
        if self.ties:
            more = len(self.ties) - _MAX_TIES_SHOWN
            shown = [f"  {config_text(config)}" for config in self.ties[:_MAX_TIES_SHOWN]]
            shown += [f"  and {more} more, listed by --json"] if more > 0 else []
            told = f"{plural(len(self.ties), 'configuration')} cannot be told apart from the winner:"
            facts.append(("ties", [told, *shown]))
        tried_texts = (
            time_text(t.time_us) if t.outcome is Outcome.OK else f"{t.outcome}, {t.reason}" for t in self.tried
        )
        refused = [f"{config_text(t.config)}: {t.outcome} in stage {t.stage}: {t.reason}" for t in self.refused]
        facts += [
            ("tried", [f"{config_text(t.config)}: {text}" for t, text in zip(self.tried, tried_texts, strict=True)]),
            ("refused", refused),
            ("matters", self.insight.sentence if self.insight is not None and winner is not None else ""),
        ]
        if drift is not None and drift.spread > _MIN_DRIFT_SHOWN:
            least, greatest = drift.reference_us["least"], drift.reference_us["greatest"]
            times = f"{least:.4g} to {greatest:.4g} us ({percent_text(drift.spread)})"
            cause = f", as {' and '.join(drift.clock_limits)} lowered the clock" if drift.clock_limits else ""
            if drift.spread > _MIN_FOREIGN_LOAD_DRIFT and not cause:
                cause = ": something else ran on the GPU; tune again where the winner matters"
            else:
                cause += " through the search; the finals are free of that"
            facts.append(("drift", f"a reference kernel took {times}{cause}"))
        facts += [
            ("learnt", f"from {'; '.join(self.learnt_from)}" if self.learnt_from else ""),
            ("not learnt", f"from {'; '.join(map(str, self.not_learnt_from))}" if self.not_learnt_from else ""),
        ]
        if load is not None and max(load.compilers_busy, load.gpu_busy) >= 0.005:  # a replay waits for neither
            compilers, gpu = 100 * load.compilers_busy, 100 * load.gpu_busy
            waits = {"gpu": ": the search waits for the GPU", "compilers": ": the search waits for the compilers"}
            shares = f"the compilers {compilers:.0f} % of the search, the GPU {gpu:.0f} %"
            facts.append(("busy", shares + waits.get(load.binds, "")))
        gpus = [
            f"{use.uuid}: {plural(use.trials, 'trial')}"
            + (f", times x {use.scale:.4f}" if use.scale is not None else "")
            + (f", given up: {use.lost}" if use.lost else "")
            for use in self.gpus
        ]
        if (found := self.confirmation) is not None:
            ratio_text = f", {found.speedup.value:.3f}x over the default" if found.speedup is not None else ""
            gpus.append(
                f"the winner on {found.gpu}: {time_text(found.time_us)}, {100 * found.spread:+.1f} %{ratio_text}"
            )
        facts += [
            ("GPUs", gpus),
            ("gates", funnel_text(self.gates, self.outcomes)),
            ("stopped", _stopped(self.stopped) if self.stopped is not None else ""),
            *self._effort("trial", is_served=winner is not None),
        ]
        return [(label, text) for label, text in facts if text]

    def study_data(self) -> StudyData:
        """Return the study with all its runs and trials, read from the database; an `InputError` if that has none."""
        return newest_study(self.database, self.problem, self.device)

    def gflops_per_s(self, trial: Trial | None) -> float | None:
        """Return the rate of a trial in GFLOP/s; None where the kernel does not state its operations."""
        if trial is None or trial.time_us is None or self.flops is None:
            return None
        return self.flops / trial.time_us / 1e3

    def to_json(self) -> JsonObject:
        """Return the document that ``autotile tune --json`` prints."""
        return {
            **self.problem.document(),
            "device": self.device.identity,
            "space": {"combinations": self.combinations, "valid": self.valid},
            "gates": dict(self.gates),
            "outcomes": {str(outcome): self.outcomes.get(outcome, 0) for outcome in Outcome},
            "winner": self._entry(self.winner),
            "default": self._entry(self.default),
            "speedup": to_document(self.speedup),
            "ties": to_document(self.ties),
            "refused": [
                {"config": dict(t.config), "outcome": str(t.outcome), "reason": t.reason} for t in self.refused
            ],
            "tried": [trial_entry(trial) for trial in self.tried],
            **to_document(attributes(self, *_PARTS)),
            **(self.insight.to_json() if self.insight is not None else dict.fromkeys(_EFFECT_KEYS)),
            **(self.front.to_json() if self.front is not None else {}),
            **attributes(self, *WORK),
            **self._ending(phases=dict(self.phases), resumed=self.resumed),
        }

    def _entry(self, trial: Trial | None) -> JsonObject | None:
        if trial is None or trial.measurement is None:
            return None
        known = {**trial_entry(trial), "gflops_per_s": self.gflops_per_s(trial)}
        names = ("config", "time_us", "interval_us", "gflops_per_s", "occupancy", "limited_by", "registers")
        return {**{name: known[name] for name in names}, **({"scores": trial.scores} if trial.scores else {})}


_MIN_GAIN_SHOWN = 0.001
"""Smallest expected gain that is stated, in percent."""
_MAX_TIES_SHOWN = 5
_MAX_FRONT_SHOWN = 10
_MIN_DRIFT_SHOWN = 0.02
"""A single reading of the reference kernel varies by 1.5 % on an H200."""
_MIN_FOREIGN_LOAD_DRIFT = 0.1
"""Clocks alone moved the reference kernel by 2.3 % at most on an H200; matrix products of another process by 22 to
230 %."""


def _stopped(stopped: Stopped) -> str:
    """Return why a search ended for what it expected; nothing for another reason."""
    gain, trials = 100 * (stopped.expected_gain or 0.0), plural(stopped.more_trials or 0, "more trial")
    if stopped.rule == "settled":
        more = f"{gain:.1g} %" if gain >= _MIN_GAIN_SHOWN else f"less than {_MIN_GAIN_SHOWN:g} %"
        return f"nothing more is expected: {more} from {trials}; --spend uses the budget up"
    if stopped.rule == "until":
        return f"{gain:.2g} % was expected of {trials}, less than --until asks for"
    return ""


_OBJECTIVE_TEXTS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "time": time_text,
        OBJECTIVE: "{:.6g}".format,
        "registers": lambda count: f"{count:.0f}",
        "energy": energy_text,
        "error": lambda share: f"{share:.2g}",
    }
)
"""Text of a value of each of `autotile.core.model`."""


@dataclass(frozen=True, slots=True, repr=False)
class Recorded(Result):
    """Result of a recording session."""

    path: Path | None
    """File that was written; None where the user interrupted, and the same command resumes from the database."""
    header: RecordingHeader
    configurations: int
    """Number of measured configurations."""
    seconds: float

    def _headline(self) -> str:
        file = str(self.path) if self.path is not None else "interrupted before a file was written"
        measured = plural(self.configurations, "configuration")
        return f"{self.header.problem} on {self.header.key.gpu_name}: {measured}, {file}"
