"""Inspection without a GPU: search spaces, also compiled, configurations, and occupancy."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from autotile.api.targets import (
    merge_sizes,
    open_problem,
    resolve_device,
    resolve_served_device,
    sizes_notice,
    split_assignments,
)
from autotile.core.argument_types import checked
from autotile.core.device import DeviceProperties
from autotile.core.documents import attributes, to_document
from autotile.core.model import (
    Config,
    LaunchGeometry,
    Occupancy,
    Outcome,
    Problem,
    Resources,
    Trial,
    Value,
    config_text,
)
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Facts,
    Part,
    Result,
    ResultTable,
    bytes_text,
    device_text,
    duration_text,
    occupancy_text,
    percent_text,
    plural,
    source_text,
    time_text,
)
from autotile.cuda.compiler import check_signatures, compile_job
from autotile.database.paths import check_output
from autotile.errors import ConfigError, InputError, SpecError, ToolchainError, WorkerError
from autotile.kernel.arguments import extents_text
from autotile.kernel.launch import LaunchData, LaunchPlan, StepLaunch, known_names, value_or_zero
from autotile.kernel.library import Kernel, KernelName, load_kernel
from autotile.kernel.operation import named_operation
from autotile.kernel.problem import resolve_problem, unsupported_reason
from autotile.kernel.spec import STEP, KernelSpec
from autotile.serving.choice import Contender
from autotile.serving.dispatcher import find_best_kernel
from autotile.settings import read_settings
from autotile.space import limits
from autotile.space.enumeration import SpaceStage
from autotile.space.limits import (
    UNLIMITED,
    CompiledStep,
    check_config,
    compiled_steps,
    demand_of,
    limits_of,
    unfit_scalar,
)
from autotile.space.search_space import SearchSpace, feasible_space

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from autotile.core.model import CompiledFunction
    from autotile.report.survey import Survey


CheckKind = Literal["device", "argument", "value", "rule", "heuristic", "limit", "compiled"]
_MAX_PER_BLOCK = 2**31 - 1
"""Largest accepted number of threads, registers or bytes of a block."""
_AHEAD = 8
"""Configurations for each worker that are compiled or wait for it at a time, which bounds the memory of jobs."""
_POLL_S = 0.25
"""Longest wait in seconds before Ctrl-C is noticed."""


@dataclass(frozen=True, slots=True)
class BlockResources:
    """Resources that one block uses."""

    threads: int
    registers: int
    """Registers per thread; 0 if unknown."""
    smem_bytes: int
    """Static and dynamic shared memory per block, in bytes."""

    def occupancy(self, device: DeviceProperties) -> Occupancy:
        """Compute the occupancy of an SM by such blocks."""
        return limits.occupancy(self.threads, self.registers, self.smem_bytes, device)


def limits_table(device: DeviceProperties, block: BlockResources, occupancy: Occupancy) -> ResultTable:
    """Return, for each limit of the occupancy, the resources of a block, those of an SM, and the blocks they allow."""
    reserved = device.smem_reserved_per_block_bytes
    smem = f"{block.smem_bytes:,} B" + (f" + {reserved:,} B reserved" if reserved else "")
    registers = f"{block.registers:,} a thread" if block.registers else "not known"
    used_and_available = {
        "threads": (f"{block.threads:,}", f"{device.max_threads_per_sm:,}"),
        "registers": (registers, f"{device.registers_per_sm:,}"),
        "shared_memory": (smem, f"{device.smem_per_sm_bytes:,} B"),
        "blocks": ("1", f"{device.max_blocks_per_sm:,}"),
    }
    rows = []
    for name, (used, available) in used_and_available.items():
        blocks = occupancy.limits[name]
        allowed = "no limit" if blocks == UNLIMITED else f"{blocks:,}"
        binds = "binds" if name in occupancy.limited_by else ""
        rows.append((name.replace("_", " "), used, available, allowed, binds))
    headings = ("limit", f"{RIGHT}a block uses", f"{RIGHT}an SM has", f"{RIGHT}blocks allowed", "")
    return ResultTable(headings, rows, is_wrapped=True, styles=["bold" if row[-1] else "" for row in rows])


def contenders_table(contenders: Sequence[Contender]) -> ResultTable:
    """Return the ways to compute a problem of an operation, that which is served first."""
    rows = []
    for one in contenders:
        measured = source_text("measurement", one.source)
        known = measured if one.doubt is None else f"model, +-{100 * one.doubt:.0f} %"
        origin = NOTHING if one.time_us is None else known
        rows.append((one.kernel, time_text(one.time_us), origin, config_text(one.config) or NOTHING))
    return ResultTable(("computed by", f"{RIGHT}time", "known from", "configuration"), rows, ("configuration",))


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """One condition on a configuration."""

    kind: CheckKind
    """Origin of the condition. A ``heuristic`` only decides whether a search tries the configuration."""
    name: str
    """Name of the rule, limit or parameter."""
    holds: bool
    detail: str
    """Expression of a rule or heuristic; for others, the reason for a failure, or an empty string."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Result):
    """Everything that is known of a configuration without running it."""

    problem: Problem
    device: DeviceProperties
    config: Mapping[str, Value]
    checks: tuple[ConfigCheck, ...]
    """Values, rules, heuristics and limits in the order applied, then the conditions on the compiled code."""
    fault: str
    """Reason why the configuration cannot be used: the first rule or limit that it breaks, or the compiler's error.
    Empty if it can be used."""
    geometry: LaunchGeometry | None
    """Launch geometry; None if it cannot be evaluated."""
    resources: Resources | None
    """Resources reported by the compiler; None if the configuration was not compiled."""
    not_compiled: str
    """Reason why it was not compiled; otherwise empty."""
    block: BlockResources | None
    occupancy: Occupancy | None
    """Resources of a block and the resulting occupancy, as compiled, or else as declared in the search-space file. None
    if the launch geometry cannot be evaluated."""
    data: LaunchData | None
    """Workspaces and tensor maps; None if they cannot be evaluated."""
    launches: tuple[StepLaunch, ...]
    """The launches of a call, in order; empty if it cannot be evaluated. With several steps, the fields above are those
    of the main launch, see `LaunchPlan.main`."""
    steps: tuple[CompiledStep, ...]
    """Each step as compiled, the main one first; empty if the configuration was not compiled."""
    notices: tuple[str, ...]
    """Assumptions about the device and the sizes, one line each."""

    def _headline(self) -> str:
        verdict = "cannot be used" if self.fault else "valid"
        share = f", occupancy {percent_text(self.occupancy.occupancy)}" if self.occupancy is not None else ""
        return f"{self._heading()}: {verdict}{share}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        valid = "valid" if self.resources is not None else "valid, as far as is known without compiling"
        facts: Facts = [
            ("configuration", config_text(self.config)),
            ("verdict", self.fault.partition("\n")[0] or valid),  # the checks below show a compiler's further lines
        ]
        if self.geometry is not None:
            grid, block = (extents_text(dimensions) for dimensions in (self.geometry.grid, self.geometry.block))
            facts.append(("grid", f"{grid}: {plural(self.geometry.blocks, 'block')}"))
            facts.append(("block", f"{block}: {plural(self.geometry.threads, 'thread')}"))
        if self.resources is not None:
            dynamic_bytes = self.geometry.dynamic_smem_bytes if self.geometry is not None else 0
            facts.append(("registers", f"{self.resources.registers} a thread"))
            facts.append(("spills", f"{self.resources.spill_bytes:,} B"))
            used = f"{self.resources.static_smem_bytes:,} B static, {dynamic_bytes:,} B dynamic"
            facts.append(("shared memory", used))
        else:
            facts.append(("not compiled", self.not_compiled))
        if len(self.launches) > 1:
            facts.append(("launches", f"{len(self.launches):,} in a call, of which the above is the main one"))
            for step in self.steps:
                of, launch = step.resources, step.geometry
                text = (
                    f"{step.entry}: {plural(launch.blocks, 'block')} of {plural(launch.threads, 'thread')}, "
                    f"{of.registers} registers a thread, "
                    f"{of.static_smem_bytes + launch.dynamic_smem_bytes:,} B shared, {of.spill_bytes:,} B spilled, "
                    f"occupancy {percent_text(step.occupancy.occupancy)}"
                )
                facts.append(("step", text))
        for workspace in self.data.workspaces if self.data is not None else ():
            text = "none for this configuration"
            if workspace.size_bytes:
                zeroed = ", zero before and after" if workspace.zeroed else ""
                shape = f"{extents_text(workspace.shape)} {workspace.dtype}"
                text = f"{shape}, {bytes_text(workspace.size_bytes)}{zeroed}"
            facts.append(("workspace", f"{workspace.name}: {text}"))
        for one in self.data.tensor_maps if self.data is not None else ():
            text = "none for this configuration"
            if not one.is_absent:
                swizzle = f"{one.swizzle_bytes} B swizzle" if one.swizzle_bytes else "no swizzle"
                text = f"{one.buffer} in boxes of {extents_text(one.box)} {one.dtype}, {swizzle}"
            facts.append(("tensor map", f"{one.name}: {text}"))
        yield facts
        rows = [(check.kind, check.name, "yes" if check.holds else "no", check.detail) for check in self.checks]
        styles = ["" if check.holds else "bold red" for check in self.checks]
        yield ResultTable(("check", "name", "met", "detail"), rows, is_wrapped=True, styles=styles)
        if self.block is not None and self.occupancy is not None:
            yield limits_table(self.device, self.block, self.occupancy)
            source = "compiled" if self.resources is not None else "declared by the search-space file"
            yield [("resources", source), ("occupancy", occupancy_text(self.device, self.occupancy))]

    def to_json(self) -> Any:
        """Return everything, with null for what is unknown."""
        data, several = self.data, len(self.launches) > 1
        launches = [
            {"step": one.step, **attributes(one.geometry, *_GEOMETRY), "arguments": one.arguments}
            for one in self.launches
        ]
        steps = [
            {
                "entry": step.entry,
                **attributes(step.geometry, *_GEOMETRY),
                "resources": attributes(step.resources, *_RESOURCES),
                "occupancy": step.occupancy,
            }
            for step in self.steps
        ]
        document = {
            **self.problem.document(),
            "device": {**self.device.identity, "compute_capability": self.device.compute_capability},
            "config": self.config,
            "valid": not self.fault,
            **attributes(self, "fault", "checks"),
            "geometry": self.geometry and attributes(self.geometry, *_GEOMETRY),
            **({"launches": launches, "steps": steps} if several else {}),
            "workspaces": data
            and [{**msgspec.structs.asdict(one), "bytes": one.size_bytes} for one in data.workspaces],
            "tensor_maps": data and [msgspec.structs.asdict(one) for one in data.tensor_maps],
            "resources": self.resources and attributes(self.resources, *_RESOURCES),
            "not_compiled": self.not_compiled,
            "occupancy": self.occupancy and {**to_document(self.occupancy), "compiled": self.resources is not None},
        }
        return to_document(document)


