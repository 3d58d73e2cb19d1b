"""Messages between the tuner and its workers, the worker's end of the pipe, and the resource limits of a worker."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotile.core.documents import Count, Name, Text, decode_json, encode_json
from autotile.cuda.compiler import CompiledFunction

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
    with contextlib.suppress(OSError):  # not permitted on every system
        Path("/proc/self/oom_score_adj").write_text("1000")
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower_limit(resource.RLIMIT_AS, mapped_pages * _PAGE_BYTES + max_bytes)


def memory_share_bytes(workers: int) -> int:
    """Return the memory limit of each of several compile workers: equal parts of 75 %, of 2 GiB at least."""
    total = min([os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES, *_container_limits(_CGROUP_LIMITS)])
    return max(_MIN_MEMORY_BYTES, int(_MEMORY_SHARE * total / workers))


def _container_limits(files: Iterable[Path]) -> list[int]:
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdecimal()]


@contextlib.contextmanager
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


class ErrorReply(msgspec.Struct):
    """Reply to a request that failed."""

    error: Text
    kind: Name = ""
    stage: Name = ""
    """Stage in which the candidate failed, if one did."""


class DriverOccupancy(msgspec.Struct):
    """Reply of the GPU worker to ``occupancy``."""

    blocks_per_sm: Count


class CompiledCubin(msgspec.Struct):
    """Reply of a compile worker."""

    path: str
    cubin_hash: Name
    functions: dict[Name, CompiledFunction]


class _Request(msgspec.Struct):
    id: int
    request: dict[str, Any]


class Answer(msgspec.Struct):
    """Line that a worker writes: the reply to a request, or the stage that it enters."""

    id: int
    reply: dict[str, Any] | None = None
    stage: Name | None = None


Stage = Callable[[str], None]
"""Called with the name of a stage before the worker enters it."""
Handler = Callable[[Mapping[str, Any], Stage], Mapping[str, Any]]

_PARENT_CHECK_S = 1.0


class FinalReply(Exception):  # noqa: N818 - it is a reply, not an error
    """Raised by a handler to reply and then end the process, such as one whose CUDA context is corrupt."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self.reply = reply
        super().__init__("the worker ends itself after this reply")


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
        self._is_orphan = _is_orphan()
        self._request_id = 0

    def receive(self) -> Mapping[str, Any] | None:
        """Return the next request; None after the parent closed the pipe."""
        line = b"" if self._is_orphan else sys.stdin.buffer.readline()
        if not line:
            return None
        _truncate_standard_error()
        message = decode_json(line, _Request)
        self._request_id = message.id
        return message.request

    def enter(self, stage: str) -> None:
        """Tell the parent which stage of the request follows."""
        self._write({"id": self._request_id, "stage": stage})

    def reply(self, reply: Mapping[str, Any]) -> None:
        """Reply to the last request."""
        self._write({"id": self._request_id, "reply": reply})

    def _write(self, message: Mapping[str, Any]) -> None:
        self._output.write(encode_json(message).encode() + b"\n")
        self._output.flush()


def _truncate_standard_error() -> None:
    """Discard the output of earlier requests, where standard error is a file, from which the parent reads it."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def serve(handler: Handler) -> None:
    """Answer requests until the parent closes the pipe; see `Channel`."""
    channel = Channel()
    while (request := channel.receive()) is not None:
        try:
            channel.reply(handler(request, channel.enter))
        except FinalReply as final:
            channel.reply(final.reply)
            os._exit(0)  # a regular exit would wait for the corrupt context


def _is_orphan() -> bool:
    """Return whether the parent died while this process started, so that it was adopted by another process.

    Only the parent writes to standard input, and it closes it only when no request will follow.
    """
    poll = select.poll()
    poll.register(0, 0)  # only for the hang-up of the other end; a request may still wait in the pipe
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def exit_with_parent() -> None:
    """End this process when its parent dies, even during a kernel that never returns."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
