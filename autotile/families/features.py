"""Features of a problem for a decision tree: its sizes, and how the blocks of each configuration fill the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Name, convert
from autotile.core.frozen import dataclass
from autotile.core.model import Config
from autotile.errors import DataError
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names
from autotile.kernel.spec import STEP, KernelSpec

Kind = Literal["size", "alignment", "outputs", "intensity", "blocks", "waves", "work_ratio"]

_NEEDS: Mapping[Kind, Sequence[str]] = {
    "size": ("of",),
    "alignment": ("of",),
    "blocks": ("config",),
    "waves": ("config",),
    "work_ratio": ("config", "over"),
}
_MAX_ALIGNMENT = 256
"""Largest power of two that divides any tile."""
_LARGE_SIZE = 2**14
"""Size at which partial tiles at the edges of the grid are negligible."""
_UNLIMITED_SMS = 2**40
"""Number of SMs at which no persistent kernel limits its grid."""

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of a problem.

    Attributes
    ----------
    kind
        ``size``: a size or flag. ``alignment``: the largest power of two that divides a size, 256 at most. ``outputs``:
        elements of all written arrays. ``intensity``: operations over bytes, as the kernel's file states them.
        ``blocks``: blocks in the grid of a configuration; for a persistent kernel, whose grid is limited to the blocks
        resident on the device, the blocks without that limit. ``waves``: those blocks over the resident blocks.
        ``work_ratio``: the work of the busiest SM under one configuration over that under another, counted in whole
        blocks of whole tiles, so that partial tiles at the edges and a partial last round are included.
    of
        Name of the size, for ``size`` and ``alignment``.
    config, over
        Numbers of the configuration and, for a ``work_ratio``, of the other one.
    """

    kind: Kind
    of: str = ""
    config: int = 0
    over: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "size":
                return self.of
            case "alignment":
                return f"alignment of {self.of}"
            case "work_ratio":
                return f"work of #{self.config} / #{self.over}"
            case "blocks" | "waves":
                return f"{self.kind} of #{self.config}"
        return self.kind

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the attributes that it needs."""
        needed = {name: getattr(self, name) for name in _NEEDS.get(self.kind, ())}
        return {"feature": self.kind, **needed}

    @classmethod
    def from_json(cls, data: Any, sizes: Iterable[str], configs: int) -> Feature:
        """Invert `to_json`.

        Parameters
        ----------
        data
            The JSON value.
        sizes
            Names of the sizes and flags.
        configs
            Number of configurations.

        Raises
        ------
        DataError
            The value is not a feature of these sizes and configurations.
        """
        known = _by_json(tuple(sizes), configs).get(frozenset(convert(data, dict[str, Name | Count]).items()))
        if known is None:
            raise DataError(f"{data} is not a feature of a problem")
        return known


@dataclass(frozen=True)
class Traits:
    """The quantities that features are computed from: problems in rows, configurations in columns.

    Attributes
    ----------
    sizes
        Values of each size and flag, shape (problems,).
    outputs, flops, bytes
        Elements written, operations and bytes moved of each problem, shape (problems,); zeros where the kernel's file
        does not state its work.
    blocks
        Blocks as in `Feature`, at least 1, shape (problems, configurations).
    slots
        Blocks resident on the device at once, shape (configurations,).
    tile
        Outputs of a full block, shape (configurations,).
    sm_count
        Number of SMs of the device.
    """

    sizes: Mapping[str, Column]
    outputs: Column
    flops: Column
    bytes: Column
    blocks: Column
    slots: Column
    tile: Column
    sm_count: int

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        device: DeviceProperties,
        configs: Sequence[Config],
        blocks_per_sm: Sequence[int],
        problems: Sequence[Mapping[str, int]],
    ) -> Traits:
        """Compute the traits.

        Parameters
        ----------
        spec, device
            Kernel, and device that it runs on.
        configs, blocks_per_sm
            Configurations, and resident blocks of each on one SM.
        problems
            Sizes and flags of each problem.
        """
        table = _Problems(spec, device, problems)
        proper = [name for name in spec.sizes if name not in spec.flags]
        unlimited = replace(device, sm_count=_UNLIMITED_SMS)
        grids = _Problems(spec, unlimited, problems)
        large = _Problems(spec, unlimited, [{**problems[0], **dict.fromkeys(proper, _LARGE_SIZE)}])
        return cls(
            sizes={name: column.astype(float) for name, column in table.sizes.items()},
            outputs=table.outputs(),
            flops=table.column(spec.work.flops, spec.default),
            bytes=table.column(spec.work.bytes, spec.default),
            blocks=np.stack([grids.blocks(config) for config in configs], axis=1),
            slots=device.sm_count * np.maximum(np.array(blocks_per_sm, float), 1.0),
            tile=np.array([float((large.outputs() / large.blocks(config))[0]) for config in configs]),
            sm_count=device.sm_count,
        )

    def select(self, configs: Sequence[int]) -> Traits:
        """Return the traits of some of the configurations, in the given order."""
        chosen = list(configs)
        return replace(
            self,
            blocks=self.blocks[:, chosen],
            slots=self.slots[chosen],
            tile=self.tile[chosen],
        )

    def rows(self, problems: NDArray[np.int64]) -> Traits:
        """Return the traits of some of the problems."""
        return replace(
            self,
            sizes={name: column[problems] for name, column in self.sizes.items()},
            outputs=self.outputs[problems],
            flops=self.flops[problems],
            bytes=self.bytes[problems],
            blocks=self.blocks[problems],
        )

    @property
    def waves(self) -> Column:
        """Blocks over resident blocks, shape (problems, configurations)."""
        return np.asarray(self.blocks / self.slots)

    @property
    def rounds(self) -> Column:
        """Blocks of the busiest SM, shape (problems, configurations)."""
        return np.asarray(np.ceil(self.blocks / self.sm_count))

    def column(self, feature: Feature) -> Column:
        """Return the value of a feature for each problem, shape (problems,)."""
        match feature.kind:
            case "size":
                found = self.sizes[feature.of]
            case "alignment":
                values = np.maximum(self.sizes[feature.of].astype(np.int64), 1)
                found = np.minimum(values & -values, _MAX_ALIGNMENT).astype(float)
            case "outputs":
                found = self.outputs
            case "intensity":
                found = self.flops / np.maximum(self.bytes, 1.0)
            case "blocks":
                found = self.blocks[:, feature.config]
            case "waves":
                found = self.waves[:, feature.config]
            case "work_ratio":
                work = self.rounds * self.tile
                found = work[:, feature.config] / work[:, feature.over]
        return found

    def table(self, features: Sequence[Feature]) -> Column:
        """Return the values of features, shape (problems, features)."""
        return np.stack([self.column(feature) for feature in features], axis=1)


def meet_rules(
    spec: KernelSpec, device: DeviceProperties, configs: Sequence[Config], problems: Sequence[Mapping[str, int]]
) -> NDArray[np.bool_]:
    """Return whether configurations meet the rules of the kernel's file, shape (problems, configurations)."""
    table = _Problems(spec, device, problems)
    return np.stack([table.meets_rules(config) for config in configs], axis=1)


