"""Quantities of problems and configurations that rules and models are learned from: sizes, work, grids and tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Name, attributes, convert
from autotile.core.model import Config, Problem, Resources, Sizes
from autotile.errors import AutotileError, DataError
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names, launch_geometry
from autotile.kernel.spec import STEP, KernelSpec
from autotile.space.limits import compiled_occupancy

Column = NDArray[np.float64]


class SizeColumns:
    """Problems of one kernel and dtype as columns, and the values of expressions over them, float64 (problems,)."""

    def __init__(self, spec: KernelSpec, device: DeviceProperties, problems: Sequence[Problem]) -> None:
        self._spec = spec
        self._count = len(problems)
        self.sizes = {name: np.array([problem.sizes[name] for problem in problems], np.int64) for name in spec.sizes}
        own = self.sizes if self._count > 1 else {}  # for a single problem, scalars cost a tenth of columns
        self._names = {**fixed_names(spec, problems[0], device), **own}

    def column(self, expression: Expression | None, config: Config | None = None) -> Column:
        """Return the values of an expression; zeros without one."""
        if expression is None:
            return np.zeros(self._count)
        values = np.asarray(expression.evaluate({**self._names, **(config or {})}), float)
        return np.broadcast_to(values, np.broadcast_shapes(values.shape, (self._count,)))

    def blocks(self, config: Mapping[str, Any]) -> Column:
        """Return the blocks of the main step, or else the largest; an extent that is not positive counts as 1.

        Of several configurations, with a column of shape (configurations, 1) for each parameter, the result has shape
        (configurations, problems), or (problems,) if the blocks are the same in all of them.
        """
        names = {STEP: 0, **config}
        counts = []
        for step in self._spec.main_steps:
            extents = [np.maximum(self.column(extent, names), 1.0) for extent in step.launch.grid]
            counts.append(reduce(np.multiply, extents))
        return reduce(np.maximum, counts)

    def outputs(self) -> Column:
        """Return the elements of all written arrays, in the default configuration where a shape depends on it."""
        written = [buffer for buffer in self._spec.buffers if buffer.access != "in"]
        default = self._spec.default
        elements = (reduce(np.multiply, [self.column(one, default) for one in buffer.shape]) for buffer in written)
        return reduce(np.add, elements, np.zeros(self._count))


def without_limit(device: DeviceProperties) -> DeviceProperties:
    """Return the device with so many SMs that no persistent kernel limits its grid."""
    return replace(device, sm_count=2**40)


def meet_rules(
    spec: KernelSpec, device: DeviceProperties, configs: Sequence[Config], problems: Sequence[Problem]
) -> NDArray[np.bool_]:
    """Return True if configurations meet the rules of the kernel's file, shape (problems, configurations)."""
    table = SizeColumns(spec, device, problems)
    every = np.ones(len(problems), np.bool_)
    rules = [rule.expression for rule in spec.rules]
    met = [reduce(np.logical_and, [table.column(rule, config) != 0 for rule in rules], every) for config in configs]
    return np.stack(met, axis=1)


Kind = Literal["size", "alignment", "outputs", "intensity", "blocks", "waves", "work_ratio"]
_KINDS: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "size": ("{of}", ("of",)),
    "alignment": ("alignment of {of}", ("of",)),
    "outputs": ("outputs", ()),
    "intensity": ("intensity", ()),
    "blocks": ("blocks of #{config}", ("config",)),
    "waves": ("waves of #{config}", ("config",)),
    "work_ratio": ("work of #{config} / #{over}", ("config", "over")),
}
"""Kinds of features as text, and the attributes that they need."""
_MAX_ALIGNMENT = 256
"""Largest power of two that divides any tile."""
_LARGE_SIZE = 2**14
"""Size at which partial tiles at the edges of the grid are negligible."""


