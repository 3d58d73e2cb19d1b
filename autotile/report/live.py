"""Local page that follows the sessions of databases while they run: loopback only, a random token, nothing but GET.

A thread for each database reads what is new, and charts are drawn when they are asked for. Nothing is written. A
database that does not exist yet, is locked, is replaced or goes away is a message, never an error; what was read of it
before is kept. Starlette and uvicorn serve the page. A request is answered only if its ``Host`` is this machine, which
a page that rebinds its own name to the loopback address cannot send, and if its path begins with the token.
"""

from __future__ import annotations

import secrets
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from importlib import import_module
from itertools import count
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, func, select

from autotile.core.argument_types import checked
from autotile.core.documents import Moment, Whole, attributes, convert, encode_json
from autotile.core.model import config_text
from autotile.core.text import duration_text, outcomes_text, sizes_text, time_text
from autotile.core.timeline import MIN_PACE_STEPS, Pace
from autotile.database.database import (
    Database,
    StoredStudy,
    StoredTrial,
    database_location,
    location_text,
    parsed_rows,
    rows_of,
    stored_run,
    stored_study,
)
from autotile.database.engine import RUNS, STUDIES, TRIALS
from autotile.errors import AutotileError, DataError, DataWarning, InputError, ToolchainError
from autotile.kernel.library import load_kernel
from autotile.report.charts import study_charts
from autotile.report.page import asset, plotly_script
from autotile.report.study import RunSettings, StudyData, lenient, read_study
from autotile.report.theme import DARK, LIGHT, load_plotly, with_units

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_SESSIONS = 16
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


class LiveSession(msgspec.Struct):
    """The newest run of a study, as a page lists it."""

    name: str
    """Identifies it among all that are followed."""
    opened: int
    """How often the database has been opened: another file may be in its place."""
    study: StoredStudy
    location: str
    id: int
    started_at: Moment
    ended_at: Moment | None
    host: str
    trials: Whole = 0
    last_trial: Whole = 0
    """Id of the newest trial; 0 if there is none."""
    last_at: Moment | None = None
    tried: int | None = None
    """Number of configurations that a running search tried, those of earlier sessions included; None if it has ended,
    or has no limit that is known."""
    target: int | None = None
    budget_s: float | None = None
    pace_s: float | None = None
    """Expected time from one trial to the next; None before there is a basis for it."""

    @property
    def version(self) -> str:
        """A text that changes with everything that a page shows of the session."""
        return f"{self.opened}.{self.id}.{self.last_trial}.{self.ended_at is not None:d}"

    def to_json(self, now: datetime) -> dict[str, Any]:
        """Return the content of the list of a page; a session is silent if it has stored nothing for five minutes."""
        last_at = self.last_at or self.started_at
        silent_s = (now - last_at).total_seconds()
        state = "ended" if self.ended_at is not None else "silent" if silent_s > _SILENT_S else "running"
        state = state if self.study.key.template_hash else "imported"
        last = self.ended_at or (last_at if state == "silent" else now)
        key, progress = self.study.key, None
        if self.tried is not None:  # how far the search is, and about how long it takes yet
            passed_s, target, shares, left = (now - self.started_at).total_seconds(), self.target, [0.0], list[float]()
            if target is not None:
                shares.append(self.tried / max(target, 1))
                if self.pace_s is not None:
                    left.append(self.pace_s * max(target - self.tried, 0) - min(silent_s, self.pace_s))
            if self.budget_s is not None:
                shares.append(passed_s / self.budget_s if self.budget_s else 0.0)
                left.append(self.budget_s - passed_s)
            share, of = min(max(shares), 1.0), f" of {target:,}" if target is not None else ""
            ends = f"about {duration_text(max(0.0, min(left)))} left" if left else ""
            progress = {
                "share": share,
                "text": f"{self.tried:,}{of} configurations tried",
                "left": ends if share < 1.0 else "the search ends, then the finals",
            }
        return {
            "name": self.name,
            "version": self.version,
            "kernel": key.kernel,
            "problem": f"{sizes_text(key.sizes)} {key.dtype}",
            "device": key.device_label,
            "host": self.host,
            "database": self.location,
            "state": state,
            "trials": self.trials,
            "elapsed": "" if state == "imported" else duration_text(max((last - self.started_at).total_seconds(), 0.0)),
            "progress": progress,
            "silent": duration_text(max(silent_s, 0.0)),
        }


