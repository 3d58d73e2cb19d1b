"""Correction of a prediction by the nearest measured problems.

A library chooses among algorithms that nobody outside of it knows, so that its time has steps that a small network
misses. Near a measured problem the network errs as it did there: the mean error of the nearest problems corrects it,
and the deviation of these errors shows how much the correction can be relied on.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.documents import convert
from autotile.errors import DataError

_NEAREST = 8
_OTHER_WEIGHT = 0.7
"""Weight of the inputs that are no sizes, such as alignments and flags: one step counts as this many doublings."""
_SOFTENING = 0.05
"""Squared distance, in doublings, below which all problems count alike."""
_MAX_ERROR = 4.0
"""Largest error of a single problem, in doublings, that is taken into account."""
MAX_POINTS = 16_000
"""Maximum number of problems that are kept, so that a model stays small and a look-up quick."""
_MAX_WIDTH = 256
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
    _groups: dict[int, tuple[Matrix, Matrix, Matrix]]

    @classmethod
    def of(cls, points: Matrix, errors: Matrix, items: NDArray[Any], weights: Matrix) -> Neighbours:
        """Group the points by item."""
        halves = points.astype(np.float16), errors.astype(np.float16)
        groups = {}
        for item in np.unique(items).tolist():
            own = np.ascontiguousarray(halves[0][items == item].T, np.float32)
            of_item = halves[1][items == item].astype(np.float32)
            groups[int(item)] = (np.float32(-2.0) * own, np.square(own).sum(axis=0), of_item)
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
        points, squares, errors = group
        place = problem * self.weights
        distances = place @ points
        distances += squares
        nearest = _smallest(distances)
        near = np.maximum(distances[nearest] + place @ place, 0.0) + _SOFTENING
        weight = 1.0 / near
        weight /= weight.sum()
        mean = float(weight @ errors[nearest])
        return mean, float(np.sqrt(weight @ np.square(errors[nearest] - mean)))

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
        return cls.of(points.astype(np.float32), errors.astype(np.float32), items, weights.astype(np.float32))


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
