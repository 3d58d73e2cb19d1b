"""Launches of a kernel: their declarations, and their values and other launch data for one configuration.

They are declared in ``[launch]``, or in ``[[steps]]`` for several kernels of one computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autotile.core.device import EXPRESSION_NAMES, DeviceProperties
from autotile.core.model import Config, LaunchGeometry, Problem, Value, Values
from autotile.core.text import plural
from autotile.errors import ConfigError, ProblemError
from autotile.kernel.arguments import (
    Argument,
    BufferArgument,
    StructArgument,
    StructValue,
    TensorMap,
    Texture,
    TextureArgument,
    Workspace,
    WorkspaceArgument,
    arguments_of_kind,
    encode_scalar,
)
from autotile.kernel.expressions import Expression
from autotile.kernel.functions import Kind, Kinds
from autotile.kernel.spec import STEP, KernelSpec, Launch, Step, computed_values, is_entry
from autotile.kernel.table import Table, describe

MAX_LAUNCHES = 4096  # of a call
MAX_STEPS = 64  # of a file

_LAUNCH = ("block", "grid", "cluster", "dynamic_smem_bytes", "static_smem_bytes", "min_registers", "cooperative")


def fixed_names(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> dict[str, Value]:
    """Return the value of every name that does not depend on the configuration: `Problem.names` and ``device.*``.

    Raise `ProblemError` if a size of the kernel is missing.
    """
    for name in spec.sizes:
        if name not in problem.sizes:
            raise ProblemError(
                f"{spec.name}: the size {name} is missing; give {name}=..., a whole number of at least 1"
            )
    return {**problem.names, **{f"device.{name}": getattr(device, name) for name in EXPRESSION_NAMES}}


def known_names(spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> dict[str, Value]:
    """Return the value of every name that an expression may use: those of `fixed_names`, parameters, ``computed.*``.

    Raise `ProblemError` if a size of the kernel is missing; `SpecError` if a computed value has none for the
    configuration.
    """
    return {**fixed_names(spec, problem, device), **config, **computed_values(spec.computed, config)}


class StepLaunch(msgspec.Struct, frozen=True, gc=False):
    """One launch of a call."""

    step: int
    geometry: LaunchGeometry
    arguments: tuple[str, ...]
    """Names of the arguments that are passed, in order; where arrays are swapped, those whose memory is passed."""
    scalars: tuple[tuple[str, int], ...]
    """Values of the scalars that depend on more than the problem; see `ScalarArgument.is_per_launch`."""
    cluster: tuple[int, int, int] | None = None
    """Blocks of a cluster in x, y, z; None if the step declares none."""
    is_cooperative: bool = False
    is_main: bool = False

    @property
    def threads(self) -> int:
        """Threads of all blocks."""
        return self.geometry.blocks * self.geometry.threads


class LaunchPlan(msgspec.Struct, frozen=True, gc=False):
    """Launches of a call of one configuration, in order; compares by value."""

    launches: tuple[StepLaunch, ...]

    @classmethod
    def of(cls, spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> LaunchPlan:
        """Evaluate the conditions, the repetitions and the geometry of every step.

        Undeclared dimensions are 1. The limits of the device are not checked. Raise `ConfigError` if a dimension is
        below 1 or the shared memory below 0; or nothing, or more than `MAX_LAUNCHES`, is launched. Raise `SpecError` if
        an expression divides by zero or exceeds 64 bits.
        """
        names = known_names(spec, config, problem, device)
        if spec.has_one_launch:
            return cls((_step_launch(spec, 0, {STEP: 0, **names}, {}),))
        counts = []
        for step in spec.steps:
            count = 0
            if step.when is None or step.when.value(names):
                count = 1 if step.times is None else max(0, int(step.times.value(names)))
            counts.append(count)
        if not 0 < sum(counts) <= MAX_LAUNCHES:
            raise ConfigError(
                f"{spec.name}: a call of the configuration would launch {plural(sum(counts), 'kernel')}, expected 1 to "
                f"{MAX_LAUNCHES:,}; add a rule that excludes it"
            )
        launches: list[StepLaunch] = []
        memory: dict[str, str] = {}
        for index, (step, count) in enumerate(zip(spec.steps, counts, strict=True)):
            for number in range(count):
                launches.append(_step_launch(spec, index, {STEP: number, **names}, memory))
                if step.swap:
                    first, second = step.swap
                    memory |= {first: memory.get(second, second), second: memory.get(first, first)}
        return cls(tuple(launches))

    @property
    def main(self) -> StepLaunch:
        """The launch that a table shows: of the main step, or else that with the most threads, the first of equals."""
        return max(self.launches, key=lambda launch: (launch.is_main, launch.threads))

    @property
    def steps(self) -> Mapping[int, StepLaunch]:
        """For each launched step, by its index, the launch with the most dynamic shared memory."""
        largest: dict[int, StepLaunch] = {}
        for launch in self.launches:
            known = largest.setdefault(launch.step, launch)
            if launch.geometry.dynamic_smem_bytes > known.geometry.dynamic_smem_bytes:
                largest[launch.step] = launch
        return largest


def _step_launch(spec: KernelSpec, index: int, names: Values, memory: Mapping[str, str]) -> StepLaunch:
    step = spec.steps[index]
    geometry = LaunchGeometry(
        grid=_dimensions(step.launch.grid, names),
        block=_dimensions(step.launch.block, names),
        dynamic_smem_bytes=value_or_zero(step.launch.dynamic_smem_bytes, names),
    )
    if min(*geometry.grid, *geometry.block) < 1 or geometry.dynamic_smem_bytes < 0:
        raise ConfigError(
            f"{spec.name}: the configuration gives the grid {geometry.grid}, the block {geometry.block} and "
            f"{geometry.dynamic_smem_bytes} bytes of dynamic shared memory; add a rule that excludes it"
        )
    scalars = tuple(
        (scalar.name, int(scalar.binding.value(names)))
        for scalar in spec.scalars
        if scalar.is_per_launch and scalar.name in step.arguments and scalar.binding is not None
    )
    return StepLaunch(
        index,
        geometry,
        tuple(memory.get(name, name) for name in step.arguments),
        scalars,
        _dimensions(step.launch.cluster, names) if step.launch.cluster else None,
        step.launch.is_cooperative,
        step.is_main,
    )


def launch_geometry(spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> LaunchGeometry:
    """Return the geometry of the main launch of a configuration; see `LaunchPlan`."""
    return LaunchPlan.of(spec, config, problem, device).main.geometry


def value_or_zero(expression: Expression | None, names: Values) -> int:
    """Evaluate an optional expression to a whole number; return 0 if there is none."""
    return int(expression.value(names)) if expression is not None else 0


def _dimensions(expressions: Sequence[Expression], names: Values) -> tuple[int, int, int]:
    x, y, z = ([int(expression.value(names)) for expression in expressions] + [1, 1])[:3]
    return x, y, z


class LaunchData(msgspec.Struct, frozen=True, gc=False):
    """Workspaces, tensor maps, structs and textures of one configuration, in order; compares by value."""

    workspaces: tuple[Workspace, ...]
    tensor_maps: tuple[TensorMap, ...]
    structs: tuple[StructValue, ...] = ()
    textures: tuple[Texture, ...] = ()

    @classmethod
    def of(cls, spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> LaunchData:
        """Evaluate the arguments of a kernel; parameters as for `known_names`.

        Raise `ConfigError` if a workspace has a negative extent.
        """
        names, dtype = known_names(spec, config, problem, device), problem.dtype
        data = cls(
            tuple(argument.workspace(dtype, names) for argument in spec.workspaces),
            tuple(
                one.tensor_map(dtype, names, lambda expression: int(expression.value(names)))
                for one in spec.tensor_maps
            ),
            tuple(one.layout(dtype, names) for one in arguments_of_kind(spec.arguments, StructArgument)),
            tuple(one.texture(dtype, names) for one in arguments_of_kind(spec.arguments, TextureArgument)),
        )
        for workspace in data.workspaces:
            if min(workspace.shape) < 0:
                raise ConfigError(
                    f"{spec.name}: the workspace {workspace.name} would have the shape {workspace.shape}; add a rule "
                    "that excludes it"
                )
        return data


def launch_kinds(document: Table, kinds: Kinds) -> dict[str, Kind]:
    """Return the kind of each name that the expressions of a launch may use, and the values of scalars."""
    if "steps" not in document.data:
        return dict(kinds)
    if STEP in kinds:
        raise document.error("steps", f"{STEP!r} is the number of a launch among those of its step; rename yours")
    return {**kinds, STEP: "number"}


def parse_steps(document: Table, arguments: Sequence[Argument], kinds: Kinds) -> tuple[Step, ...]:
    """Parse ``[[steps]]``; without it, ``[launch]`` and ``entry`` of ``[kernel]`` are the only step."""
    passed = {argument.name: argument for argument in arguments if argument.is_passed}
    kernel = document.table("kernel")
    if "steps" not in document.data:
        table = document.table("launch")
        table.allow(_LAUNCH)
        launch = _launch(table, kinds)
        return (Step(_entry(kernel), launch, tuple(passed)),)
    for table, name in ((document, "launch"), (kernel, "entry")):
        if name in table.data:
            raise table.error(name, "the file has [[steps]], of which each has its own; remove this one")
    own_kinds = launch_kinds(document, kinds)
    written = {n: a for n, a in passed.items() if isinstance(a, BufferArgument | WorkspaceArgument) and a.is_written}
    steps = []
    entries = document.entries("steps")
    if len(entries) > MAX_STEPS:
        raise document.error("steps", f"at most {MAX_STEPS} tables are accepted, got {len(entries)}")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise document.error("steps", f"expected tables, as in [[steps]], got {describe(entry)}")
        document.check_length("steps", entry)
        table = Table(document.source, document.lines, f"steps[{number}]", entry)
        table.allow(("entry", "arguments", "when", "times", "swap", "main", *_LAUNCH))
        names = table.entries("arguments") if "arguments" in table.data else [*passed]
        for name in names:
            table.check_known("arguments", name, tuple(passed))
        swap = table.texts("swap", optional=True)
        for name in swap:
            table.check_known("swap", name, written, "is not a workspace or an array that the kernel writes")
        if swap and len(swap) != 2:
            raise table.error("swap", f"expected the names of two arrays, got {len(swap)}")
        layouts = {(str(written[n].dtype), *(extent.canonical for extent in written[n].shape)) for n in swap}
        if len(layouts) > 1:
            raise table.error("swap", f"{swap[0]} and {swap[1]} differ in type or shape; declare both alike")
        step = Step(
            arguments=tuple(names),
            entry=_entry(table),
            launch=_launch(table, own_kinds),
            when=table.optional_expression("when", kinds, "boolean"),
            times=table.optional_expression("times", kinds),
            swap=swap,
            is_main=table.boolean("main", default=False),
        )
        steps.append(step)
    if sum(step.is_main for step in steps) > 1:
        raise document.error("steps", "several steps have main = true; expected one at most")
    taken = {name for step in steps for name in step.arguments}
    for name in passed:
        if name not in taken:
            raise document.error(f"arguments.{name}", f"no step takes {name!r}; add it to its arguments, or remove it")
    return tuple(steps)


def _launch(table: Table, kinds: Kinds) -> Launch:
    return Launch(
        block=table.expressions("block", kinds),
        grid=table.expressions("grid", kinds),
        cluster=table.expressions("cluster", kinds) if "cluster" in table.data else (),
        dynamic_smem_bytes=table.optional_expression("dynamic_smem_bytes", kinds),
        static_smem_bytes=table.optional_expression("static_smem_bytes", kinds),
        min_registers=table.optional_expression("min_registers", kinds),
        is_cooperative=table.boolean("cooperative", default=False),
    )


def _entry(table: Table) -> str:
    entry = table.text("entry")
    if not is_entry(entry):
        raise table.error(
            "entry",
            "expected the C++ name of a __global__ function, such as 'softmax', 'space::softmax' or "
            f"'softmax<BLOCK, float>'; got {describe(entry)}",
        )
    return entry


def problem_scalars(spec: KernelSpec, problem: Problem, *, check: bool) -> dict[str, Any]:
    """Return the encoded value of each scalar that the problem determines; with ``check``, its check value if any."""
    names, dtype = problem.names, problem.dtype
    scalars = (scalar for scalar in spec.scalars if not scalar.is_per_launch)
    return {scalar.name: encode_scalar(scalar, scalar.given(names, check=check), dtype) for scalar in scalars}
