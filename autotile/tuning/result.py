"""The result of a tuning session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotile.core.device import DeviceProperties
from autotile.core.documents import encode_json
from autotile.core.model import (
    OBJECTIVES,
    Config,
    Outcome,
    Problem,
    Trial,
    config_key,
    config_text,
    non_dominated,
    objective_values,
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
    plural,
    time_text,
)
from autotile.core.timeline import Timeline
from autotile.database.paths import atomic_write
from autotile.errors import InputError
from autotile.kernel.problem import Workrate
from autotile.report.notebook import PageContent, Reported, StudyPlots, newest_study
from autotile.tuning.backend import GpuUse
from autotile.tuning.finals import Confirmation, Finals
from autotile.tuning.pipeline import Load
from autotile.tuning.stopping import Stopped, TrialLog

if TYPE_CHECKING:
    from autotile.report.study_data import StudyData
    from autotile.search.importance import ParameterEffects
    from autotile.search.transfer import MisleadingSource  # imports Optuna

_EFFECT_KEYS = ("importance", "thresholds", "insight")
"""Keys of `ParameterEffects.to_json`, stated for an aborted session too."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Drift of the GPU during a session, seen by the reference kernel.

    Attributes
    ----------
    first_us, least_us, greatest_us
        First, minimum and maximum time of the reference kernel, in microseconds.
    """

    first_us: float
    least_us: float
    greatest_us: float

    @property
    def spread(self) -> float:
        """Relative excess of the maximum over the minimum, 0.02 for 2 %."""
        return self.greatest_us / self.least_us - 1.0

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            "reference_us": {"first": self.first_us, "least": self.least_us, "greatest": self.greatest_us},
            "spread": round(self.spread, 5),
        }


def measure_drift(trials: Iterable[Trial]) -> Drift | None:
    """Return the drift over trials, oldest first, of several GPUs that of the one that drifted most.

    None where none of the trials timed the reference kernel.
    """
    times: dict[str, list[float]] = {}
    for trial in trials:
        if trial.telemetry.get("reference_us"):
            times.setdefault(trial.gpu, []).append(float(trial.telemetry["reference_us"]))
    drifts = (Drift(own[0], min(own), max(own)) for own in times.values())
    return max(drifts, key=lambda drift: drift.spread, default=None)


@dataclass(frozen=True, slots=True)
class Front:
    """Pareto front: the trials that no other trial dominates.

    Attributes
    ----------
    objectives
        Names of the objectives, time among them.
    trials
        Trials on the front, fastest first.
    """

    objectives: tuple[str, ...]
    trials: tuple[Trial, ...]

    def values(self, trial: Trial) -> tuple[float, ...]:
        """Return the value of each objective for a trial."""
        reached = objective_values(trial, self.objectives)
        assert reached is not None
        return reached

    def table(self, winner: Config) -> ResultTable:
        """Return at most ten configurations, from the fastest to the slowest."""
        rows = []
        for trial in (self.trials[index] for index in _evenly_spaced(len(self.trials), _MAX_FRONT_SHOWN)):
            values = zip(self.objectives, self.values(trial), strict=True)
            figures = (_OBJECTIVE_TEXTS[name](value) for name, value in values)
            label = "winner" if config_key(winner) == config_key(trial.config) else ""
            rows.append((label, *figures, config_text(trial.config)))
        objectives = f"{', '.join(self.objectives[:-1])} and {self.objectives[-1]}"
        caption = f"front of {objectives}: {plural(len(self.trials), 'configuration')}"
        if len(rows) < len(self.trials):
            caption += f", {len(rows)} shown; --json lists all"
        headings = ("", *(f"{RIGHT}{name}" for name in self.objectives), "configuration")
        return ResultTable(headings, rows, ("configuration",), caption=caption)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        keys = [OBJECTIVES[name] for name in self.objectives]
        entries = [
            {"config": dict(trial.config), **dict(zip(keys, self.values(trial), strict=True))} for trial in self.trials
        ]
        return {"objectives": list(self.objectives), "front": entries}


def pareto_front(trials: Iterable[Trial], finals: Finals | None, objectives: Sequence[str]) -> Front | None:
    """Return the Pareto front of the trials of a study; None where time is the only objective.

    Finalists enter with their times from the finals; those that failed the checks are left out.
    """
    if len(objectives) == 1:
        return None
    newest = {config_key(trial.config): trial for trial in trials}
    if finals is not None:
        newest |= {config_key(trial.config): trial for trial in (*finals.ranked, *finals.refused)}
    reached = [(values, trial) for trial in newest.values() if (values := objective_values(trial, objectives))]
    kept = non_dominated([values for values, _ in reached]) if reached else ()
    best = [pair for pair, is_kept in zip(reached, kept, strict=True) if is_kept]
    return Front(tuple(objectives), tuple(trial for _, trial in sorted(best, key=lambda pair: pair[0])))


def trial_entry(trial: Trial) -> dict[str, Any]:
    """Return configuration, outcome and time of a trial as JSON values."""
    measured = trial.measurement
    return {
        "config": dict(trial.config),
        "outcome": str(trial.outcome),
        "reason": trial.reason,
        "time_us": measured.time_us if measured is not None else None,
        "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
        "registers": trial.resources.registers if trial.resources is not None else None,
        "spill_bytes": trial.resources.spill_bytes if trial.resources is not None else None,
        "occupancy": trial.occupancy.occupancy if trial.occupancy is not None else None,
        "limited_by": list(trial.occupancy.limited_by) if trial.occupancy is not None else [],
    }


@dataclass(frozen=True, slots=True, repr=False)
class TuneResult(Result, Reported, StudyPlots):
    """Result of a tuning session.

    Its methods ``plot_...`` return charts of the study, and ``to_pandas`` its trials; see
    `autotile.report.notebook.StudyPlots`.

    Attributes
    ----------
    problem, device
        Problem, and device that it was tuned for.
    combinations, valid
        Number of combinations of the parameters' values, and of valid configurations.
    gates
        Number of candidates left or rejected by each gate: ``combinations``, ``rules`` and ``limits`` (left after
        each), ``compile_rejected``, ``resources_rejected``, ``same_code`` (not launched, as another candidate has the
        same code), ``launched``.
    outcomes
        Number of trials of the study by outcome, including those of earlier sessions.
    winner
        The configuration to serve; None where no candidate ran.
    default
        Trial of the default configuration; None where it does not run.
    speedup
        Time of the default over time of the winner; None without finals, or where the default does not run.
    ties
        Configurations whose times cannot be distinguished from the winner's.
    seconds
        Wall time of the session, in seconds.
    resumed
        Number of trials taken over from earlier sessions.
    interrupted
        Whether the user ended the session.
    database
        Location of the tuning database.
    flops, bytes
        Operations and bytes moved of one run, where the kernel states them.
    unit, passes
        Arithmetic unit that does the operations, where the kernel states it, and its operations for each of them.
    notices
        Remarks for the user, one line each.
    phases
        Seconds of ``start``, ``search`` and ``finals``, for the phases that were reached.
    refused
        Finalists that failed the checks.
    tried
        Trials of the configurations that the user named, with their times in the finals where they took part.
    learnt_from
        Other studies that the search learned from, nearest first.
    not_learnt_from
        Other studies that the search ignored, as its first trials contradict them.
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
    call
        Line of Python that serves the winner; empty where it is not known.
    """

    problem: Problem
    device: DeviceProperties
    combinations: int
    valid: int
    gates: Mapping[str, int]
    outcomes: Mapping[Outcome, int]
    winner: Trial | None
    default: Trial | None
    speedup: Interval | None
    ties: tuple[Config, ...]
    seconds: float
    resumed: int
    interrupted: bool
    database: str
    flops: int | None
    bytes: int | None
    unit: str | None = None
    passes: int = 1
    notices: tuple[str, ...] = ()
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
    call: str = ""

    @property
    def summary(self) -> str:
        """Time of the winner and its ratio to that of the default, as text."""
        if self.winner is None:
            return "interrupted before a configuration ran" if self.interrupted else "no configuration ran"
        is_default = self.default is not None and self.winner.config == self.default.config
        ratio = f", {self.speedup.value:.3f}x over the default" if self.speedup is not None else ""
        if is_default:
            ratio = ", the default configuration"
        return f"{time_text(self.winner.time_us)}{ratio}{', interrupted' if self.interrupted else ''}"

    def _headline(self) -> str:
        return f"{self.problem} on {device_text(self.device)}: {self.summary}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        """Yield winner and default side by side, the front, and facts about the session."""
        if self.winner is not None:
            yield self._compared()
            if self.front is not None:
                yield self.front.table(self.winner.config)
        yield self._facts()

    @property
    def _winner_label(self) -> str:
        return "best so far" if self.interrupted else "winner"

    def _compared(self) -> ResultTable:
        scores = list(self.winner.scores) if self.winner is not None else []
        rate = Workrate(self.flops, self.bytes, self.problem.dtype, self.unit, self.passes)
        rows: list[tuple[str, ...]] = []
        for label, trial in ((self._winner_label, self.winner), ("default", self.default)):
            measured = trial.measurement if trial is not None else None
            if trial is None or measured is None:
                left = ["" for _ in scores]
                rows.append((label, NOTHING, NOTHING, str(trial.outcome) if trial is not None else "not run", *left))
                continue
            interval, speed = interval_text(measured.low_us, measured.high_us), rate.text(measured.time_us, self.device)
            values = [f"{trial.scores[name]:.6g}" if name in trial.scores else NOTHING for name in scores]
            rows.append((label, time_text(measured.time_us), interval, speed, *values))
        headings = ("", f"{RIGHT}time", "95 % interval, us", "rate", *(f"{RIGHT}{name}" for name in scores))
        return ResultTable(headings, rows, is_wrapped=True)

    def _facts(self) -> Facts:
        winner, stopped = self.winner, self.stopped
        is_stated = stopped is not None and stopped.rule in ("until", "settled")
        resumed = f", {plural(self.resumed, 'trial')} resumed" if self.resumed else ""
        facts: Facts = [
            ("interrupted", _interruption(self) if self.interrupted else ""),
            (self._winner_label, config_text(winner.config) if winner is not None else "none: no configuration ran"),
            ("occupancy", occupancy_text(self.device, winner.occupancy) if winner and winner.occupancy else ""),
            ("default", config_text(self.default.config) if self.default is not None else ""),
            ("speed-up", _speedup(self, self.speedup) if self.speedup is not None else ""),
            ("ties", _ties(self.ties) if self.ties else ""),
            ("tried", _tried(self.tried)),
            (
                "refused",
                [
                    f"{config_text(one.config)}: {one.outcome} in stage {one.stage}: {one.reason}"
                    for one in self.refused
                ],
            ),
            ("matters", self.insight.sentence if self.insight is not None and winner is not None else ""),
            ("drift", _drift(self.drift) if self.drift is not None and self.drift.spread > _MIN_DRIFT_SHOWN else ""),
            ("learnt", f"from {'; '.join(self.learnt_from)}" if self.learnt_from else ""),
            ("not learnt", f"from {'; '.join(map(str, self.not_learnt_from))}" if self.not_learnt_from else ""),
            ("busy", _load(self.load) if self.load is not None else ""),
            ("GPUs", _gpus(self) if self.gpus else ""),
            ("gates", funnel_text(self.gates, self.outcomes)),
            ("stopped", _stopped(stopped) if stopped is not None and is_stated else ""),
            ("took", duration_text(self.seconds) + resumed),
            ("saved in", self.database),
            ("serve it", self.call if winner is not None else ""),
        ]
        return [(label, text) for label, text in facts if text]

    def study_data(self) -> StudyData:
        """Return the study with all its runs and trials, read from the database.

        Raises
        ------
        InputError
            The database cannot be read, or has no such study any more.
        """
        return newest_study(self.database, self.problem, self.device)

    def page_content(self) -> PageContent:
        """As for `Reported`."""
        of = self.problem
        return PageContent(self.database, of.kernel, of.sizes, of.dtype, self.device.name)

    def gflops_per_s(self, trial: Trial | None) -> float | None:
        """Return the rate of a trial in GFLOP/s; None where the kernel does not state its operations."""
        if trial is None or trial.time_us is None or self.flops is None:
            return None
        return self.flops / trial.time_us / 1e3

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``autotile tune --json`` prints."""
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device.identity,
            "space": {"combinations": self.combinations, "valid": self.valid},
            "gates": dict(self.gates),
            "outcomes": {str(outcome): self.outcomes.get(outcome, 0) for outcome in Outcome},
            "winner": self._entry(self.winner),
            "default": self._entry(self.default),
            "speedup": self.speedup.to_json() if self.speedup is not None else None,
            "ties": [dict(config) for config in self.ties],
            "refused": [
                {"config": dict(t.config), "outcome": str(t.outcome), "reason": t.reason} for t in self.refused
            ],
            "tried": [trial_entry(trial) for trial in self.tried],
            "learnt_from": list(self.learnt_from),
            "not_learnt_from": [source.to_json() for source in self.not_learnt_from],
            "load": self.load.to_json() if self.load is not None else None,
            "gpus": [gpu.to_json() for gpu in self.gpus],
            "confirmation": self.confirmation.to_json() if self.confirmation is not None else None,
            "drift": self.drift.to_json() if self.drift is not None else None,
            "stopped": self.stopped.to_json() if self.stopped is not None else None,
            **(self.insight.to_json() if self.insight is not None else dict.fromkeys(_EFFECT_KEYS)),
            **(self.front.to_json() if self.front is not None else {}),
            "flops": self.flops,
            "bytes": self.bytes,
            "unit": self.unit,
            "passes": self.passes,
            "seconds": round(self.seconds, 3),
            "phases": dict(self.phases),
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "database": self.database,
            "notices": list(self.notices),
            **({"call": self.call} if self.call else {}),
        }

    def _entry(self, trial: Trial | None) -> dict[str, Any] | None:
        if trial is None or trial.measurement is None:
            return None
        found = trial.occupancy
        return {
            "config": dict(trial.config),
            "time_us": trial.measurement.time_us,
            "interval_us": [trial.measurement.low_us, trial.measurement.high_us],
            "gflops_per_s": self.gflops_per_s(trial),
            "occupancy": found.occupancy if found is not None else None,
            "limited_by": list(found.limited_by) if found is not None else [],
            "registers": trial.resources.registers if trial.resources is not None else None,
            **({"scores": trial.scores} if trial.scores else {}),
        }


