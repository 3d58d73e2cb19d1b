"""A disk of a given size, for as long as some commands run: a tmpfs in a namespace of mounts of its own.

    unshare -rm python small_disk.py FOLDER SIZE < steps.json

mounts it at the folder and takes one step after the other: ``["autotile", words, environment]`` runs a command,
``["size", size]`` and ``["read-only"]`` change the disk, ``["fill"]`` fills it, ``["copy", from, to]`` is
what it says, ``["text", file]`` reads. What each gave is printed as JSON.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from autotile.cli.application import app


def on_small_disk(folder: Path, size: str, *steps: list[Any]) -> list[Any]:
    """Take steps on a disk of that size, and skip the test where none can be mounted."""
    import pytest  # which the process that takes them need not load

    folder.mkdir()
    command = ["unshare", "-rm", sys.executable, __file__, str(folder), size]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, input=json.dumps(steps), env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    except FileNotFoundError:
        pytest.skip("no disk can be mounted here: there is no unshare")
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        if "Traceback" in done.stderr:
            pytest.fail(done.stderr)
        pytest.skip(f"no disk can be mounted here: {reason[-1] if reason else done.returncode}")
    return list(json.loads(done.stdout))


def autotile(*words: str | Path, **environment: str | Path) -> list[Any]:
    return ["autotile", [str(word) for word in words], {name: str(value) for name, value in environment.items()}]


def _take(folder: str, step: list[Any]) -> Any:
    match step:
        case ["autotile", words, environment]:
            tempfile.tempdir = None  # it is looked for again, as by a new process
            done = CliRunner().invoke(app, words, env=environment, prog_name="autotile")
            unexpected = done.exception is not None and not isinstance(done.exception, SystemExit)
            return [done.exit_code, done.stdout, done.stderr + ("Traceback" if unexpected else "")]
        case ["size", size]:
            _mount("-o", f"remount,size={size}", folder)
        case ["read-only"]:
            _mount("-o", "remount,ro", folder)
        case ["fill"]:
            _fill(Path(folder) / "filling")
        case ["copy", source, target]:
            shutil.copy(source, target)
        case ["text", file]:
            return Path(file).read_text()
        case _:
            raise ValueError(f"no such step: {step}")
    return None


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(1024)):
                pass
        except OSError:
            return


def _mount(*words: str) -> None:
    if subprocess.run(["mount", *words], check=False).returncode:
        sys.exit(1)


def main() -> None:
    """Mount, take the steps and print what they gave."""
    folder, size = sys.argv[1:]
    _mount("-t", "tmpfs", "-o", f"size={size}", "small", folder)
    print(json.dumps([_take(folder, step) for step in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
