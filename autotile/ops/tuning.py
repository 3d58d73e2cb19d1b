"""Tune a kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotile.api.targets import check_device_index, open_problem
from autotile.core.model import Problem
from autotile.core.objectives import normalize_objectives
from autotile.database.engine import parse_location
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.dispatcher import forget_served
from autotile.settings import read_settings
from autotile.tuning import session
from autotile.tuning.options import TuneOptions
from autotile.tuning.recorder import Recorded, record
from autotile.tuning.result import Progress, TuneResult

Observer = Callable[[Progress], None]


def tune(
    kernel: str,
    /,
    *,
    dtype: str | None = None,
    options: TuneOptions | None = None,
    observe: Observer | None = None,
    **sizes: int,
) -> TuneResult:
    """Find the fastest configuration of a kernel for a problem, prove it, and keep it in the database.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of its search-space file.
    dtype
        One of the kernel's; None for its first.
    options
        How to tune; None for the defaults.
    observe
        Called with a `Progress` as the session goes on.
    **sizes
        The problem's sizes, such as ``M=4096``.

    Returns
    -------
    TuneResult
        With the winner, the default, the ratio between them with its interval, and what the gates rejected.

    Raises
    ------
    InputError
        Kernel, size, dtype or option cannot be used, the space is empty, or the database cannot be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    WorkerError
        The GPU worker died again and again.

    Examples
    --------
    >>> result = tune("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    >>> result.winner.config  # doctest: +SKIP
    {'BM': 128, 'BN': 128, ...}
    """
    return tune_problem(*open_problem(kernel, sizes, dtype), options or TuneOptions(), observe)


def tune_problem(kernel: Kernel, problem: Problem, options: TuneOptions, observe: Observer | None = None) -> TuneResult:
    """`tune` for a kernel that is read already."""
    options = replace(
        options,
        objectives=normalize_objectives(options.objectives),
        verify_sizes=_whole_sizes(kernel, problem, options.verify_sizes),
    )
    if options.replay is None and options.device_index > 0:
        check_device_index(options.device_index)
    result = session.tune(kernel, problem, read_settings(), options, observe or (lambda _: None))
    forget_served()  # the next get_best_kernel sees what was found
    return result


def _whole_sizes(kernel: Kernel, problem: Problem, given: Sequence[Mapping[str, int]]) -> tuple[Mapping[str, int], ...]:
    """Problems to be right on, each checked and with the tuned sizes where it names none."""
    if not all(given):
        raise InputError("a further problem to verify names no size, expected SIZE=N[,...] such as M=1,N=1")
    return tuple(resolve_problem(kernel.spec, {**problem.sizes, **sizes}, problem.dtype).sizes for sizes in given)


def serving_call(kernel: str, problem: Problem, *, dtype: str | None, database: str | None) -> str:
    """The line of Python that serves what was tuned, with what the user chose beyond the defaults.

    A password in the database's URL is shown as ``***``.
    """
    database = str(parse_location(database)) if database is not None else None
    sizes = [f"{name}={value}" for name, value in problem.sizes.items()]
    choices = [f"{name}={json.dumps(value)}" for name, value in (("dtype", dtype), ("database", database)) if value]
    return f"kernel = autotile.get_best_kernel({', '.join([json.dumps(kernel), *sizes, *choices])})"


def record_problem(
    kernel: Kernel,
    problem: Problem,
    options: TuneOptions,
    *,
    sample: int | None = None,
    output: Path | None = None,
    observe: Observer | None = None,
) -> Recorded:
    """Measure a whole space, or a random sample of it, and write it down for replay.

    Raises
    ------
    InputError
        There is no GPU, or the file cannot be written.
    """
    check_device_index(options.device_index)
    return record(
        kernel, problem, read_settings(), options, sample=sample, output=output, observe=observe or (lambda _: None)
    )
