"""Messages between the tuner and its workers, and the worker's end of the pipe."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotile.core.model import Config, L2Mode, Measurement, Outcome

_MOST_FILE_BYTES = 1 << 30
"""A kernel that prints without end fills this much of the disk and no more; a cubin is a thousandth of it."""
_SHARE = 0.75
"""Of the machine's memory, for all compile workers together; the rest is the system's and the user's."""
_LEAST_BYTES = 2 << 30
"""NVRTC takes 0.2 GiB for a plain kernel; the heaviest template libraries need one or two."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limit of a container, of cgroups version 2 and 1."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def leave_nothing_behind() -> None:
    """Allow this process no core dump, of gigabytes mapped by CUDA, and no file that fills the disk."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, _MOST_FILE_BYTES)


def limit_memory(most_bytes: int) -> None:
    """Allow this process that much memory on top of what it has mapped now; an allocation beyond fails.

    Should the machine run out of memory all the same, the system is to end this process before any other.
    """
    with contextlib.suppress(OSError):  # not everywhere may a process offer itself
        Path("/proc/self/oom_score_adj").write_text("1000")
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, mapped_pages * _PAGE_BYTES + most_bytes)


def memory_share_bytes(workers: int) -> int:
    """Memory that each of several compile workers may take: an equal part of three quarters, but 2 GiB at least."""
    total = min([os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES, *_container_limits(_CGROUP_LIMITS)])
    return max(_LEAST_BYTES, int(_SHARE * total / workers))


def _container_limits(files: Iterable[Path]) -> list[int]:
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdecimal()]


def _lower(kind: int, most: int) -> None:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft > most:
        resource.setrlimit(kind, (most, hard))


@dataclass(frozen=True, slots=True)
class Workload:
    """The problem that a worker lays out once and evaluates candidates on."""

    spec_text: str
    spec_source: str
    sizes: Mapping[str, int]
    dtype: str
    l2: L2Mode
    cache: str
    cache_limit_bytes: int
    sample_limit_s: float
    device_index: int = 0
    verify_sizes: tuple[Mapping[str, int], ...] = ()
    """More problems that a candidate must be right on, besides the ragged and the tuned one."""
    energy: bool = False
    """Whether to measure the energy of a run, too."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What running one candidate on the device gave."""

    outcome: Outcome
    reason: str = ""
    stage: str = ""
    measurement: Measurement | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    telemetry: Mapping[str, float | int | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """Inverse of `to_json`."""
        measurement = data["measurement"]
        if measurement is not None:
            measurement = Measurement(**{**measurement, "samples_us": tuple(measurement["samples_us"])})
        return cls(**{**data, "outcome": Outcome(data["outcome"]), "measurement": measurement})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compiled configuration, ready to load."""

    config: Config
    cubin_path: str

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return {"config": dict(self.config), "cubin_path": self.cubin_path}


Stage = Callable[[str], None]
"""Called with the name of a stage before it is entered."""
Handler = Callable[[Mapping[str, Any], Stage], Mapping[str, Any]]

_PARENT_CHECK_S = 1.0


class LastWords(Exception):  # noqa: N818 - it is an answer, not an error
    """Raised by a handler to answer and then end the process: its CUDA context can no longer be trusted."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self.reply = reply
        super().__init__("the worker ends itself after this reply")


def serve(handler: Handler) -> None:
    """Answer requests from standard input until it closes.

    Standard output becomes the message channel; whatever else prints there (a kernel's ``printf``) goes to standard
    error instead.
    """
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    leave_nothing_behind()
    leave_with_parent()
    if _is_orphan():
        return

    def say(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message).encode() + b"\n")
        channel.flush()

    for line in sys.stdin.buffer:
        _answer(handler, json.loads(line), say)


def _answer(handler: Handler, message: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
    number = message["id"]

    def enter(stage: str) -> None:
        say({"id": number, "stage": stage})

    try:
        say({"id": number, "reply": handler(message["request"], enter)})
    except LastWords as last:
        say({"id": number, "reply": last.reply})
        os._exit(0)  # an ordinary exit would wait for the broken context


def _is_orphan() -> bool:
    """Whether the parent died while this process was starting, so that its own parent is another one by now.

    The parent alone writes to standard input, and it closes that only when nothing is asked for any more.
    """
    poll = select.poll()
    poll.register(0, 0)  # only whether the other end is gone; a request may still be waiting in the pipe
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def leave_with_parent() -> None:
    """End this process when its parent dies, even in the middle of a kernel that never returns."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
