"""The parent's end of a child process, and a pool that keeps idle children for the next session."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, BinaryIO, Self

from autotile.errors import InputError, WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.settings import child_environment

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


_GRACE_S = 2.0
"""For a child to end by itself: an interpreter with a CUDA context takes a few tenths of a second."""
_KILLED_S = 30.0
"""For the system to take a killed child away. One that the GPU driver holds on to longer cannot be waited for."""
_STDERR_TAIL_BYTES = 2000
_EXCERPT_BYTES = 60


class Child:
    """A Python module run as a child process, spoken to in JSON lines.

    The child starts in a session of its own, so that Ctrl-C in the terminal reaches only the parent, and ends itself
    when its parent dies. After a `WorkerError` it is dead, and whatever it started with it; start another.

    Parameters
    ----------
    module
        Module that calls `autotile.workers.protocol.serve`.

    Attributes
    ----------
    module
        As given.

    Raises
    ------
    WorkerError
        The system starts no process.
    InputError
        There is no folder for its temporary file.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._requests = 0
        self._begun = 0.0
        self._unsent: Exception | None = None
        """Why the request could not be sent."""
        self._lock = threading.RLock()
        self._stderr = _temporary_file()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env=child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerError(f"cannot start {module}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._pipe = LinePipe(self._process.stdin.fileno(), self._process.stdout.fileno(), self.is_running)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def request(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Parameters
        ----------
        message
            JSON values.
        deadline_s
            Seconds until the child is killed.

        Raises
        ------
        WorkerTimeoutError
            No reply in time.
        WorkerCrashError
            The child ended; the message tells its signal or exit code and the end of its standard error.
        WorkerError
            The reply makes no sense.
        """
        with self._lock:  # whoever kills the child waits until the request has seen its end
            self.begin(message, deadline_s)
            return self.answer(deadline_s)

    def begin(self, message: Mapping[str, Any], deadline_s: float) -> None:
        """Send a request, whose `answer` is waited for later; whatever goes wrong is told then."""
        with self._lock:
            self._begun = time.monotonic()
            try:
                self._send(message, self._begun + deadline_s)
                self._unsent = None
            except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
                self._unsent = error

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """Wait for the reply to what `begin` sent; the deadline counts from there, and errors are as for `request`."""
        stage, line = "", b""
        with self._lock:
            try:
                if self._unsent is not None:
                    raise self._unsent
                self._refuse_if_buried()
                while True:
                    line = self._pipe.receive(self._begun + deadline_s)
                    match json.loads(line):
                        case {"id": self._requests, "reply": dict(reply)}:
                            return reply
                        case {"id": self._requests, "stage": str(stage)}:
                            line = b""
                        case _:
                            raise ValueError("not an answer to this request")
            except TimeoutError:
                self.kill()
                raise WorkerTimeoutError(f"no answer within {deadline_s:g} s", stage) from None
            except (EOFError, ConnectionError):
                raise WorkerCrashError(self._obituary(), stage) from None
            except (ValueError, RecursionError) as error:
                self.kill()
                excerpt = f" ({line[:_EXCERPT_BYTES].decode(errors='replace')!r})" if line else ""
                raise WorkerError(f"unreadable answer from {self.module}: {error}{excerpt}", stage) from None

    def last_line(self) -> str:
        """The last line that the child wrote to its standard error since its last request; empty once it is closed."""
        with self._lock:
            if self._stderr.closed:
                return ""
            descriptor = self._stderr.fileno()
            start = max(0, os.fstat(descriptor).st_size - _STDERR_TAIL_BYTES)
            lines = os.pread(descriptor, _STDERR_TAIL_BYTES, start).decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""

    def close(self) -> None:
        """End the child: it leaves when its input closes, and is killed if it does not."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._ends_by_itself()
            self.kill()

    def kill(self) -> None:
        """Kill the child and whatever it started; a request that another thread waits for ends with an error."""
        self._signal()
        with self._lock:
            self._bury()

    def _send(self, message: Mapping[str, Any], end: float) -> None:
        self._refuse_if_buried()
        self._stderr.truncate(0)  # what is kept is of this request alone
        self._stderr.seek(0)  # the child's position, too: they share it
        self._requests += 1
        self._pipe.send(json.dumps({"id": self._requests, "request": message}).encode() + b"\n", end)

    def _refuse_if_buried(self) -> None:
        """The numbers of closed streams may be those of others by now."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise EOFError

    def _obituary(self) -> str:
        by_itself = self._ends_by_itself()
        tail = self.last_line()
        self.kill()
        code = self._process.returncode
        if not by_itself or code is None:
            return "the worker closed its input or output without an answer"
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the worker died with {end}" + (f": {tail}" if tail else "")

    def _ends_by_itself(self) -> bool:
        end = time.monotonic() + _GRACE_S
        while self.is_running():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def is_running(self) -> bool:
        """Whether it runs, leaving it unreaped: while it is a zombie, its process group is certain to be its own."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def _signal(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _bury(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()


def _temporary_file() -> BinaryIO:
    """A file for what a child writes to its standard error; it goes with the last process that has it open."""
    try:
        return tempfile.TemporaryFile(buffering=0)
    except OSError as error:
        raise InputError(
            f"cannot make a temporary file: {error.strerror}; make room, or set TMPDIR to a folder that can be written"
        ) from None


class Shelf:
    """Keeps children that are idle and well until somebody asks for one of their module; ends them when it is closed.

    What a child was asked before must not matter to it: a GPU worker lays another problem out anew, and the same one
    too where that was harmed; a compile worker remembers its cubin cache only. Both keep the memory limit that they
    were given first.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Child]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, module: str) -> Child:
        """A child that runs a module, an old one where there is one.

        Raises
        ------
        WorkerError, InputError
            As for `Child`.
        """
        return self.take_kept(module) or Child(module)

    def take_kept(self, module: str) -> Child | None:
        """An old child that runs a module; None where there is none."""
        found, dead = None, []
        with self._lock:
            kept = self._kept.get(module, [])
            while kept and found is None:
                child = kept.pop()
                if child.is_running():
                    found = child
                else:
                    dead.append(child)
        for child in dead:  # outside of the lock, as a child that the driver holds takes long to bury
            child.kill()
        return found

    def put(self, child: Child) -> None:
        """Keep a child that has answered whatever it was asked; end it where the shelf is closed."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._kept.setdefault(child.module, []).append(child)
        if closed:
            child.close()

    def close(self) -> None:
        """End all that are kept, and what is put here from now on."""
        with self._lock:
            self._closed = True
            children = [child for kept in self._kept.values() for child in kept]
            self._kept.clear()
        for child in children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
