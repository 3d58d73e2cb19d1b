"""Parameters that launches are made from again and again, without a device."""

import ctypes
from typing import Any

import numpy as np
import pytest

from autotile.device.launch import ParameterBlock
from autotile.dispatch import launching
from autotile.dispatch.calling import MapPlace
from autotile.ground.tensor_maps import TensorMap


def test_tensor_maps_follow_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def encode(tensor_map: TensorMap, pointer: int) -> np.ndarray[Any, Any]:
        made.append(pointer)
        return np.frombuffer(pointer.to_bytes(8, "little") * 16, np.dtype((np.void, 128)))

    monkeypatch.setattr(launching, "encode_tensor_map", encode)
    tensor_map = TensorMap("A_map", "A", "float32", (8, 8), (8, 8), (1, 1), 0, 0)
    block = ParameterBlock([np.uint64(1), encode(tensor_map, 2), np.int32(3)], spare_words=2)
    address, place, number = block.starts
    spare = len(block.words) - 1
    lane = launching._Lane(block, None)
    made.clear()
    for mapped, other in ((64, 128), (64, 256), (32, 256)):
        block.words[spare], block.words[address] = mapped, other
        lane.renew([MapPlace(spare, place, tensor_map)])
        assert block.words[address] == other
        assert list(block.words[place : place + 16]) == [mapped] * 16
        assert block.words[number] & 0xFFFFFFFF == 3
    assert made == [64, 32]


def test_parameters_lie_as_the_driver_reads_them() -> None:
    """Each address is that of a value, and what is wider than a word starts on 64 bytes."""
    wide = np.arange(16, dtype=np.uint64)
    block = ParameterBlock([np.float32(1.5), np.uint64(7), wide, np.int32(-2)], spare_words=1)
    addresses = np.frombuffer((ctypes.c_uint64 * 4).from_address(block.address), np.uint64)
    assert ctypes.c_float.from_address(int(addresses[0])).value == 1.5
    assert ctypes.c_uint64.from_address(int(addresses[1])).value == 7
    assert list((ctypes.c_uint64 * 16).from_address(int(addresses[2]))) == list(range(16))
    assert addresses[2] % 64 == 0
    assert ctypes.c_int32.from_address(int(addresses[3])).value == -2
    block.words[block.starts[1]] = 9
    assert ctypes.c_uint64.from_address(int(addresses[1])).value == 9
