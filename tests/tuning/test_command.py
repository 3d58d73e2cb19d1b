"""Output of `autotile tune` for a replayed session, and for a broken kernel."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autotile.cli.application import app
from autotile.cli.progress import TuneProgress

NOTICE = "replayed from measurements recorded on NVIDIA H200"


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_command_says_it_first_and_once(bench: Any, scale_toml: Path, words: tuple[str, ...]) -> None:
    command = ["tune", str(scale_toml), "n=4096", f"--replay={bench.record()}", *words]
    answer = CliRunner().invoke(app, command, catch_exceptions=False)
    lines = answer.stderr.splitlines()
    assert answer.exit_code == 0
    assert NOTICE in lines[0]
    assert lines[1].startswith("starting: ")
    assert answer.stderr.count(NOTICE) == 1
    assert answer.stdout.count(NOTICE) == (1 if words else 0)  # the document repeats it for programs


def test_on_a_terminal_it_stays_above_the_live_line(bench: Any) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, markup=False)
    with TuneProgress(console) as progress:
        bench.tune(bench.record(), progress)
    assert screen.getvalue().count(NOTICE) == 1


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_broken_kernel_is_the_users_fault_and_said_once(
    rewrite: Callable[..., Any], scale_toml: Path, words: tuple[str, ...]
) -> None:
    bench = rewrite({"factor * x[i]": "factor * z[i]"})
    command = ["tune", str(scale_toml), "n=4096", f"--replay={bench.record()}", *words]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 2
    assert answer.stderr.count('identifier "z" is undefined') == 1
    assert ("no candidate compiles" in answer.stdout) == bool(words)
