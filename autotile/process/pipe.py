"""Lines to and from a child process, neither of which waits beyond a deadline whatever the child does."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

_CHUNK_BYTES = 1 << 16
_MOST_BYTES = 1 << 24
"""A real answer is far under this; a child that says more without being read has gone mad."""
_LOOK_AFTER_S = 0.1
"""A dead child's streams may be held open by what it started, so while nothing comes its life is looked after."""


class LinePipe:
    """The parent's ends of a child's standard input and output.

    Parameters
    ----------
    to_child, from_child
        Open file descriptors; the first must not block.
    is_alive
        Whether the child still runs.
    """

    def __init__(self, to_child: int, from_child: int, is_alive: Callable[[], bool]) -> None:
        self._to_child = to_child
        self._from_child = from_child
        self._is_alive = is_alive
        self._received = bytearray()
        # poll, not select: a program that embeds the tuner may have more than 1,024 files open
        self._reading, self._both = select.poll(), select.poll()
        for poll in (self._reading, self._both):
            poll.register(from_child, select.POLLIN)
        self._both.register(to_child, select.POLLOUT)

    def send(self, line: bytes, end: float) -> None:
        """Write a line; what the child says meanwhile is kept, so that neither end waits for the other.

        Parameters
        ----------
        line
            With its newline.
        end
            `time.monotonic` at which to give up.

        Raises
        ------
        TimeoutError
            The child does not read.
        EOFError, ConnectionError
            The child is gone.
        ValueError
            The child says more than any answer holds.
        """
        left = memoryview(line)
        while left:
            if self._wait(self._both, end) & (select.POLLOUT | select.POLLERR):
                left = left[os.write(self._to_child, left) :]

    def receive(self, end: float) -> bytes:
        """The child's next line, without its newline; parameters and errors as for `send`."""
        searched = 0
        while (cut := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            self._wait(self._reading, end)
        if time.monotonic() > end:  # a child that never stops talking is late, too
            raise TimeoutError
        line = bytes(self._received[:cut])
        del self._received[: cut + 1]
        return line

    def _wait(self, poll: select.poll, end: float) -> int:
        """Wait for the child and take what it says; what became of its input, as a mask of poll's events."""
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        events = dict(poll.poll(1e3 * min(left_s, _LOOK_AFTER_S)))
        if self._from_child in events:
            self._take()
        elif not events and not self._is_alive():
            raise EOFError
        return events.get(self._to_child, 0)

    def _take(self) -> None:
        data = os.read(self._from_child, _CHUNK_BYTES)
        if not data:
            raise EOFError
        self._received += data
        if len(self._received) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