class DatabaseFollower:
    """Reads a database in a thread of its own, so that no request waits for a lock.

    The database need not exist. ``label`` is the prefix of the names of its sessions; ``kernels`` are the only ones to
    follow, none for all.
    """

    def __init__(self, location: str | Path, label: str, kernels: Collection[str] = ()) -> None:
        self._location = location
        self._label = label
        self._kernels = sorted(kernels)
        self._database: Database | None = None
        self._opened = 0
        self._studies: dict[int, StoredStudy] = {}
        self._stored: dict[int, tuple[StoredTrial, ...]] = {}
        """Trials of the studies that are drawn, each of which is read once."""
        self._drawings: dict[str, SessionDrawing] = {}
        """Those that were asked for, by the names of their sessions."""
        self._view: tuple[str, tuple[LiveSession, ...]] = ("has not been read yet", ())
        self._reading_since: float | None = None
        self._asked_at = 0.0
        self._wake = Condition()
        self._closed = Event()
        self._thread = Thread(target=self._run, name=f"follow {self._label}", daemon=True)
        self.location = location_text(location)

    def start(self) -> None:
        """Begin to read."""
        self._asked_at = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """End the thread; it may be waiting for a lock, which it does not hold up."""
        self._closed.set()
        self._ask()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        else:
            self._disconnect()

    def view(self) -> tuple[str, tuple[LiveSession, ...]]:
        """Return a message if the database cannot be read just now, and its sessions as read last; go on reading."""
        self._ask()
        since = self._reading_since
        if since is not None and time.monotonic() - since > _WAITING_S:
            return "does not answer; another process may have locked it", self._view[1]
        return self._view

    def drawing(self, name: str) -> SessionDrawing | None:
        """Return the drawing of a session, and read its trials from now on; None if there is no such session."""
        if not any(session.name == name for session in self._view[1]):
            return None
        self._ask()
        return self._drawings.setdefault(name, SessionDrawing())

    def read(self) -> None:
        """Read what is new, once."""
        self._reading_since = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DataWarning)  # `autotile db check` names rows that are skipped
                self._view = self._read()
        except AutotileError as error:
            self._disconnect()
            self._view = (str(error), self._view[1])
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
                self._wake.wait_for(lambda: self._closed.is_set() or time.monotonic() - self._asked_at < _IDLE_S)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._database is not None:
            with suppress(AutotileError):
                self._database.close()
        self._database = None
        self._studies.clear()
        self._stored.clear()

    def _read(self) -> tuple[str, tuple[LiveSession, ...]]:
        if self._database is not None:
            self._database.check_in_place()
        else:
            self._database = Database.open_readonly(self._location, server_timeout_s=_SERVER_TIMEOUT_S, upgrade=False)
            self._opened += self._database is not None
        database = self._database
        if database is None:
            return "holds nothing yet; its sessions appear here when they start", ()
        with database.reading() as connection:
            sessions = self._sessions(connection)
        # The trials and charts of sessions that are no longer listed are freed.
        names, ids = {session.name for session in sessions}, {session.study.study_id for session in sessions}
        for name in {*self._drawings} - names:
            del self._drawings[name]
        self._stored = {study_id: trials for study_id, trials in self._stored.items() if study_id in ids}
        for session in sessions:
            drawing = self._drawings.get(session.name)
            if drawing is not None and drawing.stored_version != session.version:
                drawing.study = read_study(database, session.study, self._stored.get(session.study.study_id, ()))
                self._stored[session.study.study_id] = drawing.study.stored
                drawing.stored_version = session.version
        nothing = "holds no session of these kernels yet" if self._kernels else "is empty yet"
        return "" if sessions else nothing, sessions

    def _sessions(self, connection: Connection) -> tuple[LiveSession, ...]:
        newest = select(func.max(RUNS.c.id)).group_by(RUNS.c.study_id)
        if self._kernels:
            newest = newest.join(STUDIES, STUDIES.c.id == RUNS.c.study_id).where(STUDIES.c.kernel.in_(self._kernels))
        columns = (RUNS.c.id, RUNS.c.study_id, RUNS.c.started_at, RUNS.c.ended_at, RUNS.c.host)
        query = select(*columns).where(RUNS.c.id.in_(newest)).order_by(RUNS.c.id.desc()).limit(_MAX_SESSIONS)
        found = list(rows_of(connection, query))
        counted = select(
            TRIALS.c.run_id.label("id"),
            func.count().filter(TRIALS.c.phase == "search").label("trials"),
            func.max(TRIALS.c.id).label("last_trial"),
            func.max(TRIALS.c.created_at).label("last_at"),
        ).where(TRIALS.c.run_id.in_([row["id"] for row in found]))
        counts = {row["id"]: row for row in rows_of(connection, counted.group_by(TRIALS.c.run_id))}
        if missing := {row["study_id"] for row in found} - self._studies.keys():
            studies = select(STUDIES).where(STUDIES.c.id.in_(missing))
            self._studies |= {study.study_id: study for study in parsed_rows(connection, studies, stored_study)}
        sessions = []
        for row in found:
            if (study := self._studies.get(row["study_id"])) is not None:
                of = {"name": f"{self._label}-{study.study_id}", "opened": self._opened, "study": study}
                stated = {**of, "location": self.location, **row, **counts.get(row["id"], {})}
                with suppress(DataError):  # a row that does not match its schema
                    sessions.append(convert(stated, LiveSession))
        running = {one.id: one for one in sessions if one.ended_at is None}
        for run in parsed_rows(connection, select(RUNS).where(RUNS.c.id.in_(list(running))), stored_run):
            session, settings = running[run.run_id], lenient(run.settings, RunSettings)
            if settings.trial_target is None and settings.budget_s is None:
                continue  # how far its search is cannot be told
            session.target, session.budget_s = settings.trial_target, settings.budget_s
            if session.target is not None and (valid := run.gates.get("limits")) is not None:
                session.target = min(session.target, valid)
            searched = TRIALS.c.run_id == session.id if settings.fresh else TRIALS.c.study_id == run.study_id
            counted = select(func.count(TRIALS.c.config_key.distinct())).where(searched, TRIALS.c.phase == "search")
            session.tried = int(connection.execute(counted).scalar_one())
            own = select(TRIALS.c.created_at).where(TRIALS.c.run_id == session.id, TRIALS.c.phase == "search")
            moments = connection.execute(own.order_by(TRIALS.c.id.desc()).limit(_PACED)).scalars()
            pace = Pace()
            with suppress(DataError):
                for moment in sorted(convert(list(moments), list[Moment])):
                    pace.add((moment - session.started_at).total_seconds())
            session.pace_s = pace.mean_s if len(pace) >= MIN_PACE_STEPS - 1 else None
        return tuple(sessions)


