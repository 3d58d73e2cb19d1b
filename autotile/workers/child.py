"""Child processes: their resource limits, both ends of the pipe to each, and a pool of idle ones.

Each line of a pipe is a message in JSON. A child handles requests one after another, and announces the stages of each
before its reply. The pool outlives the session that started its children.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autotile.core.documents import JsonObject, Name, Text, convert, decode_json, encode_json, to_fields
from autotile.errors import (
    AutotileError,
    DataError,
    InputError,
    ToolchainError,
    WorkerCrashError,
    WorkerError,
    WorkerTimeoutError,
)
from autotile.settings import ADDR_NO_RANDOMIZE, worker_environment

_Parsed = TypeVar("_Parsed")

Fields = Mapping[str, Any]
"""A request or a reply, of values that `to_fields` takes."""

GPU_WORKER, COMPILE_WORKER = "autotile.workers.bench", "autotile.workers.compile_pool"
"""Modules of the worker processes of a session."""

_MAX_FILE_BYTES = 1 << 30
"""Limit of each file that a worker writes, such as the output of a kernel that prints without end; a cubin is a
thousandth of it."""
_MEMORY_SHARE = 0.75
"""Share of the machine's memory for all compile workers together; the rest is left to the system and the user."""
_MIN_MEMORY_BYTES = 2 << 30
"""NVRTC takes 0.2 GiB for a plain kernel; the heaviest template libraries need 1 to 2 GiB."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limit of a container, of cgroups version 2 and 1."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def limit_disk_use() -> None:
    """Disable core dumps, which hold the gigabytes that CUDA maps, and limit the size of files that are written."""
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)


def limit_memory(max_bytes: int) -> None:
    """Limit the memory of this process to what it has mapped and ``max_bytes``; allocations beyond it fail.

    The process also offers itself to the kernel's out-of-memory killer before all others.
    """
    with suppress(OSError):  # not permitted on every system
        Path("/proc/self/oom_score_adj").write_text("1000")
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower_limit(resource.RLIMIT_AS, mapped_pages * _PAGE_BYTES + max_bytes)


def memory_share_bytes(workers: int) -> int:
    """Return the memory limit of each of several compile workers: equal parts of 75 %, of 2 GiB at least."""
    texts = [file.read_text().strip() for file in _CGROUP_LIMITS if file.is_file()]
    limits = [int(text) for text in texts if text.isdecimal()]
    total = min([os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES, *limits])
    return max(_MIN_MEMORY_BYTES, int(_MEMORY_SHARE * total / workers))


@contextmanager
def _equal_addresses() -> Iterator[None]:
    """Start processes whose addresses are not randomized, which NVRTC's precompiled headers need, if permitted."""
    personality = ctypes.CDLL(None).personality
    before = personality(0xFFFFFFFF)  # of this thread
    personality(before | ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        personality(before)


@contextmanager
def files_of_any_size() -> Iterator[None]:
    """Lift the limit of `limit_disk_use` on files, for the contents of large buffers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _lower_limit(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft > limit:
        resource.setrlimit(kind, (limit, hard))


class Message(msgspec.Struct):
    """Line of a pipe: a request, the reply to it, or the stage of it that the child enters."""

    id: int
    request: JsonObject | None = None
    reply: JsonObject | None = None
    stage: Name | None = None


def parsed_reply(reply: Fields, schema: type[_Parsed]) -> _Parsed:
    """Parse a reply.

    One with an ``error`` is raised: as `InputError` or `ToolchainError` if its ``kind``, ``input`` or ``toolchain``,
    says that it concerns all candidates, else as `WorkerError` in its ``stage``. So is a malformed reply.
    """
    try:
        if "error" not in reply:
            return convert(reply, schema)
        texts = [reply["error"], reply.get("kind", ""), reply.get("stage", "")]
        error, kind, stage = convert(texts, tuple[Text, Name, Name])
    except DataError as fault:
        raise WorkerError(f"the worker's reply is malformed: {fault}") from None
    if kind in ("input", "toolchain"):
        raise {"input": InputError, "toolchain": ToolchainError}[kind](error)
    raise WorkerError(error, stage)


def fault_reply(error: AutotileError) -> Fields:
    """Return the reply to a request that failed, of which `parsed_reply` makes the error again."""
    kind = "input" if isinstance(error, InputError) else "" if isinstance(error, WorkerError) else "toolchain"
    return {"error": str(error), "kind": kind}


Stage = Callable[[str], None]
"""Called with the name of a stage before the worker enters it."""
Handler = Callable[[Fields, Stage], Fields]
"""Returns the reply to a request, of values that `to_fields` takes; with a true ``last``, the process ends then."""

_PARENT_CHECK_S = 1.0


class Channel:
    """The worker's end of the pipe: requests arrive on standard input, replies go to standard output.

    From its construction on, other output to standard output, such as a kernel's ``printf``, goes to standard error;
    the process exits when its parent dies.
    """

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        limit_disk_use()
        exit_with_parent()
        # The parent may have died while this process started, so that another one adopted it. Only the parent writes to
        # standard input, and it closes it only when no request will follow; a request may still wait in the pipe.
        poll = select.poll()
        poll.register(0, 0)
        self._is_orphan = any(event & select.POLLHUP for _, event in poll.poll(0))
        self._request_id = 0

    def receive(self) -> Mapping[str, Any] | None:
        """Return the next request; None after the parent closed the pipe."""
        line = b"" if self._is_orphan else sys.stdin.buffer.readline()
        if not line:
            return None
        if stat.S_ISREG(os.fstat(2).st_mode):  # the parent reads it: only what this request prints
            os.ftruncate(2, 0)
            os.lseek(2, 0, os.SEEK_SET)
        message = decode_json(line, Message)
        self._request_id = message.id
        return message.request

    def enter(self, stage: str) -> None:
        """Tell the parent which stage of the request follows."""
        self._write({"id": self._request_id, "stage": stage})

    def reply(self, reply: Fields) -> None:
        """Reply to the last request."""
        self._write({"id": self._request_id, "reply": to_fields(reply)})

    def _write(self, message: Fields) -> None:
        self._output.write(encode_json(message).encode() + b"\n")
        self._output.flush()


def serve(handler: Handler, prepare: Callable[[], object] = lambda: None, channel: Channel | None = None) -> None:
    """Answer requests until the parent closes the pipe; errors of autotile are replies.

    ``prepare`` loads what most requests need while the first may be on its way; what fails there fails in a request.
    """
    channel = channel or Channel()
    with suppress(Exception):
        prepare()
    while (request := channel.receive()) is not None:
        try:
            reply = handler(request, channel.enter)
        except AutotileError as error:
            reply = fault_reply(error)
        channel.reply(reply)
        if reply.get("last"):
            os._exit(0)  # a regular exit would wait for a corrupt CUDA context


def exit_with_parent() -> None:
    """End this process when its parent dies, even during a kernel that never returns."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_CHUNK_BYTES = 1 << 16
_MAX_UNREAD_BYTES = 1 << 24
"""Limit of the output that was not read as a message; any valid reply is far smaller."""
_LIVENESS_CHECK_S = 0.1
"""Interval of the liveness check while no output arrives: processes that the child started may hold its streams open
after its death."""
_LOOK_S = 0.001
"""Time in which a look for a reply is over."""
_EXIT_GRACE_S = 2.0
"""Time that a child has to exit by itself; a process with a CUDA context takes a tenth of a second."""
_REAP_S = 30.0
"""Time that the system has to remove a killed child; one that the GPU driver holds on to is left after that."""
_STDERR_TAIL_BYTES = 65536
_EXCERPT_BYTES = 60


def is_running(process: int) -> bool:
    """Return True if a child runs, without reaping it: a zombie's process group id is not reused."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that was not reaped, the leader of a session of its own, and the processes that it started."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def reap(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child that was killed; None if the system does not remove it."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
    return process.returncode


class Child:
    """A Python module run as a child process, with messages in JSON lines.

    The child is the leader of a session of its own, so that Ctrl-C in the terminal reaches the parent only, and exits
    when its parent dies. After a `WorkerError` it is dead, and so are the processes that it started.

    The module runs `serve`; its argument ``place`` is what the child holds, such as the index of its GPU, and
    `WorkerPool` lends it for the same one. Raise `WorkerError` if the process cannot be started, `InputError` if the
    temporary file for its standard error cannot be made.
    """

    def __init__(self, module: str, place: str = "") -> None:
        self.module = module
        self.place = place
        self._requests = 0
        self.outstanding: deque[tuple[int, float, Exception | None]] = deque()
        """Number of each request without a reply, which another thread may wait for, its time by `time.monotonic`, and
        the error of sending it."""
        self._replied_at = 0.0
        self._received = bytearray()
        self._lock = threading.RLock()
        try:
            self._stderr = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open until the end of the child
        except OSError as error:
            raise InputError(
                f"cannot make a temporary file: {error.strerror}; make room, or set TMPDIR to a folder that can be "
                "written"
            ) from None
        try:
            with nullcontext() if place else _equal_addresses():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *([place] if place else ())],
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
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        os.set_blocking(self._stdin.fileno(), False)

    def request(
        self, message: Fields, deadline_s: float, stage_limits_s: Mapping[str, float] | None = None
    ) -> JsonObject:
        """Send a request, of values that `to_fields` takes, and wait for its reply.

        After the announcement of a stage, the next one or the reply must follow within its limit; a stage that is not
        listed has the deadline only. Raise `WorkerTimeoutError` if no reply arrives in time; `WorkerCrashError`, with
        the signal or exit code and the last line of standard error, if the child exits; `WorkerError` if the reply is
        malformed.
        """
        with self._lock:  # `kill` from another thread waits until the request has seen the child's end
            self.send(message, deadline_s)
            return self.receive(deadline_s, stage_limits_s)

    def send(self, message: Fields, deadline_s: float) -> None:
        """Send a request, which the child handles after those sent before.

        Its reply, or the error of sending it, comes from `receive`; the replies come in the order of the requests.
        """
        with self._lock:
            self._requests += 1
            sent_at = time.monotonic()
            fault: Exception | None = None
            try:
                self._check_open()
                left = memoryview(encode_json({"id": self._requests, "request": to_fields(message)}).encode() + b"\n")
                while left:
                    if self._await_child(sent_at + deadline_s, writes=True):
                        left = left[os.write(self._stdin.fileno(), left) :]
            except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
                fault = error
            self.outstanding.append((self._requests, sent_at, fault))

    def receive(self, deadline_s: float, stage_limits_s: Mapping[str, float] | None = None) -> JsonObject:
        """Wait for the reply to the oldest request without one; errors and limits as for `request`.

        The deadline counts from the `send` of the request, or from the previous reply if that is later.
        """
        stage, line, limit_s = "", b"", deadline_s
        with self._lock:
            number, sent_at, fault = self.outstanding[0]
            try:
                if fault is not None:
                    raise fault
                self._check_open()
                end = deadline = max(sent_at, self._replied_at) + deadline_s
                while True:
                    line = self._line(end)
                    answer = decode_json(line, Message)
                    if answer.id != number or (answer.reply is None) == (answer.stage is None):
                        raise ValueError("not a reply to this request")
                    if answer.reply is not None:
                        self.outstanding.popleft()
                        self._replied_at = time.monotonic()
                        return answer.reply
                    stage, line = answer.stage or "", b""
                    limit_s = (stage_limits_s or {}).get(stage, deadline_s)
                    end = min(deadline, time.monotonic() + limit_s)
            except TimeoutError:
                self.kill()
                raise WorkerTimeoutError(f"no answer within {min(limit_s, deadline_s):g} s", stage) from None
            except (EOFError, ConnectionError):
                exited = self._wait_for_exit()
                tail = self.last_line()
                self.kill()
                code = self._process.returncode
                if not exited or code is None:
                    reason = "the worker closed its input or output without a reply"
                else:
                    end_text = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    reason = f"the worker died with {end_text}" + (f": {tail}" if tail else "")
                killed = exited and code == -signal.SIGKILL
                raise WorkerCrashError(reason, stage, killed=killed) from None
            except ValueError as error:
                self.kill()
                excerpt = f" ({line[:_EXCERPT_BYTES].decode(errors='replace')!r})" if line else ""
                raise WorkerError(f"malformed reply from {self.module}: {error}{excerpt}", stage) from None

    def has_reply(self) -> bool:
        """Return True if `receive` is certain not to wait: a reply has arrived, or the child has ended."""
        with self._lock:
            try:
                self._check_open()
                with suppress(TimeoutError):
                    self._await_child(time.monotonic() + _LOOK_S)
            except (EOFError, ValueError):
                return True
            return b'"reply"' in self._received[: self._received.rfind(b"\n") + 1]

    def last_line(self, containing: str = "") -> str:
        """Return the last such line of standard error since the child read its last request; empty after its end."""
        with self._lock:
            if self._stderr.closed:
                return ""
            descriptor = self._stderr.fileno()
            start = max(0, os.fstat(descriptor).st_size - _STDERR_TAIL_BYTES)
            text = os.pread(descriptor, _STDERR_TAIL_BYTES, start).decode(errors="replace")
            lines = text.replace("\0", "").strip().splitlines()
            return next((line[:2000] for line in reversed(lines) if containing in line), "")

    def close(self) -> None:
        """Close the child's input, upon which it exits, and kill it if it does not."""
        with self._lock:
            self._stdin.close()
            self._wait_for_exit()
            self.kill()

    def kill(self) -> None:
        """Kill the child and the processes that it started; a request pending in another thread raises an error."""
        kill_group(self._process)
        with self._lock:
            reap(self._process)
            for stream in (self._stdin, self._stdout, self._stderr):
                stream.close()

    def _line(self, end: float) -> bytes:
        """Return the child's next line, without its newline; ``end`` and errors as for `_await_child`."""
        searched = 0
        while (cut := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            self._await_child(end)
        if time.monotonic() > end:  # a child that writes without end is late, too
            raise TimeoutError
        line = bytes(self._received[:cut])
        del self._received[: cut + 1]
        return line

    def _await_child(self, end: float, *, writes: bool = False) -> int:
        """Wait for the child's output, or until its input takes more; return what is known of its input.

        Output that arrives is buffered, so that neither end blocks the other. Raise `TimeoutError` past ``end``, by
        `time.monotonic`; `EOFError` if the child has exited; `ValueError` if it writes more than any valid reply holds.
        """
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        poll = select.poll()  # not select: a program that embeds the tuner may have more than 1,024 files open
        poll.register(self._stdout, select.POLLIN)
        if writes:
            poll.register(self._stdin, select.POLLOUT)
        events = dict(poll.poll(1e3 * min(left_s, _LIVENESS_CHECK_S)))
        if self._stdout.fileno() in events:
            data = os.read(self._stdout.fileno(), _CHUNK_BYTES)
            if not data:
                raise EOFError
            self._received += data
            if len(self._received) > _MAX_UNREAD_BYTES:
                raise ValueError(f"more than {_MAX_UNREAD_BYTES >> 20} MiB")
        elif not events and not is_running(self.pid):
            raise EOFError
        return events.get(self._stdin.fileno(), 0) & (select.POLLOUT | select.POLLERR)

    def _check_open(self) -> None:
        """Raise `EOFError` after the streams were closed: their descriptors may be in use for other files by now."""
        if self._stdin.closed:
            raise EOFError

    def _wait_for_exit(self) -> bool:
        """Wait for the child to exit by itself; return whether it did."""
        end = time.monotonic() + _EXIT_GRACE_S
        while is_running(self.pid):
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Idle children by module and place, for reuse by later sessions; closing the pool ends them.

    A worker must not depend on its earlier requests: a GPU worker sets up each new problem from scratch, and the same
    problem too if its data were corrupted; a compile worker keeps its cubin cache only. Both keep the memory limit of
    their first request.

    ``compilers`` limits the compilations at the same time of all sessions that share the pool; None for no limit but
    their own. Each of them may so use all cores while the others start, measure or end.
    """

    def __init__(self, compilers: int | None = None) -> None:
        self.compile_slots = threading.BoundedSemaphore(sys.maxsize if compilers is None else compilers)
        """Entered while something is compiled; waits for a slot."""
        self._idle: dict[tuple[str, str], list[Child]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def has_compile_slot(self) -> bool:
        """Return True if a compilation would not have to wait for a slot."""
        if is_free := self.compile_slots.acquire(blocking=False):
            self.compile_slots.release()
        return is_free

    def acquire_idle(self, module: str, place: str = "") -> Child | None:
        """Return an idle child that runs a module at a place; None if there is none."""
        found, dead = None, []
        with self._lock:
            idle = self._idle.get((module, place), [])
            while idle and found is None:
                child = idle.pop()
                if is_running(child.pid):
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
        self._closed = True
        for child in self._take_idle():
            child.close()

    def kill_idle(self) -> None:
        """Kill the idle children, without waiting for the end of their interpreters."""
        children = self._take_idle()
        for child in children:  # all of them, before the first is waited for
            kill_group(child._process)
        for child in children:
            child.kill()

    def _take_idle(self) -> list[Child]:
        with self._lock:
            children = [child for idle in self._idle.values() for child in idle]
            self._idle.clear()
        return children

    def __exit__(self, *_: object) -> None:
        self.close()


EARLY = WorkerPool()
"""Children that were started before a session asks for them."""


def start_early(module: str, place: str = "") -> None:
    """Start a child that `start_child` returns later, so that its imports run beside those of this process."""
    with suppress(InputError, WorkerError):  # the session reports it
        EARLY.release(Child(module, place))


def start_child(module: str, place: str = "") -> Child:
    """Return a child without earlier requests: one that was started early, or a new one, whose errors are raised."""
    return EARLY.acquire_idle(module, place) or Child(module, place)
