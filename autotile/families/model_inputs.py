"""Inputs of a model of time: what determines the time of a launch, as numbers for a network.

The inputs of a problem are its sizes, their alignment, that of the rows of its arrays, and its flags. Those of a
configuration are its kernel, parameters, tiles and resources. Those of a pair are the blocks, the rounds of the busiest
SM, the whole waves, and what the last round, the last wave and the padding at the edges waste.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.core import frozen
from autotile.core.device import DeviceProperties
from autotile.core.documents import Name
from autotile.core.model import Config, Resources, config_key
from autotile.families.tilings import UNTILED, Tilings, array_extents
from autotile.kernel.spec import KernelSpec

_MAX_ALIGNMENT = 4
"""Doublings of alignment beyond which it does not matter: 16 elements."""
_PAIR_INPUTS = 7
_ITEM_INPUTS = 5
_PROBLEM_INPUTS = 2
"""Inputs besides those for each size, flag, array, kernel and parameter."""
_SMALL_TILE = 2.0**30
"""Tiles below it are tiles; a size that the grid does not depend on has none."""
_MAX_LOG2_TILE = 20.0

Vector = NDArray[np.float32]
Column = NDArray[np.float64]


@frozen.dataclass(frozen=True, slots=True)
class ModelCandidate:
    """A configuration of a kernel, or a library.

    Attributes
    ----------
    kernel
        Name of the kernel or the library.
    config
        The configuration; empty for a library.
    resources
        What the compiler reported; None where that is unknown, and for a library.
    """

    kernel: Name
    config: Config
    resources: Resources | None = None

    @property
    def is_library(self) -> bool:
        """Whether it is a library, which has no configuration."""
        return not self.config

    @property
    def key(self) -> tuple[str, str]:
        """Kernel and configuration, to compare by."""
        return self.kernel, config_key(self.config)


@dataclass(frozen=True)
class Vocabulary:
    """Names that stand for inputs, in their order.

    Attributes
    ----------
    sizes, flags
        Sizes and flags of the operation.
    arrays
        Arrays that all kernels have.
    members, parameters
        Kernels, and the parameters of their configurations.
    """

    sizes: tuple[str, ...]
    flags: tuple[str, ...]
    arrays: tuple[str, ...]
    members: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Number of inputs of a problem, a configuration and a pair."""
        sizes = len(self.sizes)
        return (
            2 * sizes + len(self.flags) + len(self.arrays) + _PROBLEM_INPUTS,
            len(self.members) + len(self.parameters) + sizes + _ITEM_INPUTS,
            sizes + _PAIR_INPUTS,
        )


