"""Follows the sessions of a database while they run: a thread reads what is new, and charts are drawn when asked for.

Nothing is written. A database that does not exist yet, is locked, is replaced or goes away is a message, never an
error; what was read of it before is kept.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from autotile.core.documents import Moment, Whole, convert, encode_json
from autotile.core.model import Trial, config_text
from autotile.core.text import duration_text, outcomes_text, sizes_text, source_text, time_text
from autotile.core.timeline import MIN_PACE_STEPS, Pace
from autotile.database.database import (
    Database,
    StoredRun,
    StoredStudy,
    location_text,
    parsed_rows,
    stored_run,
    stored_study,
)
from autotile.database.engine import RUNS, STUDIES, TRIALS
from autotile.errors import AutotileError, DataError, DataWarning
from autotile.report.study_data import StudyData
from autotile.report.study_reading import StudyReader, run_settings
from autotile.report.theme import Chart, with_units

MAX_SESSIONS = 16
"""Sessions of a database that are listed, the newest first; a session of a family or an operation tunes one problem
after the other."""
_PACED = 200
"""Newest trials of a session whose moments give its pace."""
_LATEST = 15
"""Trials that are listed of a session, the newest first."""
_TIMED_PARAMETERS = 2
"""Parameters, the most important first, against which the time is drawn."""
_TICK_S = 0.7
_IDLE_S = 15.0
"""Time after the last request at which a database is no longer read."""
_SILENT_S = 300.0
"""Time without a trial after which a session that has not ended may have been killed; a compilation that takes longer
is ended by its deadline."""
_WAITING_S = 2.0
"""Time of one reading after which the page says that the database does not answer."""
_DRAW_SHARE = 0.25
"""Share of the time that may be spent on drawing a session that runs."""
_SERVER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far the search of a running session is.

    Attributes
    ----------
    tried, target
        Number of configurations that were tried, those of earlier sessions included, and the number at which the search
        ends; None if only the time ends it.
    started_at, budget_s
        Moment of the start, and wall time of the search in seconds; None if only the trials end it.
    last_at, pace_s
        Moment of the newest trial, and the expected time from one to the next; None before there is a basis for it.
    """

    tried: int
    target: int | None
    started_at: datetime
    budget_s: float | None
    last_at: datetime
    pace_s: float | None

    def share(self, now: datetime) -> float:
        """Return the share that is done, by trials or by time."""
        shares = [] if self.target is None else [self.tried / max(self.target, 1)]
        if self.budget_s:
            shares.append((now - self.started_at).total_seconds() / self.budget_s)
        return min(max(shares, default=0.0), 1.0)

    def left_s(self, now: datetime) -> float | None:
        """Return the seconds until the search ends; None if there is no basis for an estimate."""
        found = []
        if self.target is not None and self.pace_s is not None:
            waited_s = (now - self.last_at).total_seconds()
            found.append(self.pace_s * max(self.target - self.tried, 0) - min(waited_s, self.pace_s))
        if self.budget_s is not None:
            found.append(self.budget_s - (now - self.started_at).total_seconds())
        return max(0.0, min(found)) if found else None

    def to_json(self, now: datetime) -> dict[str, Any]:
        """Return the content of a page."""
        share, left_s = self.share(now), self.left_s(now)
        of = f" of {self.target:,}" if self.target is not None else ""
        left = "the search ends, then the finals" if share >= 1.0 else ""
        if share < 1.0 and left_s is not None:
            left = f"about {duration_text(left_s)} left"
        return {"share": share, "text": f"{self.tried:,}{of} configurations tried", "left": left}


