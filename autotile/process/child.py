"""The parent's end of a child process that answers one request at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from autotile.files.settings import child_environment
from autotile.ground.errors import WorkerCrashError, WorkerError, WorkerTimeoutError

_READ_BYTES = 1 << 16
_STDERR_TAIL_BYTES = 2000


class Child:
    """A Python module run as a child process, spoken to in JSON lines.

    The child starts in a session of its own, so that Ctrl-C in the terminal reaches only the parent, and ends itself
    when its parent dies.

    Parameters
    ----------
    module
        Module that calls `autotile.process.serve.serve`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(),
            start_new_session=True,
        )
        self._buffer = b""

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
            No reply in time; the child has been killed.
        WorkerCrashError
            The child ended; the message tells its signal or exit code and the end of its standard error.
        """
        stage = ""
        end = time.monotonic() + deadline_s
        try:
            self._send(message)
            while True:
                reply = json.loads(self._read_line(end))
                if "stage" not in reply:
                    return dict(reply["reply"])
                stage = reply["stage"]
        except TimeoutError:
            self.kill()
            raise WorkerTimeoutError(f"no answer within {deadline_s:.0f} s", stage) from None
        except (EOFError, BrokenPipeError, ConnectionError):
            raise WorkerCrashError(self._obituary(), stage) from None
        except ValueError as error:
            self.kill()
            raise WorkerError(f"unreadable answer from {self._module}: {error}", stage) from None

    def close(self) -> None:
        """End the child: it leaves when its input closes, and is killed if it does not."""
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.kill()
        self._release()

    def kill(self) -> None:
        """Kill the child and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._release()

    def _send(self, message: Mapping[str, Any]) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            raise EOFError
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()

    def _read_line(self, end: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            raise EOFError
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            data = os.read(pipe.fileno(), _READ_BYTES)
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _obituary(self) -> str:
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the worker closed its output"
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = self._stderr_tail()
        self._release()
        return f"the worker died with {end}" + (f": {tail}" if tail else "")

    def _stderr_tail(self) -> str:
        """The last line of the child's standard error."""
        if self._stderr.closed:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _release(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
