"""Which problems of a family to tune: few, so that every problem of the family has one nearby.

Near means in the logarithms of the sizes, since a size matters by its ratio to a tile. Ragged sizes are among them:
programs call with 1999 as well as with 2048, and a tile that does not divide a size takes other paths.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autotile.ground.errors import ProblemError
from autotile.ground.family import Extent, Family

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