def list_features(spec: KernelSpec, configs: int) -> list[Feature]:
    """Return the features for a rule over ``configs`` configurations, simplest first."""
    states_work = spec.work.flops is not None and spec.work.bytes is not None
    found = _all_features(tuple(spec.sizes), spec.flags, configs)
    return [feature for feature in found if feature.kind != "intensity" or states_work]


def _all_features(sizes: Sequence[str], flags: Sequence[str], configs: int) -> list[Feature]:
    return [
        *(Feature("size", name) for name in sizes),
        Feature("outputs"),
        Feature("intensity"),
        *(Feature("alignment", name) for name in sizes if name not in flags),
        *(Feature("blocks", config=number) for number in range(configs)),
        *(Feature("waves", config=number) for number in range(configs)),
        *(Feature("work_ratio", config=a, over=b) for a in range(configs) for b in range(a + 1, configs)),
    ]


@lru_cache(maxsize=8)
def _by_json(sizes: tuple[str, ...], configs: int) -> Mapping[frozenset[tuple[str, Any]], Feature]:
    """Return features by the items of their JSON values: a tree looks one up at every node."""
    return {frozenset(feature.to_json().items()): feature for feature in _all_features(sizes, (), configs)}


class _Problems:
    """Problems as columns, and the evaluation of expressions over them."""

    def __init__(self, spec: KernelSpec, device: DeviceProperties, problems: Sequence[Mapping[str, int]]) -> None:
        self._spec = spec
        self._count = len(problems)
        self.sizes = {name: np.array([problem[name] for problem in problems], np.int64) for name in spec.sizes}
        own = self.sizes if self._count > 1 else {}  # for a single problem, scalars cost a tenth of columns
        self._names = {**fixed_names(spec, problems[0], device), **own}

    def column(self, expression: Expression | None, config: Config | None = None) -> Column:
        """Return the values of an expression, float64, shape (problems,); zeros without an expression."""
        if expression is None:
            return np.zeros(self._count)
        values = expression.evaluate({**self._names, **(config or {})})
        return np.broadcast_to(np.asarray(values, float), (self._count,))

    def blocks(self, config: Config) -> Column:
        """Return the blocks of the main step, or else the largest; 1 if a dimension is not positive: never served."""
        grids = (step.launch.grid for step in self._spec.main_steps)
        counts = (reduce(np.multiply, (self._dimension(extent, config) for extent in grid)) for grid in grids)
        return reduce(np.maximum, counts)

    def _dimension(self, extent: Expression, config: Config) -> Column:
        return np.maximum(self.column(extent, {STEP: 0, **config}), 1.0)

    def _elements(self, shape: Sequence[Expression]) -> Column:
        """Return the elements of an array, in the default configuration if its shape depends on that."""
        return reduce(np.multiply, (self.column(extent, self._spec.default) for extent in shape))

    def meets_rules(self, config: Config) -> NDArray[np.bool_]:
        """Return whether every rule holds, shape (problems,)."""
        rules = (self.column(rule.expression, config) != 0 for rule in self._spec.rules)
        return reduce(np.logical_and, rules, np.ones(self._count, np.bool_))

    def outputs(self) -> Column:
        """Return the elements of all written arrays, shape (problems,)."""
        written = [buffer for buffer in self._spec.buffers if buffer.access != "in"]
        extents = (self._elements(buffer.shape) for buffer in written)
        return reduce(np.add, extents, np.zeros(self._count))
