"""The command line, with a file of marks: each stage that it reaches, and each trial that it says is stored.

    python telling.py MARKS tune sgemm_2d M=1024 N=1024 K=1024 --replay

A mark is one line of JSON, written at once: `[time, "stage", name]` or `[time, "trial", config]`. Time is that of the
monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

STAGES = ("import", "open", "starting", "searching", "finals", "end")

Mark = Callable[[str, str], None]


def open_marks(path: str) -> Mark:
    """Begin to write marks."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def mark(kind: str, text: str) -> None:
        os.write(file, json.dumps([time.monotonic(), kind, text]).encode() + b"\n")

    return mark


def tell_progress(mark: Mark) -> None:
    """Mark what a tuning session shows, from now on."""
    from autotile.cli.progress import TuneProgress
    from autotile.core.model import config_key
    from autotile.tuning.result import Progress

    shown, left = TuneProgress.__call__, TuneProgress.__exit__
    stage = ""

    def call(self: TuneProgress, progress: Progress) -> None:
        nonlocal stage
        if progress.phase != stage:
            stage = progress.phase
            mark("stage", stage)
        if progress.last is not None:
            mark("trial", f"{self._problem} {config_key(progress.last.config)}")
        shown(self, progress)

    def leave(self: TuneProgress, *error: object) -> None:
        mark("stage", "end")
        left(self, *error)  # type: ignore[arg-type]

    TuneProgress.__call__ = call  # type: ignore[method-assign]
    TuneProgress.__exit__ = leave  # type: ignore[assignment, method-assign]


def main() -> None:
    """Run one command."""
    mark = open_marks(sys.argv.pop(1))
    mark("stage", "import")
    tell_progress(mark)
    from autotile.cli.application import main as run

    mark("stage", "open")
    run()


if __name__ == "__main__":
    main()
