"""Studies for the tests of reports: sessions over recorded times, with clocks, failures and finals; hostile ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import structs

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Measurement, Outcome, Trial
from autotile.core.statistics import median_interval, paired_ratio, widen_by_session_spread
from autotile.database.database import Database, ensure_study, insert_run, insert_trials, trial_row
from autotile.database.engine import RUNS
from autotile.database.keys import TuningKey
from autotile.exchange.recording import Recording, read_recording
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.library import load_kernel
from autotile.report.report_data import read_report
from autotile.report.study import StudyData
from autotile.space.limits import occupancy

ROOT = Path(__file__).parent.parent
STARTED = datetime(2026, 3, 1, 12, tzinfo=UTC)
ROUNDS = 40
FINALISTS = 12

SCRIPT = "<script>alert(1)</script>"
COMPILER_WORDS = (
    'kernel.cu(31): error: identifier "acc<b>" is undefined </script><img src=x onerror=alert(2)> in '
    "'mma<T, 16>' & \N{GREEK SMALL LETTER MU}s \N{LINE SEPARATOR} %{customdata} $\\frac{1}{2}$"
)
HOSTILE_VALUES = ('a"b', "<b>bold</b>", "</script><script>alert(3)</script>", "=1+1", "\N{SNOWMAN} %{y}")


@dataclass(frozen=True)
class Session:
    """What a stored session is to look like."""

    trials: int = 200
    seed: int = 0
    objectives: tuple[str, ...] = ("time",)
    finals: bool = True
    hostile: bool = False
    ended: bool = True


def recording_of(name: str) -> Recording:
    return read_recording(ROOT / "recordings" / f"{name}.npz")


SGEMM = "sgemm_2d-nvidia-h200-4096x4096x4096-float32"


def store_session(
    path: Path, session: Session = Session(), recording: str = SGEMM, *, source: Literal["cuda", "replayed"] = "cuda"
) -> TuningKey:
    """Store a session over the times of a recording as if they had been measured, and return the study's key."""
    recorded = recording_of(recording)
    device = recorded.header.device
    trials = _trials(recorded, device, session)
    key = structs.replace(recorded.header.key, source=source)
    if session.hostile:
        values = HOSTILE_VALUES * len(trials)
        trials = [replace(trial, config={**trial.config, SCRIPT: values[i]}) for i, trial in enumerate(trials)]
        hostile: dict[str, Any] = {"kernel": SCRIPT, "gpu_name": 'H200 <i>"x"</i>', "dtype": "float32&amp;"}
        key = structs.replace(key, sizes={"M<": 4, **key.sizes}, **hostile)
    settings = {"objectives": list(session.objectives), "objective": None, "finals": 12, "sanitize": True}
    with Database.open(path) as database, database.writing() as connection:
        study_id = ensure_study(connection, key, structs.replace(device, source=source))
        run_id = insert_run(connection, {**RUN, "study_id": study_id, "seed": session.seed, "settings": settings})
        position = {"study_id": study_id, "run_id": run_id}
        searched = [
            position | {"phase": "search", "rank": None, "created_at": _moment(0.3 * i + 2.0)} | trial_row(trial)
            for i, trial in enumerate(trials)
        ]
        insert_trials(connection, searched)
        summary: dict[str, Any] = {}
        if session.finals:
            ranked, refused = _finals(trials, session)
            ends = _moment(0.3 * len(trials) + 9.0)
            rows = [{"phase": "final", "rank": rank} | trial_row(trial) for rank, trial in enumerate(ranked, start=1)]
            rows += [{"phase": "final", "rank": None} | trial_row(trial) for trial in refused]
            insert_trials(connection, [position | {"created_at": ends} | row for row in rows])
            summary = _summary(ranked, refused, trials[0].config, session)
        if session.ended:
            ended = {"ended_at": _moment(0.3 * len(trials) + 10.0), "summary": summary}
            connection.execute(RUNS.update().where(RUNS.c.id == run_id).values(**ended))
    return key