_GEOMETRY = ("grid", "block", "blocks", "threads", "dynamic_smem_bytes")
_RESOURCES = ("registers", "static_smem_bytes", "stack_bytes", "spill_bytes", "spill_store_bytes", "spill_load_bytes")


@dataclass(frozen=True, slots=True, repr=False)
class OperationExplanation(Result):
    """The kernel or library that computes a problem of an operation, and the reason."""

    problem: Problem
    device: DeviceProperties
    """Problem of the operation, with its conditions, and the device."""
    served: str
    """Name of the kernel or library that is served."""
    is_library: bool
    tier: str
    """``exact``: the fastest that was measured for this problem; ``model``: a model of times expects it to be the
    fastest; ``library``: nothing is known that is faster; others as for a kernel."""
    config: Config
    """Its configuration; empty for a library."""
    contenders: tuple[Contender, ...]
    """The best ways to compute the problem, that which is served first, each with its time."""
    kernels: Mapping[str, Mapping[str, int]]
    """Every kernel that computes the problem, with the problem's sizes by its own names."""
    text: str
    """Paragraph that states the reason."""
    notices: tuple[str, ...] = ()
    """Assumptions about the sizes, one line each."""

    def _headline(self) -> str:
        return f"{self._heading()}: {self.served}, {self.tier}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        yield [("computed by", self.served), ("tier", self.tier)]
        yield contenders_table(self.contenders)
        yield self.text

    def to_json(self) -> Any:
        """Return the choice, the contenders and the reason."""
        return to_document(
            {
                **self.problem.document("operation"),
                "device": self.device.identity,
                "served": self.served,
                "library": self.is_library,
                **attributes(self, "tier", "config", "contenders", "kernels"),
                "explain": self.text,
            }
        )


