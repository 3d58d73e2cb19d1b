"""Many processes that tune, read, import and export on one database file concurrently, for a given time.

    python crowd.py FOLDER ROLE NUMBER SECONDS large|small

is one of them: it runs command after command in one process, so that time goes to the database rather than to imports.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from endurance.progress_marks import environment_of, mark_progress, open_marks

from autotile.core.model import config_key
from autotile.database.care import check_database
from autotile.database.database import Database

ROLES = ("tune", "read", "exchange", "tune")
"""Roles of the processes, assigned in rotation."""
_SIZES = ("M=2048", "N=2048", "K=2048")
SMALL = ("matmul_tiled", *_SIZES)
"""Compiles fast; it is tuned before the others start, so that there are results to read."""
LARGE = ("sgemm_2d", *_SIZES)
_READING = (("list",), ("trials", *SMALL), ("best", *SMALL), ("db", "check"), ("explain", *SMALL))
_FORMATS = {"kernel-tuner": ".json", "t4": ".json", "optuna": ".db"}
_LAST_COMMAND_S = 240.0
"""Time limit of each process's last command, in seconds, where many share few cores."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Result of a run of the processes.

    ``commands`` counts the completed ones by name; ``acknowledged`` are trials that a process reported as stored, and
    ``lost`` those of them that are not in the database; ``imported`` and ``lost_imports`` likewise, of finished runs.
    """

    processes: int
    seconds: float
    commands: Mapping[str, int]
    errors: tuple[str, ...]
    acknowledged: int
    lost: int
    imported: int
    lost_imports: int
    stored: int
    damage: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        found = [*self.errors, *self.damage]
        found += [f"{self.lost} trials lost"] if self.lost else []
        return found + ([f"{self.lost_imports} imports lost"] if self.lost_imports else [])


def run_crowd(folder: Path, processes: int, seconds: float, cache: Path, *, large: bool = True) -> Crowd:
    """Run processes on one database for some seconds; if large, they tune a kernel that is slow to compile as well."""
    environment = environment_of(folder / "tuning.db", AUTOTILE_CACHE=cache)
    _prepare(folder, environment)
    start = time.monotonic()
    tuned = "large" if large else "small"
    members = [_start(folder, number, str(seconds), tuned, environment) for number in range(processes)]
    ends = [member.wait(seconds + _LAST_COMMAND_S) for member in members]
    took_s = time.monotonic() - start
    logs = [(folder / f"{number}.log").read_text() for number in range(processes)]
    errors = [f"exit code {code}: {log.strip()[-500:]}" for code, log in zip(ends, logs, strict=True) if code]
    errors += [f"traceback: {log.strip()[-500:]}" for log in logs if "Traceback" in log]
    return _account(folder, processes, took_s, errors)


def _start(folder: Path, number: int, seconds: str, tuned: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(folder), ROLES[number % len(ROLES)], str(number), seconds, tuned]
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)


def _prepare(folder: Path, environment: dict[str, str]) -> None:
    """Create a first study to read, and a file to import."""
    for words in (("tune", *SMALL, "--replay", "--trials", "12"), _export("kernel-tuner", folder / "import.json")):
        subprocess.run([sys.executable, "-m", "autotile", *words], env=environment, check=True, capture_output=True)


def _account(folder: Path, processes: int, seconds: float, errors: list[str]) -> Crowd:
    marks = [json.loads(line) for path in folder.glob("*.marks") for line in path.read_text().splitlines()]
    acknowledged = Counter(text for _, kind, text in marks if kind == "trial")
    done = Counter(text for _, kind, text in marks if kind == "done")
    failed = [text for _, kind, text in marks if kind == "failed"]
    aside = [f"{path.name} was set aside" for path in folder.glob("tuning.db.corrupt-*")]
    with Database.open(folder / "tuning.db") as database:
        check = check_database(database)
        unfinished = check.unfinished_runs
        stored = Counter(
            f"{study.key.problem} {config_key(trial.config)}"
            for study in database.studies()
            for trial in database.trials(study.study_id, phase="search")
        )
        imports = sum(
            run.sampler == "kernel_tuner" and run.ended_at is not None
            for study in database.studies()
            for run in database.runs(study.study_id)
        )
    return Crowd(
        processes=processes,
        seconds=seconds,
        commands=dict(done.most_common()),
        errors=(*errors, *failed),
        acknowledged=acknowledged.total(),
        lost=(acknowledged - stored).total(),
        imported=done["import"],
        lost_imports=max(0, done["import"] - imports),
        stored=stored.total(),
        damage=(*check.problems, *aside, *([f"{unfinished} runs have no end"] if unfinished else [])),
    )


def _export(file_format: str, path: Path) -> tuple[str, ...]:
    return ("export", *SMALL, "--format", file_format, "-o", str(path))


def _commands(role: str, folder: Path, number: int, problems: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the words of one command after the other, endlessly."""
    trials = "40" if LARGE in problems else "12"
    rng = Random(number)
    turn = 0
    while True:
        turn += 1
        if role == "tune":
            seed, sampler = str(rng.randrange(1000)), rng.choice(["tpe", "random", "nsga2"])
            how = ("--replay", "--fresh", "--trials", trials, "--seed", seed, "--sampler", sampler)
            yield ("tune", *rng.choice(problems), *how)
        elif role == "read":
            yield rng.choice(_READING)
        elif rng.random() < 0.5:
            name = f"imported-{number}-{turn}"  # results of a kernel that has them already add nothing
            yield ("import", str(folder / "import.json"), "--kernel", name)
        else:
            file_format, suffix = rng.choice(list(_FORMATS.items()))
            yield _export(file_format, folder / f"out-{number}-{turn}{suffix}")


def main() -> None:
    folder, role, number, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    problems = [SMALL, *([LARGE] if sys.argv[5] == "large" else [])]
    mark = open_marks(str(folder / f"{number}.marks"))
    mark_progress(mark)
    from autotile.cli.application import main as run

    end = time.monotonic() + seconds
    for words in _commands(role, folder, number, problems):
        if time.monotonic() > end:
            return
        sys.argv = ["autotile", *words]
        code: Any = 0
        try:
            run()
        except SystemExit as ended:
            code = ended.code
        mark("done" if not code else "failed", words[0] if not code else f"{' '.join(words)}: exit code {code}")


if __name__ == "__main__":
    main()
