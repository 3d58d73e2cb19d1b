"""Families of problems, and the selection of points to tune.

Distances between problems are in the logarithms of the sizes, since a size matters relative to a tile. Points include
ragged sizes: programs call with 1999 as well as with 2048, and a tile that does not divide a size takes other paths.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.documents import Count, Name, convert
from autotile.errors import DataError, ProblemError

_MAX_SIZE = 2**31 - 1
_PART = re.compile(r"(\d{1,10})(?:\.\.(\d{1,10}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Extent:
    """The values of one size: integers in disjoint closed intervals.

    Attributes
    ----------
    parts
        Ends of the intervals, in ascending order; a single value has equal ends.
    """

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
    """All problems of a kernel whose sizes and flags lie in given extents.

    Attributes
    ----------
    extents
        Extent of every size and flag of the kernel, in the order of its file.
    """

    extents: Mapping[str, Extent]

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        return sizes.keys() == self.extents.keys() and all(
            sizes[name] in extent for name, extent in self.extents.items()
        )

    def __str__(self) -> str:
        return " ".join(f"{name}={extent}" for name, extent in self.extents.items())

    @property
    def largest(self) -> dict[str, int]:
        """The member with every size at its maximum."""
        return {name: extent.ends[-1] for name, extent in self.extents.items()}

    def to_json(self) -> dict[str, list[list[int]]]:
        """Return the parts of each extent by name."""
        return {name: [list(part) for part in extent.parts] for name, extent in self.extents.items()}

    @classmethod
    def from_json(cls, data: Any) -> Family:
        """Invert `to_json`.

        Raises
        ------
        DataError
            ``data`` is not what `to_json` returns.
        """
        return cls({name: Extent(_ordered(name, parts)) for name, parts in convert(data, _Parts).items()})


_Parts = Annotated[
    dict[Name, Annotated[tuple[tuple[Count, Count], ...], Meta(min_length=1, max_length=1000)]],
    Meta(min_length=1, max_length=100),
]
"""JSON of a family."""


def _ordered(name: str, parts: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    ends = [end for part in parts for end in part]
    if ends != sorted(ends):
        raise DataError(f"expected parts in ascending order, got {parts}", field=name)
    return parts


class Sized(Protocol):
    """Object with sizes and flags: a kernel, or an operation."""

    @property
    def name(self) -> str:
        """Name, for messages."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Every size and flag with its default."""

    @property
    def flags(self) -> Collection[str]:
        """Names that are 0 or 1."""

    def is_optional(self, name: str) -> bool:
        """Return whether a size may be left out."""


