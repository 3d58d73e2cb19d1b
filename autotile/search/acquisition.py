"""How promising a prediction is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]

_TAIL = -20.0
"""Below so many deviations the improvement is taken from the first term of its asymptotic series, which is off by three
over their square; the formula itself loses as many digits as that square has, and then underflows."""


def log_expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """Logarithm of how far below ``best`` a normal value is expected to lie, where it does (Ament et al., 2023).

    Parameters
    ----------
    mean, deviation
        Of the predictions, shape (n,).
    best
        The least value so far.
    """
    standard = (best - mean) / deviation
    near = np.maximum(standard, _TAIL)
    expected = near * ndtr(near) + np.exp(-0.5 * near * near) / np.sqrt(2 * np.pi)
    far = np.minimum(standard, _TAIL)
    series = -0.5 * far * far - 0.5 * np.log(2 * np.pi) - 2 * np.log(-far)
    return np.asarray(np.log(deviation) + np.where(standard > _TAIL, np.log(expected), series))
