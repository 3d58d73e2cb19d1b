"""Kernels of several steps: a reduction of two kernels, a split sum with a condition, and a scan with repetitions."""

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
kernel = { name = "two_step_sum", template = "two_step_sum.cu" }
problem = { sizes = { N = 1000000 } }
parameters = { BLOCK = [128, 256], BLOCKS = [64, 264], LAST = [64, 256], WRONG = [0, 1] }
default = { BLOCK = 256, BLOCKS = 264, LAST = 256, WRONG = 0 }
reference = { outputs = { y = "sum(x, 1)" }, reduction = "N" }
steps = [
    { entry = "partial_sums", arguments = ["x", "partials", "N"], block = ["BLOCK"], grid = ["BLOCKS"] },
    { entry = "total", arguments = ["partials", "y", "count"], block = ["LAST"], grid = [1] },
]
[arguments]
x = { buffer = "float32", shape = [1, "N"], access = "in", init = "uniform" }
y = { buffer = "float32", shape = [1], access = "out" }
partials = { workspace = "float32", shape = ["BLOCKS"] }
N = { scalar = "int32", value = "N" }
count = { scalar = "int32", value = "BLOCKS" }
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
kernel = { name = "split_rows", template = "split_rows.cu" }
problem = { sizes = { M = 1000, N = 512 } }
parameters = { BLOCK = [64, 128], SPLIT = [1, 4] }
default = { BLOCK = 128, SPLIT = 1 }
reference = { outputs = { y = "sum(x, 1)" }, reduction = "N" }
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
kernel = { name = "scan_rounds", template = "scan_rounds.cu" }
problem = { sizes = { N = 4000 }, ragged = { N = 509 } }
parameters = { BLOCK = [64, 256] }
default = { BLOCK = 256 }
reference = { outputs = { y = "cumsum(x, 0)" }, reduction = "N" }
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
times = "9 if N <= 512 else 12"
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
"""

TILED_TEMPLATE = """
__global__ void advance(const float* x, float* y, float* rows, int N)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= N) return;
    float value = x[i];
    for (int step = 0; step < STEPS; ++step) {
        value = 0.5f * value + 1.0f;
        rows[step * N + i] = value;
    }
    y[i] = STEPS * x[i];
}
"""

TILED_SPACE = """
kernel = { name = "several_steps", template = "several_steps.cu", entry = "advance" }
problem = { sizes = { N = 100000 } }
parameters = { BLOCK = [128, 256], STEPS = [1, 2, 3] }
default = { BLOCK = 128, STEPS = 1 }
launch = { block = ["BLOCK"], grid = ["ceil_div(N, BLOCK)"] }
[arguments]
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "out" }
rows = { buffer = "float32", shape = ["STEPS", "N"], access = "out" }
N = { scalar = "int32", value = "N" }
[reference]
outputs = { y = "STEPS * x", rows = ["s = reshape(arange(STEPS) + 1, STEPS, 1)", "x * 0.5 ** s + 2 * (1 - 0.5 ** s)"] }
reduction = "STEPS"
[work]
flops = "2 * N * STEPS"
"""

PARTIAL_TEMPLATE = """
__global__ void block_sums(const float* x, float* sums, int N)
{
    __shared__ float partial[BLOCK];
    int i = blockIdx.x * BLOCK + threadIdx.x;
    partial[threadIdx.x] = i < N ? x[i] : 0.0f;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = partial[0];
}
"""

PARTIAL_SPACE = """
kernel = { name = "block_sums", template = "block_sums.cu", entry = "block_sums" }
problem = { sizes = { N = 100000 } }
parameters = { BLOCK = [64, 128, 256] }
default = { BLOCK = 128 }
launch = { block = ["BLOCK"], grid = ["ceil_div(N, BLOCK)"] }
reference = { outputs = { sums = "sum(reshape(pad(x, (0, -N % BLOCK)), -1, BLOCK), axis=1)" }, reduction = "BLOCK" }
[arguments]
x = { buffer = "float32", shape = ["N"], access = "in" }
sums = { buffer = "float32", shape = ["ceil_div(N, BLOCK)"], access = "out" }
N = { scalar = "int32", value = "N" }
"""

APART_TEMPLATE = """
HELPERS
__global__ void __launch_bounds__(A) first(const float* x, float* t, int N)
{
    int i = blockIdx.x * A + threadIdx.x;  // of B threads, no: of A
    for (int k = 0; k < UNROLL; ++k) if (i < N) { t[i] = x[i]; }
}

template <int WIDTH>
__global__ void second(const float* t, float* y, int N)
{
    int i = blockIdx.x * WIDTH + threadIdx.x;
    if (i < N) y[i] = t[i];
}
"""

APART_SPACE = """
kernel = { name = "apart", template = "apart.cu" }
problem = { sizes = { N = 1000 } }
parameters = { A = [32, 64, 128, 256], UNROLL = [1, 2], B = [32, 64, 128] }
default = { A = 64, UNROLL = 1, B = 128 }
[rules]
small = "A * UNROLL <= 256"
[[steps]]
entry = "first"
arguments = ["x", "t", "N"]
block = ["A"]
grid = ["ceil_div(N, A)"]
[[steps]]
entry = "second<B>"
arguments = ["t", "y", "N"]
block = ["B"]
grid = ["ceil_div(N, B)"]
[arguments]
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "out" }
t = { workspace = "float32", shape = ["N"] }
N = { scalar = "int32", value = "N" }
[reference]
outputs = { y = "x" }
"""

KERNELS = {
    "two_step_sum": (SUM_TEMPLATE, SUM_SPACE),
    "split_rows": (SPLIT_TEMPLATE, SPLIT_SPACE),
    "scan_rounds": (SCAN_TEMPLATE, SCAN_SPACE),
    "several_steps": (TILED_TEMPLATE, TILED_SPACE),
    "apart": (APART_TEMPLATE.replace("HELPERS", ""), APART_SPACE),
    "block_sums": (PARTIAL_TEMPLATE, PARTIAL_SPACE),
}


def write_steps(folder: Path, name: str) -> Path:
    """Write a kernel's template and search-space file; return the path of the latter."""
    template, space = KERNELS[name]
    (folder / f"{name}.cu").write_text(template)
    path = folder / f"{name}.toml"
    path.write_text(space)
    return path
