// Sums of the rows of a matrix with CUB: a block adds a row.
//
// Macros
//   BLOCK        threads of a block
//   ITEMS        elements that a thread loads before it adds them
//   ALGORITHM    how the block adds the threads' sums: cub::BLOCK_REDUCE_...

#include <cub/block/block_reduce.cuh>

template <int THREADS, int COUNT, cub::BlockReduceAlgorithm HOW>
__global__ void __launch_bounds__(THREADS) row_sums(const float* __restrict__ x, float* __restrict__ sums, int columns)
{
    using Reduce = cub::BlockReduce<float, THREADS, HOW>;
    __shared__ typename Reduce::TempStorage storage;
    const float* row = x + static_cast<long long>(blockIdx.x) * columns;
    float sum = 0.0f;
    for (int start = 0; start < columns; start += THREADS * COUNT)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int column = start + i * THREADS + threadIdx.x;
            sum += column < columns ? row[column] : 0.0f;
        }
    sum = Reduce(storage).Sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