def _checks(
    spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties, names: dict[str, Value]
) -> Iterator[ConfigCheck]:
    """Evaluate every condition that does not need compiling, including those after the first failure."""
    if fault := unsupported_reason(spec, device):
        yield ConfigCheck("device", "compute_capability", False, fault)
    if fault := unfit_scalar(spec, problem.dtype, names):
        yield ConfigCheck("argument", "scalars", False, fault)
    for parameter in spec.parameters:
        value = config[parameter.name]
        if value not in parameter.values:
            values = ", ".join(map(str, parameter.values))
            yield ConfigCheck("value", parameter.name, False, f"{value} is not among its values {values}")
    for rule in (*spec.rules, *spec.heuristics):
        try:
            holds, detail = bool(rule.expression.evaluate(names)), rule.expression.text
        except SpecError as error:  # of a value that the file does not list
            holds, detail = False, error.problem
        yield ConfigCheck("heuristic" if rule.is_heuristic else "rule", rule.name, holds, detail)
    with suppress(SpecError):
        demand = demand_of(spec, names, problem)
        for limit in limits_of(spec):
            fits = bool(limit.fits(demand, device))
            yield ConfigCheck("limit", limit.name, fits, "" if fits else limit.explain(demand, device))


def _compiled(
    kernel: Kernel, config: Config, problem: Problem, device: DeviceProperties
) -> tuple[Mapping[str, CompiledFunction], str, str]:
    """Compile through the cubin cache, in a process of its own: the compiler may hang or run out of memory.

    Returns the functions, the compiler's error or how its process ended, and the reason why there are none; each is
    empty if there is none.
    """
    from autotile.tuning.options import TuneOptions
    from autotile.workers.compile_pool import compile_in_worker

    try:
        job = compile_job(kernel, config, problem, device.architecture)
        compiled = compile_in_worker(job, read_settings(), TuneOptions().compile_deadline_s)
    except (ToolchainError, WorkerError) as error:
        return {}, "", str(error)
    if compiled.cubin is None:
        return {}, f"it does not compile: {compiled.reason}", "the compiler refuses it"
    fault = ""
    try:
        check_signatures(kernel, problem.dtype, compiled.cubin)
    except SpecError as error:
        fault = error.problem
    return compiled.cubin.functions, fault, ""


