// Matrix multiplication, step 2 of 3: tiles in shared memory.
//
//     C = A * B        A is M x K, B is K x N, C is M x N, fp32, row-major
//
// Idea. In step 1 each row of A is read again by every thread along a row of C, each column of B by every thread down
// a column. A block of TILE x TILE threads can load both once, cooperatively, into shared memory and reuse them there.
// Rows of length K do not fit, so the block iterates over tiles along K:
//
//                                  B
//                          +---+-------+---+
//                          |   | tile 0|   |      for each tile along K:
//                          |   +-------+   |          each thread loads one float of A and one of B
//                          |   | tile 1|   |          wait until all loads have completed       (barrier)
//                          |   +-------+   |          each thread adds TILE products
//              A           |   |  ...  |   |          wait until all have read the tiles        (barrier)
//      +--------------+    +---+-------+---+
//      |              |    |               |
//      +----+----+----+    |   +-------+   |
//      | t0 | t1 | ...|    |   | TILE x|   |
//      +----+----+----+    |   |  TILE |   |
//      |              |    |   +-------+ C |
//      +--------------+    +---------------+
//
// Arithmetic intensity. Each float loaded from global memory is used TILE times: 2 loads of 4 bytes for TILE
// multiply-adds, TILE / 4 FLOP per byte (8 for TILE = 32, step 1: 0.25). Shared memory is now the limit: every
// multiply-add still reads 2 floats from it.
//
// Guards. Tiles at the edges extend beyond the matrix. Predicated loads fill them with zeros, which do not change the
// sum; the predicate costs a little in every tile. GUARDED 0 omits it and is correct only if M, N and K are multiples
// of TILE: the search space allows it only then.
//
// Macros
//   TILE         edge length of the square tiles and of the block of threads
//   PAD          floats of padding per row in shared memory, so that the rows of a tile start in different banks
//   UNROLL       products per iteration of the inner loop
//   GUARDED      1: correct for any M, N, K; 0: multiples of TILE only
//
// Launch: TILE x TILE threads; grid.x counts tiles down the rows of C, grid.y across its columns.
//
// Next: sgemm_2d.cu moves the reuse into registers.

#ifndef TILE
#define TILE 16
#define PAD 0
#define UNROLL 16
#define GUARDED 1
#endif

constexpr int K_UNROLL = UNROLL;  // a pragma requires a constant, not a macro

extern "C" __global__ void __launch_bounds__(TILE * TILE)
matmul_tiled(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, int M, int N, int K)
{
    __shared__ float tile_A[TILE][TILE + PAD];
    __shared__ float tile_B[TILE][TILE + PAD];

    const int tx = threadIdx.x;
    const int ty = threadIdx.y;
    // 64-bit from here on: row * K and k * N exceed 2^31 in large matrices.
    const size_t row = static_cast<size_t>(blockIdx.x) * TILE + ty;
    const size_t column = static_cast<size_t>(blockIdx.y) * TILE + tx;

    float sum = 0.0f;
    for (size_t k0 = 0; k0 < K; k0 += TILE) {
        const bool load_A = !GUARDED || (row < M && k0 + tx < K);
        const bool load_B = !GUARDED || (k0 + ty < K && column < N);
        tile_A[ty][tx] = load_A ? A[row * K + k0 + tx] : 0.0f;
        tile_B[ty][tx] = load_B ? B[(k0 + ty) * N + column] : 0.0f;
        __syncthreads();

#pragma unroll K_UNROLL
        for (int k = 0; k < TILE; ++k) sum += tile_A[ty][k] * tile_B[k][tx];
        __syncthreads();
    }
    if (!GUARDED || (row < M && column < N)) C[row * N + column] = sum;
}
