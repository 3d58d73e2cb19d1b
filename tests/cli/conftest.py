"""The command line as its users run it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotile.cli.application import app


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document that it must be."""
        return json.loads(self.out)

    def is_refused(self, said: str) -> None:
        """Assert that the input was refused with a message, and that nothing else was printed."""
        assert self.code == 2
        assert said in self.err
        assert not self.out or set(self.document) == {"error"}


@pytest.fixture
def run() -> Callable[..., Answer]:
    """Run a command; anything raised but an exit fails the test."""

    def command(*words: str | Path) -> Answer:
        result = CliRunner().invoke(app, [str(word) for word in words], prog_name="autotile", catch_exceptions=False)
        return Answer(result.exit_code, result.stdout, result.stderr)

    return command


@pytest.fixture
def tune(run: Callable[..., Answer], scale_toml: Path, recording: Path) -> Callable[..., Answer]:
    """Tune the tiny kernel by replay."""
    return lambda *words: run("tune", scale_toml, "n=1048576", f"--replay={recording}", *words)
