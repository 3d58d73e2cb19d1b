"""Families of problems: the points that are tuned, and the rule that is learned there and serves all sizes.

Distances between problems are in the logarithms of the sizes, since a size matters relative to a tile. Points include
ragged sizes: programs call with 1999 as well as with 2048, and a tile that does not divide a size takes other paths.

A rule is a few configurations, and a small decision tree over features of a problem that chooses one. It is data that a
person can read; every part is checked when it is read back, and nothing in it is executed. It is learned from the few
measured points and from many more problems of the family, with times that `predict_times` expects; what it minimises is
the mean loss, the time of the served configuration over the fastest known one at the point, minus 1.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Finite, Format, Name, NonNegative, TimeUs, convert, to_document
from autotile.core.model import Config, Problem, Resources, Sizes, config_key, config_text
from autotile.core.text import percent_text, plural, sizes_text
from autotile.errors import DataError, ProblemError
from autotile.families.features import Feature, Traits
from autotile.kernel.problem import size_distance
from autotile.kernel.spec import KernelSpec

if TYPE_CHECKING:
    from autotile.kernel.operation import Operation

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]

_MAX_SIZE = 2**31 - 1
_PART = r"(?a)(\d{1,99})(?:\.\.(\d{1,99}))?"


@dataclass(frozen=True, slots=True)
class Extent:
    """The values of one size: integers in disjoint closed intervals, in ascending order."""

    parts: tuple[tuple[int, int], ...]

    def __contains__(self, value: int) -> bool:
        return any(low <= value <= high for low, high in self.parts)

    def __str__(self) -> str:
        return ",".join(str(low) if low == high else f"{low}..{high}" for low, high in self.parts)

    @property
    def ends(self) -> tuple[int, ...]:
        """Every listed value and both ends of every range, in ascending order."""
        return tuple(sorted({end for part in self.parts for end in part}))


@dataclass(frozen=True, slots=True)
class Family:
    """All problems of a kernel whose sizes and flags lie in given extents, in the order of the kernel's file."""

    extents: Mapping[str, Extent]

    def __contains__(self, sizes: Sizes) -> bool:
        return sizes.keys() == self.extents.keys() and all(
            sizes[name] in extent for name, extent in self.extents.items()
        )

    def __str__(self) -> str:
        return " ".join(f"{name}={extent}" for name, extent in self.extents.items())

    @property
    def largest(self) -> dict[str, int]:
        """The member with every size at its maximum."""
        return {name: extent.ends[-1] for name, extent in self.extents.items()}

    def members(self, sizes: Iterable[Sequence[int]]) -> list[dict[str, int]]:
        """Return problems, given their sizes in the order of the extents."""
        return [dict(zip(self.extents, values, strict=True)) for values in sizes]

    def to_json(self) -> dict[str, list[list[int]]]:
        """Return the parts of each extent by name."""
        return {name: [list(part) for part in extent.parts] for name, extent in self.extents.items()}

    @classmethod
    def from_json(cls, data: Any) -> Family:
        """Invert `to_json`; a `DataError` for anything else."""
        extents = {}
        for name, parts in convert(data, _Parts).items():
            ends = [end for part in parts for end in part]
            if ends != sorted(ends):
                raise DataError(f"expected parts in ascending order, got {parts}", field=name)
            extents[name] = Extent(parts)
        return cls(extents)


_Parts = Annotated[
    dict[Name, Annotated[tuple[tuple[Count, Count], ...], Meta(min_length=1, max_length=1000)]],
    Meta(min_length=1, max_length=100),
]
"""JSON of a family."""


def parse_family(spec: KernelSpec | Operation, words: Iterable[str], flags: Collection[str] | None = None) -> Family:
    """Parse a family from words such as ``M=1..8192 N=4096 K=4096,7168``, with one word for each size.

    A word is a value, a range ``a..b`` including both ends, or several of them separated by commas. Sizes and flags
    that are not given take their default, but one must be given. Names of ``flags`` are 0 or 1; None stands for those
    of ``spec``. A `ProblemError` says what cannot be parsed, is unknown, given twice, missing, empty or out of bounds.
    """
    given: dict[str, Extent] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in spec.sizes:
            known = " ".join(f"{size}={value}" for size, value in spec.sizes.items())
            raise ProblemError(
                f"{spec.name} has no size {name!r}; give a family of its sizes like {known}, with ranges"
            )
        if name in given:
            raise ProblemError(f"{name} is given twice, as {given[name]} and as {text}; join values by commas")
        given[name] = parse_extent(name, text, is_flag=name in (spec.flags if flags is None else flags))
    missing = [name for name in spec.sizes if name not in given and not spec.is_optional(name)]
    if missing and not given:
        raise ProblemError(f"the family needs the size {missing[0]}, such as {missing[0]}=1..{spec.sizes[missing[0]]}")
    return Family({name: given.get(name, Extent(((value, value),))) for name, value in spec.sizes.items()})


