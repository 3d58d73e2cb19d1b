"""Gains: whether a program that may call a library itself gains by launching what is served in its place.

What a launch costs beside the kernel's own time counts: a bias that is added by a second kernel, and the host's work,
which only a kernel that runs for longer hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotile.core.dtypes import DTYPES
from autotile.cuda.cublas import GemmLayout
from autotile.errors import AutotileError
from autotile.serving.arrays import VECTOR_BYTES
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Choice
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.operations import MatmulOptions
from autotile.settings import read_settings

_LEAD = 0.03
"""Part of the library's time by which a product must be expected to be faster: timings vary by a percent or two."""
_LAUNCH_US = 2.0
"""Time of a further kernel beside its memory traffic."""
_QUEUED_US = 80.0
"""Host time that an eager model takes for each of its products, with what it computes between them: 32 us of a chain of
layers, 54 to 95 us of transformers."""
WRAPPED_US, RECORDED_US, _STEP_US, _BIAS_US = 8.0, 138.0, 18.0, 10.0
"""Host times, beyond those of PyTorch's product, of a launch by a graph of ``torch.compile`` and of one that autograd
records in Python, and of a further launch and the addition of a bias in such; measured in `benchmarks/models.py`, as
the one above, with PyTorch 2.11 on an H100 host."""


def find_product(
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    batch: int = 1,
    trans_a: bool = False,
    trans_b: bool = False,
    aligned: bool = True,
    emulate: bool = True,
    library: bool = True,
    wait: bool = False,
    device: int | str | None = None,
    keeps: bool = True,
) -> BoundKernel | None:
    """Return the kernel or library that `autotile.matmul` serves for such a product, not yet compiled, or None.

    Unless the dispatcher ``keeps`` it, it is only to be looked at.
    """
    sizes = {"M": m, "N": n, "K": k, "BATCH": batch, "TRANS_A": int(trans_a), "TRANS_B": int(trans_b), "OUT_FP32": 0}
    sizes |= {"NONDETERMINISTIC": 0, "ALIGNED": int(aligned), "EMULATE": int(emulate)}
    try:
        if not keeps:
            location = default_dispatcher.location(None)
            return default_dispatcher.find_best_kernel("matmul", dtype, device, location, sizes, library=library)
        return default_dispatcher.serve_product(sizes, dtype, MatmulOptions(library=library, wait=wait), device)
    except AutotileError:
        return None


def stored_transposed(shape: Sequence[int], strides: Sequence[int]) -> bool | None:
    """Return True if a matrix, or each of a stack, is stored as its row-major transpose; None if it is neither."""
    *stack, rows, columns = range(len(shape))
    for transposed, order in ((False, (columns, rows)), (True, (rows, columns))):
        expected = 1
        for axis in (*order, *reversed(stack)):  # from the fastest
            if shape[axis] != 1 and strides[axis] != expected:
                break
            expected *= shape[axis]
        else:
            return transposed
    return None


def is_transposed(n: int, k: int) -> bool:
    """Return True if contiguous weights (n, k), as the factor (k, n), are stored as its row-major transpose."""
    return n > 1 and k > 1


@dataclass(frozen=True, slots=True)
class Gain:
    """Times of a product, by a choice that is served and by the library, measured or expected; None if not known.

    ``bias_us`` is what it takes to add a bias afterwards, which the library does as it stores the product; ``launches``
    the number of kernels of the choice, 0 for the library. ``is_short`` tells whether the host's part of the program's
    own call of the library may show: the library takes less time than the host takes for a product and what surrounds
    it, of matrices whose rows are aligned. Of others, PyTorch's call, which may round parts of sums, may take less
    time: 156 us in place of 193 for 2047 x 2049 x 2050 in bfloat16. Where results must not vary, none is: all calls of
    the library are the program's, as some are in any case.
    """

    choice: Choice
    kernel: str
    time_us: float | None
    library_us: float | None
    bias_us: float
    launches: int
    is_short: bool

    @classmethod
    def of(cls, served: BoundKernel, *, final: bool = False) -> Gain:
        """Return the times of a product of two matrices as it is served.

        With ``final``, they are of what was chosen, even while something stands in for it.
        """
        choice, operation = served.choice, served.operation
        found = choice.contenders
        if final and choice.awaited:
            found = served.find_contenders() or found
        first = found[0] if found else None
        is_library = first.is_library if first else served.is_library
        library = first if is_library else next(iter(served.find_contenders(kernels=False)), None)
        library_us = library.time_us if library is not None else None
        bias_us, is_short = 0.0, False
        if operation is not None:
            element_bytes = DTYPES[operation.dtype].component_bytes
            row_bytes = element_bytes * math.gcd(*GemmLayout.of(operation.sizes, operation.dtype).leading)
            varies = not (choice.pinned or read_settings().numerics == "same")
            is_short = varies and library_us is not None and library_us < _QUEUED_US and not row_bytes % VECTOR_BYTES
            count = operation.sizes["M"] * operation.sizes["N"] * operation.sizes["BATCH"]
            size_bytes = 2 * count * element_bytes  # read and written
            bias_us = _LAUNCH_US + 1e6 * size_bytes / served.device.memory_bandwidth_bytes_per_s
        return cls(
            choice,
            first.kernel if first else served.kernel,
            first.time_us if first else None,
            library_us,
            bias_us,
            0 if is_library else max(1, len(served.launches)),
            is_short,
        )

    def total_us(self, *, bias: bool = False) -> float | None:
        """The time of the product, with its bias where a kernel computes it."""
        added = self.bias_us if bias and self.launches else 0.0
        return None if self.time_us is None else self.time_us + added

    def is_worthwhile(self, *, bias: bool = False, host_us: float = 0.0) -> bool:
        """Whether a launch of the choice is known, or expected, to be faster than the program's call of the library.

        Where its host time is longer by ``host_us``, it must not be longer, with what surrounds a product, than the
        library computes, since the GPU then waits. A choice that is pinned is always launched, as all ranks must
        compute alike.
        """
        if not self.launches:
            return False
        if self.choice.pinned:
            return True
        time_us = self.total_us(bias=bias)
        if time_us is None or self.library_us is None or time_us > (1.0 - _LEAD) * self.library_us:
            return False
        if host_us:
            host_us += _QUEUED_US + _STEP_US * (self.launches - 1) + _BIAS_US * bias
        return host_us <= (1.0 - _LEAD) * self.library_us
