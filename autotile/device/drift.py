"""A reference kernel that is timed again through a session, to see how the GPU itself drifts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autotile.device.support import SupportKernels

if TYPE_CHECKING:
    from autotile.device.timing import Timer

_TURNS = 12_000
"""About 60 us at 2 GHz: long enough for an event, short enough to go unnoticed beside a candidate's samples."""
_SAMPLES = 3


class DriftProbe:
    """Times a kernel of dependent multiply-adds, one block an SM: it takes a fixed number of the SMs' clock cycles.

    So its time moves with the clock, and with other load on the GPU, and with nothing that a candidate does.

    Parameters
    ----------
    support
        The worker's own kernels.
    timer
        What candidates are timed with.
    sm_count
        Of the device.
    """

    def __init__(self, support: SupportKernels, timer: Timer, sm_count: int) -> None:
        self._support = support
        self._timer = timer
        self._sm_count = sm_count

    def read_us(self) -> float:
        """Its time now, in microseconds."""
        samples = self._timer.samples(lambda: self._support.spin(self._sm_count, _TURNS), _SAMPLES)
        return round(float(np.median(samples)), 3)
