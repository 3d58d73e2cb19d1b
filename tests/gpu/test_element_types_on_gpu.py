"""Each kind of element type: verified in tuning, and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidates import evaluate
from feature_kernels import block_space, write_kernel

from autotile.core.dtypes import DTYPES
from autotile.core.model import Outcome
from autotile.serving.dispatcher import get_best_kernel

pytestmark = pytest.mark.gpu

TEMPLATE = """
#include <cuda_fp8.h>
extern "C" __global__ void __launch_bounds__(BLOCK) map(const IN* x, OUT* y, int N) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < N) { BODY }
}
"""

SPACE = block_space(
    "map",
    """
x = { buffer = "@in", shape = ["N"], access = "in" }
y = { buffer = "@out", shape = ["N"], access = "out" }
N = { scalar = "int32", value = "N" }
""",
    'outputs = { y = "@reference" }',
)

CASES = {
    "bool": ("bool", "bool", "y[i] = !x[i];", "1 - x"),
    "float8_e4m3fn": ("float8_e4m3fn", "float", "y[i] = 2.0f * (float)x[i];", "2 * x"),
    "float8_e5m2": ("float32", "float8_e5m2", "y[i] = __nv_fp8_e5m2(x[i] * 3.0f);", "3 * x"),
    "complex64": ("complex64", "complex64", "y[i] = make_float2(x[i].x + 1.0f, x[i].y);", "x + 1"),
    "complex128": ("complex128", "complex128", "y[i] = make_double2(2 * x[i].x, 2 * x[i].y);", "2 * x"),
    "float4": ("float4", "float4", "float4 v = x[i]; y[i] = make_float4(v.x + 1, v.y + 1, v.z + 1, v.w + 1);", "x + 1"),
    "float3": ("float3", "float3", "y[i] = make_float3(-x[i].x, -x[i].y, -x[i].z);", "-x"),
    "uchar4": ("uchar4", "uchar4", "uchar4 v = x[i]; v.w += 1; y[i] = v; y[i].x += 1; ++y[i].y; ++y[i].z;", "x + 1"),
}


def kernel_of(folder: Path, case: str) -> Path:
    given, made, body, reference = CASES[case]
    types = {name: DTYPES["float32" if name == "float" else name].c_type for name in (given, made)}
    template = TEMPLATE.replace("IN*", f"{types[given]}*").replace("OUT*", f"{types[made]}*").replace("BODY", body)
    space = SPACE.replace("@in", given).replace("@out", "float32" if made == "float" else made)
    return write_kernel(folder, template, space.replace("@reference", reference))


@pytest.mark.parametrize("case", CASES)
def test_an_element_type_is_verified(tmp_path: Path, case: str) -> None:
    evaluation = evaluate(kernel_of(tmp_path, case))
    assert evaluation.outcome is Outcome.OK, evaluation.reason


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_result_is_found(tmp_path: Path, case: str) -> None:
    toml = kernel_of(tmp_path, case)
    template = toml.with_suffix(".cu")
    template.write_text(template.read_text().replace("if (i < N)", "if (i < N - 1)"))
    evaluation = evaluate(toml)
    assert evaluation.outcome is Outcome.WRONG_RESULT
    assert "of y are wrong" in evaluation.reason


@pytest.mark.parametrize("case", ["bool", "complex64", "float3"])
def test_an_element_type_is_served(tmp_path: Path, case: str, cupy: Any) -> None:
    toml = kernel_of(tmp_path, case)
    kernel = get_best_kernel(str(toml), N=1000)
    given = DTYPES[CASES[case][0]]
    x = cupy.asarray(
        given.encode(np.arange(np.prod(given.array_shape((1000,)))).reshape(given.array_shape((1000,))) % 2)
    )
    expected: dict[str, Any] = {"bool": lambda v: ~v, "complex64": lambda v: v + 1, "float3": lambda v: -v}
    for _ in range(4):
        np.testing.assert_array_equal(kernel(x).get(), expected[case](x.get()))


STRUCT_TEMPLATE = """
struct P { int n; const float4* x; float scale[2]; };
extern "C" __global__ void __launch_bounds__(BLOCK) map(float4* y, P p) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < p.n) {
        const float4 v = p.x[i];
        y[i] = make_float4(p.scale[1] * v.x, p.scale[1] * v.y, p.scale[1] * v.z, p.scale[1] * v.w);
    }
}
"""

STRUCT_ARGUMENTS = """
x = { buffer = "float4", shape = ["N"], access = "in", pass = false }
y = { buffer = "float4", shape = ["N"], access = "out" }

[arguments.p.struct]
n = { scalar = "int32", value = "N" }
x = { pointer = "x" }
scale = { scalar = "float32", value = [7, 3] }
"""


def test_a_struct_by_value(tmp_path: Path, cupy: Any) -> None:
    head, _, tail = SPACE.partition("[arguments]")
    _, _, reference = tail.partition("[reference]")
    space = f"{head}[arguments]{STRUCT_ARGUMENTS}[reference]{reference.replace('@reference', '3 * x')}"
    toml = write_kernel(tmp_path, STRUCT_TEMPLATE, space)
    evaluation = evaluate(toml)
    assert evaluation.outcome is Outcome.OK, evaluation.reason
    kernel = get_best_kernel(str(toml), N=1000)
    for number in range(6):  # other arrays, and the same again, which become graphs
        x = cupy.full((1000, 4), number % 2 + 1, cupy.float32)
        np.testing.assert_array_equal(kernel(x).get(), 3 * x.get())
        np.testing.assert_array_equal(kernel(x).get(), 3 * x.get())
