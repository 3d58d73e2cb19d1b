"""Survey of a space: every configuration compiled, or a sample, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from autotile.api.inspection import OpenedSpace, open_space
from autotile.api.targets import merge_sizes
from autotile.core.argument_types import checked
from autotile.cuda.compiler import compile_job
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.library import KernelName
from autotile.report.survey import Survey, SurveyTable
from autotile.settings import read_settings
from autotile.space.time_estimate import estimate_times
from autotile.tuning.options import check_whole
from autotile.tuning.progress_state import StopRequest
from autotile.tuning.session import gated_trial
from autotile.workers.compile_pool import Compiled, CompilePool, worker_count

_AHEAD = 8
"""Configurations for each worker that are compiled or wait for it at a time, which bounds the memory of jobs."""
_POLL_S = 0.25
"""Longest wait in seconds before Ctrl-C is noticed."""


@dataclass(frozen=True, slots=True)
class SurveyProgress:
    """State of a running survey.

    Attributes
    ----------
    done, planned
        Number of configurations that were compiled, and that will be.
    failed
        Number of those that cannot be launched.
    elapsed_s
        Seconds since the first compilation began.
    notices
        Remarks for the user, one line each.
    """

    done: int
    planned: int
    failed: int
    elapsed_s: float
    notices: tuple[str, ...]


@checked
def survey(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    dtype: str | None = None,
    device: int | str | None = None,
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    observe: Callable[[SurveyProgress], None] = lambda _: None,
    **named_sizes: int,
) -> Survey:
    """Compile the valid configurations of a kernel, and return their resources, occupancy and failures.

    No GPU is needed. The configurations are compiled in random order on all cores, through the cubin cache, so that a
    survey that is interrupted holds a fair sample, and goes on from there when it is repeated.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`.
    sizes, **named_sizes
        Problem sizes and flags; missing ones are taken from the search-space file.
    dtype
        Element type; None for the kernel's first.
    device
        CUDA index of a GPU of this machine, or name of a GPU; None for the first GPU and, without a GPU, an H200.
    sample
        Number of configurations to compile, chosen at random; None for all.
    seed
        Seed of the choice: of equal seeds, a smaller sample is part of a larger one.
    workers
        Number of compile processes, at most two per core; None for one per core.
    observe
        Called with the state as compilations end.

    Raises
    ------
    InputError
        As for `autotile.space`; or ``sample``, ``seed`` or ``workers`` is out of range, or the cubin cache cannot be
        written.
    ToolchainError
        NVRTC is not installed.
    SpecError
        A function takes other parameters than the declared arguments.

    Examples
    --------
    >>> survey("sgemm_2d", device="h200", sample=200, M=4096, N=4096, K=4096)
    <Survey: sgemm_2d M=4096 N=4096 K=4096 float32 on NVIDIA H200 (profile): 200 configurations compiled, 197 usable>
    """
    for name, value, least in (("sample", sample, 1), ("seed", seed, 0), ("workers", workers, 1)):
        check_whole(name, value, least)
    opened = open_space(kernel, merge_sizes(sizes, named_sizes), dtype, device)
    space = opened.space
    order = np.random.default_rng(seed).permutation(len(space))[:sample]
    notices = opened.notices
    if sample is not None and sample > len(space):
        notices += (f"there are {len(space):,} valid configurations: all are compiled",)
    estimate = estimate_times(opened.kernel.spec, opened.problem.sizes, opened.device, space, opened.problem.dtype)
    table, started = SurveyTable(space), time.monotonic()

    def report() -> None:
        observe(SurveyProgress(len(table), len(order), table.failed, time.monotonic() - started, notices))

    report()
    with StopRequest() as stop:
        for _ in _compile(opened, order.tolist(), workers, table, lambda: stop.requested):
            report()
    return table.survey(
        opened.problem,
        opened.device,
        planned=len(order),
        seconds=time.monotonic() - started,
        interrupted=len(table) < len(order),
        estimated_us=estimate.time_us if estimate is not None else None,
        notices=notices,
    )


def _compile(
    opened: OpenedSpace, order: list[int], workers: int | None, table: SurveyTable, is_stopped: Callable[[], bool]
) -> Iterator[None]:
    """Compile rows and add them to the table; yield whenever some have ended."""
    count = worker_count(workers)
    kernel, problem, device, space = opened.kernel, opened.problem, opened.device, opened.space
    rows = iter(order)
    pending: dict[Future[Compiled], int] = {}
    with closing(CompilePool(read_settings(), count)) as pool:
        while not is_stopped():
            for row in islice(rows, _AHEAD * count - len(pending)):
                config = space.config(row)
                job = partial(compile_job, kernel, config, problem.dtype, device.architecture, problem.sizes)
                pending[pool.submit(job)] = row
            if not pending:
                return
            done, _ = wait(pending, _POLL_S, FIRST_COMPLETED)
            for future in done:
                row = pending.pop(future)
                config = space.config(row)
                plan = LaunchPlan.of(kernel.spec, config, problem.sizes, device)
                table.add(row, gated_trial(kernel, problem, config, future.result(), plan=plan, device=device))
            if done:
                yield
