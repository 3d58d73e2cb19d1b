"""Trials, and runs that tests store step by step; the package stores those of a session as they go on."""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Executable, text

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Outcome, Problem, Resources, Trial
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database, Phase, finish_run, insert_run, insert_trials, trial_row
from autotile.database.engine import TRIALS, now_text
from autotile.database.keys import TuningKey, key_of
from autotile.database.winners import miss_row
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import Workrate, resolve_problem
from autotile.kernel.spec import Parameter
from autotile.settings import read_settings
from autotile.tuning.progress_state import Progress

SEARCHING = Progress(
    phase="searching",
    problem=Problem("scale", {"n": 4096}, "float32"),
    device=device_profile("h200"),
    done=30,
    target=200,
    elapsed_s=3.0,
    budget_s=None,
    outcomes={Outcome.OK: 45, Outcome.PRUNED: 5},
    gates={"combinations": 8294400, "limits": 24906},
    best=Trial({"BM": 128}, Outcome.OK, measurement=Measurement(4790, 4788, 4795)),
    rate=Workrate(None, None, "float32"),
    remaining_s=15.0,
)


KEY = TuningKey("k", "", "", (), "float32", {"N": 1}, "GPU", "9.0", 1, 1, "13.0", "cold")
"""Key of a study where its fields do not matter."""


PARAMETERS = (Parameter("BM", (32, 64, 128)), Parameter("WIDE", (False, True)), Parameter("KIND", ("float", "float4")))


FAST, SLOW, DEFAULT = ({"THREADS": threads, "WORK": work} for threads, work in ((256, 4), (64, 2), (128, 1)))
"""Configurations of the tiny kernel."""


