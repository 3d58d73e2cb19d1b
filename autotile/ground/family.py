"""Families of problems: for each size of a kernel the values that it may take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotile.ground.errors import ProblemError
from autotile.ground.frozen import dataclass
from autotile.ground.spec import KernelSpec

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
    missing = [name for name in spec.sizes if name not in given and not spec.may_be_left_out(name)]
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
