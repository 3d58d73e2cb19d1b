"""Families of problems, and the few of each that represent the others.

Near means in the logarithms of the sizes, since a size matters by its ratio to a tile. Ragged sizes are among them:
programs call with 1999 as well as with 2048, and a tile that does not divide a size takes other paths.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.frozen import dataclass
from autotile.errors import ProblemError
from autotile.kernel.spec import KernelSpec

_LARGEST_SIZE = 2**31 - 1
_PART = re.compile(r"(\d{1,10})(?:\.\.(\d{1,10}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Extent:
    """The values of one size: whole numbers from ``low`` to ``high`` of each part, ascending and apart.

    A single value is a part whose ends are equal.
    """

    parts: tuple[tuple[int, int], ...]

    def __contains__(self, value: int) -> bool:
        return any(low <= value <= high for low, high in self.parts)

    def __str__(self) -> str:
        return ",".join(str(low) if low == high else f"{low}..{high}" for low, high in self.parts)

    @property
    def ends(self) -> tuple[int, ...]:
        """Every listed value and both ends of every range, ascending."""
        return tuple(sorted({end for part in self.parts for end in part}))


@dataclass(frozen=True, slots=True)
class Family:
    """All problems of a kernel whose sizes and flags lie in given extents.

    Attributes
    ----------
    extents
        One for every size and flag of the kernel, in the order of its file.
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
        """The member with every size at its greatest."""
        return {name: extent.ends[-1] for name, extent in self.extents.items()}

    def to_json(self) -> dict[str, list[list[int]]]:
        """Parts of each extent by name."""
        return {name: [list(part) for part in extent.parts] for name, extent in self.extents.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Family:
        """Inverse of `to_json`.

        Raises
        ------
        ValueError
            A part is not a pair of whole numbers, or its ends are the wrong way round.
        """
        return cls({str(name): Extent(tuple(_part(part) for part in parts)) for name, parts in data.items()})


def parse_family(spec: KernelSpec, words: Iterable[str]) -> Family:
    """Read a family as it is typed: ``M=1..8192 N=4096 K=4096,7168``.

    Parameters
    ----------
    spec
        The kernel.
    words
        One a size: a value, a range ``a..b`` with both ends in it, or several of them joined by commas. Flags, and
        sizes whose default is 1, may be left out and take their default.

    Raises
    ------
    ProblemError
        A word cannot be read, a size is missing, unknown, given twice or out of bounds, or a range is empty.
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
    if missing:
        raise ProblemError(f"the family needs the size {missing[0]}, such as {missing[0]}=1..{spec.sizes[missing[0]]}")
    defaults = {name: Extent(((value, value),)) for name, value in spec.sizes.items()}
    return Family({name: given.get(name, defaults[name]) for name in spec.sizes})


def family_of(spec: KernelSpec, sizes: Mapping[str, int | str | Sequence[int] | range]) -> Family:
    """The family that a program describes.

    Each size is a number, a list of numbers, text such as ``1..8192``, or a `range` of step 1.

    Raises
    ------
    ProblemError
        As for `parse_family`.
    """
    return parse_family(spec, [f"{name}={_text(name, value)}" for name, value in sizes.items()])


def _extent(spec: KernelSpec, name: str, text: str) -> Extent:
    low, high = (0, 1) if name in spec.flags else (1, _LARGEST_SIZE)
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
    return Extent(_merged(parts))


def _merged(parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same values in parts that are ascending and do not overlap; values side by side stay values."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, range):
        if value.step != 1 or not value:
            raise ProblemError(f"{name}={value!r}, expected a range of step 1 that is not empty")
        return f"{value[0]}..{value[-1]}"
    return ",".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def _part(part: Any) -> tuple[int, int]:
    low, high = part
    if not (type(low) is type(high) is int and 0 <= low <= high):
        raise ValueError(f"{part!r} is no part of an extent, expected two whole numbers, the smaller one first")
    return low, high


_CANDIDATES = 1024
"""Problems of the family to choose from. Twice as many change no distance by more than a few percent."""
_MEMBERS = 4096
"""Problems of the family that a rule is learned for. Of 1,024, two lay in the sixteen sizes behind a row of tiles where
other configurations win than in the rest of the next row: too few to tell them apart."""
_FLAG_DOUBLINGS = 4.0
"""A flag that differs counts like a size sixteen times as large: it selects another code path."""
_RAGGED_DOUBLINGS = 0.5
"""So does, to a lesser degree, whether vectors of eight elements fit a size."""
_VECTOR = 8
_STEPS = 4
"""Round sizes are 4, 5, 6 or 7 times a power of two."""
_KINDS = ("round", "odd", "vector", "odd")
"""Of four candidates, how each size is shaped. Of all numbers seven in eight are no multiple of a vector."""

Points = NDArray[np.float64]


def choose_representatives(
    family: Family, count: int, is_possible: Callable[[Mapping[str, int]], bool] = lambda _: True
) -> list[dict[str, int]]:
    """Problems to tune, chosen one by one so that the mean distance from the family to the nearest one falls most.

    Both ends of every range and every listed value are among them. The choice is deterministic.

    Parameters
    ----------
    family
        The family.
    count
        How many, at least as many as some size has ends and listed values. A family with fewer members gives all.
    is_possible
        Whether the kernel has any configuration for a problem; others are not chosen.

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
    chosen = choose_among(family, members, count, is_possible, np.array(list(candidates.values()), float))
    if not chosen:
        raise ProblemError(f"the kernel has no valid configuration for any of {len(members)} problems of {family}")
    return chosen


def choose_among(
    family: Family,
    members: Sequence[Mapping[str, int]],
    count: int,
    is_possible: Callable[[Mapping[str, int]], bool] = lambda _: True,
    weights: Points | None = None,
) -> list[dict[str, int]]:
    """`choose_representatives` from given members, such as those that were recorded; fewer where there are fewer.

    Parameters
    ----------
    weights
        What each member counts in the mean distance, shape (members,); None: all the same.
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
        order = _preferred(np.minimum(distances, nearest) @ counted, covers[:, uncovered].sum(axis=1))
        new = next((number for number in order if left[number] and is_possible(members[number])), None)
        if new is None:
            break
        chosen.append(dict(members[new]))
        nearest = np.minimum(nearest, distances[new])
        uncovered &= ~covers[new]
        left &= nearest > 0
    return chosen


def _preferred(remaining: Points, newly_covered: NDArray[np.int64]) -> list[int]:
    """Members that cover most of what is not covered yet first; of equals those that leave the least distance."""
    return [int(number) for number in np.lexsort((remaining, -newly_covered))]


def _ends(family: Family) -> list[tuple[str, int]]:
    return [(name, end) for name, extent in family.extents.items() if len(extent.ends) > 1 for end in extent.ends]


def _position(family: Family, sizes: Mapping[str, int]) -> list[float]:
    """Coordinates whose differences add up to the distance of two problems, in doublings."""
    found: list[float] = []
    for name, extent in family.extents.items():
        value = sizes[name]
        is_flag = extent.ends[0] == 0 or value == 0
        found.append(_FLAG_DOUBLINGS * value if is_flag else math.log2(value))
        found.append(0.0 if is_flag or value % _VECTOR == 0 else _RAGGED_DOUBLINGS)
    return found


def members_of(family: Family) -> list[dict[str, int]]:
    """Members that fill the family evenly, round and ragged ones, and those at its corners and edges."""
    return [dict(zip(family.extents, values, strict=True)) for values in _candidates(family, _MEMBERS)]


def _candidates(family: Family, count: int) -> dict[tuple[int, ...], int]:
    """Members, each with how many of the problems that fill the family evenly it stands for.

    Small sizes stand for many, since few whole numbers lie in an octave; those at corners and edges for none.
    """
    extents = family.extents.values()
    found: Counter[tuple[int, ...]] = Counter()
    for number, row in enumerate(_even_fractions(count, len(extents))):
        inside = tuple(
            _value(e, float(u), _kind(number, place)) for place, (e, u) in enumerate(zip(extents, row, strict=True))
        )
        found[inside] += 1
        on_edge = tuple(
            e.ends[int(u * len(e.ends))] if (number >> place) % 2 else value
            for place, (e, u, value) in enumerate(zip(extents, row, inside, strict=True))
        )
        found[on_edge] += 0
    for corner in _corners([extent.ends for extent in extents]):
        found[corner] += 0
    return found


def _corners(ends: Sequence[Sequence[int]]) -> Iterable[tuple[int, ...]]:
    """Members whose every size is an end or a listed value: as many as cover each of them."""
    most = max(len(one) for one in ends)
    for number in range(most):
        yield tuple(one[min(number, len(one) - 1)] for one in ends)
    for number in range(most):
        yield tuple(
            one[-1 - min(number, len(one) - 1)] if place % 2 else one[min(number, len(one) - 1)]
            for place, one in enumerate(ends)
        )


def _even_fractions(count: int, dimensions: int) -> Points:
    """Points that fill the unit cube evenly, shape (count, dimensions).

    Multiples of powers of the root of ``x ** (d + 1) = x + 1`` modulo 1: M. Roberts, "The unreasonable effectiveness of
    quasirandom sequences" (2018).
    """
    root = 2.0
    for _ in range(64):
        root = (1.0 + root) ** (1.0 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return np.asarray((0.5 + np.arange(count)[:, None] * steps) % 1.0)


def _kind(number: int, place: int) -> str:
    """How the size at a place is shaped in a candidate; the kinds mix over the sizes."""
    return _KINDS[number // len(_KINDS) ** place % len(_KINDS)]


def _value(extent: Extent, fraction: float, kind: str) -> int:
    """The value at a fraction of an extent, in logarithms; one part is as likely as another."""
    place = fraction * len(extent.parts)
    low, high = extent.parts[int(place)]
    if low in (high, 0):
        return high if place % 1.0 >= 0.5 else low
    value = round(low * (high / low) ** (place % 1.0))
    return _shaped(value, low, high, kind)


def _shaped(value: int, low: int, high: int, kind: str) -> int:
    """The value made round, a multiple of a vector, or odd, where that is in the range."""
    if kind == "odd":
        return value if value % 2 or value + 1 > high else value + 1
    unit = _VECTOR if kind == "vector" else max(1, 2 ** (value.bit_length() - 1) // _STEPS)
    rounded = (value + unit // 2) // unit * unit
    return rounded if low <= rounded <= high else value
