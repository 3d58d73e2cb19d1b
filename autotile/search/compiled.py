"""What the compiler says of a candidate, as coordinates of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from autotile.ground.model import Trial

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


def features_of(compiled: Trial, sm_count: int) -> Floats | None:
    """Coordinates of what a candidate uses, each about 0 to 1; None where it did not compile.

    Registers, spilled bytes, shared bytes, threads and blocks on an SM enter by their logarithm, over the range that
    GPUs allow. Occupancy and the share of the last wave of blocks that is filled are shares to begin with.

    Parameters
    ----------
    compiled
        A candidate that went at least as far as the second gate.
    sm_count
        SMs of the device.

    Returns
    -------
    numpy.ndarray or None
        Shape (7,).
    """
    geometry, resources, occupancy = compiled.geometry, compiled.resources, compiled.occupancy
    if geometry is None or resources is None or occupancy is None:
        return None
    smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
    waves = geometry.blocks / (sm_count * max(1, occupancy.blocks_per_sm))
    return np.array(
        [
            np.log2(max(resources.registers, 1) / 16) / 4,
            np.log2(1 + resources.spill_bytes / 16) / 8,
            np.log2(1 + smem_bytes / 1024) / 8,
            np.log2(geometry.threads / 32) / 5,
            np.log2(max(1, occupancy.blocks_per_sm)) / 5,
            occupancy.occupancy,
            waves / np.ceil(waves),
        ]
    )


class CompiledPoints:
    """Coordinates of rows that were compiled: those of their parameters, and behind them what they use.

    What does not differ among the rows that a model is fitted to is left out. A row of which nothing is known, one
    that did not compile, is taken to use what the others do in the mean.

    Parameters
    ----------
    points
        Coordinates of rows by their parameters.
    groups
        Their groups, see `autotile.search.embedding.Embedding`.
    features
        What rows use, by row: `features_of`.
    fitted
        Rows that the model is fitted to.

    Attributes
    ----------
    groups
        Group of each coordinate, shape (coordinates,); each feature is one of its own.
    """

    def __init__(
        self, points: Callable[[Rows], Floats], groups: Rows, features: Mapping[int, Floats], fitted: Rows
    ) -> None:
        self._points = points
        self._features = features
        known = np.array([features[row] for row in fitted.tolist() if row in features])
        self._usual: Floats = known.mean(axis=0) if len(known) else np.zeros(0)
        self._telling = np.flatnonzero(np.ptp(known, axis=0) > 0) if len(known) else np.zeros(0, np.int64)
        self.groups = np.append(groups, groups.max(initial=-1) + 1 + np.arange(len(self._telling)))

    def __call__(self, rows: Rows) -> Floats:
        """Coordinates of rows, shape (rows, coordinates)."""
        points = self._points(rows)
        if not len(self._telling):
            return points
        used = [self._features.get(row, self._usual)[self._telling] for row in rows.tolist()]
        return np.concatenate([points, np.array(used).reshape(len(rows), len(self._telling))], axis=1)
