// Kernels that the GPU worker itself needs: filling, comparing, and a float64 matrix product for references.
// DTYPE is the element type that compare_elements reads; the other kernels do not depend on it.
#if DTYPE_IS_HALF
#include <cuda_fp16.h>
#endif
#if DTYPE_IS_BFLOAT16
#include <cuda_bf16.h>
#endif

typedef unsigned int word_t;
typedef unsigned long long count_t;

__device__ count_t first_element() { return blockIdx.x * (count_t)blockDim.x + threadIdx.x; }
__device__ count_t stride() { return (count_t)gridDim.x * blockDim.x; }

// words[0:n] = pattern
extern "C" __global__ void fill_words(word_t* words, count_t n, word_t pattern) {
    for (count_t i = first_element(); i < n; i += stride()) words[i] = pattern;
}

// result[0] += how many of words[0:n] differ from the pattern
extern "C" __global__ void count_unlike_pattern(const word_t* words, count_t n, word_t pattern, count_t* result) {
    count_t unlike = 0;
    for (count_t i = first_element(); i < n; i += stride()) unlike += words[i] != pattern;
    if (unlike) atomicAdd(result, unlike);
}

// result[0] += how many of a[0:n] differ from b[0:n]
extern "C" __global__ void count_unlike(const word_t* a, const word_t* b, count_t n, count_t* result) {
    count_t unlike = 0;
    for (count_t i = first_element(); i < n; i += stride()) unlike += a[i] != b[i];
    if (unlike) atomicAdd(result, unlike);
}

// An element is right when |got - want| <= tolerance * max(|want|, scale); NaN never is.
// result[0] counts the wrong elements; result[1] is the least index of a wrong one.
extern "C" __global__ void compare_elements(const DTYPE* got, const double* want, count_t n, double tolerance,
                                            double scale, count_t* result) {
    count_t wrong = 0, first = ~0ull;
    for (count_t i = first_element(); i < n; i += stride()) {
#if DTYPE_IS_HALF || DTYPE_IS_BFLOAT16
        const double value = (double)(float)got[i];
#else
        const double value = (double)got[i];
#endif
        const bool right = fabs(value - want[i]) <= tolerance * fmax(fabs(want[i]), scale);
        if (!right) {
            ++wrong;
            if (i < first) first = i;
        }
    }
    if (wrong) {
        atomicAdd(result, wrong);
        atomicMin(result + 1, first);
    }
}

// C = A B in float64 by 16x16 tiles; A is M x K, B is K x N, all row-major. Plain on purpose: it is the reference.
extern "C" __global__ void __launch_bounds__(256)
    matmul_float64(const double* A, const double* B, double* C, int M, int N, int K) {
    __shared__ double tile_a[16][17], tile_b[16][17];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const long long row = blockIdx.y * 16ll + ty, column = blockIdx.x * 16ll + tx;
    double sum = 0.0;
    for (int k = 0; k < K; k += 16) {
        tile_a[ty][tx] = (row < M && k + tx < K) ? A[row * K + k + tx] : 0.0;
        tile_b[ty][tx] = (column < N && k + ty < K) ? B[(k + ty) * (long long)N + column] : 0.0;
        __syncthreads();
        for (int i = 0; i < 16; ++i) sum += tile_a[ty][i] * tile_b[i][tx];
        __syncthreads();
    }
    if (row < M && column < N) C[row * N + column] = sum;
}
