"""The command line as its users run it, and a recording of a tiny kernel to replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotile.cli.application import app
from autotile.core.device import device_profile
from autotile.core.model import Config, Measurement, Outcome, Trial
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.keys import TuningKey, space_hash
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.space.search_space import feasible_space


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


@pytest.fixture
def recording(scale_toml: Path, tmp_path: Path) -> Path:
    """Every configuration of the tiny kernel on an H200, with made-up times; one of them is wrong."""
    kernel = load_kernel(str(scale_toml))
    device = device_profile("h200")
    problem = resolve_problem(kernel.spec, {"n": 1048576})
    space = feasible_space(kernel.spec, problem.sizes, device)
    key = TuningKey.for_device(
        problem,
        device,
        template_hash=kernel.source_hash,
        space_hash=space_hash(kernel.spec),
        options=kernel.spec.options,
        nvrtc_version=nvrtc_version(),
        l2_mode="cold",
    )
    path = tmp_path / "scale.npz"
    header = RecordingHeader(key=key, parameters=kernel.spec.parameters, device=device, valid_configs=len(space))
    write_recording(path, header, [_trial(space.config(row)) for row in range(len(space))])
    return path


def _trial(config: Config) -> Trial:
    """256 threads are fastest, and more work a thread helps a little; the smallest block gives a wrong result."""
    if config["THREADS"] == 32 and config["WORK"] == 4:
        return Trial(config, Outcome.WRONG_RESULT, "y[3] is 0, expected 1", "verify")
    time_us = 1000 / int(config["THREADS"]) + 2 / int(config["WORK"])
    return Trial(config, Outcome.OK, "", "measure", measurement=Measurement(time_us, 0.99 * time_us, 1.01 * time_us))
