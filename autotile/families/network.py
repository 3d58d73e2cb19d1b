"""A small regression ensemble in NumPy: several networks of two hidden layers, averaged.

A row describes a pair of a problem and an item, such as a configuration. Its inputs are those of the problem, those of
the item, and those of the pair; each item also has an offset of its own in the first layer, which is drawn towards zero
and so learns only what the inputs leave unexplained. As the first layer is linear, the part of the items is computed
once, and that of the problem once for all items, which is what makes a prediction for a hundred items take some tens of
microseconds.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from autotile.core.documents import convert
from autotile.errors import DataError

Matrix = NDArray[np.float32]

_MEMBERS = 2
_HIDDEN = (64, 32)
_EPOCHS = 120
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


class Inputs(NamedTuple):
    """Inputs of rows.

    Attributes
    ----------
    problem
        Inputs of each row's problem, shape (rows, problem inputs).
    item
        Inputs of its item, shape (rows, item inputs).
    pair
        Inputs of the pair, shape (rows, pair inputs).
    number
        Number of its item, shape (rows,).
    """

    problem: Matrix
    item: Matrix
    pair: Matrix
    number: NDArray[np.int64]

    def rows(self, chosen: NDArray[Any]) -> Inputs:
        """Return some of the rows."""
        return Inputs(self.problem[chosen], self.item[chosen], self.pair[chosen], self.number[chosen])


_Weights = dict[str, Matrix]
_SHAPES: Mapping[str, tuple[str, ...]] = {
    "problem_scale": ("problem",),
    "problem_center": ("problem",),
    "item_scale": ("item",),
    "item_center": ("item",),
    "pair_scale": ("pair",),
    "pair_center": ("pair",),
    "problem_in": ("members", "problem", "first"),
    "item_in": ("members", "item", "first"),
    "pair_in": ("members", "pair", "first"),
    "offset": ("members", "items", "first"),
    "first_bias": ("members", "first"),
    "middle": ("members", "first", "second"),
    "second_bias": ("members", "second"),
    "out": ("members", "second"),
    "problem_out": ("members", "problem"),
    "item_out": ("members", "item"),
    "pair_out": ("members", "pair"),
    "bias": ("members", "items"),
}
"""Dimensions of each array."""


@dataclass(frozen=True)
class Ensemble:
    """Networks that predict the same quantity; their mean is the prediction, their spread a measure of ignorance."""

    arrays: Mapping[str, Matrix]

    @classmethod
    def fit(
        cls,
        inputs: Inputs,
        targets: NDArray[np.float64],
        weights: NDArray[np.float64],
        items: int,
        *,
        seed: int = 0,
        members: int = _MEMBERS,
        hidden: tuple[int, int] = _HIDDEN,
        epochs: int = _EPOCHS,
    ) -> Ensemble:
        """Fit the networks with Adam; equal arguments give equal networks.

        Parameters
        ----------
        inputs, targets
            Rows and the value to predict for each, shape (rows,).
        weights
            Weight of each row, shape (rows,).
        items
            Number of items.
        seed, members, hidden, epochs
            Seed of the first weights and of the order of rows; number of networks; widths of the hidden layers; passes
            over the rows.
        """
        scales: dict[str, Matrix] = {}
        scaled: dict[str, Matrix] = {}
        for name in ("problem", "item", "pair"):
            column = getattr(inputs, name)
            center, deviation = column.mean(axis=0), column.std(axis=0)
            scale = np.where(deviation > 1e-6, 1.0 / np.maximum(deviation, 1e-6), 0.0)  # constants are left out
            scales |= {f"{name}_scale": scale.astype(np.float32), f"{name}_center": center.astype(np.float32)}
            scaled[name] = ((column - center) * scale).astype(np.float32)
        rows = Inputs(**scaled, number=inputs.number)
        trained = [
            _Training(
                rows,
                targets.astype(np.float32),
                weights.astype(np.float32),
                items=items,
                hidden=hidden,
                seed=seed + member,
            ).run(epochs)
            for member in range(members)
        ]
        return cls({**scales, **{name: np.stack([one[name] for one in trained]) for name in trained[0]}})

    @property
    def items(self) -> int:
        """Number of items."""
        return int(self.arrays["bias"].shape[1])

    @property
    def widths(self) -> tuple[int, int, int]:
        """Number of inputs of a problem, an item and a pair."""
        problem, item, pair = (int(self.arrays[f"{name}_scale"].shape[0]) for name in ("problem", "item", "pair"))
        return problem, item, pair

    def prepare(self, items: NDArray[np.int64], item_inputs: Matrix) -> Prepared:
        """Return the ensemble for some of the items, with all that does not depend on the problem computed.

        Parameters
        ----------
        items
            Numbers of the items.
        item_inputs
            Inputs of each of them, shape (items, item inputs).
        """
        a = self.arrays
        own = ((item_inputs - a["item_center"]) * a["item_scale"]).astype(np.float32)
        hidden = own @ a["item_in"] + a["offset"][:, items] + a["first_bias"][:, None]
        direct = a["item_out"] @ own.T + a["bias"][:, items]
        members, _, width = a["problem_in"].shape
        first = np.concatenate([hidden.transpose(0, 2, 1).reshape(members * width, len(items)), direct])
        weights = []
        for name in ("problem", "pair"):
            inner = a[f"{name}_in"].transpose(0, 2, 1).reshape(members * width, len(a[f"{name}_scale"]))
            weights.append(np.concatenate([inner, a[f"{name}_out"]]) * a[f"{name}_scale"])
            first = first - (weights[-1] @ a[f"{name}_center"])[:, None]
        middle = np.ascontiguousarray(a["middle"].transpose(0, 2, 1))
        out = np.ascontiguousarray(a["out"][:, None, :])
        return Prepared(members, first, weights[0], weights[1], middle, a["second_bias"][:, :, None].copy(), out)

    def only(self, items: Sequence[int]) -> Ensemble:
        """Return the ensemble for some of the items, numbered anew."""
        arrays = {name: value[:, list(items)] for name, value in self.arrays.items() if name in ("offset", "bias")}
        return Ensemble({**self.arrays, **arrays})

    def predict(self, inputs: Inputs) -> tuple[Matrix, Matrix]:
        """Return mean and spread of the predictions for rows, each of shape (rows,)."""
        return self.prepare(inputs.number, inputs.item).predict(inputs.problem.T, inputs.pair.T)

    def to_json(self) -> dict[str, Any]:
        """Return the arrays as base64 of little-endian single-precision numbers, with their dimensions."""
        sizes: dict[str, int] = {}
        for name, dimensions in _SHAPES.items():
            sizes |= dict(zip(dimensions, self.arrays[name].shape, strict=True))
        arrays = {
            name: base64.b64encode(np.ascontiguousarray(self.arrays[name], "<f4").tobytes()).decode()
            for name in _SHAPES
        }
        return {**sizes, "arrays": arrays}

    @classmethod
    def from_json(cls, data: Any) -> Ensemble:
        """Invert `to_json`.

        Raises
        ------
        DataError
            The value is damaged.
        """
        document = convert(data, _EnsembleDocument)
        sizes = {name: getattr(document, name) for name in _DIMENSIONS}
        if document.arrays.keys() != _SHAPES.keys():
            raise DataError(f"expected the arrays {', '.join(_SHAPES)}", field="arrays")
        shapes = {name: tuple(sizes[one] for one in dimensions) for name, dimensions in _SHAPES.items()}
        if sum(int(np.prod(shape, dtype=object)) for shape in shapes.values()) > _MAX_VALUES:
            raise DataError(f"more than {_MAX_VALUES:,} weights", field="arrays")
        return cls({name: _decoded(document.arrays[name], shape, name) for name, shape in shapes.items()})


def _decoded(text: str, shape: Sequence[int], name: str) -> Matrix:
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
        array = values.reshape(shape).astype(np.float32)
    except ValueError:
        raise DataError(f"expected base64 of {' x '.join(map(str, shape))} numbers", field=name) from None
    if not np.isfinite(array).all() or (np.abs(array) > 1e6).any():
        raise DataError("a number is not finite, or is beyond a million", field=name)
    return array


_Width = Annotated[int, Meta(ge=0, le=_MAX_WIDTH)]
_DIMENSIONS = ("members", "items", "problem", "item", "pair", "first", "second")


class _EnsembleDocument(msgspec.Struct):
    """JSON of an ensemble."""

    members: Annotated[int, Meta(ge=1, le=16)]
    items: Annotated[int, Meta(ge=1, le=_MAX_WIDTH)]
    problem: _Width
    item: _Width
    pair: _Width
    first: Annotated[int, Meta(ge=1, le=_MAX_WIDTH)]
    second: Annotated[int, Meta(ge=1, le=_MAX_WIDTH)]
    arrays: Annotated[dict[str, Annotated[str, Meta(max_length=2**23)]], Meta(max_length=64)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """An ensemble for given items: what is left is the part of the problem and of the pairs."""

    members: int
    first: Matrix
    """Part of the items in the first layer and, in the last rows, in the result; a column for each item."""
    problem_in: Matrix
    pair_in: Matrix
    middle: Matrix
    second_bias: Matrix
    out: Matrix

    def predict(self, problem: Matrix, pair: Matrix) -> tuple[Matrix, Matrix]:
        """Return mean and spread over the networks, half of their range, each of shape (items,).

        Parameters
        ----------
        problem
            Inputs of the problem, shape (problem inputs,) for one problem of all items, or (problem inputs, items).
        pair
            Inputs of each pair, shape (pair inputs, items).
        """
        starts = range(0, pair.shape[1], _BLOCK)
        blocks = [slice(start, start + _BLOCK) for start in starts] if len(starts) > 1 else [slice(None)]
        found = [self._values(problem if problem.ndim == 1 else problem[:, block], pair, block) for block in blocks]
        values = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        highest, lowest = np.maximum.reduce(values), np.minimum.reduce(values)
        return np.add.reduce(values) * np.float32(1.0 / self.members), (highest - lowest) * np.float32(0.5)

    def _values(self, problem: Matrix, pair: Matrix, block: slice) -> Matrix:
        """Return the value of each network for some of the items, shape (members, items)."""
        sums = self.pair_in @ pair[:, block]
        sums += self.first[:, block]
        of_problem = self.problem_in @ problem
        sums += of_problem[:, None] if of_problem.ndim == 1 else of_problem
        hidden = sums[: -self.members]
        np.maximum(hidden, 0.0, out=hidden)
        second = self.middle @ hidden.reshape(self.members, -1, hidden.shape[1])
        second += self.second_bias
        np.maximum(second, 0.0, out=second)
        values: Matrix = (self.out @ second)[:, 0]
        values += sums[-self.members :]
        return values


class _Training:
    """Adam on one network."""

    def __init__(
        self, rows: Inputs, targets: Matrix, weights: Matrix, *, items: int, hidden: tuple[int, int], seed: int
    ) -> None:
        self._rows, self._targets, self._weights = rows, targets, weights / max(float(weights.mean()), 1e-30)
        self._random = np.random.default_rng(seed)
        first, second = hidden
        widths = {name: getattr(rows, name).shape[1] for name in ("problem", "item", "pair")}
        spread = np.sqrt(2.0 / max(sum(widths.values()), 1))
        self.weights: _Weights = {
            **{f"{name}_in": self._normal((width, first), spread) for name, width in widths.items()},
            "offset": np.zeros((items, first), np.float32),
            "first_bias": np.zeros(first, np.float32),
            "middle": self._normal((first, second), np.sqrt(2.0 / first)),
            "second_bias": np.zeros(second, np.float32),
            "out": self._normal((second,), 0.1 * np.sqrt(2.0 / second)),
            **{f"{name}_out": np.zeros(width, np.float32) for name, width in widths.items()},
            "bias": np.full(items, targets.mean(), np.float32),
        }
        self._mean = {name: np.zeros_like(value) for name, value in self.weights.items()}
        self._square = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def _normal(self, shape: tuple[int, ...], deviation: float) -> Matrix:
        return (self._random.standard_normal(shape) * deviation).astype(np.float32)

    def run(self, epochs: int) -> _Weights:
        count = len(self._targets)
        size = max(min(_BATCH_ROWS, count // 16), 1)
        steps = epochs * (count // size)
        step = 0
        for _ in range(epochs):
            order = self._random.permutation(count)
            for start in range(0, count - size + 1, size):
                step += 1
                rate = 0.5 * _LEARNING_RATE * (1.0 + np.cos(np.pi * step / steps)) + 1e-5
                self._update(self._gradients(order[start : start + size]), rate, step)
        return self.weights

    def _gradients(self, chosen: NDArray[np.int64]) -> _Weights:
        rows, w = self._rows.rows(chosen), self.weights
        hidden = rows.problem @ w["problem_in"] + rows.item @ w["item_in"] + rows.pair @ w["pair_in"]
        hidden = np.maximum(hidden + w["offset"][rows.number] + w["first_bias"], 0.0)
        second = np.maximum(hidden @ w["middle"] + w["second_bias"], 0.0)
        values = second @ w["out"] + rows.problem @ w["problem_out"] + rows.item @ w["item_out"]
        residual = values + rows.pair @ w["pair_out"] + w["bias"][rows.number] - self._targets[chosen]
        error = np.clip(residual, -_MAX_RESIDUAL, _MAX_RESIDUAL) * self._weights[chosen] / len(chosen)
        to_second = np.outer(error, w["out"]) * (second > 0)
        to_first = (to_second @ w["middle"].T) * (hidden > 0)
        of_item = np.zeros((len(w["bias"]), len(chosen)), np.float32)
        of_item[rows.number, np.arange(len(chosen))] = 1.0
        return {
            "problem_in": rows.problem.T @ to_first,
            "item_in": rows.item.T @ to_first,
            "pair_in": rows.pair.T @ to_first,
            "offset": of_item @ to_first,
            "first_bias": to_first.sum(axis=0),
            "middle": hidden.T @ to_second,
            "second_bias": to_second.sum(axis=0),
            "out": second.T @ error,
            "problem_out": rows.problem.T @ error,
            "item_out": rows.item.T @ error,
            "pair_out": rows.pair.T @ error,
            "bias": of_item @ error,
        }

    def _update(self, gradients: _Weights, rate: float, step: int) -> None:
        """Adam, with decay of all weights but the biases."""
        for name, gradient in gradients.items():
            value = self.weights[name]
            decay = 0.0 if name.endswith("bias") else _OFFSET_DECAY if name == "offset" else _DECAY
            slope = gradient + decay * value if decay else gradient
            mean, square = self._mean[name], self._square[name]
            mean += 0.1 * (slope - mean)
            square += 0.01 * (slope * slope - square)
            corrected = np.sqrt(square / (1.0 - 0.99**step)) + 1e-8
            value -= np.float32(rate) * (mean / np.float32(1.0 - 0.9**step)) / corrected