def parse_extent(name: str, text: str, *, is_flag: bool = False) -> Extent:
    """Parse the values of one size; errors as for `parse_family`."""
    least, most = (0, 1) if is_flag else (1, _MAX_SIZE)
    parts = []
    for piece in text.split(","):
        match = re.fullmatch(_PART, piece)
        if match is None:
            raise ProblemError(
                f"{name}={text} cannot be read; expected a whole number, a range such as 1..8192, or several joined by "
                "commas"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ProblemError(f"the range {name}={piece} is empty; give its smaller end first: {last}..{first}")
        if first < least or last > most:
            raise ProblemError(f"{name}={piece} is out of bounds, expected values from {least} to {most}")
        parts.append((first, last))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):  # parts that overlap become one; adjacent values are not joined into ranges
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return Extent(tuple(merged))


def family_of(spec: KernelSpec | Operation, sizes: Mapping[str, int | str | Sequence[int] | range]) -> Family:
    """Return the family that a program describes; errors as for `parse_family`.

    Each size is a number, a list of numbers, text such as ``1..8192``, or a `range` of step 1.
    """
    return parse_family(spec, [f"{name}={extent_text(name, value)}" for name, value in sizes.items()])


def extent_text(name: str, value: object) -> str:
    """Return an extent as text; an integer, several, a `range` of step 1, or text as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, range):
        if value.step != 1 or not value:
            raise ProblemError(f"{name}={value!r}, expected a range of step 1 that is not empty")
        return f"{value[0]}..{value[-1]}"
    return ",".join(map(str, value)) if isinstance(value, Sequence) else str(value)


_CANDIDATES = 1024
"""Number of problems among which points are selected. Twice as many change no distance by more than a few percent."""
_MEMBERS = 4096
"""Number of problems for which a rule is learned. Of 1,024, only two lay among the sixteen sizes just beyond a row of
tiles, where other configurations win than in the rest of the next row: too few to separate the two."""
_FLAG_DOUBLINGS = 4.0
"""Distance between two values of a flag, in doublings of a size: a flag selects another code path."""
_RAGGED_DOUBLINGS = 0.5
"""Distance between a multiple of the vector length and another size, in doublings."""
_VECTOR = 8
"""Elements of the widest memory access: 16 bytes of a 16-bit type."""
_ROUND_STEPS = 4
"""Round sizes are 4, 5, 6 or 7 times a power of two."""
_KINDS = ("round", "odd", "vector", "odd")
"""Kinds of a size in turn, over the candidates. Seven in eight integers are not a multiple of the vector length."""
_SPREAD_KINDS = ("round", "vector", "odd", "round", "vector", "round", "vector")
"""Kinds of a size in turn; that of each size has another period, so that kinds are mixed."""


def select_points(
    family: Family, count: int, is_possible: Callable[[Sizes], bool] = lambda _: True
) -> list[dict[str, int]]:
    """Select the problems of a family to tune, greedily by the mean distance of the family to the nearest point.

    Both ends of every range and every listed value are among them; a smaller family is returned whole. The selection is
    deterministic. Problems that are not possible, for which the kernel has no valid configuration, are not selected. A
    `ProblemError` is raised if ``count`` cannot cover the ends, or no problem is possible.
    """
    widest = max(family.extents, key=lambda name: len(family.extents[name].ends))
    needed = len(family.extents[widest].ends)
    if count < needed:
        raise ProblemError(
            f"{plural(count, 'point')} cannot cover {widest}={family.extents[widest]}: expected at least {needed}, one "
            "for each listed value and each end of a range"
        )
    candidates = _spread_candidates(family, _CANDIDATES)
    members = family.members(candidates)
    chosen = select_points_from(family, members, count, is_possible, np.array(list(candidates.values()), float))
    if not chosen:
        raise ProblemError(
            f"the kernel has no valid configuration for any of {plural(len(members), 'problem')} of {family}"
        )
    return chosen


def select_points_from(
    family: Family,
    members: Sequence[Sizes],
    count: int,
    is_possible: Callable[[Sizes], bool] = lambda _: True,
    weights: Vector | None = None,
) -> list[dict[str, int]]:
    """Select points as `select_points` does, among given members, such as those that were recorded.

    Fewer are returned where there are fewer members. ``weights`` are those of the members in the mean distance, equal
    if None.
    """
    counted = np.ones(len(members)) if weights is None else weights
    positions = np.array([_position(family, member) for member in members])
    distances = np.abs(positions[:, None, :] - positions[None, :, :]).sum(axis=2)
    ends = [(name, end) for name, extent in family.extents.items() if len(extent.ends) > 1 for end in extent.ends]
    covers = np.array([[member[name] == end for name, end in ends] for member in members], np.bool_)
    nearest = np.full(len(members), np.inf)
    uncovered = np.ones(covers.shape[1], np.bool_)
    chosen: list[dict[str, int]] = []
    while len(chosen) < count and nearest.any():  # a problem at no distance is a point already
        np.minimum(distances, nearest, out=distances)  # distances to a point that is chosen, if that is nearer
        newly_covered = covers[:, uncovered].sum(axis=1)
        order = np.lexsort((distances @ counted, -newly_covered)).tolist()
        new = next((number for number in order if nearest[number] and is_possible(members[number])), None)
        if new is None:
            break
        chosen.append(dict(members[new]))
        nearest = np.minimum(nearest, distances[new])
        uncovered &= ~covers[new]
    return chosen


def _position(family: Family, sizes: Sizes) -> list[float]:
    """Return coordinates whose absolute differences sum to the distance of two problems, in doublings."""
    found: list[float] = []
    for name, extent in family.extents.items():
        value = sizes[name]
        is_flag = extent.ends[0] == 0 or value == 0
        found.append(_FLAG_DOUBLINGS * value if is_flag else math.log2(value))
        found.append(0.0 if is_flag or value % _VECTOR == 0 else _RAGGED_DOUBLINGS)
    return found


def sample_members(family: Family) -> list[dict[str, int]]:
    """Return members that cover the family evenly, with round and ragged sizes, and its corners and edges."""
    return family.members(_spread_candidates(family, _MEMBERS))


def spread_members(family: Family, count: int) -> list[dict[str, int]]:
    """Return members in an order in which the first ones, however many, cover the family evenly.

    Sizes are distributed evenly in logarithms; about a quarter of them are odd.
    """
    kinds = _SPREAD_KINDS
    rows = _even_sizes(family, count, kinds, lambda number, place: number * (2 * place + 1) + number // len(kinds))
    return family.members(dict.fromkeys(values for _, values in rows))


def _even_sizes(
    family: Family, count: int, kinds: Sequence[str], order: Callable[[int, int], int]
) -> Iterator[tuple[list[float], tuple[int, ...]]]:
    """Yield fractions of the extents that cover them evenly, and the sizes there.

    The kinds take turns by the order of a problem's number and a size's place. The fractions are multiples, modulo 1,
    of the inverse powers of the root of ``x ** (d + 1) = x + 1``: M. Roberts, "The unreasonable effectiveness of
    quasirandom sequences" (2018).
    """
    dimensions, root = len(family.extents), 2.0
    for _ in range(64):
        root = (1.0 + root) ** (1.0 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    for number, row in enumerate(((0.5 + np.arange(count)[:, None] * steps) % 1.0).tolist()):
        pairs = enumerate(zip(family.extents.values(), row, strict=True))
        yield row, tuple(_value(extent, at, kinds[order(number, place) % len(kinds)]) for place, (extent, at) in pairs)


def _spread_candidates(family: Family, count: int) -> dict[tuple[int, ...], int]:
    """Return members by their sizes, each with the number of evenly distributed problems that it stands for.

    Small sizes stand for many, since an octave holds few integers; members at corners and edges stand for none.
    """
    ends = [extent.ends for extent in family.extents.values()]
    found: Counter[tuple[int, ...]] = Counter()
    rows = _even_sizes(family, count, _KINDS, lambda number, place: number // len(_KINDS) ** place)
    for number, (row, inside) in enumerate(rows):
        found[inside] += 1
        on_edge = tuple(
            one[int(fraction * len(one))] if (number >> place) % 2 else value
            for place, (one, fraction, value) in enumerate(zip(ends, row, inside, strict=True))
        )
        found[on_edge] += 0
    mirrored = [one[::-1] if place % 2 else one for place, one in enumerate(ends)]
    for row_of_ends in (ends, mirrored):  # corners, so that every end and every listed value occurs
        for number in range(max(map(len, ends))):
            found[tuple(one[min(number, len(one) - 1)] for one in row_of_ends)] += 0
    return found


def _value(extent: Extent, fraction: float, kind: str) -> int:
    """Return the value of a kind at a fraction of an extent, in logarithms; every part gets an equal share."""
    place = fraction * len(extent.parts)
    low, high = extent.parts[int(place)]
    if low in (high, 0):
        return high if place % 1.0 >= 0.5 else low
    value: int = round(low * (high / low) ** (place % 1.0))
    if kind == "odd":
        return value if value % 2 or value + 1 > high else value + 1
    unit: int = _VECTOR if kind == "vector" else max(1, 2 ** (value.bit_length() - 1) // _ROUND_STEPS)
    rounded = (value + unit // 2) // unit * unit
    return rounded if low <= rounded <= high else value


_MAX_DEPTH = 32
"""Maximum number of splits above a leaf of a tree that is read from a file."""
_MAX_CONFIGS = 64
"""Maximum number of configurations of a rule that is read from a file."""
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Split:
    """A split: problems whose feature is at most a threshold go to one branch, all others to the other."""

    feature: Feature
    at_most: float
    then: Tree
    otherwise: Tree


Leaf = tuple[int, ...]
"""Numbers of the configurations in order of preference: where one is not valid, the next is served."""
Tree = Leaf | Split


def tree_to_json(tree: Tree) -> dict[str, Any]:
    """Return the order of a leaf under ``serve``, or the feature, the threshold and the branches of a split."""
    if not isinstance(tree, Split):
        return {"serve": list(tree)}
    branches = {"then": tree_to_json(tree.then), "else": tree_to_json(tree.otherwise)}
    return {"if": tree.feature.to_json(), "at_most": tree.at_most, **branches}


class TreeDocument(msgspec.Struct, forbid_unknown_fields=True):
    """JSON of a tree: ``serve`` of a leaf, or the other fields of a split."""

    serve: list[Count] | None = None
    feature: dict[str, Any] | None = msgspec.field(default=None, name="if")
    at_most: Finite | None = None
    then: TreeDocument | None = None
    otherwise: TreeDocument | None = msgspec.field(default=None, name="else")

    def tree(self, sizes: Sequence[str], configs: int, depth: int = 0) -> Tree:
        """Return the tree below so many splits; a `DataError` if it is not one over these sizes and configurations."""
        if self.serve is not None:
            if sorted(self.serve) != list(range(configs)):
                raise DataError(f"a leaf serves {self.serve}, expected every number below {configs} once")
            return tuple(self.serve)
        if self.at_most is None or self.then is None or self.otherwise is None or depth > _MAX_DEPTH:
            raise DataError("a node of the tree is neither a leaf nor a split, or is nested too deeply")
        feature = Feature.from_json(self.feature, sizes, configs)
        then, otherwise = (one.tree(sizes, configs, depth + 1) for one in (self.then, self.otherwise))
        return Split(feature, self.at_most, then, otherwise)


def find_leaf(tree: Tree, problem: Traits) -> Leaf:
    """Return the leaf of a single problem."""
    while isinstance(tree, Split):
        tree = tree.then if problem.column(tree.feature)[0] <= tree.at_most else tree.otherwise
    return tree


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """One of the configurations of a rule, with its resident blocks on one SM, and its compiled resources, if known."""

    config: Config
    blocks_per_sm: Count
    resources: Resources | None


@dataclass(frozen=True, slots=True)
class RulePoint:
    """One of the problems that a rule was learned from."""

    sizes: Mapping[Name, Count]
    times_us: tuple[tuple[TimeUs, NonNegative, NonNegative] | None, ...]
    """Time of each of the rule's configurations, with the ends of its 95 % interval; None where it cannot be served."""
    best_us: TimeUs
    """Time of the fastest configuration known at the point, whether or not it is one of the rule's."""
    loss: Finite
    """Time of the served configuration over ``best_us``, minus 1."""
    held_out: Finite | None
    """Loss of a rule that was learned without the point; None for a single point."""
    without: Finite | None = None
    """Loss of what is served at the point, if it was not tuned, without a rule; None where that is not known, as of
    rules that were learned before it was compared."""

    def times_by_config(self, configs: Sequence[RuleConfig]) -> dict[str, float]:
        """Return the time in microseconds of each of the rule's configurations that was timed, by `config_key`."""
        timed = zip(configs, self.times_us, strict=True)
        return {config_key(one.config): times[0] for one, times in timed if times is not None}

    def fastest(self) -> int | None:
        """Return the number of the fastest of the rule's configurations; None if none was timed."""
        timed = ((times[0], number) for number, times in enumerate(self.times_us) if times is not None)
        return min(timed, default=(0.0, None))[1]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Comparison of a rule with serving without it, at points that each was left out of.

    ``ratio`` is the geometric mean of the time by the rule over the time without it, ``upper`` the upper end of its
    one-sided 95 % interval; None with fewer points than `MIN_JUDGED`.
    """

    points: int
    ratio: float
    upper: float | None


MIN_JUDGED = 5
"""Minimum number of points for a judgement: with fewer, a rule that is better at each of them is so by chance in more
than 5 % of all cases."""
_STUDENT = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740)
"""Quantile of Student's distribution at 95 %, for 4 degrees of freedom and more."""


