"""Regression in NumPy: a few networks of two hidden layers, averaged, and corrected by the nearest measured problems.

A row describes a pair of a problem and an item, such as a configuration. Its inputs are those of the problem, those of
the item, and those of the pair; each item also has an offset of its own in the first layer, which is drawn towards zero
and so learns only what the inputs leave unexplained. As the first layer is linear, the part of the items is computed
once, and that of the problem once for all items, which is what makes a prediction for a hundred items take some tens of
microseconds.

A library chooses among algorithms that nobody outside of it knows, so that its time has steps that a small network
misses. Near a measured problem the network errs as it did there: the mean error of the nearest problems corrects it,
and the deviation of these errors shows how much the correction can be relied on.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.documents import convert
from autotile.core.dtypes import Array
from autotile.errors import DataError

Matrix = NDArray[np.float32]
Predict = Callable[[Matrix, Matrix], tuple[Matrix, Matrix]]
"""Predicts some items: returns mean and spread over the networks, half of their range, each of shape (items,).

It takes the inputs of the problem, of shape (problem inputs,) for one problem of all items, or (problem inputs, items),
and those of the pairs, of shape (pair inputs, items)."""

_MEMBERS = 2
"""Networks of an ensemble."""
_HIDDEN = (64, 32)
_BATCH_ROWS = 512
_LEARNING_RATE = 4e-3
_MAX_RESIDUAL = 0.3
"""Residual, in doublings, beyond which the loss is linear."""
_DECAY = 1e-5
_OFFSET_DECAY = 3e-4
"""Weight decay of the layers, and of the offsets of items."""
_BLOCK = 240
"""Items that are computed at once: for more, BLAS would wake other threads, which takes longer than the products."""
_MAX_VALUES = 2**20
_MAX_WIDTH = 1024
_MAX_VALUE = 1e6


class Inputs(NamedTuple):
    """Inputs of each row's problem, its item and their pair, shape (rows, inputs), and the number of the item."""

    problem: Matrix
    item: Matrix
    pair: Matrix
    number: NDArray[np.int64]

    def rows(self, chosen: Array) -> Inputs:
        """Return some of the rows."""
        return Inputs(self.problem[chosen], self.item[chosen], self.pair[chosen], self.number[chosen])


