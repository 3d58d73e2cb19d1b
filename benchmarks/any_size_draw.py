"""Sizes of the problems of any_size.py: drawn at random, or given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Sizes = dict[str, int]
Ranges = Mapping[str, tuple[int, int]]

MATMUL_RANGES: Ranges = {"M": (1, 16384), "N": (1, 16384), "K": (16, 131072)}
MATMUL_FLAGS = ("TRANS_A", "TRANS_B")
MAX_FLOPS = 2.0**41

_UNITS = (0, 2, 8, 8)
"""Sizes of successive problems are odd (0) or multiples of these."""
_MAX_ATTEMPTS = 1000
"""Attempts per problem, after which the condition on the problems is taken to exclude nearly all."""


def draw(
    ranges: Ranges, flags: Sequence[str], count: int, seed: int, *, fits: Callable[[Sizes], bool] = lambda _: True
) -> list[Sizes]:
    """Draw different problems: sizes log-uniformly, flags with equal probability.

    In a quarter of the problems every size is odd, in a quarter a multiple of 2, in the others a multiple of 8; a size
    below the unit stays as it was drawn. The same seed gives the same problems; more of them begin with these.

    Parameters
    ----------
    ranges
        Lowest and highest value of each size.
    flags
        Names that are 0 or 1.
    count, seed
        Number of problems, and seed of the generator.
    fits
        Condition on a problem; others are drawn again.
    """
    generator = np.random.default_rng(seed)
    found: list[Sizes] = []
    for _ in range(_MAX_ATTEMPTS * count):
        if len(found) == count:
            break
        unit = _UNITS[len(found) % len(_UNITS)]
        sizes = {name: _rounded(_log_uniform(*ends, generator), *ends, unit) for name, ends in ranges.items()}
        sizes |= {name: int(generator.integers(2)) for name in flags}
        if sizes not in found and fits(sizes):
            found.append(sizes)
    if len(found) < count:
        raise SystemExit(f"only {len(found)} of {count} problems were found in {_MAX_ATTEMPTS * count} attempts")
    return found


def _log_uniform(low: int, high: int, generator: np.random.Generator) -> int:
    return int(np.clip(round(low * (high / low) ** generator.random()), low, high))


def _rounded(value: int, low: int, high: int, unit: int) -> int:
    """Return the nearest odd number (unit 0) or multiple of the unit within the range; the value if there is none."""
    if unit == 0:
        return next((near for near in (value | 1, (value | 1) - 2) if low <= near <= high), value)
    below = value // unit * unit
    nearest = sorted((below, below + unit), key=lambda multiple: abs(multiple - value))
    return next((near for near in nearest if max(low, 1) <= near <= high), value) if value >= unit else value


def matmul_fits(sizes: Sizes) -> bool:
    """Return whether a product needs at most 2^41 floating-point operations."""
    return matmul_flops(sizes) <= MAX_FLOPS


def matmul_flops(sizes: Mapping[str, int]) -> float:
    """Return the number of multiplications and additions of a product."""
    return 2.0 * sizes["M"] * sizes["N"] * sizes["K"]


def parse_ranges(words: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Parse ranges such as ``M=1..16384``, and single values such as ``M=35``."""
    found: dict[str, tuple[int, int]] = {}
    for word in words:
        parts = re.fullmatch(r"(\w+)=(\d{1,12})(?:\.\.(\d{1,12}))?", word)
        low, high = (int(parts[2]), int(parts[3] or parts[2])) if parts else (0, 0)
        if not 1 <= low <= high:
            raise SystemExit(f"{word!r} is no range of a size; expected one like M=1..16384")
        found[parts[1]] = (low, high)  # type: ignore[index]
    return found


def parse_shape(text: str) -> Sizes:
    """Parse ``M,N,K``, or with the layout ``M,N,K,NT``: N is row-major, T stored as the row-major transpose."""
    return _product(text.split(","), text)


def read_shapes(path: Path) -> list[Sizes]:
    """Read a JSON list of ``[M, N, K]`` and ``[M, N, K, "NT"]``."""
    try:
        shapes = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: expected a JSON list of [M, N, K]: {error}") from None
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
        raise SystemExit(f"{path}: expected a JSON list of [M, N, K]")
    return [_product(shape, json.dumps(shape)) for shape in shapes]


def _product(parts: Sequence[Any], text: str) -> Sizes:
    layout = str(parts[3]).strip().upper() if len(parts) == 4 else "NN"
    try:
        sizes = dict(zip("MNK", (int(part) for part in parts[:3]), strict=True))
    except (TypeError, ValueError):
        sizes = {}
    if len(parts) > 4 or not sizes or min(sizes.values()) < 1 or layout not in ("NN", "NT", "TN", "TT"):
        raise SystemExit(f"{text!r} is no shape of a product; expected one like 64,64,131072 or 64,64,131072,NT")
    return {**sizes, "TRANS_A": int(layout[0] == "T"), "TRANS_B": int(layout[1] == "T")}


def layout_of(sizes: Mapping[str, int]) -> str:
    """Return the layout of a product as in `parse_shape`."""
    return "".join("T" if sizes.get(flag) else "N" for flag in MATMUL_FLAGS)


def text_of(sizes: Mapping[str, int]) -> str:
    """Return the sizes as text: ``64 x 64 x 131072 NT`` for a product."""
    if set(sizes) == {*MATMUL_RANGES, *MATMUL_FLAGS}:
        return f"{' x '.join(str(sizes[name]) for name in MATMUL_RANGES)} {layout_of(sizes)}"
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def largest(problems: Sequence[Mapping[str, int]]) -> tuple[int, int]:
    """Return the elements of the largest A and of the largest B among products; 0 for none."""
    return (
        max((sizes["M"] * sizes["K"] for sizes in problems), default=0),
        max((sizes["K"] * sizes["N"] for sizes in problems), default=0),
    )
