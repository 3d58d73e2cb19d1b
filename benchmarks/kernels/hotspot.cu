// One step of heat diffusion on a chip. T: temperatures, P: power, R: new temperatures (ROWS x COLS, row-major);
// beyond the edges the temperature is 0.

#define TILE_X (BLOCK_X * PER_X)
#define TILE_Y (BLOCK_Y * PER_Y)

extern "C" __global__ void __launch_bounds__(BLOCK_X * BLOCK_Y, MIN_BLOCKS)
hotspot(const float* __restrict__ T, const float* __restrict__ P, float* __restrict__ R, float rx, float ry, float rz,
        float step, int ROWS, int COLS)
{
    __shared__ float tile[TILE_Y + 2][TILE_X + 2 + PAD];
#if STAGE_POWER
    __shared__ float power[TILE_Y][TILE_X];
#endif
    const int x0 = blockIdx.x * TILE_X, y0 = blockIdx.y * TILE_Y;
    #pragma unroll LOAD_UNROLL
    for (int j = threadIdx.y; j < TILE_Y + 2; j += BLOCK_Y)
        #pragma unroll
        for (int i = threadIdx.x; i < TILE_X + 2; i += BLOCK_X) {
            const int x = x0 + i - 1, y = y0 + j - 1;
            const bool inside = x >= 0 && x < COLS && y >= 0 && y < ROWS;
            tile[j][i] = inside ? T[(size_t)y * COLS + x] : 0.0f;
#if STAGE_POWER
            if (i >= 1 && i <= TILE_X && j >= 1 && j <= TILE_Y)
                power[j - 1][i - 1] = inside ? P[(size_t)y * COLS + x] : 0.0f;
#endif
        }
    __syncthreads();
    #pragma unroll
    for (int tj = 0; tj < PER_Y; ++tj)
        #pragma unroll
        for (int ti = 0; ti < PER_X; ++ti) {
            const int i = ti * BLOCK_X + threadIdx.x, j = tj * BLOCK_Y + threadIdx.y;
            const int x = x0 + i, y = y0 + j;
            if (x >= COLS || y >= ROWS)
                continue;
#if STAGE_POWER
            const float watts = power[j][i];
#else
            const float watts = P[(size_t)y * COLS + x];
#endif
            const float here = tile[j + 1][i + 1];
            R[(size_t)y * COLS + x] = here + step * (watts + (tile[j + 2][i + 1] + tile[j][i + 1] - 2.0f * here) * ry
                + (tile[j + 1][i + 2] + tile[j + 1][i] - 2.0f * here) * rx + (80.0f - here) * rz);
        }
}