@dataclass(frozen=True, slots=True, repr=False)
class SpaceSummary(Result):
    """Size of a search space, and how far each rule and limit reduces it."""

    problem: Problem
    device: DeviceProperties
    parameters: Mapping[str, tuple[Value, ...]]
    """Values of each parameter."""
    combinations: int
    """Number of combinations before any rule."""
    rules: tuple[SpaceStage, ...]
    limits: tuple[SpaceStage, ...]
    """Stages in the order applied; each holds the number of configurations that remain after it."""
    valid: int
    """Number of configurations that remain after the last stage."""
    seconds: float
    """Wall time of the enumeration, in seconds."""
    notices: tuple[str, ...]
    """Assumptions about the device and the sizes, one line each."""

    def funnel(self) -> Iterator[tuple[str, int]]:
        """Yield each stage with the number of configurations that remain after it."""
        yield "all combinations", self.combinations
        for stage in self.rules:
            yield f"{'heuristic' if stage.is_heuristic else 'rule'} {stage.name}", stage.remaining
        for stage in self.limits:
            yield f"limit {stage.name}", stage.remaining

    def plot_rules(self, *, dark: bool | None = None) -> go.Figure:
        """Return a Plotly figure of the number of configurations that each rule and limit leaves."""
        from autotile.report.theme import figure_of, space_chart

        return figure_of(space_chart(tuple(self.funnel())), dark=dark)

    def _headline(self) -> str:
        return f"{self._heading()}: {self.valid:,} of {self.combinations:,} valid"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        yield [(name, " ".join(map(str, values))) for name, values in self.parameters.items()]
        rows = [(stage, f"{count:,}") for stage, count in self.funnel()]
        yield ResultTable(("after", f"{RIGHT}configurations left"), rows, is_wrapped=True)
        yield f"{plural(self.valid, 'valid configuration')}, enumerated in {duration_text(self.seconds)}"

    def to_json(self) -> Any:
        """Return the counts, and the values of each parameter."""
        rules, limits = (
            [
                {"name": one.name, "remaining": one.remaining, **({"heuristic": True} if one.is_heuristic else {})}
                for one in stages
            ]
            for stages in (self.rules, self.limits)
        )
        return to_document(
            {
                **self.problem.document(),
                "device": self.device.identity,
                **attributes(self, "combinations", "valid"),
                "rules": rules,
                "limits": limits,
                "parameters": self.parameters,
                "seconds": round(self.seconds, 6),
            }
        )


