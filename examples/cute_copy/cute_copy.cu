// Transposition of a matrix with CuTe (CUTLASS 3 and later): out[j, i] = in[i, j].
//
// A block moves a tile through shared memory, whose rows are padded so that columns lie in different banks.
//
// Macros
//   BM, BN     tile across the rows and columns of `in`
//   THREADS    threads of a block

#include <cute/tensor.hpp>

using namespace cute;

__global__ void __launch_bounds__(THREADS) cute_copy(const float* in, float* out, int M, int N)
{
    __shared__ float memory[BM * (BN + 1)];
    const auto tile = make_shape(Int<BM>{}, Int<BN>{});
    const auto from = make_tensor(make_gmem_ptr(in), make_shape(M, N), make_stride(N, Int<1>{}));
    const auto to = make_tensor(make_gmem_ptr(out), make_shape(M, N), make_stride(Int<1>{}, M));  // transposed
    const auto where = make_coord(blockIdx.x, blockIdx.y);
    const auto read = local_tile(from, tile, where);
    auto written = local_tile(to, tile, where);
    auto shared = make_tensor(make_smem_ptr(memory), tile, make_stride(Int<BN + 1>{}, Int<1>{}));

    const int rows = M - blockIdx.x * BM, columns = N - blockIdx.y * BN;
    for (int i = threadIdx.x; i < BM * BN; i += THREADS)
        if (i / BN < rows && i % BN < columns) shared(i / BN, i % BN) = read(i / BN, i % BN);
    __syncthreads();
    for (int i = threadIdx.x; i < BM * BN; i += THREADS)
        if (i % BM < rows && i / BM < columns) written(i % BM, i / BM) = shared(i % BM, i / BM);
}
