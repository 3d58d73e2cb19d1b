"""Record the output of the commands in README.md, so that a test can compare the page with it.

    python benchmarks/console.py --output benchmarks/results/console.json

Runs every line that begins with ``$ autotile`` in a console block of the README, in order, in an empty folder with an
empty database and without a GPU, and stores its output. A page may omit lines (``...``) but not change them.

The record also holds what shows that it is of the present code: the table of the first command in a session whose
compilations take no time (`replayed`), and the version of the kernel. A test makes both again, and repeats the commands
that only inspect. A change of the search, of what a session reports or of the kernel changes them; a refactoring or a
comment does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from instant_compilers import InstantCompilers
from provenance import provenance
from rich.console import Console

from autotile.api.targets import open_problem, tune_problem
from autotile.cli.output import print_trimmed, render
from autotile.core.model import Resources, Value
from autotile.cuda.compiler import CachedCubin, CompiledFunction, CompileJob
from autotile.exchange.recording import Recording
from autotile.kernel.library import load_kernel
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import open_recording
from autotile.workers.compile_pool import Compiled

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 120


def main() -> None:
    """Run the commands and write their output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    output = parser.parse_args().output
    found = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        printed = {command: run(command, Path(folder)) for command in found}
    report = {**provenance(), "commands": printed, "replayed": replayed(), "kernel": kernel_version()}
    output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def commands(page: str) -> list[str]:
    """Return the commands of a page's console blocks, in order."""
    lines = [line for block in BLOCK.findall(page) for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ autotile")]


def run(command: str, folder: Path) -> list[str]:
    """Run an autotile command and return its output as lines."""
    _, *words = shlex.split(command)
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    environment = {**os.environ, "AUTOTILE_DB": str(folder / "tuning.db"), "AUTOTILE_CACHE": str(folder / "cache")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(WIDTH)}
    done = subprocess.run(
        [sys.executable, "-m", "autotile", *words], env=environment, capture_output=True, text=True, check=False
    )
    print(f"{command}: exit code {done.returncode}")
    lines = done.stdout.replace(str(ROOT) + "/", "").replace(str(folder), "FOLDER").splitlines()
    return [line.rstrip() for line in lines]


KERNEL, SIZES = "sgemm_2d", {"M": 4096, "N": 4096, "K": 4096}
"""Kernel and problem of the commands of the README."""
_VARYING = ("busy", "took", "saved in", "serve it")
"""Facts of a session that differ each time or by the place where it ran."""


class RecordedCompilers(InstantCompilers):
    """Compile pool whose compilations take no time, with the resources that a recording holds."""

    def __init__(self, *arguments: Any, recording: Recording, **choices: Any) -> None:
        super().__init__(*arguments, **choices)
        self._recording = recording

    def submit(self, job: CompileJob) -> Future[Compiled]:
        """Return a compilation that has ended."""
        macros = dict(option[2:].split("=", 1) for option in job.options if option.startswith("-D") and "=" in option)
        config = {each.name: _value(each.values, macros[each.name]) for each in self._recording.header.parameters}
        found = self._recording.lookup(config)
        resources = found.resources if found is not None else None
        functions = {job.entry: CompiledFunction(job.entry, resources or Resources(64, 0, 0, 0, 0))}
        done: Future[Compiled] = Future()
        done.set_result(Compiled(CachedCubin(self.cubin, f"{next(self._names)}", functions)))
        return done


def _value(values: Sequence[Value], text: str) -> Value:
    return next(value for value in values if str(int(value) if isinstance(value, bool) else value) == text)


def replayed() -> list[str]:
    """Return the table of a session of the README's problem with the resources and the times of its recording.

    Nothing is compiled, so that it takes seconds, and is the same on every machine.
    """
    from autotile.tuning import session

    loaded, problem = open_problem(KERNEL, SIZES)
    options = TuneOptions(replay="auto", workers=2)
    recording = open_recording(loaded, problem, options, read_settings().recording_folders)
    pool, session.CompilePool = session.CompilePool, partial(RecordedCompilers, recording=recording)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = tune_problem(loaded, problem, replace(options, database=str(Path(folder) / "tuning.db")))
    finally:
        session.CompilePool = pool
    stream = StringIO()
    console = Console(file=stream, width=WIDTH, markup=False, highlight=False)
    print_trimmed(console, render(result, console))
    return [line for line in stream.getvalue().splitlines() if not line.startswith(_VARYING)]


DURATION = re.compile(r"\d[\d.]* (?:ms|s|min \d+ s)\b")
"""Text of a wall time, which differs each time."""


def only_inspects(command: str) -> bool:
    """Return whether a command neither tunes nor reads a database, so that it answers the same at once."""
    return shlex.split(command)[1] in ("space", "explain")


def kernel_version() -> str:
    """Return the hash of the kernel's source without comments, which determines what a compiler makes of it."""
    return load_kernel(KERNEL).source_hash


if __name__ == "__main__":
    main()
