"""Standard streams that are closed, full or without a reader: a session goes on, and an answer is never half there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from answers import Run
from interrupts import heeded_interrupts

from autotile.cli.application import CommandLine
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.settings import child_environment

CONFIGURATIONS = 12


@pytest.fixture
def tune(scale_toml: Path, recording: Path) -> list[str]:
    """A command that tries every configuration of a tiny kernel."""
    words = ["tune", str(scale_toml), "n=1048576", f"--replay={recording}", "--workers", "1"]
    return [sys.executable, "-m", "autotile", *words, "--json"]


def shell(redirection: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with redirections that only a shell can make."""
    line = ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *words]
    return subprocess.run(line, env=child_environment(), capture_output=True, text=True, timeout=120, check=False)


def run_interrupted(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that presses Ctrl-C."""
    command, environment = [sys.executable, "-c", code], child_environment()
    with heeded_interrupts():
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


INTERRUPTED_IMPORT = """
import sys

class Interrupter:
    def find_spec(self, name, *_):
        if name == {module!r}:
            exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")

sys.meta_path.insert(0, Interrupter())
sys.argv = ["autotile", "list", *{words!r}]
from autotile.__main__ import main
main()
"""
"""Ctrl-C while a module is imported, in a text that `exec` runs, as `dataclasses` does."""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("autotile.cli", []),
        ("typer", ["--json"]),
        ("rich", []),
        ("autotile.cli.output", ["--json"]),
        ("autotile.api.results", []),
        ("sqlalchemy", ["--json"]),
    ],
)
def test_ctrl_c_while_modules_are_imported(module: str, words: list[str]) -> None:
    Database.open(os.environ["AUTOTILE_DB"]).close()
    code = INTERRUPTED_IMPORT.format(module=module, words=words)
    done = run_interrupted(code)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    if words:
        assert json.loads(done.stdout)["error"]["message"] == "interrupted"


def stored_trials() -> int:
    with Database.open(os.environ["AUTOTILE_DB"]) as database:
        assert check_database(database).ok
        return len(database.trials(1, phase="search"))


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_a_session_goes_on_without_standard_error(tune: list[str], redirection: str) -> None:
    done = shell(redirection, tune)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["winner"]["config"] == {"THREADS": 256, "WORK": 4}
    assert stored_trials() == CONFIGURATIONS


def test_a_session_goes_on_after_the_reader_of_standard_error(tune: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        tune, env=child_environment(), stdout=subprocess.PIPE, stderr=writer, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert done.returncode == 0
    assert json.loads(done.stdout)["winner"]["config"] == {"THREADS": 256, "WORK": 4}
    assert stored_trials() == CONFIGURATIONS


def test_a_live_picture_goes_with_its_terminal(tune: list[str]) -> None:
    parent, terminal = os.openpty()
    process = subprocess.Popen(
        [*tune, "--fresh"], env=child_environment(), stdout=subprocess.PIPE, stderr=terminal, text=True
    )
    os.close(terminal)
    os.read(parent, 1)  # the picture is shown
    os.close(parent)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out)["winner"]["config"] == {"THREADS": 256, "WORK": 4}


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_error_keeps_its_exit_code(redirection: str) -> None:
    done = shell(redirection, [sys.executable, "-m", "autotile", "space", "nowhere.toml", "--json"])
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout)["error"]["kind"] == "UnknownKernelError"


def test_an_answer_without_standard_output_is_an_error_after_the_session(tune: list[str]) -> None:
    done = shell(">&-", tune)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: Bad file descriptor: the answer cannot be written; what was stored is kept"
    )
    assert "Traceback" not in done.stderr
    assert stored_trials() == CONFIGURATIONS


def test_without_any_stream(tune: list[str]) -> None:
    assert shell("<&- >&- 2>&-", tune).returncode == 1
    assert stored_trials() == CONFIGURATIONS


@pytest.mark.parametrize("module", ["rich.console", "autotile.kernel.library"])
def test_ctrl_c_during_start_up_gives_no_traceback(module: str) -> None:
    """The signal arrives while a module is imported: by the command line, or by the command."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['autotile', 'space', 'sgemm_2d', '--json']\n"
        "runpy.run_module('autotile', run_name='__main__')\n"
    )
    done = run_interrupted(code)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    assert json.loads(done.stdout) == {"error": {"kind": "CommandInterruptedError", "message": "interrupted"}}


def test_ctrl_c_while_the_command_line_is_parsed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CommandLine, "parse_args", interrupted)
    answer = run("devices", "--json")
    assert (answer.code, answer.err) == (130, "error: interrupted\n")
    assert answer.document["error"]["kind"] == "CommandInterruptedError"
