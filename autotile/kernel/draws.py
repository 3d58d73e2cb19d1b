"""Random arrays that are the same in every process: a stream of its own for each name, shape and seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import Array
from autotile.settings import available_cores

_SEED = 20_240_601
_CHUNK = 1 << 20
"""Number of values from one generator, which take a few milliseconds."""

Fill = Callable[[np.random.Generator, Array], object]


def fill_integers(low: int, high: int, dtype: Any, generator: np.random.Generator, chunk: Array) -> None:
    """Fill an array with whole numbers from ``low`` to ``high``, drawn as ``dtype``."""
    chunk[:] = generator.integers(low, high, chunk.shape, dtype, endpoint=True)


def fill_uniform(low: float, high: float, generator: np.random.Generator, chunk: Array) -> None:
    """Fill an array with uniformly distributed numbers from ``low`` to below ``high``."""
    generator.random(out=chunk)
    chunk *= high - low
    chunk += low


def fill_normal(mean: float, deviation: float, generator: np.random.Generator, chunk: Array) -> None:
    """Fill an array with normally distributed numbers."""
    generator.standard_normal(out=chunk)
    chunk *= deviation
    chunk += mean


def draw_chunks(name: str, shape: tuple[int, ...], seed: int, fill: Fill, dtype: Any = np.float32) -> NDArray[Any]:
    """Return random values of a generator that depends on seed, name and shape.

    Each chunk of a fixed size has its own generator, so the values do not depend on the number of cores that draw them.
    """
    values = np.empty(math.prod(shape), dtype)
    chunks = [values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK)]
    generators = [np.random.Generator(np.random.SFC64(seed)) for seed in seed_sequences(name, shape, seed, len(chunks))]
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(fill, generators, chunks))
    return values.reshape(shape)


def seed_sequences(name: str, shape: tuple[int, ...], seed: int, count: int) -> list[np.random.SeedSequence]:
    """Return the seeds of ``count`` generators."""
    return np.random.SeedSequence([_SEED + seed, zlib.crc32(name.encode()), *shape]).spawn(count)
