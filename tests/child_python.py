"""Python processes that find this checkout."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import autotile
from autotile.settings import child_environment


def python(
    *words: str | Path, env: Mapping[str, str] | None = None, timeout: float = 120, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python in the environment of a child of autotile's, with further variables, and keep what it prints."""
    if "stdout" not in options:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**child_environment(), **(env or {})},
        text=True,
        timeout=timeout,
        check=check,
        **options,
    )


def imported(*pieces: str, words: Sequence[str] = ()) -> list[set[str]]:
    """Return the modules that a fresh process has imported after each of some pieces of code."""
    report = "\nimport sys; print('imported', *sys.modules)\n"
    lines = python("-c", report.join([*pieces, ""]), *words, check=True).stdout.splitlines()
    return [{*line.split()} for line in lines if line.startswith("imported ")]


def needed(program: str, *words: str, ceiling: int) -> set[str]:
    """Return the modules of autotile, without packages, that a program needs, of which there are no more than so many.

    The ceiling is near their number: lower it with them.
    """
    folder = Path(autotile.__file__).parents[1]
    (modules,) = imported(program, words=words)
    own = {name for name in modules if name.startswith("autotile.")}
    found = {name for name in own if not folder.joinpath(*name.split(".")).is_dir()}
    assert len(found) <= ceiling, sorted(found)
    assert len(found) > ceiling - 3, "lower the ceiling"
    return found