@dataclass(frozen=True, slots=True)
class FamilyRule:
    """The rule by which the problems of a family are served, on the device that it was learned on."""

    family: Family
    configs: Annotated[tuple[RuleConfig, ...], Meta(min_length=1, max_length=_MAX_CONFIGS)]
    tree: Tree
    points: Annotated[tuple[RulePoint, ...], Meta(min_length=1)]

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
        return judgement is None or (judgement.upper is not None and judgement.upper < 1.0)

    @property
    def verdict(self) -> str:
        """The judgement as a clause; empty without one."""
        judgement = self.judgement
        if judgement is None:
            return ""
        if judgement.upper is None:
            points = plural(judgement.points, "held-out point is", "held-out points are")
            return f"{points} too few to judge it, at least {MIN_JUDGED} are needed"
        points = plural(judgement.points, "held-out point")
        took = f"at {points} it took {judgement.ratio:.3g} times as long as serving without it"
        if self.in_force:
            return f"{took} on average, at most {judgement.upper:.3g} times (95 %)"
        return f"{took} on average, up to {judgement.upper:.3g} times (95 %), which is not clearly better"

    def order(self, spec: KernelSpec, device: DeviceProperties, problem: Problem) -> tuple[int, ...]:
        """Return the numbers of all configurations for a problem of the family, in order of preference.

        Rules and limits are not checked here: a configuration may be invalid for the problem.
        """
        if not isinstance(self.tree, Split):
            return self.tree
        configs, resident = [one.config for one in self.configs], [one.blocks_per_sm for one in self.configs]
        return find_leaf(self.tree, Traits.of(spec, device, configs, resident, [problem]))

    def nearest_point(self, number: int, sizes: Sizes, *, won: bool = False) -> RulePoint | None:
        """Return the nearest point at which a configuration was timed, or won: is the fastest of the rule's."""
        points = [one for one in self.points if (one.fastest() == number if won else one.times_us[number] is not None)]
        return min(points, key=lambda point: size_distance(point.sizes, sizes), default=None)

    def lines(self, tree: Tree | None = None, indent: str = "") -> Iterator[str]:
        """Yield the tree, or the part of it below a node, as text, one line for each split and leaf."""
        tree = self.tree if tree is None else tree
        if not isinstance(tree, Split):
            others = f", else {' '.join(f'#{number}' for number in tree[1:])}" if tree[1:] else ""
            yield f"{indent}#{tree[0]}{others}"
            return
        yield f"{indent}{tree.feature} <= {tree.at_most:g}:"
        yield from self.lines(tree.then, indent + "  ")
        yield f"{indent}else:"
        yield from self.lines(tree.otherwise, indent + "  ")

    def facts(self) -> list[tuple[str, str | Sequence[str]]]:
        """Return the configurations by number, and the tree, as labels and texts."""
        return [*((f"#{i}", config_text(one.config)) for i, one in enumerate(self.configs)), ("rule", [*self.lines()])]

    def loss_text(self) -> str:
        """Return the relative losses at the points, and at points that were left out of learning, as text."""
        worst = f"{percent_text(self.worst.loss)} ({sizes_text(self.worst.sizes)})"
        at_points = f"{percent_text(self.mean_loss)} on average at the points, {worst} at worst"
        mean = self.mean_held_out
        if mean is None:
            return at_points
        left_out = f"{percent_text(mean)} on average and {percent_text(max(self.held_out_losses))} at worst"
        return f"{at_points}; {left_out} where the point was left out of learning"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        configs, points = to_document(self.configs), to_document(self.points)
        for point in points:
            if point["without"] is None:
                del point["without"]  # as rules were written before it was known
        tree = tree_to_json(self.tree)
        return {"format": _FORMAT, "family": self.family.to_json(), "configs": configs, "tree": tree, "points": points}

    @classmethod
    def from_json(cls, data: Any) -> FamilyRule:
        """Invert `to_json`; a `DataError` if the value is damaged, or a rule of another format."""
        found = convert(data, Format).format
        if found != _FORMAT:
            raise DataError(f"a rule of format {found!r}, expected {_FORMAT}", field="format")
        rule = convert({**data, "family": Family.from_json(data.get("family")), "tree": ()}, cls)
        sizes, configs = rule.family.extents.keys(), rule.configs
        if len({config_key(one.config) for one in configs}) < len(configs):
            raise DataError("a configuration is listed twice", field="configs")
        for point in rule.points:
            if point.sizes.keys() != sizes or len(point.times_us) != len(configs):
                raise DataError("a point has other sizes than the family, or other configurations", field="points")
        return replace(rule, tree=convert(data.get("tree"), TreeDocument).tree(tuple(sizes), len(configs)))