_MIN_GAIN_SHOWN = 0.001
"""Smallest expected gain that is stated, in percent."""
_MAX_TIES_SHOWN = 5
_MAX_FRONT_SHOWN = 10
_MIN_DRIFT_SHOWN = 0.02
"""A single reading of the reference kernel varies by 1.5 % on an H200."""
_MIN_FOREIGN_LOAD_DRIFT = 0.1
"""Clocks alone moved the reference kernel by 2.3 % at most on an H200; matrix products of another process by 22 to
230 %."""


def _gpus(result: TuneResult) -> list[str]:
    """Return a line for each GPU that took part, and one for the winner on a second one."""
    rows = [
        f"{use.uuid}: {plural(use.trials, 'trial')}"
        + (f", times x {use.scale:.4f}" if use.scale is not None else "")
        + (f", given up: {use.lost}" if use.lost else "")
        for use in result.gpus
    ]
    found = result.confirmation
    if found is not None:
        ratio = f", {found.speedup.value:.3f}x over the default" if found.speedup is not None else ""
        rows.append(f"the winner on {found.gpu}: {time_text(found.time_us)}, {100 * found.spread:+.1f} %{ratio}")
    return rows


def _interruption(result: TuneResult) -> str:
    tried = plural(sum(result.outcomes.values()), "configuration")
    compared = "" if result.speedup is not None else ", before the best were timed side by side"
    return f"the search was cut short after {tried}{compared}; the same command goes on from there"


