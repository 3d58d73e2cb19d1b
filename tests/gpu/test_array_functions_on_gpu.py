"""Array expressions on a device have the values that they have on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_cases import CASES, KINDS, environment

from autotile.errors import SpecError
from autotile.kernel.expressions import parse_array_expression

pytestmark = pytest.mark.gpu


def test_values(cupy: Any) -> None:
    given = environment()
    on_device = {name: cupy.asarray(value) if np.ndim(value) else value for name, value in given.items()}
    faults = []
    for text in CASES:
        expression = parse_array_expression(text, [name for name in given if name != "FLAG"], KINDS)
        expected = np.asarray(expression.evaluate(given))
        try:
            found = cupy.asnumpy(expression.evaluate(on_device))
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
            assert found.dtype.kind == expected.dtype.kind
        except Exception as error:
            faults.append(f"{text}: {type(error).__name__}: {str(error).strip()[:300]}")
    assert not faults, "\n".join(faults)


def test_indices_out_of_bounds_are_found(cupy: Any) -> None:
    x, i = cupy.arange(4.0), cupy.array([0, 4])
    for text in ("x[i]", "take(x, i)", "bincount(i, 4)", "scatter_add(x, i, 1)"):
        with pytest.raises(SpecError, match="indices from 0 to 4 for an axis of 4"):
            parse_array_expression(text, ["x", "i"]).evaluate({"x": x, "i": i})
