"""Explanation of one configuration (conditions, launch, resources, occupancy), and of the choice for an operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.documents import to_document
from autotile.core.model import Config, LaunchGeometry, Occupancy, Problem, Resources, Value, config_text
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Part,
    Result,
    ResultTable,
    bytes_text,
    device_text,
    occupancy_text,
    percent_text,
    source_text,
    time_text,
)
from autotile.cuda.compiler import compile_job
from autotile.errors import ConfigError, SpecError, ToolchainError, WorkerError
from autotile.kernel.arguments import TensorMap, Workspace
from autotile.kernel.launch import LaunchData, LaunchPlan, StepLaunch, known_names, value_or_zero
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Operation
from autotile.kernel.problem import unsupported_reason
from autotile.kernel.sources import signature_fault
from autotile.kernel.spec import STEP, KernelSpec, Rule
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Contender
from autotile.settings import read_settings
from autotile.space.limits import (
    UNLIMITED,
    CompiledStep,
    check_config,
    compiled_steps,
    demand_of,
    is_met,
    limits_of,
    occupancy,
)

CheckKind = Literal["device", "value", "rule", "heuristic", "limit", "compiled"]


@dataclass(frozen=True, slots=True)
class BlockResources:
    """Resources that one block uses.

    Attributes
    ----------
    threads
        Threads per block.
    registers
        Registers per thread; 0 if unknown.
    smem_bytes
        Static and dynamic shared memory per block, in bytes.
    """

    threads: int
    registers: int
    smem_bytes: int

    def occupancy(self, device: DeviceProperties) -> Occupancy:
        """Compute the occupancy of an SM by such blocks."""
        return occupancy(self.threads, self.registers, self.smem_bytes, device)


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
class Check:
    """One condition on a configuration.

    Attributes
    ----------
    kind
        Origin of the condition. A ``heuristic`` only decides whether a search tries the configuration.
    name
        Name of the rule, limit or parameter.
    holds
        Whether the configuration meets the condition.
    detail
        Expression of a rule or heuristic; for others, the reason for a failure, or an empty string.
    """

    kind: CheckKind
    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Result):
    """Everything that is known of a configuration without running it.

    Attributes
    ----------
    problem, device, config
        Configuration, and the problem and device that it is for.
    checks
        Values, rules, heuristics and limits in the order applied, then the conditions on the compiled code.
    fault
        Reason why the configuration cannot be used: the first rule or limit that it breaks, or the compiler's error.
        Empty if it can be used.
    geometry
        Launch geometry; None if it cannot be evaluated.
    resources
        Resources reported by the compiler; None if the configuration was not compiled.
    not_compiled
        Reason why it was not compiled; otherwise empty.
    block, occupancy
        Resources of a block and the resulting occupancy, as compiled, or else as declared in the search-space file.
        None if the launch geometry cannot be evaluated.
    data
        Workspaces and tensor maps; None if they cannot be evaluated.
    launches
        What a call launches, in order; empty if it cannot be evaluated. With several steps, the fields above are those
        of the main launch, see `LaunchPlan.main`.
    steps
        Each step as compiled, the main one first; empty if the configuration was not compiled.
    notices
        Assumptions about the device and the sizes, one line each.
    """

    problem: Problem
    device: DeviceProperties
    config: Mapping[str, Value]
    checks: tuple[Check, ...]
    fault: str
    geometry: LaunchGeometry | None
    resources: Resources | None
    not_compiled: str
    block: BlockResources | None
    occupancy: Occupancy | None
    data: LaunchData | None
    launches: tuple[StepLaunch, ...] = ()
    steps: tuple[CompiledStep, ...] = ()
    notices: tuple[str, ...] = ()

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the configuration, the verdict and the launch as pairs of a label and its text."""
        yield "configuration", config_text(self.config)
        valid = "valid" if self.resources is not None else "valid, as far as is known without compiling"
        yield "verdict", self.fault.partition("\n")[0] or valid  # the checks below show a compiler's further lines
        if self.geometry is not None:
            grid, block = (_shape_text(dimensions) for dimensions in (self.geometry.grid, self.geometry.block))
            yield "grid", f"{grid}: {self.geometry.blocks:,} blocks"
            yield "block", f"{block}: {self.geometry.threads:,} threads"
        if self.resources is not None:
            dynamic_bytes = self.geometry.dynamic_smem_bytes if self.geometry is not None else 0
            yield "registers", f"{self.resources.registers} a thread"
            yield "spills", f"{self.resources.spill_bytes:,} B"
            yield "shared memory", f"{self.resources.static_smem_bytes:,} B static, {dynamic_bytes:,} B dynamic"
        else:
            yield "not compiled", self.not_compiled
        if len(self.launches) > 1:
            yield "launches", f"{len(self.launches):,} in a call, of which the above is the main one"
            yield from ((f"step {step.entry}", _step_text(step)) for step in self.steps)
        if self.data is not None:
            yield from (("workspace", _workspace_text(workspace)) for workspace in self.data.workspaces)
            yield from (("tensor map", _tensor_map_text(tensor_map)) for tensor_map in self.data.tensor_maps)

    def _headline(self) -> str:
        verdict = "cannot be used" if self.fault else "valid"
        share = f", occupancy {percent_text(self.occupancy.occupancy)}" if self.occupancy is not None else ""
        return f"{self.problem} on {device_text(self.device)}: {verdict}{share}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        """Yield the verdict and the launch, the checks, and the limits of the occupancy."""
        yield [*self.facts()]
        rows = [(check.kind, check.name, "yes" if check.holds else "no", check.detail) for check in self.checks]
        styles = ["" if check.holds else "bold red" for check in self.checks]
        yield ResultTable(("check", "name", "met", "detail"), rows, is_wrapped=True, styles=styles)
        if self.block is not None and self.occupancy is not None:
            yield limits_table(self.device, self.block, self.occupancy)
            source = "compiled" if self.resources is not None else "declared by the search-space file"
            yield [("resources", source), ("occupancy", occupancy_text(self.device, self.occupancy))]

    def to_json(self) -> dict[str, Any]:
        """Return everything, with null for what is unknown."""
        compiled, data = self.resources is not None, self.data
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": {**self.device.identity, "compute_capability": self.device.compute_capability},
            "config": dict(self.config),
            "valid": not self.fault,
            "fault": self.fault,
            "checks": [asdict(check) for check in self.checks],
            "geometry": _geometry_document(self.geometry) if self.geometry is not None else None,
            **self._steps_document(),
            "workspaces": [{**asdict(workspace), "bytes": workspace.size_bytes} for workspace in data.workspaces]
            if data is not None
            else None,
            "tensor_maps": [asdict(tensor_map) for tensor_map in data.tensor_maps] if data is not None else None,
            "resources": _resources_document(self.resources) if self.resources is not None else None,
            "not_compiled": self.not_compiled,
            "occupancy": {**to_document(self.occupancy), "compiled": compiled} if self.occupancy is not None else None,
        }

    def _steps_document(self) -> dict[str, Any]:
        """Return the launches of a call and the compiled steps, where a call is more than one launch."""
        if len(self.launches) < 2:
            return {}
        return {
            "launches": [
                {"step": one.step, **_geometry_document(one.geometry), "arguments": list(one.arguments)}
                for one in self.launches
            ],
            "steps": [
                {
                    "entry": step.entry,
                    **_geometry_document(step.geometry),
                    "resources": _resources_document(step.resources),
                    "occupancy": to_document(step.occupancy),
                }
                for step in self.steps
            ],
        }


def _geometry_document(geometry: LaunchGeometry) -> dict[str, Any]:
    return {
        "grid": list(geometry.grid),
        "block": list(geometry.block),
        "blocks": geometry.blocks,
        "threads": geometry.threads,
        "dynamic_smem_bytes": geometry.dynamic_smem_bytes,
    }


def _resources_document(resources: Resources) -> dict[str, Any]:
    return {
        "registers": resources.registers,
        "static_smem_bytes": resources.static_smem_bytes,
        "stack_bytes": resources.stack_bytes,
        "spill_bytes": resources.spill_bytes,
        "spill_store_bytes": resources.spill_store_bytes,
        "spill_load_bytes": resources.spill_load_bytes,
    }


@dataclass(frozen=True, slots=True, repr=False)
class OperationExplanation(Result):
    """The kernel or library that computes a problem of an operation, and the reason.

    Attributes
    ----------
    problem, device
        Problem of the operation, with its conditions, and the device.
    served
        Name of the kernel or library that is served.
    is_library
        Whether it is a library.
    tier
        ``exact``: the fastest that was measured for this problem; ``model``: a model of times expects it to be the
        fastest; ``library``: nothing is known that is faster; others as for a kernel.
    config
        Its configuration; empty for a library.
    contenders
        The best ways to compute the problem, that which is served first, each with its time.
    kernels
        Every kernel that computes the problem, with the problem's sizes by its own names.
    text
        Paragraph that states the reason.
    notices
        Assumptions about the sizes, one line each.
    """

    problem: Problem
    device: DeviceProperties
    served: str
    is_library: bool
    tier: str
    config: Config
    contenders: tuple[Contender, ...]
    kernels: Mapping[str, Mapping[str, int]]
    text: str
    notices: tuple[str, ...] = ()

    def _headline(self) -> str:
        return f"{self.problem} on {device_text(self.device)}: {self.served}, {self.tier}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        yield [("computed by", self.served), ("tier", self.tier)]
        yield contenders_table(self.contenders)
        yield self.text

    def to_json(self) -> dict[str, Any]:
        """Return the choice, the contenders and the reason."""
        return {
            "operation": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device.identity,
            "served": self.served,
            "library": self.is_library,
            "tier": self.tier,
            "config": dict(self.config),
            "contenders": [contender.to_json() for contender in self.contenders],
            "kernels": {name: dict(sizes) for name, sizes in self.kernels.items()},
            "explain": self.text,
        }


def explain_operation(
    operation: Operation, problem: Problem, served: BoundKernel, notices: tuple[str, ...] = ()
) -> OperationExplanation:
    """Return the choice that is served for a problem of an operation, as values."""
    time_us = served.measurement.time_us if served.measurement else None
    contenders = served.contenders or (
        Contender(served.kernel, served.config, time_us, source=served.source or "cuda"),
    )
    return OperationExplanation(
        problem=problem,
        device=served.device,
        served=served.kernel,
        is_library=served.is_library,
        tier=served.tier,
        config=served.config,
        contenders=contenders,
        kernels={member.name: sizes for member, sizes in operation.fitting(problem, served.device)},
        text=served.explain(),
        notices=notices,
    )


def explain_config(
    kernel: Kernel, config: Config, problem: Problem, device: DeviceProperties, notices: tuple[str, ...] = ()
) -> Explanation:
    """Check a configuration, compile it if it is valid, and compute its occupancy.

    Parameters
    ----------
    kernel, problem, device
        Kernel and problem that the configuration is for, and the device that would run it.
    config
        A value for each parameter, of the parameter's type; it need not be one of the listed values.
    notices
        Passed on to the result.
    """
    candidate = _Candidate(kernel, config, problem, device)
    checks = list(candidate.checks())
    fault = check_config(kernel.spec, config, problem.sizes, device, problem.dtype)
    plan = candidate.plan()
    steps: list[CompiledStep] = []
    not_compiled = "it would not be compiled" if fault else ""
    if not fault and plan is not None:
        functions, fault, not_compiled = candidate.compile()
        if fault:
            checks.append(Check("compiled", "source", False, fault))
        steps = compiled_steps(kernel.spec, plan, functions, device) if functions else []
    resources = steps[0].resources if steps else None
    block = candidate.block(plan, resources) if plan is not None else None
    if steps:
        excess = next((step.fault for step in steps if step.fault), "")
        checks.append(Check("compiled", "resources", not excess, excess))
        fault = fault or excess
    return Explanation(
        problem=problem,
        device=device,
        config=config,
        checks=tuple(checks),
        fault=fault,
        geometry=plan.main.geometry if plan is not None else None,
        resources=resources,
        not_compiled=not_compiled,
        block=block,
        occupancy=block.occupancy(device) if block is not None else None,
        data=candidate.data(),
        launches=plan.launches if plan is not None else (),
        steps=tuple(steps),
        notices=notices,
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A configuration, with the problem and the device that it is for."""

    kernel: Kernel
    config: Config
    problem: Problem
    device: DeviceProperties

    @property
    def spec(self) -> KernelSpec:
        return self.kernel.spec

    @property
    def names(self) -> dict[str, Value]:
        """Value of every name that an expression may use."""
        return known_names(self.spec, self.config, self.problem.sizes, self.device)

    def checks(self) -> Iterator[Check]:
        """Evaluate every condition that does not need compiling, including those after the first failure."""
        fault = unsupported_reason(self.spec, self.device)
        if fault:
            yield Check("device", "compute_capability", False, fault)
        for parameter in self.spec.parameters:
            value = self.config[parameter.name]
            if value not in parameter.values:
                values = ", ".join(map(str, parameter.values))
                yield Check("value", parameter.name, False, f"{value} is not among its values {values}")
        names = self.names
        rules: list[tuple[CheckKind, tuple[Rule, ...]]] = [
            ("rule", self.spec.rules),
            ("heuristic", self.spec.heuristics),
        ]
        for kind, expressions in rules:
            for rule in expressions:
                yield Check(kind, rule.name, bool(rule.expression.evaluate(names)), rule.expression.text)
        demand = demand_of(self.spec, names, self.problem.sizes, self.problem.dtype)
        for limit in limits_of(self.spec):
            fits = is_met(limit.fits(demand, self.device, self.spec))
            yield Check("limit", limit.name, fits, "" if fits else limit.explain(demand, self.device, self.spec))

    def plan(self) -> LaunchPlan | None:
        try:
            return LaunchPlan.of(self.spec, self.config, self.problem.sizes, self.device)
        except (ConfigError, SpecError):
            return None  # a check reports the reason

    def data(self) -> LaunchData | None:
        try:
            return LaunchData.of(self.spec, self.problem.dtype, self.names)
        except (ConfigError, SpecError):
            return None  # a check reports the reason

    def compile(self) -> tuple[dict[str, Resources], str, str]:
        """Compile through the cubin cache, in a process of its own: the compiler may hang or run out of memory.

        Returns
        -------
        resources
            Resources of each function, as reported by the compiler; empty if there are none.
        fault
            The compiler's error, or how its process ended; otherwise empty.
        not_compiled
            Reason for missing resources; otherwise empty.
        """
        from autotile.tuning.options import TuneOptions
        from autotile.workers.compile_pool import compile_in_worker

        try:
            job = compile_job(
                self.kernel, self.config, self.problem.dtype, self.device.architecture, self.problem.sizes
            )
            compiled = compile_in_worker(job, read_settings(), TuneOptions().compile_deadline_s)
        except (ToolchainError, WorkerError) as error:
            return {}, "", str(error)
        if compiled.cubin is None:
            return {}, f"it does not compile: {compiled.reason}", "the compiler refuses it"
        functions = compiled.cubin.functions
        taken = {entry: function.parameter_bytes for entry, function in functions.items()}
        faults = (
            signature_fault(self.spec, step, self.problem.dtype, taken.get(step.entry), self.kernel.source)
            for step in self.spec.steps
        )
        resources = {entry: function.resources for entry, function in functions.items()}
        return resources, next(filter(None, faults), ""), ""

    def block(self, plan: LaunchPlan, resources: Resources | None) -> BlockResources:
        """Return the resources of a block of the main launch, as compiled, or else as declared."""
        geometry = plan.main.geometry
        if resources is not None:
            registers, static_bytes = resources.registers, resources.static_smem_bytes
        else:
            launch, names = self.spec.steps[plan.main.step].launch, {STEP: 0, **self.names}
            registers = value_or_zero(launch.min_registers, names)
            static_bytes = value_or_zero(launch.static_smem_bytes, names)
        return BlockResources(geometry.threads, registers, static_bytes + geometry.dynamic_smem_bytes)


