// Convolution of an image with a filter in constant memory, fp32, row-major; zero outside the image.
//
//     out[y, x] = sum over i, j of filter[i, j] * image[y + i - R, x + j - R]        R = K / 2
//
// All threads of a warp read the same filter element at a time, which constant memory broadcasts. A block loads its tile
// of the image with a halo of R cells into shared memory; each thread computes ROWS outputs of a column, at a stride of
// BY, so that accesses of a warp stay coalesced.
//
// Macros
//   K         side of the filter, odd
//   BX, BY    threads of a block across and down
//   ROWS      outputs of a thread
//   UNROLL    rows of the filter that are unrolled; 1 keeps the loop

__constant__ float d_filter[K * K];

constexpr int R = K / 2;
constexpr int TILE_W = BX;
constexpr int TILE_H = BY * ROWS;

__global__ void __launch_bounds__(BX * BY)
convolution(const float* __restrict__ image, float* __restrict__ out, int H, int W)
{
    __shared__ float tile[TILE_H + 2 * R][TILE_W + 2 * R];
    const int x0 = blockIdx.x * TILE_W;
    const int y0 = blockIdx.y * TILE_H;

    for (int i = threadIdx.y; i < TILE_H + 2 * R; i += BY)
        for (int j = threadIdx.x; j < TILE_W + 2 * R; j += BX) {
            const int y = y0 + i - R, x = x0 + j - R;
            const bool inside = y >= 0 && y < H && x >= 0 && x < W;
            tile[i][j] = inside ? image[static_cast<long long>(y) * W + x] : 0.0f;
        }
    __syncthreads();

    float sum[ROWS] = {};
#pragma unroll UNROLL
    for (int i = 0; i < K; ++i)
#pragma unroll
        for (int j = 0; j < K; ++j)
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
                sum[row] += d_filter[i * K + j] * tile[threadIdx.y + row * BY + i][threadIdx.x + j];

    const int x = x0 + threadIdx.x;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const int y = y0 + threadIdx.y + row * BY;
        if (y < H && x < W) out[static_cast<long long>(y) * W + x] = sum[row];
    }
}
