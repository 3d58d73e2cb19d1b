"""What a child process may take of the machine, so that the machine and the tuner survive it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path

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