@dataclass(frozen=True, slots=True, repr=False)
class OccupancyResult(Result):
    """Occupancy of an SM by blocks of given resources."""

    device: DeviceProperties
    block: BlockResources
    occupancy: Occupancy
    """Resident blocks and warps, and the limits that determine them."""
    notices: tuple[str, ...]
    """Assumptions about the device, one line each."""

    def plot_limits(self, *, dark: bool | None = None) -> go.Figure:
        """Return a Plotly figure of the number of blocks that each resource of an SM allows."""
        from autotile.report.theme import block_limits_chart, figure_of

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
        from autotile.report.theme import figure_of, occupancy_chart

        device, block = self.device, self.block
        axes = {
            "threads": ("threads of a block", "threads", range(32, device.max_threads_per_block + 1, 32)),
            "registers": ("registers of a thread", "registers", range(16, device.max_registers_per_thread + 1)),
            "smem_bytes": ("shared memory of a block", "bytes", range(0, device.smem_per_block_optin_bytes + 1, 1024)),
        }
        if resource not in axes:
            raise InputError(f"there is no resource {resource!r}; there are {', '.join(axes)}")
        name, unit, amounts = axes[resource]
        chart = occupancy_chart(
            (name, unit),
            amounts,
            int(getattr(block, resource)),
            warps_at=lambda amount: replace(block, **{resource: amount}).occupancy(device).warps_per_sm,
            max_warps=device.max_warps_per_sm,
        )
        return figure_of(chart, dark=dark)

    def _headline(self) -> str:
        return f"{self._heading()}: {occupancy_text(self.device, self.occupancy)}"

    def _heading(self) -> str:
        return device_text(self.device)

    def _parts(self) -> Iterator[Part]:
        yield limits_table(self.device, self.block, self.occupancy)
        yield [("occupancy", occupancy_text(self.device, self.occupancy))]

    def to_json(self) -> dict[str, Any]:
        """Return the resources and the occupancy; 2147483647 blocks stand for a limit that does not apply."""
        return {"device": self.device.identity, **to_document(self.block), **to_document(self.occupancy)}