@dataclass(frozen=True, slots=True)
class LiveSession:
    """The newest run of a study, as a page lists it.

    Attributes
    ----------
    name
        Identifies it among all that are followed.
    opened
        How often the database has been opened: another file may be in its place.
    run_id, study
        Run, and its study.
    location, host
        Database, and machine that it runs on.
    trials
        Number of stored trials of the run's search.
    last_trial
        Id of the newest trial, of the search or of finals; 0 if there is none.
    started_at, last_at, ended_at
        Moments of the start, of the newest trial, and of the end; ``ended_at`` is None while it runs.
    progress
        How far its search is; None if it has ended, or has no limit that is known.
    """

    name: str
    opened: int
    run_id: int
    study: StoredStudy
    location: str
    host: str
    trials: int
    last_trial: int
    started_at: datetime
    last_at: datetime
    ended_at: datetime | None
    progress: SearchProgress | None = None

    @property
    def version(self) -> str:
        """A text that changes with everything that a page shows of the session."""
        return f"{self.opened}.{self.run_id}.{self.last_trial}.{self.ended_at is not None:d}"

    def state(self, now: datetime) -> str:
        """Return ``running``, ``ended``, or ``silent`` if it has stored nothing for five minutes."""
        if self.ended_at is not None:
            return "ended"
        return "silent" if (now - self.last_at).total_seconds() > _SILENT_S else "running"

    def to_json(self, now: datetime) -> dict[str, Any]:
        """Return the content of the list of a page."""
        key, last = self.study.key, self.ended_at or (self.last_at if self.state(now) == "silent" else now)
        return {
            "name": self.name,
            "version": self.version,
            "kernel": key.kernel,
            "problem": f"{sizes_text(key.sizes)} {key.dtype}",
            "device": source_text(key.gpu_name, key.source),
            "host": self.host,
            "database": self.location,
            "state": self.state(now),
            "trials": self.trials,
            "elapsed": duration_text(max((last - self.started_at).total_seconds(), 0.0)),
            "progress": self.progress.to_json(now) if self.progress is not None else None,
            "silent": duration_text(max((now - self.last_at).total_seconds(), 0.0)),
        }


@dataclass(frozen=True, slots=True)
class DatabaseView:
    """State of a database: its sessions, the newest first, and a message if it cannot be read just now."""

    location: str
    message: str
    sessions: tuple[LiveSession, ...] = ()


