"""Local page that follows running sessions: loopback only, a random token in its address, and nothing but GET.

Starlette and uvicorn serve it. A request is answered only if its ``Host`` is this machine, which a page that rebinds
its own name to the loopback address cannot send, and if its path begins with the token.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotile.core.argument_types import checked
from autotile.core.documents import encode_json
from autotile.database.database import database_location
from autotile.errors import InputError, ToolchainError
from autotile.kernel.library import load_kernel
from autotile.report.live import DatabaseFollower
from autotile.report.theme import DARK, LIGHT, load_plotly

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost")
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

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """ASGI application in front of another one: it demands the token, and adds the headers to every answer.

    Parameters
    ----------
    app
        Application that answers paths without the token.
    token
        First part of the path; compared in constant time.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        if scope["type"] != "http":  # neither web sockets nor events of the application's life
            await self._app(scope, receive, send)
            return
        given, _, path = scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(given.encode(errors="replace"), self._token):
            from starlette.responses import PlainTextResponse

            refusal = PlainTextResponse("wrong address; use the one that `autotile watch` printed\n", status_code=403)
            await refusal(scope, receive, send_with_headers)
            return
        if (connection := scope.get("autotile.connection")) is not None:
            connection.is_known = True
        await self._app({**scope, "path": f"/{path}", "raw_path": None}, receive, send_with_headers)


class LivePage:
    """The page and its data, as Starlette's endpoints; none of them waits for a database.

    Parameters
    ----------
    followers
        Databases to show.
    """

    def __init__(self, followers: Sequence[DatabaseFollower]) -> None:
        self._followers = followers

    def application(self, token: str) -> Guard:
        """Return the ASGI application."""
        try:
            from starlette.applications import Starlette
            from starlette.middleware import Middleware
            from starlette.middleware.trustedhost import TrustedHostMiddleware
            from starlette.routing import Route

            import_module("uvicorn")
        except ImportError as error:
            raise ToolchainError(
                f"`autotile watch` needs Starlette and uvicorn ({error}); install them with "
                "`pip install 'autotile[report]'`"
            ) from None
        routes = [
            Route("/", self._page),
            Route("/state", self._state),
            Route("/session/{name}", self._session),
            Route("/{name}", self._asset),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(_HOSTS), www_redirect=False)
        application = Starlette(routes=routes, middleware=[hosts])
        application.router.redirect_slashes = False  # a redirection would lack the token
        return Guard(application, token)

    def _page(self, _: Request) -> Response:
        from starlette.responses import HTMLResponse

        return HTMLResponse(_asset("watch.html"))

    def _asset(self, request: Request) -> Response:
        from starlette.responses import Response

        found = _assets().get(request.path_params["name"])
        if found is None:
            return Response("there is no such file\n", status_code=404, media_type="text/plain")
        media_type, text = found
        return Response(text(), media_type=media_type)

    def _state(self, _: Request) -> Response:
        from starlette.responses import Response

        now = datetime.now(UTC)
        views = [follower.view() for follower in self._followers]
        document = {
            "databases": [{"location": view.location, "message": view.message} for view in views],
            "sessions": [session.to_json(now) for view in views for session in view.sessions],
        }
        return Response(encode_json(document, compact=True), media_type="application/json")

    def _session(self, request: Request) -> Response:
        from starlette.responses import Response

        name, since = request.path_params["name"], request.query_params.get("since", "0")
        number = int(since) if since.isdecimal() and len(since) < 10 else 0
        found = (follower.drawing(name) for follower in self._followers)
        drawing = next((one for one in found if one is not None), None)
        if drawing is None:
            return Response("there is no such session\n", status_code=404, media_type="text/plain")
        return Response(drawing.changes(number), media_type="application/json")


def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _assets() -> Mapping[str, tuple[str, Callable[[], str]]]:
    """Return the files that the page loads: media type, and a function that returns the text."""
    return {
        "theme.css": ("text/css", _theme),
        "watch.css": ("text/css", lambda: _asset("watch.css")),
        "parallel.css": ("text/css", lambda: _asset("parallel.css")),
        "parallel.js": ("text/javascript", lambda: _asset("parallel.js")),
        "watch.js": ("text/javascript", lambda: _asset("watch.js")),
        "plotly.js": ("text/javascript", _plotly),
        "palette": ("application/json", lambda: encode_json([dict(LIGHT), dict(DARK)])),
    }


def _theme() -> str:
    """Return the colours of the charts as variables, in both themes."""
    light, dark = ("".join(f"--{role}:{colour};" for role, colour in theme.items()) for theme in (LIGHT, DARK))
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def _plotly() -> str:
    load_plotly()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


class LiveServer:
    """Server of the page of some databases; a port is bound when it is made, and `run` serves until it is interrupted.

    Parameters
    ----------
    databases
        Paths or URLs, which need not exist; empty for the user's own.
    kernels
        The only kernels to follow: names, or paths of search-space files; empty for all.
    port
        TCP port of the loopback interface; 0 for any that is free.

    Attributes
    ----------
    url
        Address of the page, with the token.

    Raises
    ------
    InputError
        A URL is malformed, there is no such kernel, or the port is in use.
    ToolchainError
        Plotly, Starlette or uvicorn is not installed.
    """

    def __init__(
        self, databases: Sequence[str | Path] = (), kernels: Iterable[str | Path] = (), *, port: int = 0
    ) -> None:
        names = {load_kernel(kernel).name for kernel in kernels}
        places = dict.fromkeys(databases or (database_location(None),))
        self._followers = [DatabaseFollower(place, f"d{i}", names) for i, place in enumerate(places)]
        load_plotly()
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._application = LivePage(self._followers).application(token)
        self._server: Any = None
        self._socket = _listen(port)
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/{token}/"

    def open_browser(self) -> None:
        """Open the page in a graphical browser, if there is one; a browser in this terminal would hide the address."""
        import webbrowser

        with suppress(webbrowser.Error):
            browser = webbrowser.get()
            if Path(getattr(browser, "name", "")).name not in _TEXT_BROWSERS:
                browser.open(self.url)

    def run(self) -> None:
        """Serve until SIGINT, SIGTERM or `stop`."""
        import uvicorn

        from autotile.report.live_connections import LiveConnection

        settings = uvicorn.Config(
            self._application,
            http=LiveConnection,
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

    def stop(self) -> None:
        """End `run`, from another thread."""
        if self._server is not None:
            self._server.should_exit = True


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port), reuse_port=False)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"port {port} of {LOOPBACK} cannot be used: {error}; choose another one, or 0 for any"
        ) from None


@checked
def watch(*databases: str | Path, kernels: Iterable[str | Path] = (), port: int = 0, open_browser: bool = True) -> None:
    """Serve a page that follows running sessions, until Ctrl-C; its address is printed.

    Parameters
    ----------
    databases
        Paths or URLs of databases, which need not exist yet; none for the user's own.
    kernels
        The only kernels to follow: names, or paths of search-space files; empty for all.
    port
        TCP port of 127.0.0.1; 0 for any that is free.
    open_browser
        Whether to open the page in a browser.

    Raises
    ------
    InputError
        A URL is malformed, there is no such kernel, or the port is in use.
    ToolchainError
        Plotly, Starlette or uvicorn is not installed (``pip install 'autotile[report]'``).
    """
    server = LiveServer(databases, kernels, port=port)
    print(server.url, flush=True)
    if open_browser:
        server.open_browser()
    server.run()