@dataclass(frozen=True)
class Layout:
    """All that does not depend on the sizes, for problems of given flags and kernels.

    Attributes
    ----------
    flags
        Values of the operation's flags.
    names
        Name of each kernel and of its sizes.
    numbers
        Numbers of the configurations of these kernels among all candidates, shape (configurations,).
    item_inputs
        Inputs of each of these configurations, shape (configurations, inputs).
    """

    vocabulary: Vocabulary
    flags: tuple[float, ...]
    names: tuple[tuple[str, tuple[str, ...]], ...]
    numbers: NDArray[np.int64]
    item_inputs: Vector
    _source: NDArray[np.int64]
    """Position of each configuration's kernel."""
    _tilings: tuple[tuple[int, Tilings], ...]
    """Tilings of each kernel, and the position of its first configuration."""
    _tiles: Vector
    """Tile along each size of the kernel, shape (sizes, configurations)."""
    _covering: Vector
    """Matrix of 1 for each size of its kernel that a configuration tiles, shape (configurations, kernels x sizes)."""
    _log2_tile: Vector
    """Logarithm of the outputs of a tile."""
    _units: Vector
    _slots: Vector
    """Number of SMs, and of the blocks that they hold at once, shape (2, configurations)."""
    _extents: tuple[tuple[int | None, ...], ...]
    """Extents of each array of the first kernel, as positions of its sizes."""

    @classmethod
    def of(
        cls,
        vocabulary: Vocabulary,
        candidates: Sequence[ModelCandidate],
        specs: Mapping[str, KernelSpec],
        device: DeviceProperties,
        *,
        sizes: Mapping[str, int],
        kernels: Mapping[str, Mapping[str, int]],
    ) -> Layout:
        """Prepare a layout.

        Parameters
        ----------
        vocabulary, candidates
            Those of the model.
        specs, device
            The kernels, and the device.
        sizes, kernels
            Any problem of these flags and kernels: its sizes and flags by the names of the operation, and by those of
            each kernel.
        """
        own = {
            name: [n for n, one in enumerate(candidates) if one.kernel == name and not one.is_library]
            for name in kernels
        }
        found = [
            Tilings.of(
                specs[name],
                device,
                [candidates[n].config for n in chosen],
                [candidates[n].resources for n in chosen],
                {flag: kernels[name][flag] for flag in specs[name].flags},
            )
            for name, chosen in own.items()
        ]
        numbers = [n for chosen in own.values() for n in chosen]
        tiles = np.full((len(numbers), len(vocabulary.sizes)), UNTILED)
        starts = np.cumsum([0, *map(len, own.values())]).tolist()
        for start, tilings in zip(starts, found, strict=False):
            width = min(tiles.shape[1], tilings.tiles.shape[1])
            tiles[start : start + len(tilings.tiles), :width] = tilings.tiles[:, :width]
        columns = {name: _joined([getattr(tilings, name) for tilings in found]) for name in _COLUMNS}
        first = next(iter(kernels), None)
        extents = array_extents(specs[first], kernels[first]) if first is not None else {}
        log2_tiles = np.log2(tiles)
        is_tiled = tiles < _SMALL_TILE
        source = np.repeat(np.arange(len(own)), list(map(len, own.values())))
        covering = np.zeros((len(numbers), len(own), tiles.shape[1]), np.float32)
        covering[np.arange(len(numbers)), source] = is_tiled
        return cls(
            vocabulary,
            tuple(float(sizes[name]) for name in vocabulary.flags),
            tuple((name, tilings.names) for name, tilings in zip(kernels, found, strict=True)),
            np.array(numbers, np.int64),
            _item_inputs(vocabulary, [candidates[n] for n in numbers], log2_tiles, columns),
            source,
            tuple(zip(starts, found, strict=False)),
            np.ascontiguousarray(tiles.T, np.float32),
            covering.reshape(len(numbers), len(own) * tiles.shape[1]),
            (is_tiled * log2_tiles).sum(axis=1).astype(np.float32),
            columns["units"].astype(np.float32),
            device.sm_count * np.stack([np.ones(len(numbers)), columns["resident"]]).astype(np.float32),
            tuple(extents.get(name, ()) for name in vocabulary.arrays),
        )

    def problem_inputs(self, sizes: Mapping[str, int], kernels: Mapping[str, Mapping[str, int]]) -> Vector:
        """Return the inputs of a problem, shape (problem inputs,); parameters as for `of`."""
        values = [sizes[name] for name in self.vocabulary.sizes]
        own: Sequence[int] = ()
        if self.names:
            kernel, names = self.names[0]
            own = [kernels[kernel][name] for name in names]
        rows = [
            _alignment(own[extent[-1]]) if extent and extent[-1] is not None else _MAX_ALIGNMENT
            for extent in self._extents
        ]
        elements = sum(math.prod([own[place] for place in extent if place is not None]) for extent in self._extents)
        inputs = [*map(math.log2, values), *map(_alignment, values), *self.flags, *rows]
        inputs += (min(rows, default=_MAX_ALIGNMENT), math.log2(elements) if elements else 0.0)
        return np.array(inputs, np.float32)

    def pair_inputs(self, kernels: Mapping[str, Mapping[str, int]]) -> Vector:
        """Return the inputs of each configuration for a problem, shape (pair inputs, configurations)."""
        sizes = len(self.vocabulary.sizes)
        table = [[kernels[name][size] for size in names[:sizes]] for name, names in self.names]
        rows = np.array([row + [1] * (sizes - len(row)) for row in table], np.float32).reshape(len(table), sizes)
        counts = rows.T.take(self._source, axis=1)
        counts /= self._tiles
        np.ceil(counts, out=counts)
        blocks = np.multiply.reduce(counts)
        blocks *= self._units
        for start, tilings in self._tilings:
            for number, grid in tilings.irregular.items():
                given = kernels[grid.spec.name]
                blocks[start + number] = grid.blocks([given[name] for name in grid.names])
        shares = np.empty((4, len(blocks)), np.float32)
        np.divide(blocks, self._slots, out=shares[:2])
        np.ceil(shares[:2], out=shares[2:])
        inputs = np.empty((_PAIR_INPUTS + sizes, len(blocks)), np.float32)
        logs = np.log2(shares)
        inputs[0] = logs[0]
        inputs[1:3] = logs[2:]
        np.subtract(logs[2:], logs[:2], out=inputs[3:5])
        log2_counts = np.log2(counts, out=inputs[_PAIR_INPUTS:])
        np.add.reduce(log2_counts, out=inputs[5])
        inputs[5] += self._log2_tile
        inputs[5] -= self._covering @ np.log2(rows).reshape(-1)
        np.minimum(shares[0], _MANY_ROUNDS, out=inputs[6])
        return inputs


_COLUMNS = ("units", "resident", "threads", "smem_bytes", "registers")
_MANY_ROUNDS = 4.0
"""Rounds beyond which their number has no other effect than in proportion."""


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate(columns) if columns else np.zeros(0)


def _alignment(size: int) -> int:
    """Return the doublings by which a size is aligned, 4 at most."""
    return min((size & -size).bit_length() - 1, _MAX_ALIGNMENT)


def _item_inputs(
    vocabulary: Vocabulary, candidates: Sequence[ModelCandidate], log2_tiles: Column, columns: Mapping[str, Column]
) -> Vector:
    """Return the inputs of configurations: their kernel, parameters, tiles and resources."""
    kernel = [[float(one.kernel == name) for name in vocabulary.members] for one in candidates]
    values = [[_number(one.config.get(name)) for name in vocabulary.parameters] for one in candidates]
    resources = [
        np.log2(columns["units"]),
        np.log2(columns["resident"]),
        np.log2(columns["threads"]),
        np.log2(columns["smem_bytes"] + 1024.0),
        columns["registers"] / 128.0,
    ]
    parts = (
        np.array(kernel).reshape(len(candidates), len(vocabulary.members)),
        np.array(values).reshape(len(candidates), len(vocabulary.parameters)),
        np.minimum(log2_tiles, _MAX_LOG2_TILE),
        np.stack(resources, axis=1),
    )
    return np.concatenate(parts, axis=1).astype(np.float32)


def _number(value: object) -> float:
    """Return the logarithm of a parameter's value; 0 for text, which the offset of a candidate stands for."""
    return math.log2(abs(value) + 1.0) if isinstance(value, int | float) else 0.0
