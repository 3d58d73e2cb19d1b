"""Correction of a prediction by the nearest measured problems.

A library chooses among algorithms that nobody outside of it knows, so that its time has steps that a small network
misses. Near a measured problem the network errs as it did there: the mean error of the nearest problems corrects it,
and the deviation of these errors shows how much the correction can be relied on.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.documents import convert
from autotile.core.frozen import cached_property
from autotile.errors import DataError

_NEAREST = 8
_OTHER_WEIGHT = 0.7
"""Weight of the inputs that are no sizes, such as alignments and flags: one step counts as this many doublings."""
_SOFTENING = 0.05
"""Squared distance, in doublings, below which all problems count alike."""
_MAX_ERROR = 4.0
"""Largest error of a single problem, in doublings, that is taken into account."""
MAX_POINTS = 16_000
"""Maximum number of problems that are kept, so that a model stays small and quick to read."""
_MAX_WIDTH = 256
_CELL = 2.0
"""Width of a cell in doublings: points at a smaller distance are in the same cell or in one next to it."""
_GRIDDED = 3
"""Inputs along which points are sorted into cells: the first ones, which are sizes."""
_SAMPLED = 32
"""One distance in this many is ordered first: the nearest of them bound those of all."""

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Neighbours:
    """Errors of a prediction at measured problems.

    Attributes
    ----------
    points
        Inputs of each problem, scaled, of half precision, shape (problems, inputs).
    errors
        Measured minus predicted logarithm, in doublings, shape (problems,).
    items
        Number of the item that each error is of, shape (problems,).
    weights
        Scale of each input, shape (inputs,).
    """

    points: NDArray[np.float16]
    errors: NDArray[np.float16]
    items: NDArray[np.int16]
    weights: Matrix
    _grids: dict[int, _Grid]

    @classmethod
    def of(cls, points: NDArray[Any], errors: NDArray[Any], items: NDArray[Any], weights: Matrix) -> Neighbours:
        """Sort the points of each item into a grid."""
        halves = points.astype(np.float16), errors.astype(np.float16)
        used = np.flatnonzero(weights)
        grids = {}
        for item in np.unique(items).tolist():
            own = items == item
            grids[int(item)] = _Grid.of(halves[0][own][:, used].astype(np.float32), halves[1][own].astype(np.float32))
        return cls(*halves, items.astype(np.int16), weights.astype(np.float32), grids)

    @classmethod
    def fit(cls, inputs: Matrix, errors: NDArray[np.float64], items: NDArray[np.int64], sizes: int) -> Neighbours:
        """Keep the errors of a prediction.

        Parameters
        ----------
        inputs
            Inputs of each problem, shape (problems, inputs); the first ``sizes`` of them are logarithms of sizes.
        errors, items
            Error at each problem, in doublings, and the number of the item that it is of, shape (problems,).
        sizes
            Number of sizes.
        """
        weights = np.full(inputs.shape[1], _OTHER_WEIGHT, np.float32)
        weights[:sizes] = 1.0
        weights[inputs.std(axis=0) <= 1e-6] = 0.0  # constants are left out, as in the networks
        step = -(-len(inputs) // MAX_POINTS)
        kept = slice(None, None, step)
        clipped = np.clip(errors, -_MAX_ERROR, _MAX_ERROR)
        return cls.of((inputs * weights)[kept], clipped.astype(np.float32)[kept], items[kept], weights)

    def look_up(self, problem: Matrix, item: int) -> tuple[float, float]:
        """Return the expected error and the deviation of the nearest errors from it, in doublings.

        Parameters
        ----------
        problem
            Inputs of the problem, shape (inputs,).
        item
            Number of the item.
        """
        grid = self._grids.get(item)
        if grid is None:
            return 0.0, 1.0
        found = grid.nearest((problem * self.weights)[self._used])
        weights = [1.0 / (distance + _SOFTENING) for distance, _ in found]
        total = sum(weights)
        mean = sum([weight * error for weight, (_, error) in zip(weights, found, strict=True)]) / total
        variance = (
            sum([weight * (error - mean) ** 2 for weight, (_, error) in zip(weights, found, strict=True)]) / total
        )
        return mean, math.sqrt(variance)

    @cached_property
    def _used(self) -> NDArray[np.int64]:
        """The inputs that are not left out."""
        return np.flatnonzero(self.weights)

    def to_json(self) -> dict[str, Any]:
        """Return the arrays as base64 of little-endian numbers, with their dimensions."""
        count, width = self.points.shape
        return {
            "count": count,
            "width": width,
            "points": base64.b64encode(self.points.astype("<f2").tobytes()).decode(),
            "errors": base64.b64encode(self.errors.astype("<f2").tobytes()).decode(),
            "items": base64.b64encode(self.items.astype("<i2").tobytes()).decode(),
            "weights": base64.b64encode(self.weights.astype("<f4").tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Neighbours:
        """Invert `to_json`.

        Raises
        ------
        DataError
            The value is damaged.
        """
        document = convert(data, _Document)
        count, width = document.count, document.width
        points = _decoded(document.points, "<f2", (count, width), "points")
        errors = _decoded(document.errors, "<f2", (count,), "errors")
        items = _decoded(document.items, "<i2", (count,), "items")
        weights = _decoded(document.weights, "<f4", (width,), "weights")
        return cls.of(points, errors, items, weights.astype(np.float32))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Points in cells along their first inputs, so that the nearest are sought in the cells around a place only."""

    rows: Matrix
    """Points, sorted by cell: -2 times their inputs, their square, and the error; shape (points, inputs + 2)."""
    lows: tuple[float, ...]
    counts: tuple[int, ...]
    """Lowest coordinate and number of cells along each gridded input."""
    starts: list[int]
    """First row of each cell, and the number of rows at the end."""

    @classmethod
    def of(cls, points: Matrix, errors: Matrix) -> _Grid:
        """Sort points into cells; ``points`` of shape (points, inputs), ``errors`` of shape (points,)."""
        gridded = points[:, :_GRIDDED]
        lows = gridded.min(axis=0)
        cells = ((gridded - lows) / _CELL).astype(np.int64)
        counts = tuple((cells.max(axis=0) + 1).tolist())
        numbers = np.ravel_multi_index(tuple(cells.T), counts) if counts else np.zeros(len(points), np.int64)
        starts = np.concatenate([[0], np.bincount(numbers, minlength=math.prod(counts)).cumsum()]).tolist()
        rows = np.concatenate([-2.0 * points, np.square(points).sum(axis=1)[:, None], errors[:, None]], axis=1)
        order = numbers.argsort(kind="stable")
        return cls(np.ascontiguousarray(rows[order], np.float32), tuple(lows.tolist()), counts, starts)

    def nearest(self, place: Matrix) -> list[tuple[float, float]]:
        """Return the squared distance and the error of each of the nearest points, in any order."""
        rows = self._around(place.tolist())
        found = _nearest(rows, place) if len(rows) >= _NEAREST else []
        if not found or max(found)[0] > _CELL**2:  # there may be nearer ones beyond these cells
            found = _nearest(self.rows, place)
        return found

    def _around(self, place: list[float]) -> Matrix:
        """Return the rows of the cell of a place and of those next to it."""
        ranges = []
        for coordinate, low, count in zip(place, self.lows, self.counts, strict=False):
            cell = min(max(int((coordinate - low) / _CELL), 0), count - 1)
            ranges.append((max(cell - 1, 0), min(cell + 2, count)))
        if not ranges:
            return self.rows
        *outer, (first, last) = ranges
        numbers = [0]
        for (begin, end), count in zip(outer, self.counts, strict=False):
            numbers = [number * count + cell for number in numbers for cell in range(begin, end)]
        columns = [number * self.counts[-1] for number in numbers]
        parts = [self.rows[self.starts[column + first] : self.starts[column + last]] for column in columns]
        return np.concatenate(parts)