_numbers = count(1)
"""Numbers of drawings, which grow even if another file takes the place of a database."""


class SessionDrawing:
    """Charts of one session; they are drawn at most for a quarter of the time, and only where something has changed."""

    def __init__(self) -> None:
        self.study: StudyData | None = None
        self.stored_version = ""
        """Newest state of the study that was read, and its version, which is set last."""
        self._lock = Lock()
        self._drawn_version = ""
        self._number = 0
        self._charts: dict[str, tuple[int, bytes]] = {}
        """Charts as JSON, each with the number of the drawing in which it changed last."""
        self._texts = b""
        self._rest_until = 0.0

    def changes(self, since: int) -> bytes:
        """Return the changes since the drawing of a number as JSON, drawn anew where it is time; 0 for everything."""
        with self._lock:
            self._draw()
            if since >= self._number:
                return msgspec.json.encode({"number": self._number})
            changed = [msgspec.Raw(chart) for number, chart in self._charts.values() if number > since]
            answer = {"number": self._number, "version": self._drawn_version, "charts": changed}
            return msgspec.json.encode({**answer, "texts": msgspec.Raw(self._texts)})

    def _draw(self) -> None:
        study, version = self.study, self.stored_version
        is_over = version.endswith(".1")
        if study is None or version == self._drawn_version or (time.monotonic() < self._rest_until and not is_over):
            return
        start = time.monotonic()
        self._number = next(_numbers)
        known, self._charts = self._charts, {}
        for chart in study_charts(study, _TIMED_PARAMETERS):
            texts = {
                **attributes(chart, "name", "title", "summary", "note"),
                **attributes(chart.table, "headings", "rows"),
            }
            figure = chart.figure.to_json().encode() if chart.figure is not None else b"null"
            words = msgspec.Raw(encode_json(texts).encode())
            text = msgspec.json.encode({"texts": words, "figure": msgspec.Raw(figure)})
            is_same = chart.name in known and known[chart.name][1] == text
            self._charts[chart.name] = known[chart.name] if is_same else (self._number, text)
        places = {one.trial_id: place for place, one in enumerate(study.trials, start=1)}  # as the charts state them
        latest = [
            (
                "finals" if one.phase == "final" else f"{places[one.trial_id]:,}",
                str(one.trial.outcome),
                with_units(time_text(one.trial.time_us, one.trial.source)),
                config_text(one.trial.config),
                one.trial.reason.partition("\n")[0],
            )
            for one in reversed(study.stored[-_LATEST:])
        ]
        described = {"facts": list(_facts(study)), "latest": latest, "order": list(self._charts)}
        self._texts = encode_json(described).encode()
        self._drawn_version = version
        self._rest_until = time.monotonic() + (time.monotonic() - start) / _DRAW_SHARE


