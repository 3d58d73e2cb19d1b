"""Inspection of search spaces, configurations and occupancy; nothing is run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from autotile.api.explanation import (
    BlockResources,
    Explanation,
    OperationExplanation,
    explain_config,
    explain_operation,
    limits_table,
)
from autotile.api.targets import (
    merge_sizes,
    named_operation,
    open_problem,
    resolve_device,
    resolve_served_device,
    sizes_notice,
    split_assignments,
)
from autotile.core.argument_types import checked
from autotile.core.device import DeviceProperties
from autotile.core.documents import to_document
from autotile.core.model import Occupancy, Problem, Value
from autotile.core.text import RIGHT, Part, Result, ResultTable, device_text, duration_text, occupancy_text
from autotile.errors import InputError
from autotile.kernel.library import Kernel, KernelName, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.dispatcher import find_best_kernel
from autotile.space.enumeration import SpaceStage
from autotile.space.search_space import SearchSpace, feasible_space

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MAX_PER_BLOCK = 2**31 - 1
"""Largest accepted number of threads, registers or bytes of a block."""


@dataclass(frozen=True, slots=True, repr=False)
class SpaceSummary(Result):
    """Size of a search space, and how far each rule and limit reduces it.

    Attributes
    ----------
    problem, device
        Problem and device that the space is for.
    parameters
        Values of each parameter.
    combinations
        Number of combinations before any rule.
    rules, limits
        Stages in the order applied; each holds the number of configurations that remain after it.
    valid
        Number of configurations that remain after the last stage.
    seconds
        Wall time of the enumeration, in seconds.
    notices
        Assumptions about the device and the sizes, one line each.
    """

    problem: Problem
    device: DeviceProperties
    parameters: Mapping[str, tuple[Value, ...]]
    combinations: int
    rules: tuple[SpaceStage, ...]
    limits: tuple[SpaceStage, ...]
    valid: int
    seconds: float
    notices: tuple[str, ...] = ()

    def funnel(self) -> Iterator[tuple[str, int]]:
        """Yield each stage with the number of configurations that remain after it."""
        yield "all combinations", self.combinations
        for stage in self.rules:
            yield f"{'heuristic' if stage.is_heuristic else 'rule'} {stage.name}", stage.remaining
        for stage in self.limits:
            yield f"limit {stage.name}", stage.remaining

    def plot_rules(self, *, dark: bool | None = None) -> go.Figure:
        """Return a Plotly figure of the number of configurations that each rule and limit leaves."""
        from autotile.report.space_charts import space_chart
        from autotile.report.theme import figure_of

        return figure_of(space_chart(tuple(self.funnel())), dark=dark)

    def _headline(self) -> str:
        return f"{self.problem} on {device_text(self.device)}: {self.valid:,} of {self.combinations:,} valid"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        """Yield the values of each parameter, then the configurations that each stage leaves."""
        yield [(name, " ".join(map(str, values))) for name, values in self.parameters.items()]
        rows = [(stage, f"{count:,}") for stage, count in self.funnel()]
        yield ResultTable(("after", f"{RIGHT}configurations left"), rows, is_wrapped=True)
        yield f"{self.valid:,} valid configurations, enumerated in {duration_text(self.seconds)}"

    def to_json(self) -> dict[str, Any]:
        """Return the counts, and the values of each parameter."""
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device.identity,
            "combinations": self.combinations,
            "valid": self.valid,
            "rules": _stages_document(self.rules),
            "limits": _stages_document(self.limits),
            "parameters": {name: list(values) for name, values in self.parameters.items()},
            "seconds": round(self.seconds, 6),
        }


def _stages_document(stages: Sequence[SpaceStage]) -> list[dict[str, Any]]:
    return [
        {"name": stage.name, "remaining": stage.remaining, **({"heuristic": True} if stage.is_heuristic else {})}
        for stage in stages
    ]


@dataclass(frozen=True, slots=True, repr=False)
class OccupancyResult(Result):
    """Occupancy of an SM by blocks of given resources.

    Attributes
    ----------
    device
        Device whose limits apply.
    block
        Resources of a block.
    occupancy
        Resident blocks and warps, and the limits that determine them.
    notices
        Assumptions about the device, one line each.
    """

    device: DeviceProperties
    block: BlockResources
    occupancy: Occupancy
    notices: tuple[str, ...] = ()

    def plot_limits(self, *, dark: bool | None = None) -> go.Figure:
        """Return a Plotly figure of the number of blocks that each resource of an SM allows."""
        from autotile.report.space_charts import block_limits_chart
        from autotile.report.theme import figure_of

        return figure_of(block_limits_chart(self.device, self.occupancy), dark=dark)

    def plot_over(
        self, resource: Literal["threads", "registers", "smem_bytes"] = "registers", *, dark: bool | None = None
    ) -> go.Figure:
        """Return a Plotly figure of the resident warps of an SM over one resource, with the others as they are.

        Raises
        ------
        InputError
            There is no such resource.
        """
        from autotile.report.space_charts import occupancy_chart
        from autotile.report.theme import figure_of

        device, block = self.device, self.block
        axes = {
            "threads": ("threads of a block", "threads", range(32, device.max_threads_per_block + 1, 32)),
            "registers": ("registers of a thread", "registers", range(16, device.max_registers_per_thread + 1)),
            "smem_bytes": ("shared memory of a block", "bytes", range(0, device.smem_per_block_optin_bytes + 1, 1024)),
        }
        if resource not in axes:
            raise InputError(f"there is no resource {resource!r}; there are {', '.join(axes)}")
        name, unit, amounts = axes[resource]

        def warps_at(amount: int) -> int:
            return replace(block, **{resource: amount}).occupancy(device).warps_per_sm

        present = int(getattr(block, resource))
        chart = occupancy_chart((name, unit), amounts, present, warps_at=warps_at, max_warps=device.max_warps_per_sm)
        return figure_of(chart, dark=dark)

    def _headline(self) -> str:
        return f"{device_text(self.device)}: {occupancy_text(self.device, self.occupancy)}"

    def _heading(self) -> str:
        return device_text(self.device)

    def _parts(self) -> Iterator[Part]:
        """Yield the limits, then the occupancy in one line."""
        yield limits_table(self.device, self.block, self.occupancy)
        yield [("occupancy", occupancy_text(self.device, self.occupancy))]

    def to_json(self) -> dict[str, Any]:
        """Return the resources and the occupancy; 2147483647 blocks stand for a limit that does not apply."""
        return {
            "device": self.device.identity,
            "threads": self.block.threads,
            "registers": self.block.registers,
            "smem_bytes": self.block.smem_bytes,
            **to_document(self.occupancy),
        }


@checked
def space(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    dtype: str | None = None,
    device: int | str | None = None,
    **named_sizes: int,
) -> SpaceSummary:
    """Count the configurations that each rule and each limit of a device leaves.

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

    Raises
    ------
    InputError
        The kernel, a size, the dtype or the device is unknown, the search-space file is malformed, or a rule or limit
        leaves no configuration.

    Examples
    --------
    >>> space("sgemm_2d", device="h200", M=4096, N=4096, K=4096)
    <SpaceSummary: sgemm_2d M=4096 N=4096 K=4096 float32 on NVIDIA H200 (profile): 14,712 of 93,312 valid>
    """
    opened = open_space(kernel, merge_sizes(sizes, named_sizes), dtype, device)
    found = opened.space
    return SpaceSummary(
        problem=opened.problem,
        device=opened.device,
        parameters={parameter.name: parameter.values for parameter in found.parameters},
        combinations=found.combinations,
        rules=found.rules,
        limits=found.limits,
        valid=len(found),
        seconds=found.seconds,
        notices=opened.notices,
    )


@dataclass(frozen=True, slots=True)
class OpenedSpace:
    """The valid configurations of a problem on a device, and what was assumed of both, one line each."""

    kernel: Kernel
    problem: Problem
    device: DeviceProperties
    space: SearchSpace
    notices: tuple[str, ...]


def open_space(
    kernel: KernelName, given: Mapping[str, int], dtype: str | None = None, device: int | str | None = None
) -> OpenedSpace:
    """Load a kernel and enumerate its valid configurations; parameters and errors are those of `space`."""
    target = resolve_device(device)
    loaded, problem = open_problem(kernel, given, dtype)
    found = feasible_space(loaded.spec, problem.sizes, target.device, problem.dtype)
    notices = _nonempty(target.notice, sizes_notice(loaded.spec, problem.sizes, given))
    return OpenedSpace(loaded, problem, target.device, found, notices)


@checked
def explain(
    kernel: KernelName,
    assignments: Mapping[str, Value] | None = None,
    /,
    *,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    library: bool = True,
    **named_assignments: Value,
) -> Explanation | OperationExplanation:
    """Explain one configuration on one device: rules and limits, launch, compiled resources and occupancy.

    The configuration is compiled if NVRTC is installed; no GPU is needed. For an operation, explain what computes a
    problem, and why: the best contenders with their times.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`; or name of an operation, or
        path of its file.
    assignments, **named_assignments
        Values of parameters and problem sizes by name. Missing parameters are taken from the default configuration,
        missing sizes from the file. For an operation: its sizes, flags and conditions.
    dtype
        Element type; None for the kernel's first.
    device
        CUDA index of a GPU of this machine, or name of a GPU; None for the first GPU and, without a GPU, an H200.
    database, library
        For an operation: path or URL of the database, None for the user's own; and whether a library may compute it.

    Raises
    ------
    InputError
        The kernel, the dtype or the device is unknown, a name is neither a parameter nor a size, or a value has
        another type than the parameter. A value of the right type that the file does not list is a failed check.

    Examples
    --------
    >>> explain("sgemm_2d", device="h200", BM=64, M=4096).occupancy.limited_by
    ('registers',)
    """
    if (operation := named_operation(kernel)) is not None:
        given = cast("dict[str, int]", merge_sizes(assignments, named_assignments))
        problem = operation.resolve(given, dtype, defaults=True)
        from autotile.database.database import database_location

        location, served_for = str(database_location(database)), resolve_served_device(device)
        served = find_best_kernel(str(kernel), problem.dtype, served_for, location, problem.sizes, library=library)
        return explain_operation(operation, problem, served, _nonempty(sizes_notice(operation, problem.sizes, given)))
    return explain_kernel(kernel, merge_sizes(assignments, named_assignments), dtype=dtype, device=device)


def explain_kernel(
    kernel: KernelName, given: Mapping[str, Value], *, dtype: str | None = None, device: int | str | None = None
) -> Explanation:
    """Explain one configuration of a kernel, as `explain` does."""
    target = resolve_device(device)
    loaded = load_kernel(kernel)
    config, sizes = split_assignments(loaded.spec, given)
    problem = resolve_problem(loaded.spec, sizes, dtype, defaults=True)
    notices = _nonempty(target.notice, sizes_notice(loaded.spec, problem.sizes, given))
    return explain_config(loaded, config, problem, target.device, notices)


@checked
def occupancy(
    threads: int, registers: int = 0, smem_bytes: int = 0, *, device: int | str | None = None
) -> OccupancyResult:
    """Compute how many blocks of given resources an SM holds, and which limits determine that.

    Parameters
    ----------
    threads
        Threads per block.
    registers
        Registers per thread; 0 to leave them out of account.
    smem_bytes
        Static and dynamic shared memory per block, in bytes.
    device
        CUDA index of a GPU of this machine, or name of a GPU; None for the first GPU and, without a GPU, an H200.

    Raises
    ------
    InputError
        The device is unknown, a count is negative or over 2**31 - 1, or there are no threads.

    Examples
    --------
    >>> occupancy(1024, 32, 8192, device="rtx-3060").occupancy.blocks_per_sm
    1
    """
    target = resolve_device(device)
    if threads < 1 or registers < 0 or smem_bytes < 0 or max(threads, registers, smem_bytes) > _MAX_PER_BLOCK:
        raise InputError(
            f"{threads} threads, {registers} registers per thread and {smem_bytes} bytes of shared memory are no "
            f"block; expected at least 1 thread, no negative number, and at most {_MAX_PER_BLOCK:,} of each"
        )
    block = BlockResources(threads, registers, smem_bytes)
    return OccupancyResult(target.device, block, block.occupancy(target.device), _nonempty(target.notice))


def _nonempty(*notices: str) -> tuple[str, ...]:
    return tuple(filter(None, notices))