def _nearest(rows: Matrix, place: Matrix) -> list[tuple[float, float]]:
    distances = rows[:, :-1] @ np.append(place, np.float32(1.0))
    nearest = _smallest(distances)
    square = float(place @ place)
    errors = rows[nearest, -1].tolist()
    return [(max(near + square, 0.0), error) for near, error in zip(distances[nearest].tolist(), errors, strict=True)]


def _smallest(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the positions of the smallest values, in any order."""
    few = values[::_SAMPLED]
    if len(few) < _NEAREST:
        return values.argsort()[:_NEAREST]
    close = np.flatnonzero(values <= np.partition(few, _NEAREST - 1)[_NEAREST - 1])
    return close[values[close].argpartition(_NEAREST - 1)[:_NEAREST]] if len(close) > _NEAREST else close


_Text = Annotated[str, Meta(max_length=2**25)]


class _Document(msgspec.Struct):
    """JSON of the errors."""

    count: Annotated[int, Meta(ge=1, le=MAX_POINTS)]
    width: Annotated[int, Meta(ge=1, le=_MAX_WIDTH)]
    points: _Text
    errors: _Text
    items: _Text
    weights: _Text


def _decoded(text: str, kind: str, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), kind).reshape(shape)
    except ValueError:
        raise DataError(f"expected base64 of {' x '.join(map(str, shape))} numbers", field=name) from None
    if not np.isfinite(values).all():
        raise DataError("a number is not finite", field=name)
    return values
