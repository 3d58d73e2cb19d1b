"""Kernels by their C++ names, with macros, options and headers as strangers write them."""

from __future__ import annotations

from pathlib import Path

import pytest

import autotile
from autotile.cuda.toolchain import installed_nvcc

pytestmark = pytest.mark.gpu

TEMPLATE = """
#include <cfloat>
#include <vector>
template <int BLOCK, typename T>
__global__ void __launch_bounds__(BLOCK) scale(const float* x, float* y, int n)
{
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n && SIZE == n) y[i] = T(x[i] * FACTOR) + (x[i] > FLT_MAX ? INFINITY : 0);
}
int main() { std::vector<float> values; return 0; }
"""

SPACE = """
[kernel]
name = "scale"
template = "scale.cu"
entry = "scale<BLOCK, T>"
defines = { SIZE = "N" }
options = ["--maxrregcount={REGS}", "--use_fast_math={FAST}", "-Xptxas -dlcm={CACHE}", "-lineinfo"]
@compiler

[problem]
sizes = { N = 100000 }

[parameters]
BLOCK = [64, 128]
T = ["float", "double"]
FACTOR = [2.0, 2.5]
REGS = [0, 32]
FAST = [false, true]
CACHE = ["ca", "cg"]

[default]
BLOCK = 128
T = "float"
FACTOR = 2.0
REGS = 0
FAST = false
CACHE = "ca"

[rules]
right = "FACTOR < 2.25"

[launch]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK)"]

[arguments]
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "out" }
n = { scalar = "int32", value = "N" }

[reference]
outputs = { y = "2 * x" }
"""


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_a_template_with_macros_of_sizes(tmp_path: Path, compiler: str) -> None:
    if compiler == "nvcc" and not installed_nvcc():
        pytest.skip("there is no nvcc on this machine")
    (tmp_path / "scale.cu").write_text(TEMPLATE)
    (tmp_path / "scale.toml").write_text(SPACE.replace("@compiler", f'compiler = "{compiler}"'))
    options = autotile.TuneOptions(trials=3)
    result = autotile.tune(str(tmp_path / "scale.toml"), {"N": 100000}, options=options, database=tmp_path / "a.db")
    assert result.winner is not None, result
