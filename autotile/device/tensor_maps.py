"""Encode tensor maps through the driver."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.device.driver import load_driver
from autotile.ground.errors import ArgumentError, ToolchainError
from autotile.ground.tensor_maps import UNIT_BYTES, TensorMap

_MAP_BYTES = 128
"""sizeof(CUtensorMap), cuda.h."""

_MAP = np.dtype((np.void, _MAP_BYTES))

# Types of cuda.h by name. Bits are moved as they are, so signed integers of 8 and 16 bits go by the unsigned type.
_DATA_TYPES = {
    "int8": "UINT8",
    "uint8": "UINT8",
    "int16": "UINT16",
    "uint16": "UINT16",
    "int32": "INT32",
    "uint32": "UINT32",
    "int64": "INT64",
    "uint64": "UINT64",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT32",
    "float64": "FLOAT64",
}


@lru_cache(maxsize=1024)
def encode_tensor_map(tensor_map: TensorMap, pointer: int) -> NDArray[Any]:
    """Describe a buffer at an address; elements outside of it read as zero and are not written.

    Parameters
    ----------
    tensor_map
        Everything but the address; the axes are turned round, as the driver counts from the innermost one.
    pointer
        Device address of the buffer.

    Returns
    -------
    numpy.ndarray
        Shape (1,), one element of 128 bytes, which CuPy passes to a kernel by value; zeros where the map is absent.

    Raises
    ------
    ArgumentError
        The address is not a multiple of 16.
    ToolchainError
        The driver refuses the map, or is too old to make one.
    """
    if tensor_map.is_absent:
        return np.zeros(1, _MAP)
    if pointer % UNIT_BYTES:
        raise ArgumentError(
            f"{tensor_map.buffer} starts at an address {pointer % UNIT_BYTES} bytes past a multiple of {UNIT_BYTES}, "
            f"which this kernel cannot take (it reads {tensor_map.buffer} through a tensor map); pass a copy, which "
            "starts at a multiple of 256"
        )
    driver = load_driver()
    word, wide = driver.cuuint32_t, driver.cuuint64_t
    swizzle, promotion = tensor_map.swizzle_bytes, tensor_map.l2_promotion_bytes
    try:
        status, encoded = driver.cuTensorMapEncodeTiled(
            _member(driver.CUtensorMapDataType, f"DATA_TYPE_{_DATA_TYPES[tensor_map.dtype]}"),
            len(tensor_map.shape),
            pointer,
            [wide(extent) for extent in reversed(tensor_map.shape)],
            [wide(stride) for stride in reversed(tensor_map.strides_bytes)],
            [word(side) for side in reversed(tensor_map.box)],
            [word(stride) for stride in reversed(tensor_map.element_strides)],
            _member(driver.CUtensorMapInterleave, "INTERLEAVE_NONE"),
            _member(driver.CUtensorMapSwizzle, f"SWIZZLE_{swizzle}B" if swizzle else "SWIZZLE_NONE"),
            _member(
                driver.CUtensorMapL2promotion, f"L2_PROMOTION_L2_{promotion}B" if promotion else "L2_PROMOTION_NONE"
            ),
            _member(driver.CUtensorMapFloatOOBfill, "FLOAT_OOB_FILL_NONE"),
        )
    except RuntimeError as error:  # the bindings' own of a function that the driver lacks share no other base class
        raise ToolchainError(
            f"this driver makes no tensor maps, which takes one of CUDA 12 or newer: {error}"
        ) from None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ToolchainError(f"the driver makes no tensor map of {tensor_map.buffer}: {status.name} for {tensor_map}")
    data = ctypes.string_at(encoded.getPtr(), _MAP_BYTES)
    return np.frombuffer(data, _MAP)


def _member(enumeration: Any, name: str) -> Any:
    return getattr(enumeration, f"CU_TENSOR_MAP_{name}")
