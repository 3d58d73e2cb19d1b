"""Judgement of a rewritten kernel: whether it is right, and how fast it is beside the present winner."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotile.api.keywords import read_keywords
from autotile.api.targets import complete_config, open_problem, sizes_notice
from autotile.api.tuning import checked_options
from autotile.core.argument_types import checked
from autotile.core.device import DeviceProperties
from autotile.core.model import Problem, Trial, config_text
from autotile.core.statistics import Interval
from autotile.core.text import Displayed, device_text, time_text
from autotile.database.database import database_location
from autotile.errors import InputError
from autotile.kernel.library import Kernel, KernelName, make_kernel
from autotile.serving.dispatcher import find_best_result
from autotile.settings import absolute_path, read_settings, user_path
from autotile.tuning.candidate_check import CandidateVerdict, judge
from autotile.tuning.options import TuneOptions
from autotile.tuning.result import trial_entry


@dataclass(frozen=True, slots=True, repr=False)
class CandidateCheck(Displayed):
    """Judgement of a candidate.

    Attributes
    ----------
    problem, device
        Problem and device that it was verified and timed at.
    source
        Path of the candidate's source.
    verdict
        ``wrong``; or ``faster``, ``equal`` or ``slower`` than the winner, by the 95 % interval; ``right`` where the
        winner could not be timed.
    candidate, winner
        Trials of both, with configuration, resources and time; one that failed has its outcome and the reason.
    tier
        How the winner's configuration was found, as for `autotile.best`: ``exact`` if it was tuned for the problem.
    speedup
        Time of the winner over time of the candidate, with its interval; None where they were not timed.
    repeats
        Number of times that the candidate was verified, with two launches each.
    sanitized
        Tools of compute-sanitizer that ran the candidate and found nothing.
    notices
        Checks that could not be made, one line each.
    """

    problem: Problem
    device: DeviceProperties
    source: str
    verdict: CandidateVerdict
    candidate: Trial
    winner: Trial
    tier: str
    speedup: Interval | None
    repeats: int
    sanitized: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the candidate passed every check."""
        return self.verdict != "wrong"

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``autotile check --json`` prints."""
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": {"name": self.device.name, "source": self.device.source},
            "source": self.source,
            "verdict": self.verdict,
            "right": self.is_right,
            "candidate": {**trial_entry(self.candidate), "stage": self.candidate.stage},
            "winner": {**trial_entry(self.winner), "tier": self.tier},
            "speedup": {"ratio": self.speedup.value, "interval": [self.speedup.low, self.speedup.high]}
            if self.speedup is not None
            else None,
            "repeats": self.repeats,
            "sanitized": list(self.sanitized),
            "notices": list(self.notices),
        }

    def _headline(self) -> str:
        return f"{self.source} for {self.problem} on {device_text(self.device)}: {self.summary}"

    @property
    def summary(self) -> str:
        """Verdict with the ratio, or with what is wrong."""
        if not self.is_right:
            return f"wrong, {self.candidate.outcome}: {self.candidate.reason}"
        if self.speedup is None:
            return f"right, {time_text(self.candidate.time_us)}"
        ratio = f"{self.speedup.value:.3f}x, 95 % interval {self.speedup.low:.3f}x to {self.speedup.high:.3f}x"
        return f"right and {_WORDS[self.verdict]} the winner: {ratio}"

    def _facts(self) -> Iterable[tuple[str, str]]:
        for label, trial in (("candidate", self.candidate), ("winner", self.winner)):
            yield label, f"{time_text(trial.time_us)}, {config_text(trial.config)}"


_WORDS = {"faster": "faster than", "equal": "as fast as", "slower": "slower than"}


@checked
def check(
    candidate: str | os.PathLike[str],
    like: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    **named: Any,
) -> CandidateCheck:
    """Verify a rewritten source of a kernel, and time it against the present winner.

    The source takes the place of the kernel's; entry, macros, launch, arguments and reference are those of the kernel.
    It is verified with everything that the winner of a session goes through: at the ragged sizes, the tuned and further
    ones, with guard bands around its arrays, outputs that are filled with NaNs before each launch, two sets of inputs
    in turn, so that a result kept from an earlier launch is wrong, and after timed launches. Then both are timed in
    interleaved rounds. Nothing is stored.

    Parameters
    ----------
    candidate
        Path of the source.
    like
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`.
    sizes
        Problem sizes and flags; missing ones are taken from the search-space file.
    **named
        Sizes and options by name, as for `autotile.tune`.
    config
        Configuration of the candidate; parameters that are left out, and all if it is None, are those of the winner.
    dtype, device, database, options
        As for `autotile.tune`; of the options, ``verify_sizes``, ``sanitize``, ``l2`` and the timeouts apply.

    Raises
    ------
    InputError
        The candidate cannot be read, its configuration is not valid, there is no GPU, or as for `autotile.tune`.
    ToolchainError, WorkerError
        As for `autotile.tune`.

    Examples
    --------
    >>> check("rewritten.cu", "mine.toml", N=1 << 24)  # doctest: +SKIP
    <CandidateCheck: rewritten.cu for mine N=16777216 float32 on NVIDIA H200: right and faster than the winner: ...>
    """
    given, chosen = read_keywords(like, sizes, named, options, device=device, database=database)
    kernel, problem = open_problem(like, given, dtype)
    chosen = checked_options(kernel, problem, replace(chosen, transfer=False))
    location = str(database_location(chosen.database))
    served = find_best_result(kernel, problem.dtype, _index(chosen), location, problem.sizes)
    wanted = complete_config(kernel.spec, {**served.config, **(config or {})})
    judged = judge(
        kernel,
        _rewritten(kernel, candidate),
        problem,
        configs=(wanted, served.config),
        settings=read_settings(),
        options=chosen,
    )
    return CandidateCheck(
        problem=problem,
        device=judged.device,
        source=str(candidate),
        verdict=judged.verdict,
        candidate=judged.candidate,
        winner=judged.winner,
        tier=served.tier,
        speedup=judged.speedup,
        repeats=judged.repeats,
        sanitized=judged.sanitized,
        notices=(*filter(None, [sizes_notice(kernel.spec, problem.sizes, given)]), *judged.notices),
    )


def _rewritten(kernel: Kernel, source: str | os.PathLike[str]) -> Kernel:
    path = absolute_path(user_path(source, "a rewritten source"), "a rewritten source")
    if not path.is_file():
        raise InputError(f"there is no file {str(source)!r}; give the path of the rewritten CUDA C++ source")
    return make_kernel(kernel.spec, path)


def _index(options: TuneOptions) -> int | None:
    """Return the device to look up the winner for; None without a GPU, which `judge` reports."""
    from autotile.cuda.driver import device_count

    return options.device_index if device_count() > 0 else None