class Feature(NamedTuple):
    """One feature of a problem, of a size, of a configuration, or of one configuration over another, by their numbers.

    ``size``: a size or flag. ``alignment``: the largest power of two that divides a size, 256 at most. ``outputs``:
    elements of all written arrays. ``intensity``: operations over bytes, as the kernel's file states them. ``blocks``:
    blocks in the grid of a configuration; for a persistent kernel, whose grid is limited to the blocks resident on the
    device, the blocks without that limit. ``waves``: those blocks over the resident blocks. ``work_ratio``: the work of
    the busiest SM under one configuration over that under another, counted in whole blocks of whole tiles, so that
    partial tiles at the edges and a partial last round are included.
    """

    kind: Kind
    of: str = ""
    config: int = 0
    over: int = 0

    def __str__(self) -> str:
        return _KINDS[self.kind][0].format(**self._asdict())

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the attributes that it needs."""
        return {"feature": self.kind, **attributes(self, *_KINDS[self.kind][1])}

    @classmethod
    def from_json(cls, data: Any, sizes: Iterable[str], configs: int) -> Feature:
        """Invert `to_json`; a `DataError` if it is no feature of these sizes, flags and number of configurations."""
        known = _by_json(tuple(sizes), (), configs).get(frozenset(convert(data, dict[str, Name | Count]).items()))
        if known is None:
            raise DataError(f"{data} is not a feature of a problem")
        return known


def list_features(spec: KernelSpec, configs: int) -> list[Feature]:
    """Return the features for a rule over ``configs`` configurations, simplest first."""
    states_work = spec.work.flops is not None and spec.work.bytes is not None
    found = _by_json(tuple(spec.sizes), tuple(spec.flags), configs).values()
    return [feature for feature in found if feature.kind != "intensity" or states_work]


@lru_cache(maxsize=8)
def _by_json(
    sizes: tuple[str, ...], flags: tuple[str, ...], configs: int
) -> Mapping[frozenset[tuple[str, Any]], Feature]:
    """Return features by the items of their JSON values, simplest first: a tree looks one up at every node."""
    found = [
        *(Feature("size", name) for name in sizes),
        Feature("outputs"),
        Feature("intensity"),
        *(Feature("alignment", name) for name in sizes if name not in flags),
        *(Feature("blocks", config=number) for number in range(configs)),
        *(Feature("waves", config=number) for number in range(configs)),
        *(Feature("work_ratio", config=a, over=b) for a in range(configs) for b in range(a + 1, configs)),
    ]
    return {frozenset(feature.to_json().items()): feature for feature in found}


class Traits(NamedTuple):
    """The quantities that features are computed from: problems in rows, configurations in columns."""

    sizes: Mapping[str, Column]
    outputs: Column
    flops: Column
    bytes: Column
    """Elements written, operations and bytes moved, shape (problems,); zeros where the kernel's file does not state its
    work."""
    blocks: Column
    """Blocks as in `Feature`, at least 1, shape (problems, configurations)."""
    slots: Column
    """Blocks resident on the device at once, shape (configurations,)."""
    tile: Column
    """Outputs of a full block, shape (configurations,)."""
    sm_count: int

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        device: DeviceProperties,
        configs: Sequence[Config],
        blocks_per_sm: Sequence[int],
        problems: Sequence[Problem],
    ) -> Traits:
        """Compute the traits; ``blocks_per_sm`` are the resident blocks of each configuration."""
        table, grids = (SizeColumns(spec, each, problems) for each in (device, without_limit(device)))
        large_problem = problems[0].at({**problems[0].sizes, **dict.fromkeys(spec.proper_sizes, _LARGE_SIZE)})
        large = SizeColumns(spec, without_limit(device), [large_problem])
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
        return self._replace(blocks=self.blocks[:, chosen], slots=self.slots[chosen], tile=self.tile[chosen])

    def rows(self, problems: NDArray[np.int64]) -> Traits:
        """Return the traits of some of the problems."""
        columns = {name: getattr(self, name)[problems] for name in ("outputs", "flops", "bytes", "blocks")}
        return self._replace(sizes={name: column[problems] for name, column in self.sizes.items()}, **columns)

    @property
    def waves(self) -> Column:
        """Blocks over resident blocks, shape (problems, configurations)."""
        return self.blocks / self.slots

    @property
    def rounds(self) -> Column:
        """Blocks of the busiest SM, shape (problems, configurations)."""
        return np.ceil(self.blocks / self.sm_count)

    def column(self, feature: Feature) -> Column:
        """Return the value of a feature for each problem, shape (problems,)."""
        match feature.kind:
            case "size":
                return self.sizes[feature.of]
            case "alignment":
                values = np.maximum(self.sizes[feature.of].astype(np.int64), 1)
                return np.minimum(values & -values, _MAX_ALIGNMENT).astype(float)
            case "outputs":
                return self.outputs
            case "intensity":
                return self.flops / np.maximum(self.bytes, 1.0)
            case "blocks":
                return self.blocks[:, feature.config]
            case "waves":
                return self.waves[:, feature.config]
            case "work_ratio":
                work = self.rounds * self.tile
                return work[:, feature.config] / work[:, feature.over]

    def table(self, features: Sequence[Feature]) -> Column:
        """Return the values of features, shape (problems, features)."""
        return np.stack([self.column(feature) for feature in features], axis=1)


_LARGE = 2**14 * 3**2 * 5 * 7
"""A size that most tiles divide."""
UNTILED = 2.0**40
"""Tile of a size that the grid does not depend on; no size exceeds it."""
_TESTED = ((1, 2, 3, 5), (64, 65, 127, 1000), (4096, 33, 2049, 7), (777, 5555, 16384, 2))
"""Sizes of the problems at which a tiling is tested, repeated for further sizes."""
TILING_COLUMNS = 5
_UNCOMPILED = Resources(64, 0, 0, 0, 0)
"""Assumed where the compiler's report is not known."""


