// B = A^T through the copy engine (TMA), for compute capability 9.0 and later.
//
// A block loads a box of ROWS x COLUMNS elements into shared memory by one copy, and writes it turned round, one column
// of the box after the other. Elements beyond the edge of A arrive as zeros, so loading needs no care there.
//
// A column's elements lie COLUMNS * 4 bytes apart, which without a swizzle is one bank of shared memory for many of
// them. With SWIZZLE = 128, 64 or 32 the engine swaps 16-byte chunks within rows of so many bytes, by a pattern that
// repeats after 1024, 512 or 256 bytes, and the reads spread over the banks.
//
//   ROWS, COLUMNS   the box; a row of it fits in the swizzle's span
//   SWIZZLE         0, 32, 64 or 128 bytes
//   THREADS         threads in a block

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

// Where element (row, column) of the box lies: the chunk's number within its row is combined with bits of the row's.
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