_REACH_DOUBLINGS = 1.0
"""Distance from a point, in doublings, at which the weight of its residual is 1/e."""
_GUESS_WEIGHT = 0.001
"""Weight of a point where a configuration was not measured, as it cannot run there, relative to a measured one. It only
breaks ties: with 0.1, guesses made a large tile take 175 us where it took 706 us."""
_PRIOR_WEIGHT = 0.3
"""Weight of a residual of zero, relative to the weight of 1 at the point itself."""
_UNKNOWN_SHARE = 0.1
"""Share of measured points among those nearby, below which a configuration is regarded as hardly known there. This and
the factor of two in `predict_times` were chosen on times of some hundred configurations of ``sgemm`` and
``gemm_mma`` at 64 and 110 sizes on an H200; similar values do about as well."""
_COMMON_TERMS = 6
"""Number of terms that do not depend on the alignment of the sizes."""
_MIN_US = 1e-9
"""Minimum of a modelled time, in microseconds."""


def fit_times(times_us: Matrix, best_us: Matrix, points: Traits) -> tuple[Matrix, Matrix]:
    """Fit a model of times by least squares of relative errors, to times of shape (points, configurations).

    The model of a launch is a sum of terms with non-negative weights: a constant; the work of the busiest SM (its
    rounds of blocks times the depth, the operations per output); that work again for each size that is not a multiple
    of the vector length; the depth alone (one block whose latency nothing hides); the number of whole waves; waves
    times depth; and the bytes moved.

    Where a configuration was not measured (NaN), its time is guessed from its mean ratio to the best time elsewhere.
    Guesses only decide what the measured times leave undetermined. Every configuration has at least one time;
    ``best_us`` is the best known one at each point. The result is the weight of each term, in microseconds per unit of
    the term, shape (configurations, terms), and the logarithm of measured over modelled time, 0 where not measured,
    shape (points, configurations).
    """
    from scipy.optimize import nnls  # the import takes 0.1 s, and serving does not need it

    known = np.isfinite(times_us)
    slowdown = np.nanmean(np.log(times_us / best_us[:, None]), axis=0)
    filled = np.where(known, times_us, np.exp(slowdown) * best_us[:, None])
    trust = np.where(known, 1.0, _GUESS_WEIGHT)
    weights = []
    for config in range(times_us.shape[1]):
        relative = _terms(points, config) * (trust[:, config] / filled[:, config])[:, None]
        scale = np.maximum(relative.max(axis=0), 1e-300)
        weights.append(nnls(relative / scale, trust[:, config])[0] / scale)
    modelled_us = _model_us(points, np.array(weights))
    residuals = np.where(known, np.log(np.where(known, times_us, 1.0) / modelled_us), 0.0)
    return np.array(weights), residuals


