// Heat equation, five-point stencil, zero outside the grid: STEPS time steps in one launch (temporal tiling).
//
//     u'[y, x] = u[y, x] + r (u[y-1, x] + u[y+1, x] + u[y, x-1] + u[y, x+1] - 4 u[y, x])        r = 0.1
//
// A block reads a tile with a halo of STEPS cells and updates it STEPS times in shared memory; the valid part shrinks by
// one cell a step. More steps a launch read and write the grid less often, and compute the halo more often.
//
// Macros
//   BX, BY    threads of a block across and down
//   TX, TY    cells of the tile across and down, halo included
//   STEPS     time steps of a launch

__global__ void __launch_bounds__(BX * BY) heat(const float* __restrict__ u, float* __restrict__ out, int H, int W)
{
    __shared__ float tile[2][TY][TX];
    const int x0 = blockIdx.x * (TX - 2 * STEPS) - STEPS;
    const int y0 = blockIdx.y * (TY - 2 * STEPS) - STEPS;

    for (int i = threadIdx.y; i < TY; i += BY)
        for (int j = threadIdx.x; j < TX; j += BX) {
            const int y = y0 + i, x = x0 + j;
            const bool inside = y >= 0 && y < H && x >= 0 && x < W;
            tile[0][i][j] = inside ? u[static_cast<long long>(y) * W + x] : 0.0f;
        }
    __syncthreads();

#pragma unroll
    for (int step = 1; step <= STEPS; ++step) {
        const auto& from = tile[(step + 1) % 2];
        auto& to = tile[step % 2];
        for (int i = step + threadIdx.y; i < TY - step; i += BY)
            for (int j = step + threadIdx.x; j < TX - step; j += BX) {
                const int y = y0 + i, x = x0 + j;
                const bool inside = y >= 0 && y < H && x >= 0 && x < W;  // the boundary stays zero
                const float around = from[i - 1][j] + from[i + 1][j] + from[i][j - 1] + from[i][j + 1];
                to[i][j] = inside ? from[i][j] + 0.1f * (around - 4.0f * from[i][j]) : 0.0f;
            }
        __syncthreads();
    }

    for (int i = STEPS + threadIdx.y; i < TY - STEPS; i += BY)
        for (int j = STEPS + threadIdx.x; j < TX - STEPS; j += BX) {
            const int y = y0 + i, x = x0 + j;
            if (y < H && x < W) out[static_cast<long long>(y) * W + x] = tile[STEPS % 2][i][j];
        }
}

// The same for one cell a thread, in T, from all cells that it depends on.
template <typename T> __global__ void heat_reference(const float* u, float* out, int H, int W)
{
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= W || y >= H) return;
    constexpr int SIDE = 2 * STEPS + 1;
    T cells[2][SIDE][SIDE];
    auto inside = [&](int i, int j) {
        const int row = y + i - STEPS, column = x + j - STEPS;
        return row >= 0 && row < H && column >= 0 && column < W;
    };
    for (int i = 0; i < SIDE; ++i)
        for (int j = 0; j < SIDE; ++j)
            cells[0][i][j] = inside(i, j) ? u[static_cast<long long>(y + i - STEPS) * W + x + j - STEPS] : T(0);
    for (int step = 1; step <= STEPS; ++step)
        for (int i = step; i < SIDE - step; ++i)
            for (int j = step; j < SIDE - step; ++j) {
                const auto& from = cells[(step + 1) % 2];
                const T around = from[i - 1][j] + from[i + 1][j] + from[i][j - 1] + from[i][j + 1];
                cells[step % 2][i][j] = inside(i, j) ? from[i][j] + T(0.1f) * (around - 4 * from[i][j]) : T(0);
            }
    out[static_cast<long long>(y) * W + x] = static_cast<float>(cells[STEPS % 2][STEPS][STEPS]);
}