def parse_family(spec: Sized, words: Iterable[str]) -> Family:
    """Parse a family from words such as ``M=1..8192 N=4096 K=4096,7168``.

    Parameters
    ----------
    spec
        Specification of the kernel.
    words
        One word for each size: a value, a range ``a..b`` including both ends, or several of them separated by commas.
        Sizes and flags that are not given take their default, but one must be given.

    Raises
    ------
    ProblemError
        A word cannot be parsed; no size is given, or one is unknown, given twice or out of bounds; or a range is empty.
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
        given[name] = _extent(spec, name, text)
    missing = [name for name in spec.sizes if name not in given and not spec.is_optional(name)]
    if missing and not given:
        raise ProblemError(f"the family needs the size {missing[0]}, such as {missing[0]}=1..{spec.sizes[missing[0]]}")
    defaults = {name: Extent(((value, value),)) for name, value in spec.sizes.items()}
    return Family({name: given.get(name, defaults[name]) for name in spec.sizes})


def family_of(spec: Sized, sizes: Mapping[str, int | str | Sequence[int] | range]) -> Family:
    """Return the family that a program describes.

    Parameters
    ----------
    spec
        Specification of the kernel.
    sizes
        For each size a number, a list of numbers, text such as ``1..8192``, or a `range` of step 1.

    Raises
    ------
    ProblemError
        As for `parse_family`.
    """
    return parse_family(spec, [f"{name}={extent_text(name, value)}" for name, value in sizes.items()])


def _extent(spec: Sized, name: str, text: str) -> Extent:
    low, high = (0, 1) if name in spec.flags else (1, _MAX_SIZE)
    parts = []
    for piece in text.split(","):
        match = _PART.fullmatch(piece)
        if match is None:
            raise ProblemError(
                f"{name}={text} cannot be read; expected a whole number, a range such as 1..8192, or several joined by "
                "commas"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ProblemError(f"the range {name}={piece} is empty; give its smaller end first: {last}..{first}")
        if first < low or last > high:
            raise ProblemError(f"{name}={piece} is out of bounds, expected values from {low} to {high}")
        parts.append((first, last))
    return Extent(_merge(parts))


def _merge(parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the same values in ascending, disjoint parts; adjacent values are not joined into ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


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

Points = NDArray[np.float64]


def select_points(
    family: Family, count: int, is_possible: Callable[[Mapping[str, int]], bool] = lambda _: True
) -> list[dict[str, int]]:
    """Select the problems of a family to tune, greedily by the mean distance of the family to the nearest point.

    Both ends of every range and every listed value are among them. The selection is deterministic.

    Parameters
    ----------
    family
        The family.
    count
        Number of points, at least the number of ends and listed values of any size. A smaller family is returned
        whole.
    is_possible
        Whether the kernel has a valid configuration for a problem; other problems are not selected.

    Returns
    -------
    list of dict
        Sizes of each point.

    Raises
    ------
    ProblemError
        ``count`` is too small, or no problem of the family is possible.
    """
    needed = max(len(extent.ends) for extent in family.extents.values())
    if count < needed:
        widest = max(family.extents, key=lambda name: len(family.extents[name].ends))
        raise ProblemError(
            f"{count} points cannot cover {widest}={family.extents[widest]}: expected at least {needed}, one for each "
            "listed value and each end of a range"
        )
    candidates = _candidates(family, _CANDIDATES)
    members = [dict(zip(family.extents, values, strict=True)) for values in candidates]
    chosen = select_points_from(family, members, count, is_possible, np.array(list(candidates.values()), float))
    if not chosen:
        raise ProblemError(f"the kernel has no valid configuration for any of {len(members)} problems of {family}")
    return chosen


def select_points_from(
    family: Family,
    members: Sequence[Mapping[str, int]],
    count: int,
    is_possible: Callable[[Mapping[str, int]], bool] = lambda _: True,
    weights: Points | None = None,
) -> list[dict[str, int]]:
    """Select points as `select_points` does, among given members, such as those that were recorded.

    Parameters
    ----------
    family, count, is_possible
        As for `select_points`; fewer points are returned where there are fewer members.
    members
        Problems of the family.
    weights
        Weight of each member in the mean distance, shape (members,); None for equal weights.
    """
    counted = np.ones(len(members)) if weights is None else weights
    positions = np.array([_position(family, member) for member in members])
    distances = np.abs(positions[:, None, :] - positions[None, :, :]).sum(axis=2)
    covers = np.array([[member[name] == end for name, end in _ends(family)] for member in members], np.bool_)
    left = np.ones(len(members), np.bool_)
    nearest = np.full(len(members), np.inf)
    uncovered = np.ones(covers.shape[1], np.bool_)
    chosen: list[dict[str, int]] = []
    while len(chosen) < count and left.any():
        np.minimum(distances, nearest, out=distances)  # distances to a point that is chosen, if that is nearer
        order = _preferred(distances @ counted, covers[:, uncovered].sum(axis=1))
        new = next((number for number in order if left[number] and is_possible(members[number])), None)
        if new is None:
            break
        chosen.append(dict(members[new]))
        nearest = np.minimum(nearest, distances[new])
        uncovered &= ~covers[new]
        left &= nearest > 0
    return chosen


def _preferred(remaining: Points, newly_covered: NDArray[np.int64]) -> list[int]:
    """Return the members in order of preference: newly covered ends and values first, then the remaining distance."""
    return [int(number) for number in np.lexsort((remaining, -newly_covered))]


def _ends(family: Family) -> list[tuple[str, int]]:
    return [(name, end) for name, extent in family.extents.items() if len(extent.ends) > 1 for end in extent.ends]


def _position(family: Family, sizes: Mapping[str, int]) -> list[float]:
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
    return [dict(zip(family.extents, values, strict=True)) for values in _candidates(family, _MEMBERS)]


_SPREAD_KINDS = ("round", "vector", "odd", "round", "vector", "round", "vector")
"""Kinds of a size in turn; that of each size has another period, so that kinds are mixed."""


def spread_members(family: Family, count: int) -> list[dict[str, int]]:
    """Return members in an order in which the first ones, however many, cover the family evenly.

    Sizes are distributed evenly in logarithms; about a quarter of them are odd.
    """
    kinds = len(_SPREAD_KINDS)
    found: dict[tuple[int, ...], None] = {}
    for number, row in enumerate(_even_fractions(count, len(family.extents))):
        pairs = zip(family.extents.values(), row, strict=True)
        values = (
            _value(extent, float(fraction), _SPREAD_KINDS[(number * (2 * place + 1) + number // kinds) % kinds])
            for place, (extent, fraction) in enumerate(pairs)
        )
        found[tuple(values)] = None
    return [dict(zip(family.extents, values, strict=True)) for values in found]


def _candidates(family: Family, count: int) -> dict[tuple[int, ...], int]:
    """Return members by their sizes, each with the number of evenly distributed problems that it stands for.

    Small sizes stand for many, since an octave holds few integers; members at corners and edges stand for none.
    """
    extents = list(family.extents.values())
    ends = [extent.ends for extent in extents]
    found: Counter[tuple[int, ...]] = Counter()
    for number, row in enumerate(_even_fractions(count, len(extents))):
        inside = tuple(
            _value(e, float(u), _kind(number, place)) for place, (e, u) in enumerate(zip(extents, row, strict=True))
        )
        found[inside] += 1
        on_edge = tuple(
            e[int(u * len(e))] if (number >> place) % 2 else value
            for place, (e, u, value) in enumerate(zip(ends, row, inside, strict=True))
        )
        found[on_edge] += 0
    for corner in _corners(ends):
        found[corner] += 0
    return found


def _corners(ends: Sequence[Sequence[int]]) -> Iterable[tuple[int, ...]]:
    """Yield members whose sizes are all ends or listed values, so that each of these occurs."""
    count = max(len(one) for one in ends)
    for number in range(count):
        yield tuple(one[min(number, len(one) - 1)] for one in ends)
    for number in range(count):
        yield tuple(
            one[-1 - min(number, len(one) - 1)] if place % 2 else one[min(number, len(one) - 1)]
            for place, one in enumerate(ends)
        )


def _even_fractions(count: int, dimensions: int) -> Points:
    """Return points that cover the unit cube evenly, shape (count, dimensions).

    They are multiples, modulo 1, of the inverse powers of the root of ``x ** (d + 1) = x + 1``: M. Roberts, "The
    unreasonable effectiveness of quasirandom sequences" (2018).
    """
    root = 2.0
    for _ in range(64):
        root = (1.0 + root) ** (1.0 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return np.asarray((0.5 + np.arange(count)[:, None] * steps) % 1.0)


def _kind(number: int, place: int) -> str:
    """Return the kind of the size at a position in a candidate; all combinations of kinds occur."""
    return _KINDS[number // len(_KINDS) ** place % len(_KINDS)]


def _value(extent: Extent, fraction: float, kind: str) -> int:
    """Return the value at a fraction of an extent, in logarithms; every part gets an equal share."""
    place = fraction * len(extent.parts)
    low, high = extent.parts[int(place)]
    if low in (high, 0):
        return high if place % 1.0 >= 0.5 else low
    value = round(low * (high / low) ** (place % 1.0))
    return _rounded(value, low, high, kind)


def _rounded(value: int, low: int, high: int, kind: str) -> int:
    """Return the nearest value that is round, a multiple of the vector length, or odd, if it is within the range."""
    if kind == "odd":
        return value if value % 2 or value + 1 > high else value + 1
    unit = _VECTOR if kind == "vector" else max(1, 2 ** (value.bit_length() - 1) // _ROUND_STEPS)
    rounded = (value + unit // 2) // unit * unit
    return rounded if low <= rounded <= high else value
