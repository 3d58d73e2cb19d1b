"""Launches, workspaces and tensor maps of one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotile.core.device import EXPRESSION_NAMES, DeviceProperties
from autotile.core.frozen import cached_property, dataclass
from autotile.core.model import Config, LaunchGeometry, Value
from autotile.errors import ConfigError, ProblemError
from autotile.kernel.arguments import Workspace
from autotile.kernel.computed import computed_values
from autotile.kernel.descriptors import TensorMap, Texture
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import STEP, KernelSpec, Step
from autotile.kernel.structures import StructValue


def fixed_names(spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties) -> dict[str, Value]:
    """Return the value of every name that does not depend on the configuration: sizes, flags and ``device.*``.

    Raises
    ------
    ProblemError
        A size of the kernel is missing.
    """
    for name in spec.sizes:
        if name not in sizes:
            raise ProblemError(
                f"{spec.name}: the size {name} is missing; give {name}=..., a whole number of at least 1"
            )
    return {**sizes, **{f"device.{name}": getattr(device, name) for name in EXPRESSION_NAMES}}


def known_names(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties
) -> dict[str, Value]:
    """Return the value of every name that an expression may use.

    These are sizes, flags, parameters, ``device.*`` and ``computed.*``.

    Raises
    ------
    ProblemError
        A size of the kernel is missing.
    SpecError
        A computed value has none for the configuration.
    """
    computed = computed_values(spec.computed, config) if spec.computed else {}
    return {**fixed_names(spec, sizes, device), **config, **computed}


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """One launch of a call."""

    step: int
    """Index of the step."""
    geometry: LaunchGeometry
    arguments: tuple[str, ...]
    """Names of the arguments that are passed, in order; where arrays are swapped, those whose memory is passed."""
    scalars: tuple[tuple[str, int], ...]
    """Values of the scalars that depend on more than the problem; see `ScalarArgument.is_per_launch`."""
    cluster: tuple[int, int, int] | None = None
    """Blocks of a cluster in x, y, z; None if the step declares none."""
    is_cooperative: bool = False
    """Whether all blocks must be resident at once."""
    is_main: bool = False
    """Whether the step is declared to be the main one."""

    @property
    def threads(self) -> int:
        """Threads of all blocks."""
        return self.geometry.blocks * self.geometry.threads


@dataclass(frozen=True)
class LaunchPlan:
    """Launches of a call of one configuration, in order; compares by value."""

    launches: tuple[StepLaunch, ...]

    @classmethod
    def of(cls, spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties) -> LaunchPlan:
        """Evaluate the conditions, the repetitions and the geometry of every step.

        Undeclared dimensions are 1. The limits of the device are not checked.

        Raises
        ------
        ConfigError
            A dimension is below 1 or the shared memory below 0; or nothing, or more than `MAX_LAUNCHES`, is launched.
        SpecError
            An expression divides by zero or exceeds 64 bits.
        """
        names = known_names(spec, config, sizes, device)
        if spec.has_one_launch:
            return cls((_step_launch(spec, 0, {STEP: 0, **names}, {}),))
        counts = [repetitions(step, names) for step in spec.steps]
        if not 0 < sum(counts) <= MAX_LAUNCHES:
            raise ConfigError(
                f"{spec.name}: a call of the configuration would launch {sum(counts):,} kernels, expected 1 to "
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

    @cached_property
    def main(self) -> StepLaunch:
        """The launch that a table shows: of the main step, or else that with the most threads, the first of equals."""
        return max(self.launches, key=lambda launch: (launch.is_main, launch.threads))

    @cached_property
    def steps(self) -> Mapping[int, StepLaunch]:
        """For each launched step, by its index, the launch with the most dynamic shared memory."""
        largest: dict[int, StepLaunch] = {}
        for launch in self.launches:
            known = largest.setdefault(launch.step, launch)
            if launch.geometry.dynamic_smem_bytes > known.geometry.dynamic_smem_bytes:
                largest[launch.step] = launch
        return largest


MAX_LAUNCHES = 4096
"""Maximum number of launches of a call."""


def repetitions(step: Step, names: Mapping[str, Value]) -> int:
    """Return the number of launches of a step, at least 0."""
    if step.when is not None and not step.when.evaluate(names):
        return 0
    return max(0, int(step.times.evaluate(names))) if step.times is not None else 1


def _step_launch(spec: KernelSpec, index: int, names: Mapping[str, Value], memory: Mapping[str, str]) -> StepLaunch:
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
        (scalar.name, int(scalar.value.evaluate(names)))
        for scalar in spec.scalars
        if scalar.is_per_launch and scalar.name in step.arguments and isinstance(scalar.value, Expression)
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


def launch_geometry(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties
) -> LaunchGeometry:
    """Return the geometry of the main launch of a configuration; see `LaunchPlan`."""
    return LaunchPlan.of(spec, config, sizes, device).main.geometry


def value_or_zero(expression: Expression | None, names: Mapping[str, Value]) -> int:
    """Evaluate an optional expression to a whole number; return 0 if there is none."""
    return int(expression.evaluate(names)) if expression is not None else 0


def _dimensions(expressions: Sequence[Expression], names: Mapping[str, Value]) -> tuple[int, int, int]:
    x, y, z = ([int(expression.evaluate(names)) for expression in expressions] + [1, 1])[:3]
    return x, y, z


@dataclass(frozen=True, slots=True)
class LaunchData:
    """Workspaces, tensor maps, structs and textures of one configuration, in order; compares by value."""

    workspaces: tuple[Workspace, ...]
    tensor_maps: tuple[TensorMap, ...]
    structs: tuple[StructValue, ...] = ()
    textures: tuple[Texture, ...] = ()

    @classmethod
    def of(cls, spec: KernelSpec, dtype: str, names: Mapping[str, Value]) -> LaunchData:
        """Evaluate the arguments of a kernel.

        Parameters
        ----------
        spec, dtype
            Kernel and element type of the problem.
        names
            Value of every size, flag, parameter and ``device.*``; see `known_names`.

        Raises
        ------
        ConfigError
            A workspace has a negative extent.
        """
        workspaces = [argument.workspace(dtype, names) for argument in spec.arguments]
        tensor_maps = [argument.tensor_map(dtype, names) for argument in spec.arguments]
        textures = [argument.texture(dtype, names) for argument in spec.arguments]
        structs = [argument.structure(dtype, names) for argument in spec.arguments]
        data = cls(
            tuple(filter(None, workspaces)),
            tuple(filter(None, tensor_maps)),
            tuple(filter(None, structs)),
            tuple(filter(None, textures)),
        )
        for workspace in data.workspaces:
            if min(workspace.shape) < 0:
                raise ConfigError(
                    f"{spec.name}: the workspace {workspace.name} would have the shape {workspace.shape}; add a rule "
                    "that excludes it"
                )
        return data
