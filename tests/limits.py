"""Limits of the memory that a test may take."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def little_memory(limit_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()