def _speedup(result: TuneResult, ratio: Interval) -> str:
    winner, default = result.winner, result.default
    if winner is not None and default is not None and config_key(winner.config) == config_key(default.config):
        return "none: the default configuration is the winner"
    known = f"{ratio.value:.3f}x over the default, 95 % interval {ratio.low:.3f}x to {ratio.high:.3f}x"
    return f"{known}: not told apart from the default" if is_tie(ratio) else known


def _tried(tried: Sequence[Trial]) -> list[str]:
    """Return a line for each configuration that the user named."""
    outcomes = [
        time_text(trial.time_us) if trial.outcome is Outcome.OK else f"{trial.outcome}, {trial.reason}"
        for trial in tried
    ]
    return [f"{config_text(trial.config)}: {text}" for trial, text in zip(tried, outcomes, strict=True)]


def _stopped(stopped: Stopped) -> str:
    gain = 100 * (stopped.expected_gain or 0.0)
    if stopped.rule == "settled":
        more = f"{gain:.1g} %" if gain >= _MIN_GAIN_SHOWN else f"less than {_MIN_GAIN_SHOWN:g} %"
        return f"nothing more is expected: {more} from {stopped.more_trials} more trials; --spend uses the budget up"
    return f"all the candidates that lay ready were expected to gain {gain:.2g} %, less than --until asks for"


