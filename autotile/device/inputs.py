"""Input data: fixed-seed random numbers, never zeros unless the author asks for them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from autotile.files.settings import available_cores
from autotile.ground.dtypes import DTYPES, Array
from autotile.ground.spec import BufferArgument

_SEED = 20_240_601
_INTEGER_SPAN = 8
"""Random integers lie in [-8, 8] (unsigned: [0, 8]), so that sums of products stay exact in float64."""
_PART = 1 << 20
"""Values that one generator draws: a few milliseconds' work."""


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
            values = _random(buffer.name, shape, lambda generator, part: generator.random(out=part, dtype=np.float32))
        case "normal" if dtype.is_integer:
            low = 0 if dtype_name.startswith("u") else -_INTEGER_SPAN
            values = _random(buffer.name, shape, partial(_fill_integers, low))
        case "normal":
            values = _random(
                buffer.name, shape, lambda generator, part: generator.standard_normal(out=part, dtype=np.float32)
            )
    return np.ascontiguousarray(dtype.encode(values))


def _fill_integers(low: int, generator: np.random.Generator, part: Array) -> None:
    part[:] = generator.integers(low, _INTEGER_SPAN, part.shape, np.int8, endpoint=True)


def _random(name: str, shape: tuple[int, ...], fill: Callable[[np.random.Generator, Array], object]) -> Array:
    """Values of a seed that name and shape decide, in float32.

    Parts of fixed size have generators of their own, so that all cores draw at once and yet draw the same everywhere.
    """
    values = np.empty(math.prod(shape), np.float32)
    parts = [values[start : start + _PART] for start in range(0, values.size, _PART)]
    seeds = np.random.SeedSequence([_SEED, zlib.crc32(name.encode()), *shape]).spawn(len(parts))
    generators = [np.random.Generator(np.random.SFC64(seed)) for seed in seeds]
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(fill, generators, parts))
    return values.reshape(shape)
