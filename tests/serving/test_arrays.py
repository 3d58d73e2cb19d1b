"""Signatures of arrays, and which arrays are accepted on the fast path; arrays need a device only to be used."""

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest

from autotile.serving.arrays import ArraySpec, CupyLibrary, accepted_pointers

ADDRESS = 0x7000_0000_0000
SPECS = (ArraySpec(((1, 8, 4), (8, 4)), (np.dtype(np.float32),)), ArraySpec(((4,),), (np.dtype(np.float16),)))


def array(shape: tuple[int, ...], dtype: type, address: int = ADDRESS) -> Any:
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def taken(*arrays: Any) -> tuple[int, ...] | None:
    signature = CupyLibrary().signature(arrays)
    return accepted_pointers(signature, SPECS, 0) if signature else None


@pytest.mark.parametrize("shape", [(1, 8, 4), (8, 4)])
def test_arrays_that_are_just_right(shape: tuple[int, ...]) -> None:
    found = taken(array(shape, np.float32), array((4,), np.float16, ADDRESS + 4096))
    assert found == (ADDRESS, ADDRESS + 4096)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.reshape(4, 8),
        lambda a: a.reshape(4, 8).T,
        lambda a: a.view(np.int32),
        lambda a: a.reshape(1, 1, 8, 4),
        lambda a: np.zeros((8, 4), np.float32),
    ],
)
def test_what_is_not_just_right_is_not_taken(spoil: Callable[[Any], Any]) -> None:
    assert taken(spoil(array((8, 4), np.float32)), array((4,), np.float16)) is None


def test_arrays_of_another_device_are_not_taken() -> None:
    signature = CupyLibrary().signature([array((8, 4), np.float32), array((4,), np.float16)])
    assert accepted_pointers(signature, SPECS, 0) is not None
    assert accepted_pointers(signature, SPECS, 1) is None


def test_a_launch_is_found_again_by_all_that_its_arrays_are() -> None:
    """Arrays on the same memory that differ in any property have different signatures."""
    library = CupyLibrary()
    first = array((8, 4), np.float32)
    views = (first, first.reshape(32), first.view(np.int32), first.reshape(4, 8).T, array((8, 4), np.float32, 4096))
    keys = [library.signature([view]) for view in views]
    assert len(set(keys)) == len(views)
    assert library.signature([array((8, 4), np.float32)]) == keys[0]
