"""Small kernels that use features of search-space files beyond buffers and scalars."""

from collections.abc import Mapping, Sequence
from pathlib import Path

SPLIT_TEMPLATE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#if OUT_FP32
typedef float Out;
#else
typedef DTYPE Out;
#endif

// C = alpha op(A) op(B) + beta C for each of a stack of matrices, K cut into SPLIT_K parts
extern "C" __global__ void split(const DTYPE* A, const DTYPE* B, Out* C, float* partials, unsigned* counters, int M,
                                 int N, int K, int batches, float alpha, float beta)
{
    __shared__ unsigned last;
    const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    const int batch = blockIdx.z / SPLIT_K, part = blockIdx.z % SPLIT_K;
    const bool inside = row < M && column < N, first = threadIdx.x == 0 && threadIdx.y == 0;
    const long long own = (long long)batch * M * N + (long long)row * N + column, all = (long long)batches * M * N;
    const int share = (K + SPLIT_K - 1) / SPLIT_K, end = min(K, (part + 1) * share);
    A += (long long)batch * M * K;
    B += (long long)batch * K * N;
    float sum = 0.0f;
    for (int k = part * share; inside && k < end; ++k)
        sum += (float)A[TRANS_A ? k * M + row : row * K + k] * (float)B[TRANS_B ? column * K + k : k * N + column];
    if (SPLIT_K > 1) {
        if (inside && FAULT != 3) partials[part * all + own] = sum;
        if (FAULT == 2 && inside) partials[SPLIT_K * all] = 1.0f;
        __threadfence();
        __syncthreads();
        unsigned* counter = counters + ((long long)batch * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        if (first) last = atomicAdd(counter, 1) == SPLIT_K - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        sum = 0.0f;
        for (int p = 0; inside && p < SPLIT_K; ++p) sum += __ldcg(partials + p * all + own);
        if (first && FAULT != 1) *counter = 0;
    }
    if (inside) C[own] = (Out)(alpha * sum + beta * (float)C[own]);
}
"""

SPLIT_SPACE = """
[kernel]
name = "split"
template = "split.cu"
entry = "split"
[problem]
sizes = { M = 256, N = 192, K = 320, BATCH = 1 }
flags = { TRANS_A = 0, TRANS_B = 0, OUT_FP32 = 0 }
ragged = { M = 45, N = 37, K = 67, BATCH = 3 }
dtypes = ["float32", "float16", "bfloat16"]
[parameters]
TILE = [8, 16, 32]
SPLIT_K = [1, 2, 5]
FAULT = [0, 1, 2, 3]
[default]
TILE = 16
SPLIT_K = 2
FAULT = 0
[rules]
no_fault_without_a_split = "SPLIT_K > 1 or FAULT == 0"
[launch]
block = ["TILE", "TILE"]
grid = ["ceil_div(N, TILE)", "ceil_div(M, TILE)", "BATCH * SPLIT_K"]
[arguments]
A = { buffer = "dtype", shape = ["BATCH", "K if TRANS_A else M", "M if TRANS_A else K"], access = "in" }
B = { buffer = "dtype", shape = ["BATCH", "N if TRANS_B else K", "K if TRANS_B else N"], access = "in" }
C = { buffer = "float32 if OUT_FP32 else dtype", shape = ["BATCH", "M", "N"], access = "inout" }
partials = { workspace = "float32", shape = ["SPLIT_K if SPLIT_K > 1 else 0", "BATCH", "M", "N"] }
counters = { workspace = "uint32", init = "zeros", shape = [
    "BATCH if SPLIT_K > 1 else 0", "ceil_div(M, TILE)", "ceil_div(N, TILE)"] }
M = { scalar = "int32", value = "M" }
N = { scalar = "int32", value = "N" }
K = { scalar = "int32", value = "K" }
batches = { scalar = "int32", value = "BATCH" }
alpha = { scalar = "float32", value = 1.0, check = 0.75 }
beta = { scalar = "float32", value = 0.0, check = -0.5 }
[reference]
outputs = { C = "alpha * ((transpose(A) if TRANS_A else A) @ (transpose(B) if TRANS_B else B)) + beta * C" }
reduction = "K"
[work]
flops = "2 * BATCH * M * N * K"
"""

CLUSTER_TEMPLATE = """
// Each block reads the tile of the block at the other end of its cluster, from that block's shared memory.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) swap(const float* x, float* y, int n)
{
    __shared__ float tile[THREADS];
    const int i = blockIdx.x * THREADS + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : 0.0f;
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const unsigned other = CLUSTER - 1 - blockIdx.x % CLUSTER;
    unsigned there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(tile + threadIdx.x))), "r"(other));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    const int from = (blockIdx.x - blockIdx.x % CLUSTER + other) * THREADS + threadIdx.x;
    if (from < n) y[from] = value;
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
"""

CLUSTER_SPACE = """
problem = { sizes = { n = 1000000 } }
parameters = { THREADS = [64, 256], CLUSTER = [1, 2, 3, 8, 16], WHOLE = [false, true] }
default = { THREADS = 256, CLUSTER = 2, WHOLE = true }
reference = { outputs = { y = "x" } }
[kernel]
name = "swap"
template = "swap.cu"
entry = "swap"
architecture = "sm_90a"
[launch]
block = ["THREADS"]
grid = ["ceil_div(n, THREADS * CLUSTER) * CLUSTER if WHOLE else ceil_div(n, THREADS)"]
cluster = ["CLUSTER"]
[arguments]
x = { buffer = "float32", shape = ["n"], access = "in" }
y = { buffer = "float32", shape = ["n"], access = "out" }
n = { scalar = "int32", value = "n" }
"""


def write_kernel(folder: Path, template: str, space: str) -> Path:
    """Write a kernel to a folder, and return the path of its search-space file, which has the name of the kernel."""
    name = space.partition('name = "')[2].partition('"')[0]
    (folder / f"{name}.cu").write_text(template)
    (folder / f"{name}.toml").write_text(space)
    return folder / f"{name}.toml"


def block_space(
    name: str,
    arguments: str,
    reference: str,
    *,
    entry: str = "",
    problem: str = "sizes = { N = 5000 }",
    parameters: Mapping[str, Sequence[int]] = {"BLOCK": (64, 128)},
    default: Mapping[str, int] = {"BLOCK": 128},
    grid: str = '"ceil_div(N, BLOCK)"',
    launch: str = "",
) -> str:
    """Return the search space of a kernel whose blocks have BLOCK threads; its entry is its name unless given."""
    lists = ", ".join(f"{key} = {list(values)}" for key, values in parameters.items())
    chosen = ", ".join(f"{key} = {value}" for key, value in default.items())
    return f"""
kernel = {{ name = "{name}", template = "{name}.cu", entry = "{entry or name}" }}
parameters = {{ {lists} }}
default = {{ {chosen} }}

[problem]
{problem}

[launch]
block = ["BLOCK"]
grid = [{grid}]
{launch}

[arguments]
{arguments.strip()}

[reference]
{reference.strip()}
"""
