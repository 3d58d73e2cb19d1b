"""Element types, and the tolerance of results that are computed in them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.frozen import dataclass

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type of buffers and scalars."""

    name: str
    c_type: str
    """CUDA C++ type; the template itself includes ``cuda_fp16.h`` or ``cuda_bf16.h``."""
    storage: str
    """NumPy dtype that holds the bits; ``uint16`` for bfloat16, which NumPy does not have."""
    unit_roundoff: float
    """Half the distance from 1 to the next larger value; 0 for integers."""

    @property
    def size_bytes(self) -> int:
        """Size of an element in bytes."""
        return np.dtype(self.storage).itemsize

    @property
    def is_integer(self) -> bool:
        """Whether the type is an integer type, whose results are exact."""
        return self.unit_roundoff == 0.0

    def encode(self, values: Array) -> Array:
        """Round values to this type, and return the stored bits."""
        if self.name != "bfloat16":
            return values.astype(self.storage)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits >> 16) & 1  # to nearest, ties to even; in place, as inputs are large
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        return rounded.astype(np.uint16)

    def decode(self, stored: Array) -> NDArray[np.float64]:
        """Return the float64 values of stored bits, exact except for 64-bit integers above 2**53."""
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
"""Element types by name; unit roundoffs from IEEE 754 (bfloat16: 8 significant bits)."""


def dtype_name(dtype: object) -> str:
    """Return the name of an element type: of a name, a NumPy dtype or what `numpy.dtype` takes, or a PyTorch dtype.

    What names no element type here is returned as text, for a message.
    """
    text = str(dtype).removeprefix("torch.")
    if text in DTYPES:
        return text
    try:
        found = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return text
    return str(found.name) if found.isnative and found.name in DTYPES else text


_SAFETY = 8.0


def output_tolerance(output: Dtype, inputs: Iterable[Dtype], reduction: int) -> float:
    """Return the allowed error of an output element, relative to the larger of its magnitude and the output's RMS.

    The error of a sum of n products, accumulated sequentially with unit roundoff u, grows like a random walk: for
    inputs of equal magnitude, to about 0.4 u sqrt(n) of the result's RMS (Higham, Accuracy and Stability of Numerical
    Algorithms, section 2.8). The largest error of 1e8 elements is at six standard deviations, 2.5 u sqrt(n). The factor
    8 leaves a margin of three and still rejects TF32 (an error near 3e-4) in fp32 products of lengths up to 400,000.

    The accumulator is assumed to be fp32 or the widest input, whichever is wider. A narrower output adds the roundoff
    of its final rounding. Integers must be exact.

    Parameters
    ----------
    output
        Element type of the output.
    inputs
        Element types of the buffers.
    reduction
        Number of terms summed into one output element.
    """
    if output.is_integer:
        return 0.0
    single = 2.0**-24
    widest = min([d.unit_roundoff for d in [*inputs, output] if not d.is_integer])
    accumulator = min(single, widest)
    rounding = output.unit_roundoff if output.unit_roundoff > accumulator else 0.0
    return 2.0 * rounding + _SAFETY * accumulator * math.sqrt(max(reduction, 1))