def predict_times(weights: Matrix, residuals: Matrix, measured_us: Matrix, points: Traits, traits: Traits) -> Matrix:
    """Return the expected times in microseconds at other problems, shape (problems, configurations).

    Weights and residuals are those of `fit_times` for measured times at points. The residuals are interpolated to
    nearby problems. Measured times bound the result: a problem that is larger in every size does not take less time.

    The time of a configuration that was measured at hardly any point nearby is raised by up to a factor of two: a
    model of one or two times fits them by chance, and among many such models some are far too low.
    """
    places, others = (
        np.stack([np.log2(np.maximum(column, 0.5)) for column in sizes.values()], axis=1)  # flags: 1 doubling apart
        for sizes in (traits.sizes, points.sizes)
    )
    nearness = np.exp(-np.abs(places[:, None, :] - others[None, :, :]).sum(axis=2) / _REACH_DOUBLINGS)
    known = nearness @ np.isfinite(measured_us)
    interpolated = nearness @ residuals / (known + _PRIOR_WEIGHT)
    share = known / nearness.sum(axis=1, keepdims=True)
    expected_us = _model_us(traits, weights) * np.exp(interpolated)
    # Times measured at a larger problem bound from above, at a smaller one from below: the model assumes that two
    # blocks on an SM take twice the time of one, where they often take hardly more. Where only one of the two
    # problems has aligned sizes, the bound is scaled by the modelled cost of the alignment.
    aligned = weights.copy()
    aligned[:, _COMMON_TERMS:] = 0.0
    here, there = (_model_us(each, weights) / _model_us(each, aligned) for each in (traits, points))
    smaller, larger = _is_within(traits.sizes, points.sizes), _is_within(points.sizes, traits.sizes)
    upper_us, lower_us = np.full_like(expected_us, np.inf), np.zeros_like(expected_us)
    for point, times_us in enumerate(measured_us):  # NaN bounds nothing
        ratio, below, above = here / there[point], smaller[:, point], larger[point]
        upper_us[below] = np.fmin(upper_us, times_us * np.maximum(ratio, 1.0))[below]
        lower_us[above] = np.fmax(lower_us, times_us * np.minimum(ratio, 1.0))[above]
    bounded = np.maximum(np.minimum(expected_us, upper_us), lower_us)
    bounded = np.where(lower_us > upper_us, expected_us, bounded)  # contradicting bounds are ignored
    return np.asarray(bounded * (1.0 + np.exp(-share / _UNKNOWN_SHARE)))


