"""What the names of an expression stand for, and the launch geometry of one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotile.ground.errors import ConfigError, ProblemError
from autotile.ground.expressions import Expression
from autotile.ground.hardware import EXPRESSION_NAMES, DeviceProperties
from autotile.ground.model import Config, LaunchGeometry, Value
from autotile.ground.spec import KernelSpec


def fixed_names(spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties) -> dict[str, Value]:
    """Give the value of every name that no parameter decides: the sizes and ``device.*``.

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
    """Give the value of every name that an expression may use: sizes, flags, parameters and ``device.*``.

    Raises
    ------
    ProblemError
        A size of the kernel is missing.
    """
    return {**fixed_names(spec, sizes, device), **config}


def launch_geometry(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties
) -> LaunchGeometry:
    """Evaluate a configuration's block, grid and dynamic shared memory.

    Dimensions that the file does not give are 1. Nothing is compared with the device's limits here.

    Raises
    ------
    ConfigError
        A dimension is below 1 or the shared memory below 0.
    SpecError
        An expression divides by zero or leaves 64 bits.
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
    """Evaluate an optional expression to a whole number; absent means 0."""
    return int(expression.evaluate(names)) if expression is not None else 0


def _dimensions(expressions: Sequence[Expression], names: Mapping[str, Value]) -> tuple[int, int, int]:
    x, y, z = ([int(expression.evaluate(names)) for expression in expressions] + [1, 1])[:3]
    return x, y, z
