"""One thread for linear algebra: the matrices of a search are small, and every core compiles meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

from threadpoolctl import ThreadpoolController


def one_blas_thread() -> AbstractContextManager[object]:
    """Context in which BLAS runs on the calling thread alone.

    On two cores that were busy otherwise, a proposal over 14,712 rows took 190 ms with OpenBLAS's own choice of
    threads, which wait for each other spinning, and 4 ms with one.
    """
    limiter: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limiter


@cache
def _controller() -> ThreadpoolController:
    """What is found in the libraries that are loaded; NumPy's and SciPy's are by the time of the first proposal."""
    import scipy.linalg  # noqa: F401 - its BLAS is another than NumPy's

    return ThreadpoolController()
