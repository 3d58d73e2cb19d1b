"""The command line as its users run it."""

from pathlib import Path

import pytest
from answers import Answer
from typer.testing import CliRunner

from autotile.cli.application import app


@pytest.fixture
def run():
    """Run a command; anything raised but an exit fails the test."""

    def command(*given: str | Path) -> Answer:
        words = tuple(map(str, given))
        result = CliRunner().invoke(app, words, prog_name="autotile", catch_exceptions=False)
        return Answer(words, result.exit_code, result.stdout, result.stderr)

    return command


@pytest.fixture
def tune(run, scale_toml, recording):
    return lambda *words: run("tune", scale_toml, "n=1048576", f"--replay={recording}", *words)


@pytest.fixture
def written(scale_toml, recording, tmp_path):
    """Split a command into words; those in capitals stand for files, for no text and for 5,000 digits."""
    names = {"KERNEL": scale_toml, "RECORDING": recording, "NINES": "9" * 5000, "OUT": tmp_path}
    names |= {name: tmp_path / file for name, file in (("DATABASE", "tuning.db"), ("OTHER", "other.db"))}

    def words(command: str) -> list[str]:
        for name, text in names.items():
            command = command.replace(name, str(text))
        return ["" if word == "EMPTY" else word for word in command.split()]

    return words
