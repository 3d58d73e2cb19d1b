"""Connections of the live page's server: those that send nothing, or too slowly, neither pile up nor keep others out.

Who knows the token is never displaced by who does not. The module imports uvicorn, for a server that runs only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_MAX_CONNECTIONS = 64
_MAX_WAIT_S = 10.0
"""Time from the beginning of a connection, or from the last answer, in which the head of a request has to be complete;
and the longest time in which a stranger takes its answer."""


class LiveConnection(H11Protocol):
    """A connection that is closed if no request comes in time, or to make room for a new one.

    Applications find it in the scope of a request, under ``"autotile.connection"``.

    Attributes
    ----------
    is_known
        Whether a request had the token; otherwise it is a stranger's.
    begun_s
        Time at which it began, by the clock of the event loop.
    """

    is_known = False
    begun_s = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, and close another connection if there are too many: nobody is turned away."""
        super().connection_made(transport)
        self.begun_s, application = self.loop.time(), self.app

        async def introduced(scope: Any, receive: Any, send: Any) -> None:
            await application({**scope, "autotile.connection": self}, receive, send)

        self.app = introduced
        self._await_request()
        others: list[Any] = [one for one in self.connections if one is not self and not one.transport.is_closing()]
        if len(others) >= _MAX_CONNECTIONS:
            min(others, key=lambda one: (one.is_known, not one.is_waiting, one.begun_s)).leave()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is answered."""
        return self.cycle is None or self.cycle.response_complete

    def leave(self) -> None:
        """Close the connection, and drop what the other side does not take."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _await_request(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(_MAX_WAIT_S, self._give_up)

    def _give_up(self) -> None:
        if self.is_known and (not self.is_waiting or self.transport.get_write_buffer_size()):
            self._await_request()  # an answer is on its way, however slow the other side is
        else:
            self.leave()