def _moment(seconds: float) -> str:
    return (STARTED + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


GATES = {"combinations": 93312, "rules": 19200, "limits": 14712}
RUN = {"started_at": _moment(0.0), "sampler": "auto", "driver": "13.0", "host": "gpu-node-1", "gates": GATES}


def _trials(recorded: Recording, device: DeviceProperties, session: Session) -> list[Trial]:
    """Return the default and then other configurations, the later the better on average, as a search finds them."""
    rng = np.random.default_rng(session.seed)
    kernel = load_kernel(recorded.header.key.kernel)
    times = recorded.columns["time_us"]
    times = np.where(np.isnan(times), np.nanmedian(times), times)
    order = np.argsort(-np.log(times) + rng.normal(0.0, 0.6, len(times)))
    order = order[np.sort(rng.choice(len(order), min(session.trials, len(order)), replace=False))]
    copies = -(-session.trials // len(order))
    found: list[Trial] = []
    best_us = np.inf
    for index in range(session.trials):
        row, copy = int(order[index % len(order)]), index // len(order)
        heat = 1.0 - np.exp(-index / 60.0)
        result = recorded.trial(row)
        geometry = LaunchPlan.of(kernel.spec, result.config, recorded.header.problem, device).main.geometry
        resident = None
        if result.resources is not None:
            smem_bytes = result.resources.static_smem_bytes + geometry.dynamic_smem_bytes
            resident = occupancy(geometry.threads, result.resources.registers, smem_bytes, device)
        telemetry: dict[str, Any] = {
            "reference_us": float(41.5 * (1 + 0.012 * heat) + rng.normal(0.0, 0.05)),
            "sm_clock_mhz": int(1980 - 105 * heat + rng.integers(-8, 8)),
            "power_w": float(310 + 330 * heat + rng.normal(0.0, 12.0)),
            "temperature_c": int(38 + 24 * heat),
            "throttle_reasons": 4 if heat > 0.9 and row % 5 == 0 else 0,
            "max_error": 1.4e-6,
            "energy_mj": float(1e-3 * (result.measurement.time_us if result.measurement else 1.0) * (480 + 40 * heat)),
            "output_digest": "8f1c02-77ab19",
        }
        trial = replace(
            result,
            config={**result.config, "COPY": copy} if copies > 1 else result.config,
            geometry=geometry,
            occupancy=resident,
            seconds={"compile": 1.2, "verify": 0.1, "measure": 0.2},
            telemetry=telemetry if result.measurement is not None else {},
        )
        if trial.time_us is not None and trial.time_us > 1.3 * best_us and index:
            trial = replace(trial, outcome=Outcome.PRUNED, reason="slower than 1.3 times the best after 9 samples")
        best_us = min(best_us, trial.time_us or np.inf)
        if index % 23 == 7:
            reason = f"C differs by 0.25 at element {len(str(trial.config)) * 37}"
            how = (Outcome.COMPILE_FAILED, "compile", COMPILER_WORDS)
            outcome, stage, reason = how if session.hostile else (Outcome.WRONG_RESULT, "verify", reason)
            trial = replace(trial, measurement=None, telemetry={}, outcome=outcome, stage=stage, reason=reason)
        found.append(trial)
    return found


def _finals(trials: Sequence[Trial], session: Session) -> tuple[list[Trial], list[Trial]]:
    """Return the ranked finalists with the times of a race, and one that the sanitizer refused."""
    rng = np.random.default_rng(session.seed + 1)
    timed = sorted((t for t in trials if t.outcome is Outcome.OK), key=lambda t: t.time_us or 0.0)
    reason = "memcheck: Invalid __global__ read of size 16 bytes at sgemm_2d+0x1a40 by thread (96,0,0)"
    refused = replace(timed[1], outcome=Outcome.OUT_OF_BOUNDS, stage="sanitize", reason=reason, measurement=None)
    rows = [timed[0], *timed[2 : FINALISTS + 1]]
    default = next((t for t in trials if t.outcome.has_time), rows[0])
    rows += [default] if all(default is not one for one in rows) else []
    drift = 1 + rng.normal(0.0, 0.004, ROUNDS)
    raced = []
    for place, trial in enumerate(rows):
        base = (timed[0].time_us or 1.0) * (1 + 0.0004 * place if place < 3 else 1.0 + 0.006 * place)
        base = base if place < FINALISTS else (trial.time_us or 1.0)
        samples = base * drift * (1 + rng.normal(0.0, 0.003, ROUNDS))
        interval = median_interval(samples)
        times = Measurement(interval.value, interval.low, interval.high, tuple(samples.tolist()))
        raced.append(replace(trial, outcome=Outcome.OK, reason="", stage="finals", measurement=times))
    return sorted(raced, key=lambda t: t.time_us or 0.0), [refused]


def _summary(ranked: Sequence[Trial], refused: Sequence[Trial], default: Config, session: Session) -> dict[str, Any]:
    first, last = ranked[0].measurement, ranked[-1].measurement
    speedup = widen_by_session_spread(paired_ratio(first.samples_us, last.samples_us))
    names = list(ranked[0].config)
    shares = [0.46, 0.21, 0.11, 0.06, 0.03]
    return {
        "speedup": {"ratio": speedup.value, "interval": [speedup.low, speedup.high]},
        "winner": {"config": dict(ranked[0].config)},
        "default": {"config": dict(ranked[-1].config)},
        "ties": [dict(ranked[1].config), dict(ranked[2].config)],
        "gates": GATES,
        "stopped": {"rule": "trials", "expected_gain": 0.0042, "more_trials": 256},
        "importance": [
            {"parameter": name, "share": share, "alone": 0.8 * share, "matters": share > 0.02, "favoured": []}
            for name, share in zip(names, [*shares, *[0.0] * len(names)], strict=False)
        ],
        "insight": f"{names[0]} explains 46 % of the differences, {names[1]} 21 %",
        "notices": ["the clocks are not locked"],
        "seconds": 0.3 * 200 + 10.0,
        "phases": {"start": 2.0, "search": 60.0, "finals": 8.0},
    }


def read_one(path: Path) -> StudyData:
    opened = Database.open_readonly(path)
    with opened:
        (study,) = read_report(opened).studies
    return study
