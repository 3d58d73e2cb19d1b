"""Kill and resume `autotile tune` repeatedly, and compare the result with that of an uninterrupted session."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from random import Random

from endurance.progress_marks import environment_of
from faults.traces import descendants

from autotile.core.model import config_key
from autotile.database.database import Database

_COMMAND = Path(__file__).with_name("progress_marks.py")
_TIMEOUT_S = 300.0
"""Timeout for a session to reach a stage or its end, in seconds, on a busy machine."""
_WEIGHTS = {"searching": 8, "finals": 2}
"""Relative frequency of drawing a stage, 1 by default: these have results to lose. A resumed session may skip them."""
GONE_WITHIN_S = 5.0
"""Time limit for orphaned workers to end, in seconds; a worker checks for its parent once a second."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command that is killed; if cold, without a cubin cache, so that compile workers are busy at the kill."""

    name: str
    words: tuple[str, ...]
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and its consequences.

    Attributes
    ----------
    stage, after_s
        The stage that the process had reached, and the time from start to kill, in seconds.
    acknowledged, stored, lost
        Number of trials that were reported as stored, that are in the database, and that are missing or duplicated.
    workers, gone_s
        Number of worker processes at the kill, and the time until the last one ended; infinite if one remained.
    damage
        Fault that SQLite reports for the file; empty if there is none.
    """

    scenario: str
    stage: str
    after_s: float
    acknowledged: int
    stored: int
    lost: int
    workers: int
    gone_s: float
    damage: str


@dataclass(frozen=True, slots=True)
class Series:
    """One study that was killed and resumed until it ended, and its difference from an uninterrupted one."""

    scenario: str
    kills: tuple[Kill, ...]
    difference: str

    @property
    def faults(self) -> list[str]:
        """All faults; empty if the series succeeded."""
        found = [f"{kill.lost} trials lost" for kill in self.kills if kill.lost]
        found += [f"damaged: {kill.damage}" for kill in self.kills if kill.damage]
        found += ["a worker remained" for kill in self.kills if kill.gone_s > GONE_WITHIN_S]
        return [*found, *filter(None, [self.difference])]


class Bench:
    """Runner of one scenario: a folder with a new database for each series, and a cubin cache."""

    def __init__(self, folder: Path, scenario: Scenario, cache: Path) -> None:
        self._folder, self._scenario, self._cache, self._number = folder, scenario, cache, 0
        self.uninterrupted, self.spans_s = self._measure()

    def series(self, rng: Random, max_kills: int) -> Series:
        """Start a study, kill and resume it until it ends or after ``max_kills``, and check the result."""
        location = self._new_location()
        kills: list[Kill] = []
        acknowledged: Counter[str] = Counter()
        while len(kills) < max_kills:
            kill = self._run_and_kill(location, rng, acknowledged)
            if kill is None:
                break
            kills.append(kill)
        else:
            self._run(location)
        return Series(self._scenario.name, tuple(kills), difference(self.uninterrupted, read_study(location)))

    def _measure(self) -> tuple[list[str], dict[str, float]]:
        """Return the study of an uninterrupted session, and its time in each stage, in seconds.

        A first session fills the cubin cache, unless each session is to start without one.
        """
        for _ in range(1 if self._scenario.cold else 2):
            location = self._new_location()
            end_s = self._run(location)
        times = {text: at for at, kind, text in _read_marks(_marks_of(location)) if kind == "stage"}
        spans = {stage: until - at for (stage, at), (_, until) in pairwise([*times.items(), ("", end_s)])}
        return read_study(location), spans

    def _run_and_kill(self, location: Path, rng: Random, acknowledged: Counter[str]) -> Kill | None:
        """Kill a session at a random moment of a random stage; return None if it ended before."""
        stage = rng.choices(list(self.spans_s), [_WEIGHTS.get(each, 1) for each in self.spans_s])[0]
        delay_s = rng.uniform(0.0, self.spans_s[stage])
        started_s = time.monotonic()
        process = self._start(location)
        reached_s = self._wait_for(process, location, stage)
        while process.poll() is None and time.monotonic() < reached_s + delay_s:
            time.sleep(0.0005)
        mark = f"AUTOTILE_TEST_OF={location}\0"
        workers = descendants(mark) - {process.pid}
        process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        if process.wait() != -signal.SIGKILL:
            assert process.returncode == 0, _log_of(location).read_text()
            return None
        gone_s = _seconds_until_gone(mark, killed_s)
        marks = list(_read_marks(_marks_of(location)))
        _marks_of(location).unlink(missing_ok=True)
        acknowledged.update(text for _, kind, text in marks if kind == "trial")
        reported = Counter({"{" + text.partition("{")[2]: 1 for text in acknowledged})  # without the problem before it
        stored = _stored(location)
        repeated = sum(count - 1 for count in stored.values())
        return Kill(
            scenario=self._scenario.name,
            stage=next((text for _, kind, text in reversed(marks) if kind == "stage"), "import"),
            after_s=killed_s - started_s,
            acknowledged=len(acknowledged),
            stored=len(stored),
            lost=sum((reported - stored).values()) + repeated,
            workers=len(workers),
            gone_s=gone_s,
            damage=_damage(location),
        )

    def _run(self, location: Path) -> float:
        process = self._start(location)
        assert process.wait(_TIMEOUT_S) == 0, _log_of(location).read_text()
        return time.monotonic()

    def _start(self, location: Path) -> subprocess.Popen[bytes]:
        if self._scenario.cold:
            shutil.rmtree(self._cache, ignore_errors=True)
        command = [sys.executable, str(_COMMAND), str(_marks_of(location)), "tune", *self._scenario.words]
        environment = environment_of(location, AUTOTILE_CACHE=self._cache)
        with _log_of(location).open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _wait_for(self, process: subprocess.Popen[bytes], location: Path, stage: str) -> float:
        """Return the time at which a stage was reached, or the process ended."""
        end = time.monotonic() + _TIMEOUT_S
        marks = _marks_of(location)
        while process.poll() is None and time.monotonic() < end:
            if marks.exists() and f'"stage", "{stage}"' in marks.read_text():
                break
            time.sleep(0.002)
        return time.monotonic()

    def _new_location(self) -> Path:
        self._number += 1
        folder = self._folder / f"{self._scenario.name}-{self._number}"
        folder.mkdir(parents=True)
        return folder / "tuning.db"


def kill_and_resume(
    folder: Path, scenarios: Sequence[Scenario], kills: int, seed: int, cache: Path | None = None
) -> Iterator[Series]:
    """Kill sessions ``kills`` times in total, rotating through the scenarios; yield each series."""
    rng = Random(seed)
    benches = [
        Bench(folder, scenario, folder / scenario.name / "cache" if scenario.cold or cache is None else cache)
        for scenario in scenarios
    ]
    while kills > 0:
        for bench in benches[: kills or None]:
            series = bench.series(rng, max(1, min(kills, 10)))
            kills -= len(series.kills)
            yield series
            if kills <= 0:
                return


def read_study(location: Path) -> list[str]:
    """Return the final content of the only study of a database: its trials in their order, then the winner."""
    with Database.open(location) as database:
        (best,) = database.best()
        assert best.confirmed
        trials = database.trials(best.study_id, phase="search")
    shown = [f"trial {at} is {config_key(t.config)} {t.outcome} {t.time_us}" for at, t in enumerate(trials)]
    return [*shown, f"the winner is {config_key(best.trial.config)}"]


def difference(expected: list[str], found: list[str]) -> str:
    """Return the first difference between two studies; empty if they are equal."""
    pairs = zip_longest(expected, found, fillvalue="nothing follows")
    return next((f"{other}, expected {one}" for one, other in pairs if one != other), "")


def _stored(location: Path) -> Counter[str]:
    """Count the trials of each configuration; empty if the database was not created yet."""
    database = Database.open_readonly(location)
    if database is None:
        return Counter()
    with database:
        studies = database.studies()
        return Counter(
            config_key(trial.config) for study in studies for trial in database.trials(study.study_id, phase="search")
        )


def _damage(location: Path) -> str:
    if not location.exists():
        return ""
    with closing(sqlite3.connect(location)) as connection:
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    return "" if verdict == "ok" else str(verdict)


def _seconds_until_gone(mark: str, killed_s: float) -> float:
    while descendants(mark):
        if time.monotonic() > killed_s + 2 * GONE_WITHIN_S:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - killed_s


def _read_marks(path: Path) -> Iterator[tuple[float, str, str]]:
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        if line.endswith("\n"):
            at, kind, text = json.loads(line)
            yield at, kind, text


def _marks_of(location: Path) -> Path:
    return location.with_name("marks")


def _log_of(location: Path) -> Path:
    return location.with_name("log")
