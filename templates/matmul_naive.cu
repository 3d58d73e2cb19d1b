// Matrix multiplication, step 1 of 3: one thread computes one element.
//
//     C = A * B        A is M x K, B is K x N, C is M x N, fp32, row-major
//
// Idea. Every element of C is the dot product of a row of A and a column of B. Give each to a thread of its own:
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
// Coalescing. The 32 threads of a warp load at the same time, and memory is delivered in pieces of 32 bytes. Threads
// whose threadIdx.x differs by one sit side by side in a warp, so it matters which way threadIdx.x walks:
//
//     COALESCED 1   along a row of C:     a warp reads 32 neighbouring floats of B and one float of A (broadcast)
//     COALESCED 0   down a column of C:   a warp reads one float of B and 32 floats of A that lie K apart: 32 pieces
//
// Arithmetic intensity. For each k a thread loads 2 floats and does 1 multiply-add: 8 bytes for 2 FLOP, 0.25 FLOP a
// byte. No memory feeds the arithmetic units at that rate; only the caches keep this kernel alive.
//
// Macros
//   BX, BY       threads of a block along threadIdx.x and threadIdx.y
//   COALESCED    1: threadIdx.x walks along the rows of C; 0: down its columns
//   UNROLL       steps of the dot product between two tests of the loop's end
//
// Launch: BX x BY threads; grid.x counts blocks down the rows of C (it may grow to 2^31 - 1, grid.y only to 65,535),
// grid.y across its columns.
//
// Next: matmul_tiled.cu shares what neighbouring threads read.

#ifndef BX
#define BX 32
#define BY 8
#define COALESCED 1
#define UNROLL 4
#endif

constexpr int BLOCK_ROWS = COALESCED ? BY : BX;
constexpr int BLOCK_COLUMNS = COALESCED ? BX : BY;
constexpr int K_UNROLL = UNROLL;  // a pragma takes a constant, not a macro

extern "C" __global__ void __launch_bounds__(BX * BY)
matmul_naive(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, int M, int N, int K)
{
    // 64-bit from here on: row * K and k * N pass 2^31 in large matrices.
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
