// Sums of the rows of a matrix, each by PARTS blocks, which write partial sums; a second kernel adds these.
//
// Macros
//   PARTS      blocks of a row
//   BLOCK      threads of a block of the first kernel
//   VEC        floats of a load, where rows are aligned to them: 1, 2 or 4
//   UNROLL     loads of a thread in flight

#include "row_sums.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK)
add_parts(const float* __restrict__ x, float* __restrict__ partial, int n)
{
    const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
    float sum = sum_of_share<VEC>(x + size_t(row) * n, n, part * BLOCK + threadIdx.x, PARTS * BLOCK);
    sum = sum_over_threads<BLOCK, 1>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One warp for each row.
extern "C" __global__ void __launch_bounds__(128)
add_partial_sums(const float* __restrict__ partial, float* __restrict__ sums, int rows)
{
    const int row = blockIdx.x * 4 + threadIdx.y;
    float sum = 0.0f;
    if (row < rows)
        for (int part = threadIdx.x; part < PARTS; part += 32) sum += partial[row * PARTS + part];
    sum = sum_over_threads<32, 4>(sum);
    if (row < rows && threadIdx.x == 0) sums[row] = sum;
}