def tilings(
    spec: KernelSpec,
    device: DeviceProperties,
    configs: Sequence[Config],
    resources: Sequence[Resources | None],
    problem: Problem,
) -> tuple[Column, Column, list[int]]:
    """Return the tilings of several configurations of a kernel, for the flags and the dtype of a problem.

    They are found from the grids at a few problems; ``resources`` are the compiler's reports, where known. First, of
    shape (configurations, proper sizes), the extent of a tile along each size; `UNTILED` where the grid does not depend
    on it. Second, of shape (configurations, 5), the blocks of one tile, such as the parts of split-K, those that one SM
    holds, at least 1, the threads and bytes of shared memory of a block, and the registers of a thread. Third, the
    numbers of the configurations whose grids have another form; `blocks_at` evaluates those.
    """
    count = len(spec.proper_sizes)
    tested = [[row[place % len(row)] for place in range(count)] for row in _TESTED]
    large = np.where(np.eye(count, dtype=bool), _LARGE, 1).tolist()
    usual = {**spec.sizes, **{flag: problem.sizes[flag] for flag in spec.flags}}
    problems = [
        problem.at({**usual, **dict(zip(spec.proper_sizes, row, strict=True))})
        for row in ([1] * count, *large, *tested)
    ]
    together = SizeColumns(spec, without_limit(device), problems)
    rows = []
    irregular: list[int] = []
    try:
        columns = {name: np.array([config[name] for config in configs]).reshape(-1, 1) for name in spec.default}
        grids = np.broadcast_to(together.blocks(columns), (len(configs), len(problems))).tolist()
    except AutotileError:  # of some of the configurations, at some of the problems
        grids = [[blocks_at(spec, device, config, each) for each in problems] for config in configs]
    for number, (config, compiled, blocks) in enumerate(zip(configs, resources, grids, strict=True)):
        units = blocks[0]
        tiles = [_LARGE * units / each if each > units else UNTILED for each in blocks[1 : count + 1]]
        counts = [[-(-size // tile) for size, tile in zip(row, tiles, strict=True)] for row in tested]
        if any(float(np.prod(row)) * units != each for row, each in zip(counts, blocks[count + 1 :], strict=True)):
            irregular.append(number)
        used, resident, threads, smem_bytes = compiled or _UNCOMPILED, 1, 128, 0
        with suppress(AutotileError):  # it may be launched at other sizes
            geometry = launch_geometry(spec, config, problem.at(usual), device)
            resident = max(compiled_occupancy(geometry, used, device).blocks_per_sm, 1)
            threads, smem_bytes = geometry.threads, geometry.dynamic_smem_bytes + used.static_smem_bytes
        rows.append([*tiles, units, resident, threads, smem_bytes, used.registers])
    table: Column = np.array(rows, float).reshape(len(rows), count + TILING_COLUMNS)
    return table[:, :count], table[:, count:], irregular


def blocks_at(spec: KernelSpec, device: DeviceProperties, config: Config, problem: Problem) -> float:
    """Return the blocks of a grid without a limit by the number of SMs; 1 where it cannot be evaluated.

    A division by zero at sizes for which the configuration is not meant is such a case.
    """
    try:
        complete = problem.at({**spec.sizes, **problem.sizes})
        return float(SizeColumns(spec, without_limit(device), [complete]).blocks(config)[0])
    except AutotileError:
        return 1.0


def array_extents(spec: KernelSpec, flags: Sizes) -> dict[str, tuple[int | None, ...]]:
    """Return, for each array of a kernel, which of the sizes each extent is; None where it is none of them.

    Sizes are counted in the order of the kernel's file, without flags.
    """
    distinct = {name: 10007 + 2 * place for place, name in enumerate(spec.proper_sizes)}
    places = {value: place for place, value in enumerate(distinct.values())}
    names = {**spec.at({**spec.sizes, **flags, **distinct}).names, **spec.default}
    found: dict[str, tuple[int | None, ...]] = {}
    for buffer in spec.buffers:
        try:
            found[buffer.name] = tuple(places.get(int(extent.value(names))) for extent in buffer.shape)
        except AutotileError:
            found[buffer.name] = ()
    return found