class DatabaseFollower:
    """Reads a database in a thread of its own, so that no request waits for a lock.

    Parameters
    ----------
    location
        Path or URL; it need not exist.
    label
        Prefix of the names of its sessions.
    kernels
        Names of the only kernels to follow; empty for all.
    """

    def __init__(self, location: str | Path, label: str, kernels: Collection[str] = ()) -> None:
        self._location = location
        self._label = label
        self._kernels = sorted(kernels)
        self._database: Database | None = None
        self._opened = 0
        self._studies: dict[int, StoredStudy] = {}
        self._readers: dict[int, StudyReader] = {}
        self._wanted: set[str] = set()
        self._drawings: dict[str, SessionDrawing] = {}
        self._view = DatabaseView(location_text(location), "has not been read yet")
        self._reading_since: float | None = None
        self._asked_at = 0.0
        self._wake = Condition()
        self._closed = Event()
        self._thread = Thread(target=self._run, name=f"follow {self._label}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._asked_at = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """End the thread; it may be waiting for a lock, which it does not hold up."""
        self._closed.set()
        with self._wake:
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        else:
            self._disconnect()

    def view(self) -> DatabaseView:
        """Return the state that was read last, and go on reading."""
        self._ask()
        since = self._reading_since
        if since is not None and time.monotonic() - since > _WAITING_S:
            return replace(self._view, message="does not answer; another process may have locked it")
        return self._view

    def drawing(self, name: str) -> SessionDrawing | None:
        """Return the drawing of a session, and read its trials from now on; None if there is no such session."""
        if not any(session.name == name for session in self._view.sessions):
            return None
        self._wanted.add(name)
        self._ask()
        return self._drawings.setdefault(name, SessionDrawing())

    def read(self) -> None:
        """Read what is new, once."""
        self._reading_since = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DataWarning)  # `autotile db check` names rows that are skipped
                self._view = DatabaseView(self._view.location, *self._read())
        except AutotileError as error:
            self._disconnect()
            self._view = replace(self._view, message=str(error))
        finally:
            self._reading_since = None

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        with self._wake:
            self._wake.notify_all()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.read()
            self._closed.wait(_TICK_S)
            with self._wake:
                self._wake.wait_for(self._is_asked)
        self._disconnect()

    def _is_asked(self) -> bool:
        return self._closed.is_set() or time.monotonic() - self._asked_at < _IDLE_S

    def _disconnect(self) -> None:
        if self._database is not None:
            with suppress(AutotileError):
                self._database.close()
        self._database = None
        self._studies.clear()
        self._readers.clear()

    def _read(self) -> tuple[str, tuple[LiveSession, ...]]:
        if self._database is not None:
            self._database.check_in_place()
        else:
            self._database = Database.open_readonly(self._location, server_timeout_s=_SERVER_TIMEOUT_S, upgrade=False)
            self._opened += self._database is not None
        if self._database is None:
            return "holds nothing yet; its sessions appear here when they start", ()
        with self._database.reading() as connection:
            sessions = self._sessions(connection)
        self._forget_all_but(sessions)
        for session in sessions:
            if session.name in self._wanted:
                drawing = self._drawings.setdefault(session.name, SessionDrawing())
                if drawing.stored_version != session.version:
                    drawing.give(session.version, self._reader(session.study).read())
        return (
            "" if sessions else "holds no session of these kernels yet" if self._kernels else "is empty yet",
            sessions,
        )

    def _forget_all_but(self, sessions: Collection[LiveSession]) -> None:
        """Free the trials and charts of sessions that are no longer listed."""
        names, ids = {session.name for session in sessions}, {session.study.study_id for session in sessions}
        self._wanted &= names
        self._drawings = {name: drawing for name, drawing in self._drawings.items() if name in names}
        self._readers = {study_id: reader for study_id, reader in self._readers.items() if study_id in ids}

    def _reader(self, study: StoredStudy) -> StudyReader:
        assert self._database is not None
        return self._readers.setdefault(study.study_id, StudyReader(self._database, study))

    def _sessions(self, connection: Connection) -> tuple[LiveSession, ...]:
        newest = select(func.max(RUNS.c.id)).group_by(RUNS.c.study_id)
        if self._kernels:
            newest = newest.join(STUDIES, STUDIES.c.id == RUNS.c.study_id).where(STUDIES.c.kernel.in_(self._kernels))
        columns = (RUNS.c.id, RUNS.c.study_id, RUNS.c.started_at, RUNS.c.ended_at, RUNS.c.host)
        query = select(*columns).where(RUNS.c.id.in_(newest)).order_by(RUNS.c.id.desc()).limit(MAX_SESSIONS)
        found = [dict(row) for row in connection.execute(query).mappings()]
        searched = func.count().filter(TRIALS.c.phase == "search")
        counted = select(TRIALS.c.run_id, searched, func.max(TRIALS.c.id), func.max(TRIALS.c.created_at)).where(
            TRIALS.c.run_id.in_([row["id"] for row in found])
        )
        counts = {row[0]: row[1:] for row in connection.execute(counted.group_by(TRIALS.c.run_id))}
        self._read_studies(connection, {row["study_id"] for row in found})
        read = (self._session(row, *counts.get(row["id"], (0, 0, None))) for row in found)
        sessions = [session for session in read if session is not None]
        ids = [session.run_id for session in sessions if session.ended_at is None]
        runs = parsed_rows(connection, select(RUNS).where(RUNS.c.id.in_(ids)), stored_run) if ids else []
        running = {run.run_id: run for run in runs}
        return tuple(
            replace(one, progress=_progress(connection, running[one.run_id], one)) if one.run_id in running else one
            for one in sessions
        )

    def _read_studies(self, connection: Connection, ids: Collection[int]) -> None:
        if missing := set(ids) - self._studies.keys():
            query = select(STUDIES).where(STUDIES.c.id.in_(missing))
            self._studies |= {study.study_id: study for study in parsed_rows(connection, query, stored_study)}

    def _session(self, row: Mapping[str, Any], trials: int, last_trial: int, last_at: Any) -> LiveSession | None:
        study = self._studies.get(row["study_id"])
        if study is None:  # it does not match its schema
            return None
        moments = {
            "started_at": row["started_at"],
            "last_at": last_at or row["started_at"],
            "ended_at": row["ended_at"],
        }
        try:
            found = convert(moments, dict[str, Moment | None])
            started_at, newest_at = convert(found["started_at"], Moment), convert(found["last_at"], Moment)
            convert([trials, last_trial], list[Whole])
            host = convert(row["host"], str)
        except DataError:
            return None
        name = f"{self._label}-{study.study_id}"
        location = self._view.location
        return LiveSession(
            name,
            self._opened,
            row["id"],
            study,
            location,
            host,
            trials,
            last_trial,
            started_at,
            newest_at,
            found["ended_at"],
        )


def _progress(connection: Connection, run: StoredRun, session: LiveSession) -> SearchProgress | None:
    """Return how far the search of a running session is; None if no limit of it is known."""
    settings = run_settings(run.settings)
    if settings.trial_target is None and settings.budget_s is None:
        return None
    target, valid = settings.trial_target, run.gates.get("limits")
    if target is not None and valid is not None:
        target = min(target, valid)
    searched = TRIALS.c.run_id == session.run_id if settings.fresh else TRIALS.c.study_id == session.study.study_id
    counted = select(func.count(TRIALS.c.config_key.distinct())).where(searched, TRIALS.c.phase == "search")
    tried = int(connection.execute(counted).scalar_one())
    newest = select(TRIALS.c.created_at).where(TRIALS.c.run_id == session.run_id, TRIALS.c.phase == "search")
    moments = connection.execute(newest.order_by(TRIALS.c.id.desc()).limit(_PACED)).scalars()
    pace = Pace()
    with suppress(DataError):
        for moment in sorted(convert(list(moments), list[Moment])):
            pace.add((moment - session.started_at).total_seconds())
    pace_s = pace.mean_s if len(pace) >= MIN_PACE_STEPS - 1 else None
    return SearchProgress(tried, target, session.started_at, settings.budget_s, session.last_at, pace_s)


_numbers = count(1)
"""Numbers of drawings, which grow even if another file takes the place of a database."""


class SessionDrawing:
    """Charts of one session; they are drawn at most for a quarter of the time, and only where something has changed."""

    def __init__(self) -> None:
        self.stored_version = ""
        self._study: StudyData | None = None
        self._lock = Lock()
        self._drawn_version = ""
        self._number = 0
        self._charts: dict[str, tuple[int, bytes]] = {}
        """Charts as JSON, each with the number of the drawing in which it changed last."""
        self._facts: list[tuple[str, str]] = []
        self._latest: list[tuple[str, ...]] = []
        self._rest_until = 0.0

    def give(self, version: str, study: StudyData) -> None:
        """Take a newer version of the study."""
        self._study, self.stored_version = study, version

    def changes(self, since: int) -> bytes:
        """Return the changes since a drawing as JSON, drawn anew where it is time.

        Parameters
        ----------
        since
            ``number`` of the answer that a page had last; 0 for everything.
        """
        with self._lock:
            self._draw()
            if since >= self._number:
                return msgspec.json.encode({"number": self._number})
            changed = [msgspec.Raw(chart) for number, chart in self._charts.values() if number > since]
            texts = encode_json({"facts": self._facts, "latest": self._latest, "order": list(self._charts)})
            answer = {
                "number": self._number,
                "version": self._drawn_version,
                "charts": changed,
                "texts": msgspec.Raw(texts.encode()),
            }
            return msgspec.json.encode(answer)

    def _draw(self) -> None:
        study, version = self._study, self.stored_version
        is_over = version.endswith(".1")
        if study is None or version == self._drawn_version or (time.monotonic() < self._rest_until and not is_over):
            return
        start = time.monotonic()
        self._number = next(_numbers)
        self._facts, self._latest = list(_facts(study)), _latest_trials(study)
        charts = {chart.name: chart_json(chart) for chart in _charts(study)}
        known = self._charts
        self._charts = {
            name: known[name] if name in known and known[name][1] == text else (self._number, text)
            for name, text in charts.items()
        }
        self._drawn_version = version
        self._rest_until = time.monotonic() + (time.monotonic() - start) / _DRAW_SHARE


def _charts(study: StudyData) -> Iterator[Chart]:
    """Yield the charts of a session, those first that change most while it runs."""
    from autotile.report import charts, parameter_charts, session_charts

    yield session_charts.best_so_far_chart(study)
    yield charts.finals_chart(study)
    yield charts.limits_chart(study)
    effects = parameter_charts.study_effects(study)
    yield parameter_charts.importance_chart(study, effects)
    names = effects.order(study.parameters)
    for name in names[:_TIMED_PARAMETERS]:
        yield parameter_charts.time_by_parameter_chart(study, name)
    yield parameter_charts.heat_map_chart(study, *names[:2])
    yield parameter_charts.parallel_coordinates_chart(study)
    yield session_charts.best_so_far_chart(study, "seconds")
    yield charts.funnel_chart(study)
    yield charts.failures_chart(study)
    yield charts.roofline_chart([study])
    yield charts.front_chart(study)
    yield session_charts.drift_chart(study)


def chart_json(chart: Chart) -> bytes:
    """Return all of a chart as JSON; its figure is null where there is nothing to draw."""
    texts = {
        "name": chart.name,
        "title": chart.title,
        "summary": chart.summary,
        "note": chart.note,
        "headings": chart.table.headings,
        "rows": chart.table.rows,
    }
    figure = chart.figure.to_json().encode() if chart.figure is not None else b"null"
    return msgspec.json.encode({"texts": msgspec.Raw(encode_json(texts).encode()), "figure": msgspec.Raw(figure)})


def _facts(study: StudyData) -> Iterator[tuple[str, str]]:
    winner, default, speedup = study.winner, study.default, study.speedup
    if winner is not None:
        label = "best so far" if study.is_running else "winner"
        yield label, f"{_shown_time(winner)}: {config_text(winner.config)}"
    if default is not None and default.time_us is not None:
        yield "default", _shown_time(default)
    if speedup is not None:
        yield "speed-up", f"{speedup.value:.3f} ({speedup.low:.3f} to {speedup.high:.3f})"
    outcomes = Counter(one.trial.outcome for one in study.newest)
    if outcomes:
        yield "tried", f"{len(study.newest):,}: {outcomes_text(outcomes)}"
    gpus = Counter(one.trial.gpu for one in study.newest if one.trial.gpu)
    if len(gpus) > 1:
        yield "trials by GPU", ", ".join(f"{gpu}: {found:,}" for gpu, found in sorted(gpus.items()))


def _shown_time(trial: Trial) -> str:
    """Return the time of a trial, marked if it was replayed; a dash if there is none."""
    text = with_units(time_text(trial.time_us))
    return text if trial.time_us is None else source_text(text, trial.source)


def _latest_trials(study: StudyData) -> list[tuple[str, ...]]:
    """Return the newest trials, the last one first: number, outcome, time, configuration, reason."""
    trials = (*study.trials, *study.final_trials)[-_LATEST:]
    first = len(study.trials) + len(study.final_trials) - len(trials) + 1
    return [
        (
            f"{number:,}" + (" finals" if one.phase == "final" else ""),
            str(one.trial.outcome),
            _shown_time(one.trial),
            config_text(one.trial.config),
            one.trial.reason.partition("\n")[0],
        )
        for number, one in reversed(list(enumerate(trials, first)))
    ]
