"""Which rows a model looks at where a space has more than it can."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotile.search.candidates import Candidates

Rows = NDArray[np.int64]

WHOLE = 8192
"""Up to so many rows all are looked at."""

_UNIFORM = 4096
"""Rows from anywhere, so that no region is out of reach."""

_MUTANTS = 8192
"""Changes of the best that are tried; those that are rows are looked at."""

_MOST_CHANGES = 3
"""Parameters that a change alters at most."""

_NEIGHBOURED = 3
"""Best rows of which every row that differs in one parameter is looked at."""


def rows_to_look_at(candidates: Candidates, best: Rows, rng: np.random.Generator) -> Rows:
    """Every row of a small space; of a large one those near the best and some from anywhere, in ascending order.

    Parameters
    ----------
    candidates
        The space.
    best
        Best rows, the best first; at least one.
    rng
        Draws the rows.
    """
    count = len(candidates.space)
    if count <= WHOLE:
        return np.arange(count)
    codes = candidates.space.codes[best].astype(np.int64)
    sizes = np.array([len(parameter.values) for parameter in candidates.space.parameters])
    near = candidates.rows_of(np.concatenate([_neighbours(codes[:_NEIGHBOURED], sizes), _mutants(codes, sizes, rng)]))
    return np.unique(np.concatenate([near[near >= 0], rng.integers(count, size=_UNIFORM)]))


def _neighbours(codes: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every combination that differs from one of these in at most one parameter."""
    found = []
    for index, size in enumerate(sizes):
        changed = np.repeat(codes, size, axis=0)
        changed[:, index] = np.tile(np.arange(size), len(codes))
        found.append(changed)
    return np.concatenate(found)


def _mutants(codes: NDArray[np.int64], sizes: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Combinations that differ from these in a few parameters, each drawn alike."""
    changed = codes[np.arange(_MUTANTS) % len(codes)]
    changes = rng.integers(1, _MOST_CHANGES + 1, size=_MUTANTS)
    for step in range(_MOST_CHANGES):
        mutants = np.flatnonzero(changes > step)
        index = rng.integers(len(sizes), size=len(mutants))
        changed[mutants, index] = rng.integers(sizes[index])
    return changed
