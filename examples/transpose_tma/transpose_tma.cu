// B = A^T through TMA, for compute capability 9.0 and later.
//
// A block loads a box of ROWS x COLUMNS elements into shared memory with one copy, and writes it transposed, one column
// of the box after the other. Elements beyond the edge of A are read as zeros, so the load needs no bounds checks.
//
// The elements of a column are COLUMNS * 4 bytes apart; without a swizzle, many of them lie in the same bank of shared
// memory. With SWIZZLE = 128, 64 or 32, TMA permutes 16-byte chunks within rows of that length, by a pattern that repeats
// after 1024, 512 or 256 bytes, and the reads spread over the banks.
//
//   ROWS, COLUMNS   the box; its rows fit into the swizzle span
//   SWIZZLE         0, 32, 64 or 128 bytes
//   THREADS         threads per block

#ifndef ROWS
#define ROWS 64
#define COLUMNS 32
#define SWIZZLE 128
#define THREADS 256
#endif

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

__device__ unsigned shared_address(const void* pointer)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Index of element (row, column) of the box: the index of a chunk within its row is XORed with bits of the row index.
__device__ int swizzled(int row, int column)
{
    const int bytes = (row * COLUMNS + column) * 4;
    return (SWIZZLE ? bytes ^ (bytes >> 3 & (SWIZZLE - 16)) : bytes) / 4;
}

extern "C" __global__ void __launch_bounds__(THREADS)
transpose_tma(float* B, const __grid_constant__ TensorMap A_map, int M, int N)
{
    __shared__ alignas(1024) float tile[ROWS * COLUMNS];
    __shared__ unsigned long long arrived;
    const int row = blockIdx.y * ROWS, column = blockIdx.x * COLUMNS;

    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived)) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&arrived)),
                     "r"(ROWS * COLUMNS * 4)
                     : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            ::"r"(shared_address(tile)), "l"(&A_map), "r"(shared_address(&arrived)), "r"(column), "r"(row)
            : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile(
            "{\n"
            "  .reg .pred done;\n"
            "  mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n"
            "  selp.b32 %0, 1, 0, done;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(&arrived))
            : "memory");

    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        const int r = i % ROWS, c = i / ROWS;
        if (row + r < M && column + c < N) B[(column + c) * static_cast<long long>(M) + row + r] = tile[swizzled(r, c)];
    }
}