def _facts(study: StudyData) -> Iterator[tuple[str, str]]:
    winner, default, speedup = study.winner, study.default, study.speedup
    if winner is not None:
        label = "best so far" if study.is_running else "winner"
        yield label, f"{with_units(time_text(winner.time_us, winner.source))}: {config_text(winner.config)}"
    if default is not None and default.time_us is not None:
        yield "default", with_units(time_text(default.time_us, default.source))
    if speedup is not None:
        label = "objective, over the default" if study.has_own_objective else "speed-up"
        yield label, f"{speedup.value:.3f} ({speedup.low:.3f} to {speedup.high:.3f})"
    outcomes = Counter(one.trial.outcome for one in study.newest)
    if outcomes:
        yield "tried", f"{len(study.newest):,}: {outcomes_text(outcomes)}"
    gpus = Counter(one.trial.gpu for one in study.newest if one.trial.gpu)
    if len(gpus) > 1:
        yield "trials by GPU", ", ".join(f"{gpu}: {found:,}" for gpu, found in sorted(gpus.items()))


LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 24
_SHUTDOWN_S = 2
_TEXT_BROWSERS = frozenset({"www-browser", "links", "elinks", "lynx", "w3m"})
"""Browsers in the terminal that the module `webbrowser` chooses where there is no graphical one."""

