"""Element types and the tolerance of results computed in them."""

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


_SAFETY = 8.0


def output_tolerance(output: Dtype, inputs: Iterable[Dtype], reduction: int) -> float:
    """Allowed error of an output element, relative to the larger of its own size and the output's RMS.

    A sum of n products accumulated one after another in a type of unit roundoff u errs like a random walk: for inputs
    of equal size, by about 0.4 u sqrt(n) of the result's RMS (Higham, Accuracy and Stability of Numerical Algorithms,
    section 2.8). The largest of 1e8 elements lies six standard deviations out, at 2.5 u sqrt(n); the factor 8 leaves a
    margin of three and still rejects TF32 (an error near 3e-4) in an fp32 product of any length up to 400,000.

    The accumulator is taken to be fp32 or the widest input, whichever is wider; a narrower output adds the roundoff of
    its own rounding. Integers must be exact.

    Parameters
    ----------
    output
        Type of the output element.
    inputs
        Types of the buffers.
    reduction
        Terms summed into one output element.
    """
    if output.is_integer:
        return 0.0
    single = 2.0**-24
    widest = min([d.unit_roundoff for d in [*inputs, output] if not d.is_integer])
    accumulator = min(single, widest)
    rounding = output.unit_roundoff if output.unit_roundoff > accumulator else 0.0
    return 2.0 * rounding + _SAFETY * accumulator * math.sqrt(max(reduction, 1))
