"""How far a right answer may lie from the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotile.ground.dtypes import Dtype

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