def _step_text(step: CompiledStep) -> str:
    used = step.resources
    smem_bytes = used.static_smem_bytes + step.geometry.dynamic_smem_bytes
    return (
        f"{step.geometry.blocks:,} blocks of {step.geometry.threads:,} threads, {used.registers} registers a thread, "
        f"{smem_bytes:,} B shared, {used.spill_bytes:,} B spilled, occupancy {percent_text(step.occupancy.occupancy)}"
    )


def _workspace_text(workspace: Workspace) -> str:
    if not workspace.size_bytes:
        return f"{workspace.name}: none for this configuration"
    zeroed = ", zero before and after" if workspace.zeroed else ""
    shape = f"{_shape_text(workspace.shape)} {workspace.dtype}"
    return f"{workspace.name}: {shape}, {bytes_text(workspace.size_bytes)}{zeroed}"


def _tensor_map_text(tensor_map: TensorMap) -> str:
    if tensor_map.is_absent:
        return f"{tensor_map.name}: none for this configuration"
    swizzle = f"{tensor_map.swizzle_bytes} B swizzle" if tensor_map.swizzle_bytes else "no swizzle"
    box = f"{tensor_map.buffer} in boxes of {_shape_text(tensor_map.box)} {tensor_map.dtype}"
    return f"{tensor_map.name}: {box}, {swizzle}"


def _shape_text(dimensions: tuple[int, ...]) -> str:
    return " x ".join(f"{dimension:,}" for dimension in dimensions)