def _terms(traits: Traits, config: int) -> Matrix:
    """Return the terms of a configuration's time at each problem, shape (problems, terms)."""
    depth = traits.flops / traits.outputs if traits.flops.any() else np.ones_like(traits.outputs)
    rounds, waves = traits.rounds[:, config], np.ceil(traits.waves[:, config])
    ragged = [rounds * depth * (sizes % _VECTOR != 0) for sizes in traits.sizes.values()]
    common = [np.ones_like(depth), depth, rounds * depth, waves, waves * depth, traits.bytes]
    return np.stack([*common, *ragged], axis=1)


def _model_us(traits: Traits, weights: Matrix) -> Matrix:
    """Return the modelled times in microseconds, shape (problems, configurations)."""
    sums = [_terms(traits, config) @ row for config, row in enumerate(weights)]
    return np.asarray(np.maximum(np.stack(sums, axis=1), _MIN_US))


def _is_within(inner: Mapping[str, Vector], outer: Mapping[str, Vector]) -> Mask:
    """Return True if no size of a problem exceeds another's and no flag differs, shape (inner, outer)."""
    found = []
    for name in inner:
        size, other = inner[name][:, None], outer[name][None, :]
        found.append((size == other) | ((size <= other) & (size > 0)))  # only flags are 0
    return np.asarray(np.logical_and.reduce(found))


_MIN_LEAF_SHARE = 0.01
"""Minimum share of a leaf in the total weight."""
_PARENT_SHARE = 1e-4
"""Weight of the parent's losses in the order of a leaf, as a share of the total weight."""
_MIN_SPLIT_GAIN = 1e-4
"""Minimum gain of a split in mean loss over all points, 0.01 %, and of a split by a less simple feature over one by a
simpler feature."""
_TILES = (256, 128, 64, 32, 16, 8, 4, 2)
"""Preferred divisors of a threshold between sizes."""


