"""Correction of a prediction by the nearest measured problems.

A library chooses among algorithms that nobody outside of it knows, so that its time has steps that a small network
misses. Near a measured problem the network errs as it did there: the mean error of the nearest problems corrects it,
and the deviation of these errors shows how much the correction can be relied on.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_left, bisect_right
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
_WINDOW = 2.5
"""Distance, in doublings, within which the nearest problems are sought along the input that varies most. Those beyond
it would weigh little."""
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
    _groups: dict[int, _Points]

    @classmethod
    def of(cls, points: NDArray[Any], errors: NDArray[Any], items: NDArray[Any], weights: Matrix) -> Neighbours:
        """Sort the points of each item."""
        halves = points.astype(np.float16), errors.astype(np.float16)
        used = np.flatnonzero(weights)
        groups = {}
        for item in np.unique(items).tolist():
            own = items == item
            points, of_item = halves[0][own][:, used], halves[1][own]
            groups[int(item)] = _Points.of(points.astype(np.float32), of_item.astype(np.float32))
        return cls(*halves, items.astype(np.int16), weights.astype(np.float32), groups)

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
        group = self._groups.get(item)
        if group is None:
            return 0.0, 1.0
        found = group.nearest((problem * self.weights)[self._used])
        weighted = [(1.0 / (distance + _SOFTENING), error) for distance, error in found]
        total = sum([weight for weight, _ in weighted])
        mean = sum([weight * error for weight, error in weighted]) / total
        return mean, math.sqrt(sum([weight * (error - mean) ** 2 for weight, error in weighted]) / total)

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
class _Points:
    """Points in the order of the input that varies most, so that the nearest are sought among those alike in it."""

    along: int
    coordinates: list[float]
    """That input, and its value at each point, in ascending order."""
    columns: Matrix
    """-2 times the inputs of the points, shape (inputs, points)."""
    squares: Matrix
    """Squared length of each, shape (points,)."""
    errors: Matrix

    @classmethod
    def of(cls, points: Matrix, errors: Matrix) -> _Points:
        """Sort points; ``points`` of shape (points, inputs), ``errors`` of shape (points,)."""
        along = int(points.std(axis=0).argmax()) if points.size else 0
        order = points[:, along].argsort(kind="stable") if points.size else np.arange(len(points))
        columns = np.ascontiguousarray(points[order].T)
        coordinates = columns[along].tolist() if points.size else [0.0] * len(points)
        return cls(along, coordinates, np.float32(-2.0) * columns, np.square(columns).sum(axis=0), errors[order])

    def nearest(self, place: Matrix) -> list[tuple[float, float]]:
        """Return the squared distance and the error of each of the nearest points within a window, in any order."""
        middle = float(place[self.along]) if place.size else 0.0
        first = bisect_left(self.coordinates, middle - _WINDOW)
        found = self._nearest(place, slice(first, bisect_right(self.coordinates, middle + _WINDOW)))
        return found if len(found) == _NEAREST else self._nearest(place, slice(None))

    def _nearest(self, place: Matrix, among: slice) -> list[tuple[float, float]]:
        distances = place @ self.columns[:, among]
        distances += self.squares[among]
        nearest = _smallest(distances)
        square = float(place @ place)
        errors = self.errors[among][nearest].tolist()
        return [
            (max(near + square, 0.0), error) for near, error in zip(distances[nearest].tolist(), errors, strict=True)
        ]


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
