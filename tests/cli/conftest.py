"""The command line as its users run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import Answer, Run
from typer.testing import CliRunner

from autotile.cli.application import app


@pytest.fixture
def run() -> Run:
    """Run a command; anything raised but an exit fails the test."""

    def command(*given: str | Path) -> Answer:
        words = tuple(map(str, given))
        result = CliRunner().invoke(app, words, prog_name="autotile", catch_exceptions=False)
        return Answer(words, result.exit_code, result.stdout, result.stderr)

    return command


@pytest.fixture
def tune(run: Run, scale_toml: Path, recording: Path) -> Run:
    """Tune the tiny kernel by replay."""
    return lambda *words: run("tune", scale_toml, "n=1048576", f"--replay={recording}", *words)


@pytest.fixture(scope="session")
def whole_study() -> list[bytes]:
    """The file of a database in which the tiny kernel is tuned, as soon as a test has needed it."""
    return []


@pytest.fixture
def tuned(request: pytest.FixtureRequest, whole_study: list[bytes], tmp_path: Path) -> Path:
    """The user's database, in which every configuration of the tiny kernel was tried."""
    path = tmp_path / "tuning.db"
    if not whole_study:
        assert request.getfixturevalue("tune")("--trials", "12").code == 0
        whole_study.append(path.read_bytes())
    path.write_bytes(whole_study[0])
    return path
