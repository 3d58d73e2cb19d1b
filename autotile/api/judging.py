"""Judgement of a rewritten kernel: whether it is right, and how fast it is beside the present winner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotile.api.keywords import read_keywords
from autotile.api.targets import complete_config, open_problem, sizes_notice
from autotile.api.tuning import checked_options
from autotile.core.argument_types import checked
from autotile.database.database import database_location
from autotile.errors import InputError
from autotile.kernel.library import Kernel, KernelName, make_kernel
from autotile.serving.dispatcher import find_best_result
from autotile.settings import absolute_path, read_settings, user_path
from autotile.tuning.options import TuneOptions
from autotile.tuning.verifying import CandidateCheck, judge


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
    notices = (*filter(None, [sizes_notice(kernel.spec, problem.sizes, given)]), *judged.notices)
    return replace(judged, source=str(candidate), tier=served.tier, notices=notices)


def _rewritten(kernel: Kernel, source: str | os.PathLike[str]) -> Kernel:
    path = absolute_path(user_path(source, "a rewritten source"), "a rewritten source")
    if not path.is_file():
        raise InputError(f"there is no file {str(source)!r}; give the path of the rewritten CUDA C++ source")
    return make_kernel(kernel.spec, path)


def _index(options: TuneOptions) -> int | None:
    """Return the device to look up the winner for; None without a GPU, which `judge` reports."""
    from autotile.cuda.driver import device_count

    return options.device_index if device_count() > 0 else None
