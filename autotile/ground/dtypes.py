"""Element types: their C names, sizes and roundoff, and how NumPy holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.ground.frozen import dataclass

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type that buffers and scalars may have."""

    name: str
    c_type: str
    """Name in CUDA C++; the template includes ``cuda_fp16.h`` or ``cuda_bf16.h`` itself."""
    storage: str
    """NumPy dtype that holds the bits; bfloat16 has none of its own and lies in ``uint16``."""
    unit_roundoff: float
    """Half the distance from 1 to the next larger value; 0 for integers."""

    @property
    def size_bytes(self) -> int:
        """Bytes an element."""
        return np.dtype(self.storage).itemsize

    @property
    def is_integer(self) -> bool:
        """Whether values are exact."""
        return self.unit_roundoff == 0.0

    def encode(self, values: Array) -> Array:
        """Round values to this type, as stored bits."""
        if self.name != "bfloat16":
            return values.astype(self.storage)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits >> 16) & 1  # to nearest, ties to even; in place, as inputs are large
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        return rounded.astype(np.uint16)

    def decode(self, stored: Array) -> NDArray[np.float64]:
        """Exact float64 values of stored bits (int64 beyond 2**53 is rounded)."""
        if self.name != "bfloat16":
            return stored.astype(np.float64)
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float16", "__half", "float16", 2.0**-11),
        Dtype("bfloat16", "__nv_bfloat16", "uint16", 2.0**-8),
        Dtype("float32", "float", "float32", 2.0**-24),
        Dtype("float64", "double", "float64", 2.0**-53),
        Dtype("int8", "signed char", "int8", 0.0),
        Dtype("uint8", "unsigned char", "uint8", 0.0),
        Dtype("int16", "short", "int16", 0.0),
        Dtype("uint16", "unsigned short", "uint16", 0.0),
        Dtype("int32", "int", "int32", 0.0),
        Dtype("uint32", "unsigned int", "uint32", 0.0),
        Dtype("int64", "long long", "int64", 0.0),
        Dtype("uint64", "unsigned long long", "uint64", 0.0),
    )
}
"""Every element type by name; roundoffs from IEEE 754 (bfloat16: 8 significant bits)."""