@checked
def space(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    compile: bool = False,
    sample: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    output: str | Path | None = None,
    workers: int | None = None,
    dtype: str | None = None,
    device: int | str | None = None,
    observe: Callable[[SurveyProgress], None] = lambda _: None,
    **named_sizes: int,
) -> SpaceSummary | Survey:
    """Count the valid configurations of a search space, or compile them.

    Shows how many configurations each rule and each limit of the device leaves. Sizes that are not given are taken from
    the search-space file.

    With ``compile`` or ``sample``: compiles them, without a GPU, and shows registers, spills, shared memory, occupancy
    and waves, and what does not compile or fit, with the compiler's words. Ctrl-C ends it and shows what there is;
    compiled code is kept, so that a second run goes on from there.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of a search-space file (path/to/mine.toml). Or a kernel from `autotile.kernel`.
    sizes, **named_sizes
        Problem sizes and flags, such as M=4096 N=4096 TRANS_A=1. None for those in the search-space file.
    compile
        Compile every valid configuration, and show registers, spills and occupancy.
    sample
        Compile N configurations, chosen at random. None for all.
    seed
        Seed of the choice.
    limit
        Configurations in the table; files and JSON have all. None for 12.
    output
        Write a page, too. None for no.
    workers
        Compile processes, at most two a core. None for one a core.
    dtype
        Element type, one of the kernel's. None for the kernel's first.
    device
        GPU to answer for: a profile of `autotile devices`, or the index of a GPU of this machine. None for this
        machine's GPU, else an H200.
    observe
        Called with the state as compilations end.

    Returns
    -------
    SpaceSummary or Survey
        The counts; or the compiled configurations, as of `autotile.survey`.

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
    given = merge_sizes(sizes, named_sizes)
    if compile or sample is not None:
        page = check_output(output) if output is not None else None
        place: Any = {"dtype": dtype, "device": device}
        found = survey(kernel, given, sample=sample, seed=seed, workers=workers, observe=observe, **place)
        found = found if limit is None else replace(found, shown=limit)
        if page is None:
            return found
        from autotile.report.page import write_page

        write_page(found.page(), page)
        return replace(found, notices=(*found.notices, f"wrote {page}"))
    for name, option in (("--output", output), ("--workers", workers), ("--seed", seed or None), ("--limit", limit)):
        if option is not None:
            raise InputError(f"{name} is of compiled configurations; add --compile")
    _, problem, target, opened, notices = _open_space(kernel, given, dtype, device)
    return SpaceSummary(
        problem=problem,
        device=target,
        parameters={parameter.name: parameter.values for parameter in opened.parameters},
        valid=len(opened),
        notices=notices,
        **attributes(opened, "combinations", "rules", "limits", "seconds"),
    )


def _open_space(
    kernel: KernelName, given: Mapping[str, int], dtype: str | None, device: int | str | None
) -> tuple[Kernel, Problem, DeviceProperties, SearchSpace, tuple[str, ...]]:
    """Load a kernel and enumerate its valid configurations; return what was assumed, too, one line each."""
    target, notice = resolve_device(device)
    loaded, problem = open_problem(kernel, given, dtype)
    found = feasible_space(loaded.spec, problem, target)
    ignored = "the heuristics leave no configuration at these sizes, so they are ignored"
    is_whole = len(found.rules) == len((*loaded.spec.rules, *loaded.spec.heuristics))
    notices = (notice, sizes_notice(loaded.spec, problem.sizes, given), "" if is_whole else ignored)
    return loaded, problem, target, found, tuple(filter(None, notices))


@checked
def explain(
    kernel: KernelName | None = None,
    assignments: Mapping[str, Value] | None = None,
    /,
    *,
    threads: int | None = None,
    registers: int = 0,
    smem: int = 0,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    library: bool = True,
    **named_assignments: Value,
) -> Explanation | OperationExplanation | OccupancyResult:
    """Explain one configuration on one device, or the occupancy of a block.

    Shows which rules and limits it meets, its launch geometry, registers and shared memory, and what limits its
    occupancy. It is compiled if NVRTC is installed; no GPU is needed.

    For an operation, such as matmul: shows which kernel or library computes a problem, and why. Without a kernel:
    computes how many blocks of ``threads``, ``registers`` and ``smem`` fit on an SM, and what limits them.

    Parameters
    ----------
    kernel
        Name of a kernel or an operation, or path of its file. Or a kernel from `autotile.kernel`.
    assignments, **named_assignments
        Parameters and sizes in any order, such as BM=64 M=4096; the others have their defaults.
    threads
        Without a kernel: threads per block.
    registers
        Registers per thread; 0 to ignore them.
    smem
        Static and dynamic shared memory per block, in bytes.
    dtype
        Element type, one of the kernel's. None for the kernel's first.
    device
        GPU to answer for: a profile of `autotile devices`, or the index of a GPU of this machine. None for this
        machine's GPU, else an H200.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.
    library
        Whether a library, such as cuBLAS, may compute an operation.

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
    if kernel is None:
        if threads is None:
            raise InputError("nothing to explain; expected KERNEL [NAME=VALUE ...], or --threads N of a block")
        if dtype is not None or database is not None:
            raise InputError("--dtype and --db are of a kernel or an operation; leave them out with --threads")
        return occupancy(threads, registers, smem, device=device)
    if threads is not None or registers or smem:
        raise InputError("--threads, --registers and --smem are of a block without a kernel; leave the kernel out")
    given = merge_sizes(assignments, named_assignments)
    if (operation := named_operation(kernel)) is None:
        if database is not None:
            raise InputError(f"{kernel} is a kernel, which nothing stored changes; leave --db out")
        return explain_kernel(kernel, given, dtype=dtype, device=device)
    from autotile.database.database import database_location

    problem = operation.resolve(given, dtype, defaults=True)
    location, served_for = str(database_location(database)), resolve_served_device(device)
    served = find_best_kernel(str(kernel), problem.dtype, served_for, location, problem.sizes, library=library)
    time_us = served.measurement.time_us if served.measurement else None
    alone = Contender(served.kernel, served.config, time_us, source=served.source or "cuda")
    return OperationExplanation(
        problem=problem,
        device=served.device,
        served=served.kernel,
        is_library=served.is_library,
        tier=served.tier,
        config=served.config,
        contenders=served.contenders or (alone,),
        kernels={member.name: sizes for member, sizes in operation.fitting(problem, served.device)},
        text=served.explain(),
        notices=tuple(filter(None, [sizes_notice(operation, problem.sizes, given)])),
    )