_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer. Plotly places the parts of a chart by style attributes, which are no scripts."""

_FILES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "page.css": ("text/css", lambda: asset("page.css")),
    "page.js": ("text/javascript", lambda: asset("page.js")),
    "plotly.js": ("text/javascript", plotly_script),
    "palette": ("application/json", lambda: encode_json({"light": LIGHT, "dark": DARK})),
}
"""Files that the page loads: media type, and a function that returns the text."""


def live_application(followers: Sequence[DatabaseFollower], token: str) -> ASGIApp:
    """Return the page and its data as an ASGI application; no answer waits for a database.

    Every path begins with the token, which is compared in constant time. Without Starlette and uvicorn it is a
    `ToolchainError`.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, PlainTextResponse, Response
        from starlette.routing import Route

        import_module("uvicorn")
    except ImportError as error:
        raise ToolchainError(
            f"`autotile watch` needs Starlette and uvicorn ({error}); install them with "
            "`pip install 'autotile[report]'`"
        ) from None

    def file(request: Request) -> Response:
        if request.path_params["name"] not in _FILES:
            return PlainTextResponse("there is no such file\n", status_code=404)
        media_type, text = _FILES[request.path_params["name"]]
        return Response(text(), media_type=media_type)

    def state(_: Request) -> Response:
        now, views = datetime.now(UTC), [(follower.location, *follower.view()) for follower in followers]
        document = {
            "databases": [{"location": location, "message": message} for location, message, _ in views],
            "sessions": [session.to_json(now) for _, _, sessions in views for session in sessions],
        }
        return Response(encode_json(document, compact=True), media_type="application/json")

    def session(request: Request) -> Response:
        name, since = request.path_params["name"], request.query_params.get("since", "0")
        number = int(since) if since.isdecimal() and len(since) < 10 else 0
        found = (follower.drawing(name) for follower in followers)
        drawing = next((one for one in found if one is not None), None)
        if drawing is None:
            return PlainTextResponse("there is no such session\n", status_code=404)
        return Response(drawing.changes(number), media_type="application/json")

    routes = [
        Route("/", lambda _: HTMLResponse(asset("watch.html"))),
        Route("/state", state),
        Route("/session/{name}", session),
        Route("/{name}", file),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"], www_redirect=False)
    application = Starlette(routes=routes, middleware=[hosts])
    application.router.redirect_slashes = False  # a redirection would lack the token
    refusal = PlainTextResponse("wrong address; use the one that `autotile watch` printed\n", status_code=403)
    headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        if scope["type"] != "http":  # neither web sockets nor events of the application's life
            await application(scope, receive, send)
            return
        given, _, path = scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(given.encode(errors="replace"), token.encode()):
            await refusal(scope, receive, send_with_headers)
            return
        await application({**scope, "path": f"/{path}", "raw_path": None}, receive, send_with_headers)

    return guarded


class LiveServer:
    """Server of the page of some databases; a port is bound when it is made, and `run` serves until it is interrupted.

    Parameters and errors are those of `watch`; ``url`` is the address of the page, with the token.
    """

    def __init__(
        self, databases: Sequence[str | Path] = (), kernels: Iterable[str | Path] = (), *, port: int = 0
    ) -> None:
        names = {load_kernel(kernel).name for kernel in kernels}
        places = dict.fromkeys(databases or (database_location(None),))
        self._followers = [DatabaseFollower(place, f"d{i}", names) for i, place in enumerate(places)]
        load_plotly()
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._application = live_application(self._followers, token)
        self._server: Any = None
        try:
            self._socket = socket.create_server((LOOPBACK, port), reuse_port=False)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"port {port} of {LOOPBACK} cannot be used: {error}; choose another one, or 0 for any"
            ) from None
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/{token}/"

    def open_browser(self) -> None:
        """Open the page in a graphical browser, if there is one; a browser in this terminal would hide the address."""
        import webbrowser

        with suppress(webbrowser.Error):
            browser = webbrowser.get()
            if Path(getattr(browser, "name", "")).name not in _TEXT_BROWSERS:
                browser.open(self.url)

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        import uvicorn

        settings = uvicorn.Config(
            self._application,
            http="h11",  # bounds the head of a request, which the other parser that may be installed does not
            access_log=False,
            log_level="error",
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        with ExitStack() as stack:
            stack.enter_context(closing(self._socket))
            for follower in self._followers:
                stack.enter_context(closing(follower))
                follower.start()
            self._server = uvicorn.Server(settings)
            with suppress(KeyboardInterrupt):  # uvicorn raises it again when everything is closed
                self._server.run(sockets=[self._socket])


@checked
def watch(
    *databases: str | Path,
    kernels: Iterable[str | Path] = (),
    port: int = 0,
    open_browser: bool = True,
    announce: Callable[[str], None] = lambda _: None,
) -> None:
    """Show running sessions in the browser, several GPUs side by side.

    Their charts follow the trials. The page is served to this machine only, at an address with a random token, which is
    printed, until Ctrl-C ends it. It reads the database, and writes nothing.

    Parameters
    ----------
    databases
        Databases to follow, which need not exist yet; and kernels, if only theirs are to be shown. In Python, databases
        only. None for the user's own database.
    kernels
        The only kernels to follow: names, or paths of search-space files; empty for all.
    port
        TCP port of 127.0.0.1; 0 for any that is free.
    open_browser
        Only print the address; open no browser. In Python, whether to open one.
    announce
        Called with how to end it, once the page is served.

    Raises
    ------
    InputError
        A URL is malformed, there is no such kernel, or the port is in use.
    ToolchainError
        Plotly, Starlette or uvicorn is not installed (``pip install 'autotile[report]'``).
    """
    server = LiveServer(databases, kernels, port=port)
    print(server.url, flush=True)
    announce("Ctrl-C ends it")
    if open_browser:
        server.open_browser()
    server.run()
