"""Tilings: the grid of a configuration as a product of quotients, each a size over the extent of its tile, rounded up.

The grid of nearly every kernel has this form for given flags. Its tiles are found by evaluating the expressions of the
kernel's file at a few problems, and tested at others; after that, the blocks of a hundred configurations are computed
in three array operations. Grids of any other form are evaluated from their expressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Resources
from autotile.errors import AutotileError
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import LaunchPlan, fixed_names
from autotile.kernel.spec import STEP, KernelSpec
from autotile.space.limits import compiled_occupancy

_UNLIMITED_SMS = 2**40
"""Number of SMs at which no persistent kernel limits its grid."""
_LARGE = 2**14 * 3**2 * 5 * 7
"""A size that most tiles divide."""
UNTILED = 2.0**40
"""Tile of a size that the grid does not depend on; no size exceeds it."""
_TESTED = ((1, 2, 3, 5), (64, 65, 127, 1000), (4096, 33, 2049, 7), (777, 5555, 16384, 2))
"""Sizes of the problems at which a tiling is tested, repeated for further sizes."""
_UNCOMPILED = Resources(64, 0, 0, 0, 0)
"""Assumed where the compiler's report is not known."""

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Tilings:
    """Tilings of several configurations of a kernel, for given flags.

    Attributes
    ----------
    names
        Names of the kernel's sizes that are no flags.
    tiles
        Extent of a tile along each size, shape (configurations, sizes); `2**40` where the grid does not depend on it.
    units
        Blocks of one tile, such as the parts of split-K, shape (configurations,).
    resident
        Blocks that one SM holds, at least 1, shape (configurations,).
    threads, smem_bytes, registers
        Threads and bytes of shared memory of a block and registers of a thread, shape (configurations,).
    irregular
        Configurations whose grid has another form, with the expressions of each step's grid.
    """

    names: tuple[str, ...]
    tiles: Column
    units: Column
    resident: Column
    threads: Column
    smem_bytes: Column
    registers: Column
    irregular: Mapping[int, _Grid]

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        device: DeviceProperties,
        configs: Sequence[Config],
        resources: Sequence[Resources | None],
        flags: Mapping[str, int],
    ) -> Tilings:
        """Find the tilings.

        Parameters
        ----------
        spec, device
            Kernel and device.
        configs, resources
            Configurations, and what the compiler reported of each, None where that is not known.
        flags
            Value of each flag of the kernel.
        """
        names = tuple(name for name in spec.sizes if name not in spec.flags)
        irregular = {}
        rows = []
        for number, (config, compiled) in enumerate(zip(configs, resources, strict=True)):
            grid = _Grid(spec, config, names, flags, device)
            tiles, units = grid.tiling()
            if not grid.has(tiles, units):
                irregular[number] = grid
            rows.append([*tiles, units, *_shape(spec, config, flags, device, compiled or _UNCOMPILED)])
        table = np.array(rows, float).reshape(len(rows), len(names) + 5)
        split = len(names)
        units, resident, threads, smem, registers = table[:, split:].T
        return cls(names, table[:, :split], units, resident, threads, smem, registers, irregular)


@dataclass(frozen=True)
class _Grid:
    """The expressions of a configuration's grid."""

    spec: KernelSpec
    config: Config
    names: tuple[str, ...]
    flags: Mapping[str, int]
    device: DeviceProperties

    def blocks(self, sizes: Sequence[int]) -> float:
        """Return the blocks of the main step, or else the largest, without a limit by the number of SMs."""
        unlimited = replace(self.device, sm_count=_UNLIMITED_SMS)
        problem = {**self.spec.sizes, **self.flags, **dict(zip(self.names, sizes, strict=True))}
        names = {**fixed_names(self.spec, problem, unlimited), **self.config, STEP: 0}
        try:
            return max(_product(step.launch.grid, names) for step in self.spec.main_steps)
        except AutotileError:  # such as a division by zero at sizes for which the configuration is not meant
            return 1.0

    def tiling(self) -> tuple[list[float], float]:
        """Return the tile along each size, and the blocks of one tile, as far as a tiling explains the grid."""
        ones = [1] * len(self.names)
        units = self.blocks(ones)
        tiles = []
        for place in range(len(self.names)):
            large = self.blocks([_LARGE if place == other else 1 for other in range(len(self.names))])
            tiles.append(_LARGE * units / large if large > units else UNTILED)
        return tiles, units

    def has(self, tiles: Sequence[float], units: float) -> bool:
        """Return whether a tiling gives the number of blocks at the tested problems."""
        for row in _TESTED:
            sizes = [row[place % len(row)] for place in range(len(self.names))]
            counts = [-(-size // tile) for size, tile in zip(sizes, tiles, strict=True)]
            if float(np.prod(counts)) * units != self.blocks(sizes):
                return False
        return True


def _product(grid: Sequence[Expression], names: Mapping[str, Any]) -> float:
    return reduce(lambda product, extent: product * max(float(extent.value(names)), 1.0), grid, 1.0)


def _shape(
    spec: KernelSpec, config: Config, flags: Mapping[str, int], device: DeviceProperties, compiled: Resources
) -> tuple[float, float, float, float]:
    """Return resident blocks, threads, shared memory in bytes and registers of the main launch."""
    try:
        geometry = LaunchPlan.of(spec, config, {**spec.sizes, **flags}, device).main.geometry
    except AutotileError:
        return 1.0, 128.0, 0.0, float(compiled.registers)
    found = compiled_occupancy(geometry, compiled, device).blocks_per_sm
    smem_bytes = geometry.dynamic_smem_bytes + compiled.static_smem_bytes
    return float(max(found, 1)), float(geometry.threads), float(smem_bytes), float(compiled.registers)


def array_extents(spec: KernelSpec, flags: Mapping[str, int]) -> dict[str, tuple[int | None, ...]]:
    """Return, for each array of a kernel, which of the sizes each extent is; None where it is none of them.

    Sizes are counted in the order of the kernel's file, without flags.
    """
    proper = [name for name in spec.sizes if name not in spec.flags]
    distinct = {name: 10007 + 2 * place for place, name in enumerate(proper)}
    places = {value: place for place, value in enumerate(distinct.values())}
    names = {**spec.sizes, **flags, **distinct, **spec.default}
    found: dict[str, tuple[int | None, ...]] = {}
    for buffer in spec.buffers:
        try:
            found[buffer.name] = tuple(places.get(int(extent.value(names))) for extent in buffer.shape)
        except AutotileError:
            found[buffer.name] = ()
    return found
