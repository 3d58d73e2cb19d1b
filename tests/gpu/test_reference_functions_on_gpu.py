"""References that are Python functions, arrays, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import autotile
from autotile import Buffer, Scalar
from autotile.core.model import Outcome

pytestmark = pytest.mark.gpu

CODE = """
extern "C" __global__ void smooth(const float* x, float* y, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = x[i] + 0.5f * x[(i + 1) % n] + (WRONG ? 1.0f : 0.0f);
}"""


def smooth(**more: Any) -> autotile.TunableKernel:
    arguments = {"x": Buffer("float32", "n"), "y": Buffer("float32", "n", "out"), "n": Scalar("int32", "n")}
    return autotile.kernel(
        CODE,
        "smooth",
        sizes={"n": 5000},
        **{
            "parameters": {"BLOCK": [32, 64, 128], "WRONG": [0, 1]},
            "default": {"BLOCK": 64, "WRONG": 0},
            "arguments": arguments,
            "launch": {"block": "BLOCK", "grid": "ceil_div(n, BLOCK)"},
            **more,
        },
    )


OPTIONS = autotile.TuneOptions(trials=6, finals=3)


def expect_right_wins(result: autotile.TuneResult) -> None:
    assert result.outcomes[Outcome.WRONG_RESULT] == 3
    assert result.winner is not None
    assert result.winner.config["WRONG"] == 0


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_a_function_tells_right_from_wrong(library: Any) -> None:
    def expected(x: Any) -> Any:
        if library == "cupy":
            import cupy

            assert isinstance(x, cupy.ndarray)
            return x + 0.5 * cupy.roll(x, -1)
        return x + 0.5 * np.roll(x, -1)

    result = smooth(reference=expected, reference_on=library).tune(options=OPTIONS, progress=False)
    expect_right_wins(result)


def test_an_array_is_the_reference_of_arrays() -> None:
    x = np.arange(5000, dtype=np.float32)
    arguments = {"x": x, "y": Buffer("float32", "n", "out"), "n": Scalar("int32", "n")}
    kernel = smooth(arguments=arguments, reference={"y": x + 0.5 * np.roll(x, -1)}, ragged={"n": 5000})
    result = kernel.tune(options=OPTIONS, progress=False)
    expect_right_wins(result)


def test_without_a_reference_configurations_must_agree() -> None:
    code = CODE.replace("WRONG ? 1.0f", "WRONG ? (float)BLOCK")
    arguments = [Buffer("float32", "n"), Buffer("float32", "n", "out"), Scalar("int32", "n")]
    described: dict[str, Any] = {"sizes": {"n": 5000}, "arguments": arguments, "default": {"BLOCK": 64, "WRONG": 0}}
    described["launch"] = ("BLOCK", "ceil_div(n, BLOCK)")
    kernel = autotile.kernel(code, "smooth", parameters={"BLOCK": [32, 64, 128], "WRONG": [0, 1]}, **described)
    result = kernel.tune(options=OPTIONS, progress=False)
    assert result.winner is not None
    assert result.winner.config["WRONG"] == 0
    assert any("NO REFERENCE" in notice for notice in result.notices)
    alone = autotile.kernel(code, "smooth", name="alone", parameters={"BLOCK": [64], "WRONG": [0]}, **described)
    assert alone.tune(options=OPTIONS, progress=False).winner is None  # nothing confirms its result


def test_a_function_compares_the_outputs() -> None:
    seen: list[int] = []

    def verify(expected: Any, got: Any, tolerance: Any) -> bool:
        seen.append(len(expected))
        return bool(np.allclose(expected, got, atol=tolerance))

    kernel = smooth(reference=lambda x: x + 0.5 * np.roll(x, -1), verify=verify, tolerance=1e-3)
    result = kernel.tune(options=OPTIONS, progress=False)
    assert seen == [5000] * 6
    expect_right_wins(result)