_PARTS = ("problem", "item", "pair")
_SHAPES: Mapping[str, tuple[str, ...]] = {
    **{f"{part}_{of}": (part,) for part in _PARTS for of in ("scale", "center")},
    **{f"{part}_in": ("members", part, "first") for part in _PARTS},
    "offset": ("members", "items", "first"),
    "first_bias": ("members", "first"),
    "middle": ("members", "first", "second"),
    "second_bias": ("members", "second"),
    "out": ("members", "second"),
    **{f"{part}_out": ("members", part) for part in _PARTS},
    "bias": ("members", "items"),
}
"""Dimensions of each array."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Networks that predict the same quantity; their mean is the prediction, their spread a measure of ignorance."""

    arrays: Mapping[str, Matrix]

    @classmethod
    def fit(
        cls, inputs: Inputs, targets: NDArray[np.float64], weights: NDArray[np.float64], items: int, *, epochs: int
    ) -> Ensemble:
        """Fit the networks with Adam; equal arguments give equal networks.

        ``targets`` and ``weights`` are the value to predict for each row, and its weight; ``epochs`` the passes over
        the rows.
        """
        scales: dict[str, Matrix] = {}
        scaled: dict[str, Matrix] = {}
        for name in _PARTS:
            column = getattr(inputs, name)
            center, deviation = column.mean(axis=0), column.std(axis=0)
            scale = np.where(deviation > 1e-6, 1.0 / np.maximum(deviation, 1e-6), 0.0)  # constants are left out
            scales |= {f"{name}_scale": scale.astype(np.float32), f"{name}_center": center.astype(np.float32)}
            scaled[name] = ((column - center) * scale).astype(np.float32)
        rows = Inputs(**scaled, number=inputs.number)
        known = targets.astype(np.float32), weights.astype(np.float32)
        trained = [_train(rows, *known, items=items, seed=member, epochs=epochs) for member in range(_MEMBERS)]
        return cls({**scales, **{name: np.stack([one[name] for one in trained]) for name in trained[0]}})

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of inputs of a problem, an item and a pair, and number of items."""
        return tuple(self.arrays[name].shape[-1] for name in ("problem_scale", "item_scale", "pair_scale", "bias"))

    def only(self, items: Sequence[int]) -> Ensemble:
        """Return the ensemble for some of the items, numbered anew."""
        own = {name: self.arrays[name][:, list(items)] for name in ("offset", "bias")}
        return Ensemble({**self.arrays, **own})

    def predict(self, inputs: Inputs) -> tuple[Matrix, Matrix]:
        """Return mean and spread of the predictions for rows, each of shape (rows,)."""
        return prepare(self.arrays, inputs.number, inputs.item)(inputs.problem.T, inputs.pair.T)

    def to_json(self) -> dict[str, Any]:
        """Return the arrays as base64 of little-endian single-precision numbers, with their dimensions."""
        sizes: dict[str, int] = {}
        for name, dimensions in _SHAPES.items():
            sizes |= dict(zip(dimensions, self.arrays[name].shape, strict=True))
        return {**sizes, "arrays": {name: _encoded(self.arrays[name], "<f4") for name in _SHAPES}}

    @classmethod
    def from_json(cls, data: Any) -> Ensemble:
        """Invert `to_json`; a `DataError` if the value is damaged."""
        document = convert(data, _EnsembleDocument)
        if document.arrays.keys() != _SHAPES.keys():
            raise DataError(f"expected the arrays {', '.join(_SHAPES)}", field="arrays")
        shapes = {name: [getattr(document, one) for one in dimensions] for name, dimensions in _SHAPES.items()}
        if sum(map(math.prod, shapes.values())) > _MAX_VALUES:
            raise DataError(f"more than {_MAX_VALUES:,} weights", field="arrays")
        decoded = {name: _decoded(document.arrays[name], "<f4", shape, name) for name, shape in shapes.items()}
        return cls({name: array.astype(np.float32) for name, array in decoded.items()})


_Width = Annotated[int, Meta(ge=0, le=_MAX_WIDTH)]
_Count = Annotated[int, Meta(ge=1, le=_MAX_WIDTH)]


class _EnsembleDocument(msgspec.Struct):
    """JSON of an ensemble."""

    members: Annotated[int, Meta(ge=1, le=16)]
    items: _Count
    problem: _Width
    item: _Width
    pair: _Width
    first: _Count
    second: _Count
    arrays: Annotated[dict[str, Annotated[str, Meta(max_length=2**23)]], Meta(max_length=64)]


def _encoded(array: Array, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, kind).tobytes()).decode()


def _decoded(text: str, kind: str, shape: Sequence[int], name: str) -> Array:
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), kind).reshape(shape)
    except ValueError:
        raise DataError(f"expected base64 of {' x '.join(map(str, shape))} numbers", field=name) from None
    if not (np.abs(values.astype(np.float64)) <= _MAX_VALUE).all():  # NaN is not either
        raise DataError("a number is not finite, or is beyond a million", field=name)
    return values


def prepare(arrays: Mapping[str, Matrix], items: NDArray[np.int64], item_inputs: Matrix) -> Predict:
    """Return the predictions of an ensemble for items of given numbers and inputs, a row for each.

    What does not depend on the problem is computed here.
    """
    a = arrays
    own = ((item_inputs - a["item_center"]) * a["item_scale"]).astype(np.float32)
    hidden = own @ a["item_in"] + a["offset"][:, items] + a["first_bias"][:, None]
    direct = a["item_out"] @ own.T + a["bias"][:, items]
    members, _, width = a["problem_in"].shape
    rows = members * width  # of the first layer, a column for each item; then one for each result
    first: Matrix = np.concatenate([hidden.transpose(0, 2, 1).reshape(rows, len(items)), direct])
    weights = []
    for name in ("problem", "pair"):
        inner = a[f"{name}_in"].transpose(0, 2, 1).reshape(rows, len(a[f"{name}_scale"]))
        weights.append(np.concatenate([inner, a[f"{name}_out"]]) * a[f"{name}_scale"])
        first = first - (weights[-1] @ a[f"{name}_center"])[:, None]
    problem_in, pair_in = weights
    middle = np.ascontiguousarray(a["middle"].transpose(0, 2, 1))
    second_bias = a["second_bias"][:, :, None].copy()
    out = np.ascontiguousarray(a["out"][:, None, :])
    share, half = np.float32(1.0 / members), np.float32(0.5)

    def values_of(problem: Matrix, pair: Matrix, block: slice) -> Matrix:
        """Return the value of each network for some of the items, shape (members, items)."""
        sums = pair_in @ pair[:, block]
        sums += first[:, block]
        of_problem = problem_in @ problem
        sums += of_problem[:, None] if of_problem.ndim == 1 else of_problem
        hidden = sums[:-members]
        np.maximum(hidden, 0.0, out=hidden)
        second = middle @ hidden.reshape(members, -1, hidden.shape[1])
        second += second_bias
        np.maximum(second, 0.0, out=second)
        values: Matrix = (out @ second)[:, 0]
        values += sums[-members:]
        return values

    def predict(problem: Matrix, pair: Matrix) -> tuple[Matrix, Matrix]:
        starts = range(0, pair.shape[1], _BLOCK)
        blocks = [slice(start, start + _BLOCK) for start in starts] if len(starts) > 1 else [slice(None)]
        found = [values_of(problem if problem.ndim == 1 else problem[:, block], pair, block) for block in blocks]
        values = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        highest, lowest = np.maximum.reduce(values), np.minimum.reduce(values)
        return np.add.reduce(values) * share, (highest - lowest) * half

    return predict


def _train(rows: Inputs, targets: Matrix, weights: Matrix, *, items: int, seed: int, epochs: int) -> dict[str, Matrix]:
    """Return the arrays of one network, fitted by Adam with decay of all weights but the biases."""
    random = np.random.default_rng(seed)
    first, second = _HIDDEN
    widths = {name: getattr(rows, name).shape[1] for name in _PARTS}

    def normal(shape: tuple[int, ...], deviation: float) -> Matrix:
        return (random.standard_normal(shape) * deviation).astype(np.float32)

    spread = np.sqrt(2.0 / max(sum(widths.values()), 1))
    w = {
        **{f"{name}_in": normal((width, first), spread) for name, width in widths.items()},
        "offset": np.zeros((items, first), np.float32),
        "first_bias": np.zeros(first, np.float32),
        "middle": normal((first, second), np.sqrt(2.0 / first)),
        "second_bias": np.zeros(second, np.float32),
        "out": normal((second,), 0.1 * np.sqrt(2.0 / second)),
        **{f"{name}_out": np.zeros(width, np.float32) for name, width in widths.items()},
        "bias": np.full(items, targets.mean(), np.float32),
    }
    means, squares = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    weights = weights / max(float(weights.mean()), 1e-30)
    count = len(targets)
    size = max(min(_BATCH_ROWS, count // 16), 1)
    steps = epochs * (count // size)
    step = 0
    for _ in range(epochs):
        order = random.permutation(count)
        for start in range(0, count - size + 1, size):
            chosen = order[start : start + size]
            gradients = _gradients(w, rows.rows(chosen), targets[chosen], weights[chosen])
            step += 1
            rate = 0.5 * _LEARNING_RATE * (1.0 + np.cos(np.pi * step / steps)) + 1e-5
            for name, gradient in gradients.items():
                value, mean, square = w[name], means[name], squares[name]
                decay = 0.0 if name.endswith("bias") else _OFFSET_DECAY if name == "offset" else _DECAY
                slope = gradient + decay * value if decay else gradient
                mean += 0.1 * (slope - mean)
                square += 0.01 * (slope * slope - square)
                corrected = np.sqrt(square / (1.0 - 0.99**step)) + 1e-8
                value -= np.float32(rate) * (mean / np.float32(1.0 - 0.9**step)) / corrected
    return w


def _gradients(w: Mapping[str, Matrix], rows: Inputs, targets: Matrix, weights: Matrix) -> dict[str, Matrix]:
    """Return the slope of the loss of a batch with each array."""
    count = len(targets)
    hidden = rows.problem @ w["problem_in"] + rows.item @ w["item_in"] + rows.pair @ w["pair_in"]
    hidden = np.maximum(hidden + w["offset"][rows.number] + w["first_bias"], 0.0)
    second = np.maximum(hidden @ w["middle"] + w["second_bias"], 0.0)
    values = second @ w["out"] + rows.problem @ w["problem_out"] + rows.item @ w["item_out"]
    residual = values + rows.pair @ w["pair_out"] + w["bias"][rows.number] - targets
    error = np.clip(residual, -_MAX_RESIDUAL, _MAX_RESIDUAL) * weights / count
    to_second = np.outer(error, w["out"]) * (second > 0)
    to_first = (to_second @ w["middle"].T) * (hidden > 0)
    of_item = np.zeros((len(w["bias"]), count), np.float32)
    of_item[rows.number, np.arange(count)] = 1.0
    parts = {name: getattr(rows, name).T for name in _PARTS}
    return {
        **{f"{name}_in": part @ to_first for name, part in parts.items()},
        "offset": of_item @ to_first,
        "first_bias": to_first.sum(axis=0),
        "middle": hidden.T @ to_second,
        "second_bias": to_second.sum(axis=0),
        "out": second.T @ error,
        **{f"{name}_out": part @ error for name, part in parts.items()},
        "bias": of_item @ error,
    }


_NEAREST = 8
_OTHER_WEIGHT = 0.7
"""Weight of the inputs that are no sizes, such as alignments and flags: one step counts as this many doublings."""
_SOFTENING = 0.05
"""Squared distance, in doublings, below which all problems count alike."""
_MAX_ERROR = 4.0
"""Largest error of a single problem, in doublings, that is taken into account."""
MAX_POINTS = 16_000
"""Maximum number of problems that are kept, so that a model stays small and quick to read."""
_WINDOW = 2.5
"""Distance, in doublings, within which the nearest problems are sought along the input that varies most. Those beyond
it would weigh little."""
_SAMPLED = 32
"""One distance in this many is ordered first: the nearest of them bound those of all."""


_STORED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "points": ("<f2", ("count", "width")),
    "errors": ("<f2", ("count",)),
    "items": ("<i2", ("count",)),
    "weights": ("<f4", ("width",)),
}
"""Type and dimensions of each array in a file."""


class Neighbours:
    """Errors of a prediction at measured problems: measured minus predicted logarithm, in doublings, shape (problems,).

    ``items`` are the numbers of the items that they are of, ``points`` the inputs of each problem, scaled by
    ``weights``, shape (problems, inputs).
    """

    def __init__(self, points: Array, errors: Array, items: Array, weights: Array) -> None:
        self.points: NDArray[np.float16] = points.astype(np.float16)
        self.errors: NDArray[np.float16] = errors.astype(np.float16)
        self.items: NDArray[np.int16] = items.astype(np.int16)
        self.weights: Matrix = weights.astype(np.float32)
        self._used = np.flatnonzero(weights)
        """The inputs that are not left out."""
        self._nearest: dict[int, Callable[[Matrix], list[tuple[float, float]]]] = {}
        """Search among the points of each item."""
        for item in sorted(set(items.tolist())):  # `numpy.unique` would import `numpy.ma`, which takes 7 ms
            own, of_item = self.points[items == item][:, self._used], self.errors[items == item]
            self._nearest[item] = _finder(own.astype(np.float32), of_item.astype(np.float32))

    @classmethod
    def fit(cls, inputs: Matrix, errors: NDArray[np.float64], items: NDArray[np.int64], sizes: int) -> Neighbours:
        """Keep the errors of a prediction, in doublings, and the number of the item that each is of, shape (problems,).

        The first ``sizes`` of the inputs, shape (problems, inputs), are logarithms of sizes.
        """
        weights = np.full(inputs.shape[1], _OTHER_WEIGHT, np.float32)
        weights[:sizes] = 1.0
        weights[inputs.std(axis=0) <= 1e-6] = 0.0  # constants are left out, as in the networks
        step = -(-len(inputs) // MAX_POINTS)
        kept = slice(None, None, step)
        clipped = np.clip(errors, -_MAX_ERROR, _MAX_ERROR)
        return cls((inputs * weights)[kept], clipped.astype(np.float32)[kept], items[kept], weights)

    def look_up(self, problem: Matrix, item: int) -> tuple[float, float]:
        """Return the expected error of an item at a problem, and the deviation of the nearest errors, in doublings."""
        nearest = self._nearest.get(item)
        if nearest is None:
            return 0.0, 1.0
        found = nearest((problem * self.weights)[self._used])
        weighted = [(1.0 / (distance + _SOFTENING), error) for distance, error in found]
        total = sum([weight for weight, _ in weighted])
        mean = sum([weight * error for weight, error in weighted]) / total
        return mean, math.sqrt(sum([weight * (error - mean) ** 2 for weight, error in weighted]) / total)

    def to_json(self) -> dict[str, Any]:
        """Return the arrays as base64 of little-endian numbers, with their dimensions."""
        count, width = self.points.shape
        arrays = {name: _encoded(getattr(self, name), kind) for name, (kind, _) in _STORED.items()}
        return {"count": count, "width": width, **arrays}

    @classmethod
    def from_json(cls, data: Any) -> Neighbours:
        """Invert `to_json`; a `DataError` if the value is damaged."""
        document = convert(data, _NeighboursDocument)
        arrays = {
            name: _decoded(getattr(document, name), kind, [getattr(document, one) for one in dimensions], name)
            for name, (kind, dimensions) in _STORED.items()
        }
        return cls(**arrays)


def _finder(points: Matrix, errors: Matrix) -> Callable[[Matrix], list[tuple[float, float]]]:
    """Return a function that finds the squared distance and the error of the nearest points within a window.

    ``points`` have shape (points, inputs), ``errors`` (points,); the function takes a place of shape (inputs,). Points
    are kept in the order of the input that varies most, so that the nearest are sought among those alike in it.
    """
    along = int(points.std(axis=0).argmax()) if points.size else 0
    order = points[:, along].argsort(kind="stable") if points.size else np.arange(len(points))
    columns = np.ascontiguousarray(points[order].T)
    coordinates: list[float] = columns[along].tolist() if points.size else [0.0] * len(points)
    doubled: Matrix = np.float32(-2.0) * columns
    squares: Matrix = np.square(columns).sum(axis=0)
    sorted_errors = errors[order]

    def nearest(place: Matrix) -> list[tuple[float, float]]:
        middle = float(place[along]) if place.size else 0.0
        first = bisect_left(coordinates, middle - _WINDOW)
        near = slice(first, bisect_right(coordinates, middle + _WINDOW))
        square = float(place @ place)
        found: list[tuple[float, float]] = []
        for among in (near, slice(None)):
            distances = place @ doubled[:, among]
            distances += squares[among]
            smallest = _smallest(distances)
            pairs = zip(distances[smallest].tolist(), sorted_errors[among][smallest].tolist(), strict=True)
            found = [(max(distance + square, 0.0), error) for distance, error in pairs]
            if len(found) == _NEAREST:
                break
        return found

    return nearest


def _smallest(values: Array) -> NDArray[np.int64]:
    """Return the positions of the smallest values, in any order."""
    few = values[::_SAMPLED]
    if len(few) < _NEAREST:
        return values.argsort()[:_NEAREST]
    close = np.flatnonzero(values <= np.partition(few, _NEAREST - 1)[_NEAREST - 1])
    return close[values[close].argpartition(_NEAREST - 1)[:_NEAREST]] if len(close) > _NEAREST else close


_Text = Annotated[str, Meta(max_length=2**25)]


class _NeighboursDocument(msgspec.Struct):
    """JSON of the errors."""

    count: Annotated[int, Meta(ge=1, le=MAX_POINTS)]
    width: Annotated[int, Meta(ge=1, le=_MAX_WIDTH)]
    points: _Text
    errors: _Text
    items: _Text
    weights: _Text
