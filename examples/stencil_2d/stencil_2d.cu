// Five-point stencil on an H x W grid, fp32, row-major; zero outside the grid.
//
//     out[y, x] = centre * u[y, x] + neighbour * (u[y-1, x] + u[y+1, x] + u[y, x-1] + u[y, x+1])
//
// Every cell is read for five outputs. A block loads its tile once, with a halo of one cell, into shared memory:
//
//        . h h h h h h .
//        h o o o o o o h        o  cells that the block computes, TILE_H x TILE_W
//        h o o o o o o h        h  halo: read, not computed
//        h o o o o o o h        .  corners: loaded with the rest, not used
//        . h h h h h h .
//
// The kernel is memory-bound: 6 FLOP for 8 bytes (read once, written once). The tile shape determines the overhead of
// the halo, (TILE_H + 2) * (TILE_W + 2) / (TILE_H * TILE_W) reads per cell, and the number of bytes in flight.
//
// Macros
//   BX, BY         threads per block across and down
//   COLUMNS, ROWS  cells per thread across and down, at strides of BX and BY: accesses of a warp stay coalesced
//   USE_SMEM       1: tile and halo in shared memory; 0: all five reads go to global memory and its caches
//
// Launch: BX x BY threads; grid.x counts tiles down the rows (its limit is 2^31 - 1, that of grid.y only 65,535), grid.y
// across.

#ifndef BX
#define BX 32
#define BY 8
#define COLUMNS 1
#define ROWS 4
#define USE_SMEM 1
#endif

constexpr int TILE_W = BX * COLUMNS;
constexpr int TILE_H = BY * ROWS;

// The grid with its boundary condition: zero outside.
struct Field {
    const float* u;
    int H;
    int W;

    __device__ float at(long long y, long long x) const
    {
        return y >= 0 && y < H && x >= 0 && x < W ? u[y * W + x] : 0.0f;
    }
};

extern "C" __global__ void __launch_bounds__(BX * BY)
stencil_2d(const float* __restrict__ u, float* __restrict__ out, int H, int W, float centre, float neighbour)
{
    const Field field = {u, H, W};
    // 64-bit: y * W exceeds 2^31 in large grids.
    const long long y0 = static_cast<long long>(blockIdx.x) * TILE_H;
    const long long x0 = static_cast<long long>(blockIdx.y) * TILE_W;

    __shared__ float tile[USE_SMEM ? TILE_H + 2 : 1][USE_SMEM ? TILE_W + 2 : 1];
    if (USE_SMEM) {
        for (int y = threadIdx.y; y < TILE_H + 2; y += BY)
            for (int x = threadIdx.x; x < TILE_W + 2; x += BX) tile[y][x] = field.at(y0 + y - 1, x0 + x - 1);
        __syncthreads();
    }
    const auto cell = [&](int y, int x) { return USE_SMEM ? tile[y + 1][x + 1] : field.at(y0 + y, x0 + x); };

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int y = threadIdx.y + i * BY;
            const int x = threadIdx.x + j * BX;
            if (y0 + y >= H || x0 + x >= W) continue;
            const float around = cell(y - 1, x) + cell(y + 1, x) + cell(y, x - 1) + cell(y, x + 1);
            out[(y0 + y) * W + x0 + x] = centre * cell(y, x) + neighbour * around;
        }
    }
}
