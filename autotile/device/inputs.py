"""Input data: fixed-seed random numbers, never zeros unless the author asks for them."""

from __future__ import annotations

import zlib

import numpy as np

from autotile.ground.dtypes import DTYPES, Array
from autotile.ground.spec import BufferArgument

_SEED = 20_240_601
_INTEGER_SPAN = 8
"""Random integers lie in [-8, 8] (unsigned: [0, 8]), so that sums of products stay exact in float64."""


def make_input(buffer: BufferArgument, shape: tuple[int, ...], dtype_name: str) -> Array:
    """Values of an input buffer, rounded to its element type and stored as its bits.

    The same buffer name and shape give the same values in every process and on every machine.
    """
    dtype = DTYPES[dtype_name]
    match buffer.init:
        case "zeros":
            values: Array = np.zeros(shape)
        case "ones":
            values = np.ones(shape)
        case "arange":
            values = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
        case "uniform":
            values = _generator(buffer.name, shape).random(shape, dtype=np.float32)
        case "normal" if dtype.is_integer:
            low = 0 if dtype_name.startswith("u") else -_INTEGER_SPAN
            values = _generator(buffer.name, shape).integers(low, _INTEGER_SPAN, shape, endpoint=True)
        case "normal":
            values = _generator(buffer.name, shape).standard_normal(shape, dtype=np.float32)
    return np.ascontiguousarray(dtype.encode(values))


def _generator(name: str, shape: tuple[int, ...]) -> np.random.Generator:
    return np.random.default_rng([_SEED, zlib.crc32(name.encode()), *shape])
