"""The command line with a file of progress marks: each stage that it reaches, each trial that it reports as stored.

    python progress_marks.py MARKS tune sgemm_2d M=1024 N=1024 K=1024 --replay

A mark is one line of JSON, written with a single system call: `[time, "stage", name]` or `[time, "trial", config]`.
Times, in seconds, are those of the monotonic clock, which all processes share.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

STAGES = ("import", "open", "starting", "searching", "finals", "end")

Mark = Callable[[str, str], None]


def environment_of(location: Path, **variables: object) -> dict[str, str]:
    """Return the environment of a tuning process with a database of its own, which marks its workers, too."""
    paths = os.pathsep.join(filter(None, sys.path))
    own = {"AUTOTILE_DB": location, "AUTOTILE_TEST_OF": location, "PYTHONPATH": paths, **variables}
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def open_marks(path: str) -> Mark:
    """Open a file of marks, and return the function that appends one."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def mark(kind: str, text: str) -> None:
        os.write(file, json.dumps([time.monotonic(), kind, text]).encode() + b"\n")

    return mark


def mark_progress(mark: Mark) -> None:
    """Write marks of the progress that tuning sessions display."""
    from autotile.cli.progress import TuneProgress
    from autotile.core.model import config_key
    from autotile.tuning.progress_state import Progress

    display, leave = TuneProgress.__call__, TuneProgress.__exit__
    stage = ""

    def marked_call(self: TuneProgress, progress: Progress) -> None:
        nonlocal stage
        if progress.phase != stage:
            stage = progress.phase
            mark("stage", stage)
        if progress.last is not None:
            mark("trial", f"{progress.problem} {config_key(progress.last.config)}")
        display(self, progress)

    def marked_exit(self: TuneProgress, *error: object) -> None:
        mark("stage", "end")
        leave(self, *error)  # type: ignore[arg-type]

    TuneProgress.__call__ = marked_call  # type: ignore[method-assign]
    TuneProgress.__exit__ = marked_exit  # type: ignore[assignment, method-assign]


def main() -> None:
    mark = open_marks(sys.argv.pop(1))
    mark("stage", "import")
    mark_progress(mark)
    from autotile.cli.application import main as run

    mark("stage", "open")
    run()


if __name__ == "__main__":
    main()
