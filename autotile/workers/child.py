"""The parent's end of a child process, and a pool of idle ones that outlive the session that started them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

from autotile.core.documents import decode_json, encode_json
from autotile.errors import InputError, WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.settings import worker_environment
from autotile.workers.protocol import Answer

_CHUNK_BYTES = 1 << 16
_MAX_UNREAD_BYTES = 1 << 24
"""Limit of the output that was not read as a message; any valid reply is far smaller."""
_LIVENESS_CHECK_S = 0.1
"""Interval of the liveness check while no output arrives: processes that the child started may hold its streams open
after its death."""


class LinePipe:
    """The parent's ends of a child's standard input and output.

    Parameters
    ----------
    to_child, from_child
        Open file descriptors; the first must be non-blocking.
    is_alive
        Return whether the child is running.
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
        """Write a line; output that arrives meanwhile is buffered, so that neither end blocks the other.

        Parameters
        ----------
        line
            The line, including its newline.
        end
            Time limit, by `time.monotonic`.

        Raises
        ------
        TimeoutError
            The child does not read its input.
        EOFError, ConnectionError
            The child has exited.
        ValueError
            The child writes more than any valid reply holds.
        """
        left = memoryview(line)
        while left:
            if self._wait(self._both, end) & (select.POLLOUT | select.POLLERR):
                left = left[os.write(self._to_child, left) :]

    def receive(self, end: float) -> bytes:
        """Return the child's next line, without its newline; parameters and errors as for `send`."""
        searched = 0
        while (cut := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            self._wait(self._reading, end)
        if time.monotonic() > end:  # a child that writes without end is late, too
            raise TimeoutError
        line = bytes(self._received[:cut])
        del self._received[: cut + 1]
        return line

    def _wait(self, poll: select.poll, end: float) -> int:
        """Wait for the child and buffer its output; return the poll events of its input."""
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        events = dict(poll.poll(1e3 * min(left_s, _LIVENESS_CHECK_S)))
        if self._from_child in events:
            self._read()
        elif not events and not self._is_alive():
            raise EOFError
        return events.get(self._to_child, 0)

    def _read(self) -> None:
        data = os.read(self._from_child, _CHUNK_BYTES)
        if not data:
            raise EOFError
        self._received += data
        if len(self._received) > _MAX_UNREAD_BYTES:
            raise ValueError(f"more than {_MAX_UNREAD_BYTES >> 20} MiB")


_EXIT_GRACE_S = 2.0
"""Time that a child has to exit by itself; an interpreter with a CUDA context takes a few tenths of a second."""
_REAP_S = 30.0
"""Time that the system has to remove a killed child; one that the GPU driver holds on to is left after that."""
_STDERR_TAIL_BYTES = 2000
_EXCERPT_BYTES = 60


class _Sent(NamedTuple):
    number: int
    at: float
    """By `time.monotonic`."""
    error: Exception | None
    """Error of sending it."""


class Child:
    """A Python module run as a child process, with messages in JSON lines.

    The child is the leader of a session of its own, so that Ctrl-C in the terminal reaches the parent only, and exits
    when its parent dies. After a `WorkerError` it is dead, and so are the processes that it started.

    Parameters
    ----------
    module
        Name of a module that runs `autotile.workers.protocol.serve`.
    place
        What the child holds beside its module, such as the index of its GPU; `WorkerPool` lends it for the same one.

    Attributes
    ----------
    module, place
        As given.

    Raises
    ------
    WorkerError
        The process cannot be started.
    InputError
        The temporary file for its standard error cannot be made.
    """

    def __init__(self, module: str, place: str = "") -> None:
        self.module = module
        self.place = place
        self._requests = 0
        self._outstanding: deque[_Sent] = deque()
        """Requests without a reply, oldest first."""
        self._replied_at = 0.0
        self._was_killed = False
        self._lock = threading.RLock()
        self._stderr = _temporary_file()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env=worker_environment(),
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
        """Process id."""
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether a request has no reply, which another thread may wait for."""
        return bool(self._outstanding)

    def request(
        self, message: Mapping[str, Any], deadline_s: float, stage_limits_s: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Parameters
        ----------
        message
            JSON values.
        deadline_s
            Time after which the child is killed, in seconds.
        stage_limits_s
            Time after the announcement of a stage, by its name, in which the next stage or the reply must follow; a
            stage that is not listed has the deadline only.

        Raises
        ------
        WorkerTimeoutError
            No reply arrived before the deadline.
        WorkerCrashError
            The child exited; the message states its signal or exit code and the last line of its standard error.
        WorkerError
            The reply is malformed.
        """
        with self._lock:  # `kill` from another thread waits until the request has seen the child's end
            self.send(message, deadline_s)
            return self.receive(deadline_s, stage_limits_s)

    def send(self, message: Mapping[str, Any], deadline_s: float) -> None:
        """Send a request, which the child handles after those sent before.

        Its reply, or the error of sending it, comes from `receive`; the replies come in the order of the requests.
        """
        with self._lock:
            self._requests += 1
            sent_at = time.monotonic()
            error: Exception | None = None
            try:
                self._check_open()
                line = encode_json({"id": self._requests, "request": message}).encode() + b"\n"
                self._pipe.send(line, sent_at + deadline_s)
            except (TimeoutError, EOFError, ConnectionError, ValueError) as reason:
                error = reason
            self._outstanding.append(_Sent(self._requests, sent_at, error))

    def receive(self, deadline_s: float, stage_limits_s: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Wait for the reply to the oldest request without one; errors and limits as for `request`.

        The deadline counts from the `send` of the request, or from the previous reply if that is later.
        """
        stage, line, limit_s = "", b"", deadline_s
        with self._lock:
            sent = self._outstanding[0]
            try:
                if sent.error is not None:
                    raise sent.error
                self._check_open()
                end = deadline = max(sent.at, self._replied_at) + deadline_s
                while True:
                    line = self._pipe.receive(end)
                    answer = decode_json(line, Answer)
                    if answer.id != sent.number or (answer.reply is None) == (answer.stage is None):
                        raise ValueError("not a reply to this request")
                    if answer.reply is not None:
                        self._outstanding.popleft()
                        self._replied_at = time.monotonic()
                        return answer.reply
                    stage, line = answer.stage or "", b""
                    limit_s = (stage_limits_s or {}).get(stage, deadline_s)
                    end = min(deadline, time.monotonic() + limit_s)
            except TimeoutError:
                self.kill()
                raise WorkerTimeoutError(f"no answer within {min(limit_s, deadline_s):g} s", stage) from None
            except (EOFError, ConnectionError):
                reason = self._describe_exit()
                raise WorkerCrashError(reason, stage, killed=self._was_killed) from None
            except ValueError as error:
                self.kill()
                excerpt = f" ({line[:_EXCERPT_BYTES].decode(errors='replace')!r})" if line else ""
                raise WorkerError(f"malformed reply from {self.module}: {error}{excerpt}", stage) from None

    def last_line(self) -> str:
        """Return the last line of standard error since the child read its last request; empty after the child's end."""
        with self._lock:
            if self._stderr.closed:
                return ""
            descriptor = self._stderr.fileno()
            start = max(0, os.fstat(descriptor).st_size - _STDERR_TAIL_BYTES)
            lines = (
                os.pread(descriptor, _STDERR_TAIL_BYTES, start)
                .decode(errors="replace")
                .replace("\0", "")
                .strip()
                .splitlines()
            )
            return lines[-1] if lines else ""

    def close(self) -> None:
        """Close the child's input, upon which it exits, and kill it if it does not."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._wait_for_exit()
            self.kill()

    def kill(self) -> None:
        """Kill the child and the processes that it started; a request pending in another thread raises an error."""
        self._kill_group()
        with self._lock:
            self._reap()

    def is_running(self) -> bool:
        """Return whether the child runs, without reaping it: a zombie's process group id is not reused."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def _check_open(self) -> None:
        """Raise `EOFError` after the streams were closed: their descriptors may be in use for other files by now."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise EOFError

    def _describe_exit(self) -> str:
        """Reap the child and return how it ended."""
        exited = self._wait_for_exit()
        tail = self.last_line()
        self.kill()
        code = self._process.returncode
        self._was_killed = exited and code == -signal.SIGKILL
        if not exited or code is None:
            return "the worker closed its input or output without a reply"
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the worker died with {end}" + (f": {tail}" if tail else "")

    def _wait_for_exit(self) -> bool:
        """Wait for the child to exit by itself; return whether it did."""
        end = time.monotonic() + _EXIT_GRACE_S
        while self.is_running():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def _kill_group(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()


def _temporary_file() -> BinaryIO:
    """Make a file for a child's standard error; it is deleted when the last process closes it."""
    try:
        return tempfile.TemporaryFile(buffering=0)
    except OSError as error:
        raise InputError(
            f"cannot make a temporary file: {error.strerror}; make room, or set TMPDIR to a folder that can be written"
        ) from None


class WorkerPool:
    """Idle children by module and place, for reuse by later sessions; closing the pool ends them.

    A worker must not depend on its earlier requests: a GPU worker sets up each new problem from scratch, and the same
    problem too if its data were corrupted; a compile worker keeps its cubin cache only. Both keep the memory limit of
    their first request.

    Parameters
    ----------
    compilers
        Compilations at the same time of all sessions that share the pool; None for no limit but their own. Each of them
        may so use all cores while the others start, measure or end.
    """

    def __init__(self, compilers: int | None = None) -> None:
        self._semaphore = threading.BoundedSemaphore(compilers) if compilers is not None else None
        self._idle: dict[tuple[str, str], list[Child]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def compile_slots(self) -> AbstractContextManager[object]:
        """Entered while something is compiled; waits for a slot."""
        return self._semaphore if self._semaphore is not None else nullcontext()

    def has_compile_slot(self) -> bool:
        """Return whether a compilation would not have to wait for a slot."""
        if self._semaphore is None:
            return True
        if is_free := self._semaphore.acquire(blocking=False):
            self._semaphore.release()
        return is_free

    def acquire(self, module: str, place: str = "") -> Child:
        """Return a child that runs a module at a place: an idle one, or a new one if there is none.

        Raises
        ------
        WorkerError, InputError
            As for `autotile.workers.child.Child`.
        """
        return self.acquire_idle(module, place) or Child(module, place)

    def acquire_idle(self, module: str, place: str = "") -> Child | None:
        """Return an idle child that runs a module at a place; None if there is none."""
        found, dead = None, []
        with self._lock:
            idle = self._idle.get((module, place), [])
            while idle and found is None:
                child = idle.pop()
                if child.is_running():
                    found = child
                else:
                    dead.append(child)
        for child in dead:  # outside of the lock: reaping a child that the GPU driver holds takes long
            child.kill()
        return found

    def release(self, child: Child) -> None:
        """Keep a child without a pending request for reuse; a closed pool ends it."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._idle.setdefault((child.module, child.place), []).append(child)
        if closed:
            child.close()

    def close(self) -> None:
        """End the idle children, and those that are released from now on."""
        with self._lock:
            self._closed = True
            children = [child for idle in self._idle.values() for child in idle]
            self._idle.clear()
        for child in children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
