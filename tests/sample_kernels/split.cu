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
