"""Recordings: measure a whole space, or a random sample of it, for replay."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotile.core.model import Problem, Trial
from autotile.core.text import Result, plural
from autotile.errors import InputError
from autotile.exchange.recording import RecordingHeader, recording_name, write_recording
from autotile.kernel.library import Kernel
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import Settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Observer
from autotile.tuning.session import open_session

_SAMPLE_LIMIT_S = 0.02
"""GPU time of the samples of one configuration, in seconds: a recording holds thousands of configurations, so that more
than nine samples are taken only of short kernels."""


@dataclass(frozen=True, slots=True, repr=False)
class Recorded(Result):
    """Result of a recording session.

    Attributes
    ----------
    path
        File that was written; None where the user interrupted, and the same command resumes from the database.
    header
        Description of the recording.
    configurations
        Number of measured configurations.
    seconds
        Wall time of the session, in seconds.
    """

    path: Path | None
    header: RecordingHeader
    configurations: int
    seconds: float

    def _headline(self) -> str:
        file = str(self.path) if self.path is not None else "interrupted before a file was written"
        measured = plural(self.configurations, "configuration")
        return f"{self.header.problem} on {self.header.key.gpu_name}: {measured}, {file}"


def record(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    *,
    sample: int | None = None,
    output: Path | None = None,
    observe: Observer = lambda _: None,
) -> Recorded:
    """Measure configurations on the GPU, without pruning, and write them as a recording.

    Every trial is stored in the database as in tuning, so that an interrupted recording resumes.

    Parameters
    ----------
    kernel, problem, settings, options, observe
        As for `autotile.tuning.session.tune`; the sampler and the number of trials are set here.
    sample
        Number of configurations of a random sample; None for all configurations.
    output
        File or folder to write to; None for the current folder. In a folder the file is named after its contents.

    Raises
    ------
    InputError
        There is no GPU: a recording cannot be made from a replay.
    """
    options = replace(
        options,
        sampler=BRUTE_FORCE if sample is None else "random",
        trials=sample,
        discard=False,
        finals=0,
        sample_limit_s=_SAMPLE_LIMIT_S,
    )
    with open_session(kernel, problem, settings, options, observe) as session:
        if session.device.source == "replayed":
            raise InputError("a recording is measured on a CUDA device, not made from a replay; see `autotile doctor`")
        result = session.run()
        header = RecordingHeader(
            key=session.key,
            parameters=kernel.spec.parameters,
            device=session.device,
            driver=session.device.driver,
            settings={"sample_limit_s": options.sample_limit_s, "seed": options.seed, "host": platform.node()},
            valid_configs=result.valid,
            chosen="all" if len(session.trials) >= result.valid else f"{len(session.trials)} at random",
        )
        path = None if result.interrupted else _write(header, session.trials, output)
        return Recorded(path, header, len(session.trials), result.seconds)


def _write(header: RecordingHeader, trials: Sequence[Trial], output: Path | None) -> Path:
    path = output if output is not None else Path()
    is_folder = path.is_dir()
    if is_folder:
        path /= recording_name(header)
    write_recording(path, header, trials, follow_link=not is_folder)
    return path
