"""The rule of a family: a few configurations, and a small decision tree over features of a problem that chooses one.

Features are the sizes, and how the blocks of each configuration fill the device. A rule is data that a person can read;
every part is checked when it is read back, and nothing in it is executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, reduce
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Finite, Format, Name, NonNegative, TimeUs, convert
from autotile.core.model import Config, Resources, config_key, config_text
from autotile.core.text import percent_text, sizes_text
from autotile.errors import DataError
from autotile.families.family import Family
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names
from autotile.kernel.problem import size_distance
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


_MAX_DEPTH = 32
"""Maximum number of splits above a leaf of a tree that is read from a file."""
_MAX_CONFIGS = 64
"""Maximum number of configurations of a rule that is read from a file."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The configurations in order of preference: where one is not valid, the next is served."""

    order: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the order under ``serve``."""
        return {"serve": list(self.order)}


@dataclass(frozen=True, slots=True)
class Split:
    """A split: problems whose feature is at most a threshold go to one branch, all others to the other."""

    feature: Feature
    at_most: float
    then: Tree
    otherwise: Tree

    def to_json(self) -> dict[str, Any]:
        """Return the feature, the threshold and the branches."""
        question = {"if": self.feature.to_json(), "at_most": self.at_most}
        return {**question, "then": self.then.to_json(), "else": self.otherwise.to_json()}


Tree = Leaf | Split


class TreeDocument(msgspec.Struct, forbid_unknown_fields=True):
    """JSON of a tree: ``serve`` of a leaf, or the other fields of a split."""

    serve: list[Count] | None = None
    feature: dict[str, Any] | None = msgspec.field(default=None, name="if")
    at_most: Finite | None = None
    then: TreeDocument | None = None
    otherwise: TreeDocument | None = msgspec.field(default=None, name="else")

    def tree(self, sizes: Sequence[str], configs: int, depth: int = 0) -> Tree:
        """Return the tree.

        Parameters
        ----------
        sizes
            Names of the sizes and flags.
        configs
            Number of configurations.
        depth
            Number of splits above it.

        Raises
        ------
        DataError
            It is not a tree over these sizes and configurations.
        """
        if self.serve is not None:
            if sorted(self.serve) != list(range(configs)):
                raise DataError(f"a leaf serves {self.serve}, expected every number below {configs} once")
            return Leaf(tuple(self.serve))
        if self.at_most is None or self.then is None or self.otherwise is None or depth > _MAX_DEPTH:
            raise DataError("a node of the tree is neither a leaf nor a split, or is nested too deeply")
        return Split(
            Feature.from_json(self.feature, sizes, configs),
            self.at_most,
            self.then.tree(sizes, configs, depth + 1),
            self.otherwise.tree(sizes, configs, depth + 1),
        )


def find_leaf(tree: Tree, problem: Traits) -> Leaf:
    """Return the leaf of a single problem."""
    while isinstance(tree, Split):
        tree = tree.then if problem.column(tree.feature)[0] <= tree.at_most else tree.otherwise
    return tree


_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """One of the configurations of a rule.

    Attributes
    ----------
    config
        Values of the parameters.
    resources
        Compiled resources; None if unknown.
    blocks_per_sm
        Resident blocks on one SM.
    """

    config: Config
    resources: Resources | None
    blocks_per_sm: Count


@dataclass(frozen=True, slots=True)
class RulePoint:
    """One of the problems that a rule was learned from.

    Attributes
    ----------
    sizes
        Sizes and flags of the problem.
    times_us
        Time of each of the rule's configurations in microseconds, with the ends of its 95 % interval; None where it
        cannot be served.
    best_us
        Time of the fastest configuration known at the point, whether or not it is one of the rule's.
    loss
        Time of the served configuration over ``best_us``, minus 1.
    held_out
        Loss of a rule that was learned without the point; None for a single point.
    without
        Loss of what is served at the point, if it was not tuned, without a rule; None where that is not known, as of
        rules that were learned before it was compared.
    """

    sizes: Mapping[Name, Count]
    times_us: tuple[tuple[TimeUs, NonNegative, NonNegative] | None, ...]
    best_us: TimeUs
    loss: Finite
    held_out: Finite | None
    without: Finite | None = None

    def times_by_config(self, configs: Sequence[RuleConfig]) -> dict[str, float]:
        """Return the time in microseconds of each of the rule's configurations that was timed, by `config_key`."""
        timed = zip(configs, self.times_us, strict=True)
        return {config_key(one.config): times[0] for one, times in timed if times is not None}

    def fastest(self) -> int | None:
        """Return the number of the fastest of the rule's configurations; None if none was timed."""
        timed = [(times[0], number) for number, times in enumerate(self.times_us) if times is not None]
        return min(timed)[1] if timed else None