def explain_kernel(
    kernel: KernelName, given: Mapping[str, Value], *, dtype: str | None = None, device: int | str | None = None
) -> Explanation:
    """Explain one configuration of a kernel, as `explain` does: check it, compile it if it is valid, and see it fit.

    Its values have the types of the parameters, but need not be among those listed.
    """
    (gpu, notice), loaded = resolve_device(device), load_kernel(kernel)
    spec = loaded.spec
    config, named = split_assignments(spec, given)
    problem = resolve_problem(spec, named, dtype, defaults=True)
    names = known_names(spec, config, problem, gpu)
    checks = list(_checks(spec, config, problem, gpu, names))
    fault, not_compiled = check_config(spec, config, problem, gpu), ""
    plan, data = None, None
    with suppress(ConfigError, SpecError):  # a check reports the reason
        plan = LaunchPlan.of(spec, config, problem, gpu)
    with suppress(ConfigError, SpecError):
        data = LaunchData.of(spec, config, problem, gpu)
    steps: list[CompiledStep] = []
    if fault:
        not_compiled = "it would not be compiled"
    elif plan is not None:
        functions, fault, not_compiled = _compiled(loaded, config, problem, gpu)
        if fault:
            checks.append(ConfigCheck("compiled", "source", False, fault))
        steps = compiled_steps(spec, plan, functions, gpu) if functions else []
    resources = steps[0].resources if steps else None
    if steps:
        excess = next((step.fault for step in steps if step.fault), "")
        checks.append(ConfigCheck("compiled", "resources", not excess, excess))
        fault = fault or excess
    block = None
    if plan is not None:
        geometry, launch, known = plan.main.geometry, spec.steps[plan.main.step].launch, {STEP: 0, **names}
        if resources is not None:
            registers, static_bytes = resources.registers, resources.static_smem_bytes
        else:
            registers = value_or_zero(launch.min_registers, known)
            static_bytes = value_or_zero(launch.static_smem_bytes, known)
        block = BlockResources(geometry.threads, registers, static_bytes + geometry.dynamic_smem_bytes)
    return Explanation(
        problem=problem,
        device=gpu,
        config=config,
        checks=tuple(checks),
        fault=fault,
        geometry=plan.main.geometry if plan is not None else None,
        resources=resources,
        not_compiled=not_compiled,
        block=block,
        occupancy=block.occupancy(gpu) if block is not None else None,
        data=data,
        launches=plan.launches if plan is not None else (),
        steps=tuple(steps),
        notices=tuple(filter(None, (notice, sizes_notice(spec, problem.sizes, given)))),
    )


