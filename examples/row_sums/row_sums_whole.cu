// Sums of the rows of a matrix, each by LANES threads of one block.
//
// Macros
//   LANES            threads of a row
//   ROWS_PER_BLOCK   rows of a block
//   VEC              floats of a load, where rows are aligned to them: 1, 2 or 4
//   UNROLL           loads of a thread in flight

#include "row_sums.cuh"

extern "C" __global__ void __launch_bounds__(LANES * ROWS_PER_BLOCK)
row_sums_whole(const float* __restrict__ x, float* __restrict__ sums, int rows, int n)
{
    const int row = blockIdx.x * ROWS_PER_BLOCK + threadIdx.y;
    float sum = 0.0f;
    if (row < rows) sum = sum_of_share<VEC>(x + size_t(row) * n, n, threadIdx.x, LANES);
    sum = sum_over_threads<LANES, ROWS_PER_BLOCK>(sum);
    if (row < rows && threadIdx.x == 0) sums[row] = sum;
}