@dataclass(frozen=True, slots=True)
class Judgement:
    """Comparison of a rule with serving without it, at points that each was left out of.

    Attributes
    ----------
    points
        Number of points.
    ratio
        Geometric mean of the time by the rule over the time without it.
    upper
        Upper end of the one-sided 95 % interval of `ratio`; None with fewer points than `MIN_JUDGED`.
    """

    points: int
    ratio: float
    upper: float | None

    @property
    def is_better(self) -> bool:
        """Whether the rule is faster for sure."""
        return self.upper is not None and self.upper < 1.0

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object."""
        return {"points": self.points, "ratio": self.ratio, "upper": self.upper}


MIN_JUDGED = 5
"""Minimum number of points for a judgement: with fewer, a rule that is better at each of them is so by chance in more
than 5 % of all cases."""
_STUDENT = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740)
"""Quantile of Student's distribution at 95 %, for 4 degrees of freedom and more."""


@dataclass(frozen=True, slots=True)
class FamilyRule:
    """The rule by which the problems of a family are served, on the device that it was learned on."""

    family: Family
    configs: tuple[RuleConfig, ...]
    tree: Tree
    points: tuple[RulePoint, ...]

    @property
    def mean_loss(self) -> float:
        """Mean loss over the points, 0.02 for 2 %."""
        return math.fsum(point.loss for point in self.points) / len(self.points)

    @property
    def worst(self) -> RulePoint:
        """The point with the largest loss."""
        return max(self.points, key=lambda point: point.loss)

    @property
    def held_out_losses(self) -> list[float]:
        """Cross-validated losses at the points; empty for a single point."""
        return [point.held_out for point in self.points if point.held_out is not None]

    @property
    def mean_held_out(self) -> float | None:
        """Expected loss at a size that was not tuned; None for a single point."""
        losses = self.held_out_losses
        return math.fsum(losses) / len(losses) if losses else None

    @property
    def judgement(self) -> Judgement | None:
        """Comparison with serving without the rule; None for a rule that was learned before they were compared."""
        pairs = [(one.held_out, one.without) for one in self.points]
        if all(without is None for _, without in pairs):
            return None
        logs = [
            math.log((1 + by_rule) / (1 + without))
            for by_rule, without in pairs
            if by_rule is not None and without is not None
        ]
        count, mean = len(logs), math.fsum(logs) / max(len(logs), 1)
        if count < MIN_JUDGED:
            return Judgement(count, math.exp(mean), None)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / (count - 1))
        quantile = _STUDENT[min(count - MIN_JUDGED, len(_STUDENT) - 1)]
        return Judgement(count, math.exp(mean), math.exp(mean + quantile * deviation / math.sqrt(count)))

    @property
    def in_force(self) -> bool:
        """Whether the rule is served: it was better for sure than serving without it, or they were never compared."""
        judgement = self.judgement
        return judgement is None or judgement.is_better

    @property
    def verdict(self) -> str:
        """The judgement as a clause; empty without one."""
        judgement = self.judgement
        if judgement is None:
            return ""
        if judgement.upper is None:
            return f"{judgement.points} held-out points are too few to judge it, at least {MIN_JUDGED} are needed"
        took = (
            f"at {judgement.points} held-out points it took {judgement.ratio:.3g} times as long as serving without it"
        )
        if judgement.is_better:
            return f"{took} on average, at most {judgement.upper:.3g} times (95 %)"
        return f"{took} on average, up to {judgement.upper:.3g} times (95 %), which is not clearly better"

    def order(self, spec: KernelSpec, device: DeviceProperties, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the numbers of all configurations for a problem of the family, in order of preference.

        Rules and limits are not checked here: a configuration may be invalid for the problem.
        """
        if isinstance(self.tree, Leaf):
            return self.tree.order
        configs, resident = [one.config for one in self.configs], [one.blocks_per_sm for one in self.configs]
        return find_leaf(self.tree, Traits.of(spec, device, configs, resident, [sizes])).order

    def nearest_point(self, number: int, sizes: Mapping[str, int]) -> RulePoint | None:
        """Return the nearest point at which a configuration was timed; None if there is none."""
        timed = [point for point in self.points if point.times_us[number] is not None]
        return min(timed, key=lambda point: size_distance(point.sizes, sizes), default=None)

    def nearest_win(self, number: int, sizes: Mapping[str, int]) -> RulePoint | None:
        """Return the nearest point at which a configuration is the fastest of the rule's; None if there is none."""
        won = [point for point in self.points if point.fastest() == number]
        return min(won, key=lambda point: size_distance(point.sizes, sizes), default=None)

    def lines(self) -> Iterator[str]:
        """Yield the tree as text, one line for each split and leaf."""
        yield from _lines(self.tree, "")

    def facts(self) -> list[tuple[str, str | Sequence[str]]]:
        """Return the configurations by number, and the tree, as labels and texts."""
        return [*((f"#{i}", config_text(one.config)) for i, one in enumerate(self.configs)), ("rule", [*self.lines()])]

    def loss_text(self) -> str:
        """Return the relative losses at the points, and at points that were left out of learning, as text."""
        worst = f"{percent_text(self.worst.loss)} ({sizes_text(self.worst.sizes)})"
        at_points = f"{percent_text(self.mean_loss)} on average at the points, {worst} at worst"
        losses = self.held_out_losses
        if not losses:
            return at_points
        left_out = f"{percent_text(sum(losses) / len(losses))} on average and {percent_text(max(losses))} at worst"
        return f"{at_points}; {left_out} where the point was left out of learning"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            "format": _FORMAT,
            "family": self.family.to_json(),
            "configs": [
                {
                    "config": dict(one.config),
                    "blocks_per_sm": one.blocks_per_sm,
                    "resources": asdict(one.resources) if one.resources is not None else None,
                }
                for one in self.configs
            ],
            "tree": self.tree.to_json(),
            "points": [
                {
                    name: dict(value) if name == "sizes" else value
                    for name, value in asdict(point).items()
                    if name != "without" or value is not None  # as rules were written before it was known
                }
                for point in self.points
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> FamilyRule:
        """Invert `to_json`.

        Raises
        ------
        DataError
            The value is damaged, or a rule of another format.
        """
        found = convert(data, Format).format
        if found != _FORMAT:
            raise DataError(f"a rule of format {found!r}, expected {_FORMAT}", field="format")
        document = convert(data, _RuleDocument)
        family, configs = Family.from_json(document.family), document.configs
        if len({config_key(one.config) for one in configs}) < len(configs):
            raise DataError("a configuration is listed twice", field="configs")
        for point in document.points:
            if point.sizes.keys() != family.extents.keys() or len(point.times_us) != len(configs):
                raise DataError("a point has other sizes than the family, or other configurations", field="points")
        return cls(family, configs, document.tree.tree(tuple(family.extents), len(configs)), document.points)


class _RuleDocument(msgspec.Struct):
    """JSON of a rule."""

    family: Any
    configs: Annotated[tuple[RuleConfig, ...], Meta(min_length=1, max_length=_MAX_CONFIGS)]
    tree: TreeDocument
    points: Annotated[tuple[RulePoint, ...], Meta(min_length=1)]


def _lines(tree: Tree, indent: str) -> Iterator[str]:
    if isinstance(tree, Leaf):
        yield f"{indent}#{tree.order[0]}{_others(tree.order[1:])}"
        return
    yield f"{indent}{tree.feature} <= {tree.at_most:g}:"
    yield from _lines(tree.then, indent + "  ")
    yield f"{indent}else:"
    yield from _lines(tree.otherwise, indent + "  ")


def _others(order: Sequence[int]) -> str:
    return f", else {' '.join(f'#{number}' for number in order)}" if order else ""
