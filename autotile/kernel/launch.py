"""Launch geometry, workspaces and tensor maps of one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotile.core.device import EXPRESSION_NAMES, DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Config, LaunchGeometry, Value
from autotile.errors import ConfigError, ProblemError
from autotile.kernel.arguments import Workspace
from autotile.kernel.computed import computed_values
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import KernelSpec
from autotile.kernel.structures import StructValue
from autotile.kernel.tensor_maps import TensorMap


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


def launch_geometry(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties
) -> LaunchGeometry:
    """Evaluate the block, grid and dynamic shared memory of a configuration.

    Undeclared dimensions are 1. The limits of the device are not checked.

    Raises
    ------
    ConfigError
        A dimension is below 1 or the shared memory below 0.
    SpecError
        An expression divides by zero or exceeds 64 bits.
    """
    names = known_names(spec, config, sizes, device)
    geometry = LaunchGeometry(
        grid=_dimensions(spec.launch.grid, names),
        block=_dimensions(spec.launch.block, names),
        dynamic_smem_bytes=value_or_zero(spec.launch.dynamic_smem_bytes, names),
    )
    if min(*geometry.grid, *geometry.block) < 1 or geometry.dynamic_smem_bytes < 0:
        raise ConfigError(
            f"{spec.name}: the configuration gives the grid {geometry.grid}, the block {geometry.block} and "
            f"{geometry.dynamic_smem_bytes} bytes of dynamic shared memory; add a rule that excludes it"
        )
    return geometry


def value_or_zero(expression: Expression | None, names: Mapping[str, Value]) -> int:
    """Evaluate an optional expression to a whole number; return 0 if there is none."""
    return int(expression.evaluate(names)) if expression is not None else 0


def _dimensions(expressions: Sequence[Expression], names: Mapping[str, Value]) -> tuple[int, int, int]:
    x, y, z = ([int(expression.evaluate(names)) for expression in expressions] + [1, 1])[:3]
    return x, y, z


@dataclass(frozen=True, slots=True)
class LaunchData:
    """Workspaces, tensor maps and structs of one configuration, in the order of the arguments; compares by value."""

    workspaces: tuple[Workspace, ...]
    tensor_maps: tuple[TensorMap, ...]
    structs: tuple[StructValue, ...] = ()

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
        structs = [argument.structure(dtype, names) for argument in spec.arguments]
        data = cls(tuple(filter(None, workspaces)), tuple(filter(None, tensor_maps)), tuple(filter(None, structs)))
        for workspace in data.workspaces:
            if min(workspace.shape) < 0:
                raise ConfigError(
                    f"{spec.name}: the workspace {workspace.name} would have the shape {workspace.shape}; add a rule "
                    "that excludes it"
                )
        return data
