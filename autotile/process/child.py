"""The parent's end of a child process that answers one request at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from autotile.files.settings import child_environment
from autotile.ground.errors import InputError, WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.process.pipe import LinePipe

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
        Module that calls `autotile.process.serve.serve`.

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