def learn_tree(losses: Matrix, weights: Vector, features: Sequence[Feature], table: Matrix, max_leaves: int) -> Tree:
    """Learn a decision tree by repeatedly splitting the leaf with the largest gain, until no split gains enough.

    ``losses`` of serving each configuration at each point, or its substitute where it cannot be served, are finite, of
    shape (points, configurations), and ``weights`` of shape (points,). The values of ``features``, simplest first, are
    ``table``, of shape (points, features).
    """
    weights = weights / weights.sum()
    weighted = losses * weights[:, None]
    ascending = np.argsort(table, axis=0, kind="stable")

    def best_split(points: Mask) -> tuple[float, int, float]:
        """Return gain, feature and threshold of the split with the least loss, by the simplest of nearly equal ones."""
        found = 0.0, -1, 0.0
        whole = float(weighted[points].sum(axis=0).min())
        for feature in range(len(features)):
            order = ascending[points[ascending[:, feature]], feature]
            values = table[order, feature]
            weight = np.cumsum(weights[order])
            heavy = (weight[:-1] >= _MIN_LEAF_SHARE) & (weight[-1] - weight[:-1] >= _MIN_LEAF_SHARE)
            cuts = np.flatnonzero((values[:-1] < values[1:]) & heavy)
            if not len(cuts):
                continue
            below = np.cumsum(weighted[order], axis=0)
            remaining = below[cuts].min(axis=1) + (below[-1] - below[cuts]).min(axis=1)
            best = int(np.argmin(remaining))
            gain = whole - float(remaining[best])
            if gain > found[0] + _MIN_SPLIT_GAIN:
                low, high = values[cuts[best] : cuts[best] + 2]
                found = gain, feature, threshold_between(float(low), float(high))
        return found

    everywhere = np.ones(len(losses), np.bool_)
    nodes = [(everywhere, best_split(everywhere))]  # the points of each, and its best split
    children: dict[int, tuple[int, int]] = {}
    while len(nodes) - len(children) < max_leaves:
        number = max((n for n in range(len(nodes)) if n not in children), key=lambda n: nodes[n][1][0])
        points, (gain, feature, threshold) = nodes[number]
        if not gain:
            break
        low = points & (table[:, feature] <= threshold)
        children[number] = len(nodes), len(nodes) + 1
        nodes += [(each, best_split(each)) for each in (low, points & ~low)]

    def tree(number: int, parent_scores: Vector) -> Tree:
        """Return the tree below a node; scores are the mean loss of each configuration, blended with the parent's."""
        points, (_, feature, threshold) = nodes[number]
        total = weighted[points].sum(axis=0) + _PARENT_SHARE * parent_scores
        scores = total / (weights[points].sum() + _PARENT_SHARE)
        if number not in children:
            return tuple(np.argsort(scores, kind="stable").tolist())
        then, otherwise = (tree(child, scores) for child in children[number])
        return Split(features[feature], threshold, then, otherwise)

    return tree(0, weighted.sum(axis=0))


def threshold_between(low: float, high: float) -> float:
    """Return a threshold in the interval from ``low`` (included) to ``high`` (excluded), near the geometric mean.

    Between sizes it is a multiple of a large power of two, where a row of tiles ends: 128 between 120 and 137.
    Otherwise it has as few digits as possible.
    """
    middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
    for tile in _TILES if low >= 1.0 and low == int(low) else ():
        whole = max(round(middle / tile), math.ceil(low / tile)) * tile
        if whole < high and tile <= 2 * middle:
            return float(whole)
    for digits in range(2, 17):
        rounded = float(f"{middle:.{digits}g}")
        if low <= rounded < high:
            return rounded
    return low


UNSERVED_LOSS = 10.0
"""Loss at a point where none of the selected configurations can be served: equal to eleven times the best time."""
_UNCOVERED_LOSS = 1.0
"""The same at an unmeasured problem, for which the nearest tuned size or the default can still be served."""
_MIN_GAIN = 1e-9
"""Minimum gain in mean loss; less is rounding error."""
_FOLDS = 32
"""Number of folds of the cross-validation; with no more points than this, each is left out alone."""
_MEASURED_SHARE = 0.25
"""Share of all measured points in the total weight; the rest is that of the unmeasured problems."""
_LEAVES_PER_CONFIG = 2
"""A configuration may be best in more than one region of the sizes, but the tree must remain readable."""


class TrainingData(NamedTuple):
    """The data that a rule is learned from: measurements at points, and other problems of the family."""

    times_us: Matrix
    """Shape (points, configurations), at least one of each point; NaN where a configuration cannot be served."""
    proposed_by: Mask
    """Whether the tuning of a point proposed the configuration, same shape. One that no point proposed (the default) is
    available to every rule."""
    traits: Traits
    unmeasured: Traits
    """Traits of the points, and of the other problems, with the same configurations."""
    is_valid: Mask
    """Whether a configuration meets the kernel's rules at these other problems, shape (problems, configurations)."""

    @property
    def losses(self) -> Matrix:
        """Times over the best time at each point, minus 1, shape (points, configurations)."""
        return np.asarray(self.times_us / np.nanmin(self.times_us, axis=1, keepdims=True) - 1.0)


LearnedRule = tuple[tuple[int, ...], Tree, Vector, Vector]
"""Columns of the training data that were chosen, in the order in which the tree numbers them; the tree; losses.

Losses, of shape (points,), are those of the served configuration, and those of a rule that was learned without the
point and without the configurations that only this point proposed, NaN for a single point."""


