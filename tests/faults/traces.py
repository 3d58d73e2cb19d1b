"""Detection of leaks: processes, open files, temporary files."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SETTLED_S = 5.0
"""Time for the system to remove killed processes, in seconds."""

_LASTING = ("multiprocessing.resource_tracker", "/postgres\0", "/chromedriver\0", "\0dask\0scheduler\0")
"""Programs that live as long as the interpreter, or as long as the tests."""


def open_files() -> int:
    """Return the number of file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def processes() -> Iterator[tuple[int, int, str, str]]:
    """Yield the id of each process, that of its parent, its arguments and its environment; zombies have neither."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            arguments, environment = ((folder / name).read_text(errors="replace") for name in ("cmdline", "environ"))
        except OSError:  # it has just ended, or belongs to another user
            continue
        yield int(folder.name), parent, arguments, environment


def descendants(mark: str) -> set[int]:
    """Return the children of this process, including zombies, and all processes with ``mark`` in their environment.

    What other tests may have started for the whole session is not included.
    """
    found = set()
    for pid, parent, arguments, environment in processes():
        lasting = any(program in arguments for program in _LASTING)
        if pid != os.getpid() and not lasting and (mark in environment or parent == os.getpid()):
            found.add(pid)
    return found


def settles(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true within a few seconds."""
    end = time.monotonic() + _SETTLED_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def no_traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if the ``with`` block leaves a process, an open file or, in an empty folder for them, a temporary file."""
    mark = f"AUTOTILE_TEST_MARK={folder}"
    monkeypatch.setenv(*mark.split("=", 1))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    files, processes = open_files(), descendants(mark)
    yield
    assert settles(lambda: descendants(mark) <= processes), f"left running: {descendants(mark) - processes}"
    assert settles(lambda: open_files() <= files), f"{open_files() - files} files left open"
    assert list(folder.iterdir()) == []
