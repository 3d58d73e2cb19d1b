"""Do while a CUDA graph is captured what has no place in the graph: load modules, allocate memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from autotile.device.driver import load_driver

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h."""


@contextmanager
def outside_of_captures() -> Iterator[None]:
    """Let this thread make calls that a capture forbids by default, as they do not touch the captured stream.

    CUDA driver API, ``cuThreadExchangeStreamCaptureMode``: in the relaxed mode nothing is forbidden but what would
    invalidate the capture itself.
    """
    exchange, mode = load_driver().cuThreadExchangeStreamCaptureMode, ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # which now holds the mode before
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