@checked
def occupancy(
    threads: int, registers: int = 0, smem_bytes: int = 0, *, device: int | str | None = None
) -> OccupancyResult:
    """Compute how many blocks of given resources an SM holds, and which limits determine that.

    Parameters
    ----------
    threads, registers, smem_bytes, device
        As ``threads``, ``registers``, ``smem`` and ``device`` for `autotile.explain`.

    Raises
    ------
    InputError
        The device is unknown, a count is negative or over 2**31 - 1, or there are no threads.

    Examples
    --------
    >>> occupancy(1024, 32, 8192, device="rtx-3060").occupancy.blocks_per_sm
    1
    """
    of, notice = resolve_device(device)
    if threads < 1 or registers < 0 or smem_bytes < 0 or max(threads, registers, smem_bytes) > _MAX_PER_BLOCK:
        raise InputError(
            f"{threads} threads, {registers} registers per thread and {smem_bytes} bytes of shared memory are no "
            f"block; expected at least 1 thread, no negative number, and at most {_MAX_PER_BLOCK:,} of each"
        )
    most = of.max_threads_per_block, of.max_registers_per_thread, of.smem_per_block_optin_bytes
    allows = f"a block has at most {most[0]:,} threads, {most[1]} registers a thread and {most[2]:,} bytes on {of.name}"
    fits = threads <= most[0] and registers <= most[1] and smem_bytes <= most[2]
    block = BlockResources(threads, registers, smem_bytes)
    return OccupancyResult(of, block, block.occupancy(of), tuple(filter(None, (notice, "" if fits else allows))))


@dataclass(frozen=True, slots=True)
class SurveyProgress:
    """State of a running survey."""

    done: int
    planned: int
    """Number of configurations that were compiled, and that will be."""
    failed: int
    """Number of those that cannot be launched."""
    elapsed_s: float
    """Seconds since the first compilation began."""
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
    kernel, sizes, **named_sizes, dtype, device, sample, seed, workers, observe
        As for `autotile.space`. Of equal seeds, a smaller sample is part of a larger one.

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
    >>> survey("sgemm_2d", device="h200", sample=200, M=4096, N=4096, K=4096)  # doctest: +SKIP
    <Survey: sgemm_2d M=4096 N=4096 K=4096 float32 on NVIDIA H200 (profile): 200 configurations compiled, 197 usable>
    """
    from autotile.report.survey import survey_of
    from autotile.space.time_estimate import estimate_times
    from autotile.tuning.options import check_whole
    from autotile.tuning.progress_state import StopRequest
    from autotile.tuning.session import gated_trial
    from autotile.workers.compile_pool import Compiled, CompilePool, worker_count

    for name, value, least in (("sample", sample, 1), ("seed", seed, 0), ("workers", workers, 1)):
        check_whole(name, value, least)
    loaded, problem, target, valid, notices = _open_space(kernel, merge_sizes(sizes, named_sizes), dtype, device)
    order = np.random.default_rng(seed).permutation(len(valid))[:sample].tolist()
    if sample is not None and sample > len(valid):
        notices += (f"only {plural(len(valid), 'configuration is', 'configurations are')} valid: all are compiled",)
    estimate = estimate_times(loaded.spec, problem, target, valid)
    started_s, count = time.monotonic(), worker_count(workers)

    def compiled() -> Generator[tuple[int, Trial]]:
        """Yield rows with their trials as they compile, until the user interrupts."""
        rows, pending = iter(order), dict[Future[Compiled], int]()
        ended = failed = 0
        with StopRequest() as stop, closing(CompilePool(read_settings(), count)) as pool:
            while not stop.requested:
                for row in islice(rows, _AHEAD * count - len(pending)):
                    job = compile_job(loaded, valid.config(row), problem, target.architecture)
                    pending[pool.submit(job)] = row
                if not pending:
                    break
                done, _ = wait(pending, _POLL_S, FIRST_COMPLETED)
                for future in done:
                    row = pending.pop(future)
                    trial = gated_trial(loaded, problem, valid.config(row), future.result(), target)
                    failed += trial.outcome is not Outcome.OK
                    yield row, trial
                if done:
                    ended += len(done)
                    observe(SurveyProgress(ended, len(order), failed, time.monotonic() - started_s, notices))

    observe(SurveyProgress(0, len(order), 0, 0.0, notices))
    with closing(compiled()) as trials:
        return survey_of(
            valid,
            trials,
            planned=len(order),
            estimated_us=estimate.time_us if estimate is not None else None,
            problem=problem,
            device=target,
            notices=notices,
        )
