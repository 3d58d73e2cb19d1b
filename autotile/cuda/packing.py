"""Pack the arguments of a launch: pointers, scalars, structs, tensor maps and texture objects."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, assert_never

import numpy as np

from autotile.core.dtypes import DTYPES, Array
from autotile.cuda.driver import load_driver, outside_of_captures, result_name
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError, ToolchainError
from autotile.kernel.arguments import (
    POINTER_BYTES,
    TENSOR_MAP_BYTES,
    UNIT_BYTES,
    BufferArgument,
    ScalarArgument,
    StructArgument,
    StructValue,
    TensorMap,
    TensorMapArgument,
    Texture,
    TextureArgument,
    WorkspaceArgument,
    encode_scalar,
    encode_value,
)
from autotile.kernel.launch import LaunchData, LaunchPlan
from autotile.kernel.spec import KernelSpec

_MAP = np.dtype((np.void, TENSOR_MAP_BYTES))

_ALIGNMENT_BYTES = 64
"""Alignment of a ``CUtensorMap``, cuda.h."""

# Enumerations of cuda.h. Values are copied bit by bit, so the unsigned types also stand for others of their size.
DATA_TYPES = {
    "int8": 0,
    "uint8": 0,
    "bool": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "int16": 1,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""``CUtensorMapDataType``"""
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""``CUtensorMapSwizzle`` by bytes."""
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
"""``CUtensorMapL2promotion`` by bytes."""
_NONE = 0
"""Value of the enumerators ``..._NONE`` of ``CUtensorMapInterleave`` and ``CUtensorMapFloatOOBfill``."""


@lru_cache(maxsize=1024)
def encode_tensor_map(tensor_map: TensorMap, pointer: int) -> Array:
    """Encode the tensor map of a buffer or workspace; elements outside of it read as zero and are not written.

    Axes are reversed here, as the driver counts from the innermost one. The result has shape (1,), one element of 128
    bytes, which CuPy passes to a kernel by value; zeros if the map is absent. Raise `ArgumentError` if the address is
    not a multiple of 16; `ToolchainError` if the driver refuses the map, or is too old to encode one.
    """
    if tensor_map.is_absent:
        return np.zeros(1, _MAP)
    if pointer % UNIT_BYTES:
        raise ArgumentError(
            f"{tensor_map.buffer} starts at an address {pointer % UNIT_BYTES} bytes past a multiple of {UNIT_BYTES}, "
            f"which this kernel cannot take (it reads {tensor_map.buffer} through a tensor map); pass a copy, which "
            "starts at a multiple of 256"
        )
    try:
        encode = load_driver().cuTensorMapEncodeTiled
    except AttributeError:
        raise ToolchainError("this driver cannot encode tensor maps; install a driver for CUDA 12 or newer") from None
    memory = np.zeros(TENSOR_MAP_BYTES + _ALIGNMENT_BYTES, np.uint8)
    start = -int(memory.ctypes.data) % _ALIGNMENT_BYTES
    status = encode(
        ctypes.c_void_p(memory.ctypes.data + start),
        DATA_TYPES[tensor_map.dtype],
        len(tensor_map.shape),
        ctypes.c_void_p(pointer),
        _array(ctypes.c_uint64, tensor_map.shape),
        _array(ctypes.c_uint64, tensor_map.strides_bytes),
        _array(ctypes.c_uint32, tensor_map.box),
        _array(ctypes.c_uint32, tensor_map.element_strides),
        _NONE,
        SWIZZLES[tensor_map.swizzle_bytes],
        PROMOTIONS[tensor_map.l2_promotion_bytes],
        _NONE,
    )
    if status:
        raise ToolchainError(
            f"the driver refuses the tensor map of {tensor_map.buffer}: {result_name(status)} for {tensor_map}"
        )
    encoded = memory[start : start + TENSOR_MAP_BYTES].view(_MAP)
    encoded.flags.writeable = False  # it is cached
    return encoded


def _array(kind: type[ctypes.c_uint32 | ctypes.c_uint64], values: Sequence[int]) -> Any:
    return (kind * len(values))(*reversed(values))


def encode_description(described: TensorMap | Texture, pointer: int) -> Array:
    """Return the bytes of a tensor map or a texture object of the buffer at an address, as 64-bit words."""
    if isinstance(described, Texture):
        return np.atleast_1d(texture_object(described, pointer))
    return encode_tensor_map(described, pointer).view(np.uint64)


def by_value(stored: Any) -> Any:
    """Return an encoded scalar as CuPy passes it to a kernel: a vector as one element of its size."""
    return stored.view((np.void, stored.nbytes)) if np.ndim(stored) else stored


def encode_struct(struct: StructValue, addresses: Mapping[str, int]) -> Array:
    """Encode a struct, given the address of each buffer and workspace, as an array of one element of its size.

    Raise `ArgumentError` if a value does not fit in its type.
    """
    memory = np.zeros(struct.size_bytes, np.uint8)
    for offset, name, values in struct.scalars:
        value = values if len(values) > 1 else values[0]
        stored = np.atleast_1d(encode_value(f"a member of {struct.name}", value, DTYPES[name])).view(np.uint8)
        memory[offset : offset + stored.size] = stored
    for offset, target in struct.pointers:
        memory[offset : offset + POINTER_BYTES].view(np.uint64)[:] = addresses[target]
    return memory.view((np.void, struct.size_bytes))


def pack_launches(
    spec: KernelSpec,
    plan: LaunchPlan,
    data: LaunchData,
    dtype: str,
    *,
    addresses: Mapping[str, int],
    scalars: Mapping[str, Any],
) -> tuple[tuple[Any, ...], ...]:
    """Return the arguments of every launch of a call; as for `pack_arguments`, but without the scalars of a launch."""
    known = {scalar.name: scalar for scalar in spec.scalars}
    packed = []
    for launch in plan.launches:
        own = {name: encode_scalar(known[name], value, dtype) for name, value in launch.scalars}
        values, names = {**scalars, **own}, launch.arguments
        packed.append(pack_arguments(spec, data, addresses=addresses, scalars=values, names=names))
    return tuple(packed)


def pack_arguments(
    spec: KernelSpec,
    data: LaunchData,
    *,
    addresses: Mapping[str, int],
    scalars: Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of a launch, in order; ``names`` are those that the function takes, None for all.

    Addresses are those of buffers and workspaces; an empty workspace may be left out. The caller keeps the memory
    alive. Scalars are encoded. Raise `ArgumentError` if a buffer with a tensor map is not aligned to 16 bytes;
    `ToolchainError` if the driver refuses a tensor map.
    """
    maps = {tensor_map.name: tensor_map for tensor_map in data.tensor_maps}
    structs = {struct.name: struct for struct in data.structs}
    addresses = {**dict.fromkeys((workspace.name for workspace in data.workspaces), 0), **addresses}
    textures = {texture.name: texture for texture in data.textures}
    packed: list[Any] = []
    passed = spec.arguments if names is None else [spec.argument(name) for name in names]
    for argument in passed:
        if not argument.is_passed:
            continue
        match argument:
            case BufferArgument() | WorkspaceArgument():
                packed.append(np.uint64(addresses[argument.name]))
            case ScalarArgument():
                packed.append(by_value(scalars[argument.name]))
            case StructArgument():
                packed.append(encode_struct(structs[argument.name], addresses))
            case TensorMapArgument():
                packed.append(encode_tensor_map(maps[argument.name], addresses[argument.described_buffer]))
            case TextureArgument():
                packed.append(texture_object(textures[argument.name], addresses[argument.described_buffer]))
            case _:
                assert_never(argument)
    return tuple(packed)


ALIGNMENT_BYTES = 512
"""Multiple that the address of a texture's memory must be, ``textureAlignment`` of all current devices."""
_MAX_OBJECTS = 1 << 16
"""Texture objects that are kept; graphs and launches in flight refer to them."""


def texture_object(texture: Texture, pointer: int) -> Any:
    """Return the texture object of a buffer as a kernel takes it: the handle as a NumPy scalar.

    Raise `ArgumentError` if the address or the distance of rows is one that textures cannot have.
    """
    if pointer % ALIGNMENT_BYTES:
        raise ArgumentError(
            f"{texture.buffer} starts at an address {pointer % ALIGNMENT_BYTES} bytes past a multiple of "
            f"{ALIGNMENT_BYTES}, which a texture cannot have; pass a copy"
        )
    if texture.misalignment:
        raise ArgumentError(texture.misalignment)
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