def _drift(drift: Drift) -> str:
    times = f"a reference kernel took {drift.least_us:.4g} to {drift.greatest_us:.4g} us ({drift.spread:.1%})"
    if drift.spread > _MIN_FOREIGN_LOAD_DRIFT:
        return f"{times}: something else ran on the GPU; tune again where the winner matters"
    return f"{times} through the search; the finals are free of that"


def _load(load: Load) -> str:
    shares = f"the compilers {load.compilers_busy:.0%} of the search, the GPU {load.gpu_busy:.0%}"
    return f"{shares}: the search waits for the {'GPU' if load.binds == 'gpu' else 'compilers'}"


def _ties(ties: Sequence[Config]) -> list[str]:
    shown = [f"  {config_text(config)}" for config in ties[:_MAX_TIES_SHOWN]]
    left = [f"  and {len(ties) - _MAX_TIES_SHOWN} more, listed by --json"] if len(ties) > _MAX_TIES_SHOWN else []
    return [f"{plural(len(ties), 'configuration')} cannot be told apart from the winner:", *shown, *left]


_OBJECTIVE_TEXTS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "time": time_text,
        "registers": lambda count: f"{count:.0f}",
        "energy": energy_text,
        "error": lambda share: f"{share:.2g}",
    }
)
"""Text of a value of each of `autotile.core.model`."""


def _evenly_spaced(count: int, max_shown: int) -> list[int]:
    """Return at most so many indices below ``count``, the first and the last among them."""
    shown = min(count, max_shown)
    step = (count - 1) / max(1, shown - 1)
    return sorted({round(number * step) for number in range(shown)})


def write_trace(timeline: Timeline, path: Path) -> tuple[str, ...]:
    """Write the timeline of a session; return a notice if that fails, as the results do not depend on it."""
    try:
        with atomic_write(path) as stream:
            stream.write(encode_json(timeline.to_json()).encode())
    except (OSError, InputError) as error:
        return (f"the timeline could not be written to {path}: {error}",)
    return ()


def newest_trials(configs: Iterable[Config], log: TrialLog, finals: Finals | None) -> tuple[Trial, ...]:
    """Return the newest trial of each configuration, those of the finals included; none of one without a trial."""
    raced = {config_key(t.config): t for t in (*finals.ranked, *finals.refused)} if finals is not None else {}
    found = [raced.get(config_key(config)) or log.find(config) for config in configs]
    return tuple(trial for trial in found if trial is not None)
