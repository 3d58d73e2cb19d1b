"""Kernels of several steps: a reduction of two kernels, a split sum with a condition, and windows that double."""

from __future__ import annotations

from pathlib import Path

SUM_TEMPLATE = """
template <int THREADS>
__device__ float block_sum(float value)
{
    __shared__ float partial[THREADS];
    partial[threadIdx.x] = value;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    __syncthreads();
    return partial[0];
}

__global__ void partial_sums(const float* x, float* partials, int N)
{
    float sum = 0.0f;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK) sum += x[i];
    sum = block_sum<BLOCK>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void total(const float* partials, float* y, int count)
{
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count - WRONG; i += LAST) sum += partials[i];
    sum = block_sum<LAST>(sum);
    if (threadIdx.x == 0) y[0] = sum;
}
"""

SUM_SPACE = """
[kernel]
name = "two_step_sum"
template = "two_step_sum.cu"

[problem]
sizes = { N = 1000000 }

[parameters]
BLOCK = [128, 256]
BLOCKS = [64, 264]
LAST = [64, 256]
WRONG = [0, 1]

[default]
BLOCK = 256
BLOCKS = 264
LAST = 256
WRONG = 0

[[steps]]
entry = "partial_sums"
arguments = ["x", "partials", "N"]
block = ["BLOCK"]
grid = ["BLOCKS"]

[[steps]]
entry = "total"
arguments = ["partials", "y", "count"]
block = ["LAST"]
grid = [1]

[arguments]
x = { buffer = "float32", shape = [1, "N"], access = "in", init = "uniform" }
y = { buffer = "float32", shape = [1], access = "out" }
partials = { workspace = "float32", shape = ["BLOCKS"] }
N = { scalar = "int32", value = "N" }
count = { scalar = "int32", value = "BLOCKS" }

[reference]
outputs = { y = "sum(x, 1)" }
reduction = "N"

[work]
bytes = "4 * N"
"""

SPLIT_TEMPLATE = """
extern "C" __global__ void rows(const float* x, float* y, float* partials, int M, int N)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= M) return;
    float sum = 0.0f;
    for (int j = blockIdx.y; j < N; j += SPLIT) sum += x[row * N + j];
    if (SPLIT > 1) partials[blockIdx.y * M + row] = sum;
    else y[row] = sum;
}

extern "C" __global__ void combine(float* y, const float* partials, int M)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= M) return;
    float sum = 0.0f;
    for (int part = 0; part < SPLIT; ++part) sum += partials[part * M + row];
    y[row] = sum;
}
"""

SPLIT_SPACE = """
[kernel]
name = "split_rows"
template = "split_rows.cu"

[problem]
sizes = { M = 1000, N = 512 }

[parameters]
BLOCK = [64, 128]
SPLIT = [1, 4]

[default]
BLOCK = 128
SPLIT = 1

[[steps]]
entry = "rows"
arguments = ["x", "y", "partials", "M", "N"]
block = ["BLOCK"]
grid = ["ceil_div(M, BLOCK)", "SPLIT"]

[[steps]]
entry = "combine"
arguments = ["y", "partials", "M"]
block = ["BLOCK"]
grid = ["ceil_div(M, BLOCK)"]
when = "SPLIT > 1"

[arguments]
x = { buffer = "float32", shape = ["M", "N"], access = "in" }
y = { buffer = "float32", shape = ["M"], access = "out" }
partials = { workspace = "float32", shape = ["SPLIT if SPLIT > 1 else 0", "M"] }
M = { scalar = "int32", value = "M" }
N = { scalar = "int32", value = "N" }

[reference]
outputs = { y = "sum(x, 1)" }
reduction = "N"
"""

SCAN_TEMPLATE = """
__global__ void copy(const float* from, float* to, int N)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < N) to[i] = from[i];
}

__global__ void sweep(const float* from, float* to, int stride, int N)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < N) to[i] = i < stride ? from[i] : from[i] + from[i - stride];
}
"""

SCAN_SPACE = """
[kernel]
name = "scan_rounds"
template = "scan_rounds.cu"

[problem]
sizes = { N = 4000 }
ragged = { N = 509 }

[parameters]
BLOCK = [64, 256]

[default]
BLOCK = 256

[[steps]]
entry = "copy"
arguments = ["x", "a", "N"]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK)"]

[[steps]]
entry = "sweep"
arguments = ["a", "b", "stride", "N"]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK)"]
times = 3
swap = ["a", "b"]

[[steps]]
entry = "copy"
arguments = ["a", "y", "N"]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK)"]

[arguments]
x = { buffer = "float32", shape = ["N"], access = "in", init = "uniform" }
y = { buffer = "float32", shape = ["N"], access = "out" }
a = { workspace = "float32", shape = ["N"] }
b = { workspace = "float32", shape = ["N"] }
stride = { scalar = "int32", value = "2 ** step" }
N = { scalar = "int32", value = "N" }

[reference]
outputs = { y = "TERMS" }
reduction = 8
""".replace("TERMS", " + ".join(["x", *(f"shift(x, -{back})" for back in range(1, 8))]))

KERNELS = {
    "two_step_sum": (SUM_TEMPLATE, SUM_SPACE),
    "split_rows": (SPLIT_TEMPLATE, SPLIT_SPACE),
    "scan_rounds": (SCAN_TEMPLATE, SCAN_SPACE),
}


def write_steps(folder: Path, name: str) -> Path:
    """Write a kernel's template and search-space file; return the path of the latter."""
    template, space = KERNELS[name]
    (folder / f"{name}.cu").write_text(template)
    path = folder / f"{name}.toml"
    path.write_text(space)
    return path