def space_of(parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
    names = [parameter.name for parameter in parameters]
    return [dict(zip(names, values, strict=True)) for values in product(*(p.values for p in parameters))]


SPACE = space_of(PARAMETERS)


def measured(config: Config, time_us: float) -> Trial:
    """Return a trial that went all the way, with a given time."""
    return Trial(
        config=config,
        outcome=Outcome.OK,
        stage="measure",
        geometry=LaunchGeometry((32, 64, 1), (16, 16, 1), 49152),
        resources=Resources(96, 0, 0, 0, 16640),
        occupancy=Occupancy(2, 16, 0.25, ("registers",), {"threads": 8, "registers": 2, "shared_memory": 3}),
        measurement=Measurement(time_us, time_us * 0.99, time_us * 1.01, (time_us, time_us * 1.01), "cold"),
        cubin_hash="c" * 64,
        seconds={"compile": 0.25, "measure": 0.05},
        telemetry={"clock_mhz": 1980, "power_w": 512.5, "throttle": "none"},
    )


def failed(config: Config, outcome: Outcome, reason: str = "why") -> Trial:
    """Return a trial that ended with a given outcome before it was measured."""
    return Trial(config=config, outcome=outcome, reason=reason, stage="compile")


def start_run(database: Database, study_id: int, **fields: Any) -> int:
    """Record the start of a run with columns of the table ``runs``, and return its id."""
    with database.writing() as connection:
        return insert_run(connection, {"study_id": study_id, **fields})


def begin(database: Database, key: TuningKey, device: DeviceProperties | None = None) -> tuple[int, int]:
    """Begin a run of a key's study, and return the ids of both."""
    study_id = database.study(key, device)
    return study_id, start_run(database, study_id, sampler="random")


def end_run(database: Database, run_id: int, summary: Mapping[str, Any] | None = None) -> None:
    """Record the end of a run; the winner of its finals becomes the study's best."""
    with database.writing() as connection:
        assert finish_run(connection, run_id, summary or {})


def change(database: Database, *statements: str | Executable) -> None:
    with database.writing() as connection:
        for statement in statements:
            connection.execute(text(statement) if isinstance(statement, str) else statement)


def change_file(path: Path, *statements: str) -> None:
    """Run statements on a file as another program does."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def add_trial(
    database: Database, study_id: int, run_id: int, trial: Trial, *, phase: Phase = "search", rank: int | None = None
) -> int:
    """Commit one trial, and return its id."""
    position = {"study_id": study_id, "run_id": run_id, "phase": phase, "rank": rank, "created_at": now_text()}
    with database.writing() as connection:
        insert = TRIALS.insert().returning(TRIALS.c.id)
        return int(connection.execute(insert, position | trial_row(trial)).scalar_one())


def timed(config: Config, time_us: float, outcome: Outcome = Outcome.OK, *, source: Any = "cuda") -> Trial:
    """Return a trial with a time and an interval of a percent to each side."""
    times = Measurement(time_us, 0.99 * time_us, 1.01 * time_us, (time_us,) * 3)
    return Trial(config, outcome, "", "measure", measurement=times, source=source)


class Book:
    """A database of results of the tiny kernel that never ran."""

    def __init__(self, path: Path, kernel: Path) -> None:
        self.path = path
        self._kernel = load_kernel(str(kernel))

    def key(self, n: int, gpu: str = "h200", source: Any = "cuda", **changes: Any) -> TuningKey:
        problem, device = Problem("scale", {"n": n}, "float32"), replace(device_profile(gpu), source=source)
        key = key_of(self._kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
        return replace(key, **changes)

    def put(self, n: int, winner: Config, time_us: float, *losers: Config, **key: Any) -> None:
        """A search over the winner and the losers, which take twice as long, and finals that the winner won."""
        source = key.get("source", "cuda")
        searched = [timed(config, 2 * time_us, source=source) for config in (winner, *losers)]
        self.rank(n, (winner, time_us), searched=searched, **key)

    def rank(self, n: int, *ranking: tuple[Config, float], searched: Sequence[Trial] = (), **key: Any) -> None:
        """Finals with a ranking, after a search."""
        device = replace(device_profile(key.get("gpu", "h200")), source=key.get("source", "cuda"))
        ranked = [timed(config, time_us, source=device.source) for config, time_us in ranking]
        with Database.open(self.path) as database:
            study = database.add_run(self.key(n, **key), searched, sampler="random", device=device)
            database.add_run(study, ranked, sampler="random", phase="final", is_ranked=True)

    def served(self, n: int, **key: Any) -> Config | None:
        with Database.open(self.path) as database:
            study = database.find_study(self.key(n, **key))
            best = database.best(study_id=study) if study is not None else []
            return best[0].trial.config if best else None

    def trials(self) -> list[tuple[str, Any]]:
        with Database.open(self.path) as database:
            return sorted(
                (study.key.digest, stored.created_at.isoformat() + str(stored.trial.config) + stored.phase)
                for study in database.studies()
                for stored in database.stored_trials(study.study_id)
            )


def store_winner(
    key: TuningKey, config: Config, time_us: float, device: DeviceProperties, location: str | Path | None = None
) -> None:
    with Database.open(location or read_settings().database) as database:
        database.add_run(key, [timed(config, time_us)], sampler="random", device=device, phase="final", is_ranked=True)


def store_default(
    name: str, sizes: Mapping[str, int], dtype: str, time_us: float, location: str | Path | None = None
) -> None:
    """Store the default of a kernel as the winner of a session of one trial on an H200."""
    kernel, device = load_kernel(name), replace(device_profile("h200"), source="cuda")
    problem = resolve_problem(kernel.spec, sizes, dtype)
    key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    store_winner(key, kernel.spec.default, time_us, device, location)


def add_trials(database: Database, study_id: int, run_id: int, trials: Iterable[Trial]) -> None:
    position = {"study_id": study_id, "run_id": run_id, "phase": "search", "rank": None, "created_at": now_text()}
    with database.writing() as connection:
        insert_trials(connection, [position | trial_row(trial) for trial in trials])


def record_miss(database: Database, problem: Problem, gpu_name: str, tier: str, count: int = 1) -> None:
    """Count calls of a problem that a tier served in place of an exact result."""
    database.add_misses([miss_row(problem, gpu_name, tier, count)])