def learn_rule(data: TrainingData, features: Sequence[Feature], max_configs: int) -> LearnedRule:
    """Learn a rule from all points, and estimate its loss at other problems by cross-validation.

    ``features`` are those over ``max_configs`` configurations, see `autotile.families.features.list_features`.
    """
    everywhere = np.arange(len(data.times_us))
    held_out = np.full(len(everywhere), np.nan)
    for start in range(min(_FOLDS, len(everywhere)) if len(everywhere) > 1 else 0):
        fold = everywhere[start::_FOLDS]
        rule = _learn_on(data, np.setdiff1d(everywhere, fold), features, max_configs)
        held_out[fold] = _served_losses(data, *rule, fold)
    chosen, tree = _learn_on(data, everywhere, features, max_configs)
    return chosen, tree, _served_losses(data, chosen, tree, everywhere), held_out


def select_configs(losses: Matrix, weights: Vector, max_configs: int) -> list[int]:
    """Select the columns with the least mean loss of the best one at each problem: greedily, then by exchange.

    Losses have shape (problems, configurations), weights (problems,). Fewer columns are returned where more gain
    nothing.
    """
    weighted = losses * (weights / weights.sum())[:, None]
    chosen: list[int] = []
    best = weighted.max(axis=1)
    while len(chosen) < max_configs:
        means = np.minimum(weighted, best[:, None]).sum(axis=0)
        new = int(np.argmin(means))
        if chosen and means[new] > best.sum() - _MIN_GAIN:
            break
        chosen.append(new)
        best = np.minimum(best, weighted[:, new])
    improved = len(chosen) > 1
    while improved:
        improved = False
        for place in range(len(chosen)):
            others = weighted[:, chosen[:place] + chosen[place + 1 :]].min(axis=1)
            means = np.minimum(weighted, others[:, None]).sum(axis=0)
            new = int(np.argmin(means))
            if means[new] < means[chosen[place]] - _MIN_GAIN:
                chosen[place] = new
                improved = True
    return chosen


def _learn_on(
    data: TrainingData, points: Indices, features: Sequence[Feature], max_configs: int
) -> tuple[tuple[int, ...], Tree]:
    """Learn from some of the points; return the selected columns and the tree between them."""
    proposed_by, losses = data.proposed_by, data.losses[points]
    known = proposed_by[points].any(axis=0) | ~proposed_by.any(axis=0)
    columns = np.flatnonzero(known & np.isfinite(losses).any(axis=0))
    # Of the unmeasured problems, losses that are predicted from these points; NaN where not valid.
    traits, others = data.traits.select(columns.tolist()).rows(points), data.unmeasured.select(columns.tolist())
    best_us = np.nanmin(data.times_us[points], axis=1)
    times_us = data.times_us[np.ix_(points, columns)]
    predicted_us = predict_times(*fit_times(times_us, best_us, traits), times_us, traits, others)
    valid = data.is_valid[:, columns]
    least_us = np.where(valid, predicted_us, np.inf).min(axis=1, keepdims=True)
    predicted = np.where(valid, predicted_us / least_us - 1.0, np.nan)
    of_points = np.nan_to_num(losses[:, columns], nan=UNSERVED_LOSS)
    all_losses = np.concatenate([of_points, np.nan_to_num(predicted, nan=_UNCOVERED_LOSS)])
    selected = select_configs(all_losses, _weights(len(points), len(predicted)), max_configs)
    chosen = tuple(columns[selected].tolist())
    usable = [feature for feature in features if max(feature.config, feature.over) < len(chosen)]
    served = np.flatnonzero(np.isfinite(predicted[:, selected]).any(axis=1))
    table = [of.select(chosen).rows(at).table(usable) for of, at in ((data.traits, points), (data.unmeasured, served))]
    known_losses = [_with_substitutes(one) for one in (losses[:, chosen], predicted[served][:, selected])]
    weights, leaves = _weights(len(points), len(served)), _LEAVES_PER_CONFIG * max_configs
    return chosen, learn_tree(np.concatenate(known_losses), weights, usable, np.concatenate(table), leaves)


def _weights(points: int, unmeasured: int) -> Vector:
    shares = (_MEASURED_SHARE, 1.0 - _MEASURED_SHARE) if unmeasured else (1.0, 0.0)
    return np.repeat(np.array(shares) / np.maximum((points, unmeasured), 1), (points, unmeasured))


def _with_substitutes(losses: Matrix) -> Matrix:
    """Return the losses with that of a substitute where a configuration cannot be served: the best other on average."""
    if not len(losses):
        return losses
    finite = np.isfinite(losses)
    substitute = np.full(len(losses), UNSERVED_LOSS)
    for column in np.argsort(np.nan_to_num(losses, nan=UNSERVED_LOSS).mean(axis=0), kind="stable")[::-1]:
        substitute = np.where(finite[:, column], losses[:, column], substitute)
    return np.where(finite, losses, substitute[:, None])


def _served_losses(data: TrainingData, chosen: Sequence[int], tree: Tree, points: Indices) -> Vector:
    """Return the loss at each point of the configuration that a tree serves there: the first of its leaf that runs."""
    losses, traits = data.losses[np.ix_(points, np.array(chosen))], data.traits.select(chosen)
    found = []
    for row, point in zip(losses, points, strict=True):
        order = find_leaf(tree, traits.rows(np.array([point])))
        found.append(next((row[number] for number in order if np.isfinite(row[number])), UNSERVED_LOSS))
    return np.array(found)
