// Matrix multiplication, step 1 of 3: one thread computes one element.
//
//     C = A * B        A is M x K, B is K x N, C is M x N, fp32, row-major
//
// Idea. Every element of C is the dot product of a row of A and a column of B. Assign each to a thread of its own:
//
//                          B
//                    +-----|-----+
//                    |     |     |        thread (row, column) walks along one row of A
//                    |     |     |        and down one column of B:
//                    +-----|-----+
//          A               |              for k in 0 .. K-1:  sum += A[row, k] * B[k, column]
//      +-------+     +-----|-----+
//      |-------|-----|-----x     |
//      |       |     |         C |
//      +-------+     +-----------+
//
// Coalescing. The 32 threads of a warp load at the same time, and memory is accessed in sectors of 32 bytes. Threads
// with consecutive threadIdx.x are adjacent in a warp, so the direction of threadIdx.x matters:
//
//     COALESCED 1   along a row of C:     a warp reads 32 adjacent floats of B and one float of A (broadcast)
//     COALESCED 0   down a column of C:   a warp reads one float of B and 32 floats of A at a stride of K: 32 sectors
//
// Arithmetic intensity. For each k a thread loads 2 floats and executes 1 multiply-add: 8 bytes for 2 FLOP, 0.25 FLOP
// per byte. No memory feeds the arithmetic units at that rate; only the caches make this kernel usable.
//
// Macros
//   BX, BY       threads per block along threadIdx.x and threadIdx.y
//   COALESCED    1: threadIdx.x runs along the rows of C; 0: down its columns
//   UNROLL       steps of the dot product per loop iteration
//
// Launch: BX x BY threads; grid.x counts blocks down the rows of C (its limit is 2^31 - 1, that of grid.y only 65,535),
// grid.y across its columns.
//
// Next: matmul_tiled.cu shares the loads of neighboring threads.

#ifndef BX
#define BX 32
#define BY 8
#define COALESCED 1
#define UNROLL 4
#endif

constexpr int BLOCK_ROWS = COALESCED ? BY : BX;
constexpr int BLOCK_COLUMNS = COALESCED ? BX : BY;
constexpr int K_UNROLL = UNROLL;  // a pragma requires a constant, not a macro

extern "C" __global__ void __launch_bounds__(BX * BY)
matmul_naive(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, int M, int N, int K)
{
    // 64-bit from here on: row * K and k * N exceed 2^31 in large matrices.
    const size_t row = static_cast<size_t>(blockIdx.x) * BLOCK_ROWS + (COALESCED ? threadIdx.y : threadIdx.x);
    const size_t column = static_cast<size_t>(blockIdx.y) * BLOCK_COLUMNS + (COALESCED ? threadIdx.x : threadIdx.y);
    if (row >= M || column >= N) return;

    const float* a = A + row * K;
    const float* b = B + column;
    float sum = 0.0f;
#pragma unroll K_UNROLL
    for (int k = 0; k < K; ++k) sum += a[k] * b[static_cast<size_t>(k) * N];
    C[row * N + column] = sum;
}
