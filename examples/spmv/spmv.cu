// Sparse matrix times vector, CSR, fp32: y = A x. LANES threads share a row.
//
// Macros
//   BLOCK    threads of a block
//   LANES    threads of a row, a power of two up to 32: few for short rows, many for long ones
//   LDG      1: columns and values pass by the read-only cache

#if LDG
#define LOAD(p) __ldg(p)
#else
#define LOAD(p) (*(p))
#endif

__global__ void __launch_bounds__(BLOCK)
spmv(const int* __restrict__ offsets, const int* __restrict__ columns, const float* __restrict__ values,
     const float* __restrict__ x, float* __restrict__ y, int rows)
{
    const int row = blockIdx.x * (BLOCK / LANES) + threadIdx.x / LANES;
    const bool inside = row < rows;  // all threads of a warp take part in the shuffles
    const int end = inside ? offsets[row + 1] : 0;
    float sum = 0.0f;
    for (int i = inside ? offsets[row] + threadIdx.x % LANES : 0; i < end; i += LANES)
        sum += LOAD(values + i) * x[LOAD(columns + i)];
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xffffffff, sum, lanes, LANES);
    if (inside && threadIdx.x % LANES == 0) y[row] = sum;
}
