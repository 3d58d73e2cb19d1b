"""Parameters that launches are made from again and again, without a device."""

from typing import Any

import numpy as np
import pytest

from autotile.device.launch import ParameterBlock
from autotile.dispatch import launching
from autotile.dispatch.calling import Places
from autotile.ground.tensor_maps import TensorMap


def test_tensor_maps_follow_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def encode(tensor_map: TensorMap, pointer: int) -> np.ndarray[Any, Any]:
        made.append(pointer)
        return np.frombuffer(pointer.to_bytes(8, "little") * 16, np.dtype((np.void, 128)))

    monkeypatch.setattr(launching, "encode_tensor_map", encode)
    tensor_map = TensorMap("A_map", "A", "float32", (8, 8), (8, 8), (1, 1), 0, 0)
    block = ParameterBlock([np.uint64(1), encode(tensor_map, 2), np.int32(3)])
    starts = block.starts
    lane = launching._Lane(block, Places(((1, starts[0]),), ((0, starts[1], tensor_map),)), None)
    made.clear()
    for pointers in ([64, 128], [64, 256], [32, 256]):
        lane.write(pointers)
        assert block.words[starts[0]] == pointers[1]
        assert list(block.words[starts[1] : starts[1] + 16]) == [pointers[0]] * 16
        assert block.words[starts[2]] & 0xFFFFFFFF == 3
    assert made == [64, 32]
