"""Texture objects over device memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from autotile.core.dtypes import DTYPES
from autotile.cuda.driver import outside_of_captures
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError
from autotile.kernel.textures import PITCH_BYTES, Texture

ALIGNMENT_BYTES = 512
"""Multiple that the address of a texture's memory must be, ``textureAlignment`` of all current devices."""
_MAX_OBJECTS = 1 << 16
"""Texture objects that are kept; graphs and launches in flight refer to them."""


def texture_object(texture: Texture, pointer: int) -> Any:
    """Return the texture object of a buffer as a kernel takes it: the handle as a NumPy scalar.

    Parameters
    ----------
    texture
        The texture.
    pointer
        Device address of the buffer.

    Raises
    ------
    ArgumentError
        The address or the distance of rows is one that textures cannot have.
    """
    if pointer % ALIGNMENT_BYTES:
        raise ArgumentError(
            f"{texture.buffer} starts at an address {pointer % ALIGNMENT_BYTES} bytes past a multiple of "
            f"{ALIGNMENT_BYTES}, which a texture cannot have; pass a copy"
        )
    if not texture.is_aligned:
        raise ArgumentError(
            f"rows of {texture.buffer} are {texture.pitch_bytes} bytes apart, which textures cannot have; choose sizes "
            f"whose rows are multiples of {PITCH_BYTES} bytes"
        )
    return np.uint64(_object(texture, pointer, load_cupy().cuda.runtime.getDevice()).ptr)


@lru_cache(maxsize=_MAX_OBJECTS)
def _object(texture: Texture, pointer: int, device: int) -> Any:
    cupy = load_cupy()
    runtime, kinds = cupy.cuda.runtime, cupy.cuda.texture
    dtype = DTYPES[texture.dtype]
    bits = 8 * dtype.component_bytes
    channels = [bits if number < (dtype.components or 1) else 0 for number in range(4)]
    kind = {"f": "Float", "i": "Signed", "u": "Unsigned"}[np.dtype(dtype.storage).kind]
    channel = kinds.ChannelFormatDescriptor(*channels, getattr(runtime, f"cudaChannelFormatKind{kind}"))
    size_bytes = int(np.prod(texture.shape)) * dtype.size_bytes
    memory = cupy.cuda.UnownedMemory(pointer, size_bytes, None, device)
    array = cupy.ndarray((size_bytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
    if len(texture.shape) == 1:
        resource = kinds.ResourceDescriptor(
            runtime.cudaResourceTypeLinear, arr=array, chDesc=channel, sizeInBytes=size_bytes
        )
    else:
        height, width = texture.shape
        resource = kinds.ResourceDescriptor(
            runtime.cudaResourceTypePitch2D,
            arr=array,
            chDesc=channel,
            width=width,
            height=height,
            pitchInBytes=texture.pitch_bytes,
        )
    address = getattr(runtime, f"cudaAddressMode{texture.address.capitalize()}")
    descriptor = kinds.TextureDescriptor(
        addressModes=(address,) * 3,
        filterMode=getattr(runtime, f"cudaFilterMode{texture.filter.capitalize()}"),
        readMode=runtime.cudaReadModeElementType if texture.read == "element" else runtime.cudaReadModeNormalizedFloat,
        normalizedCoords=int(texture.is_normalized),
    )
    with outside_of_captures():
        return kinds.TextureObject(resource, descriptor)
