// C = alpha * sum + beta * C for the tile of a warp whose lanes own strips of it (see thread_tile.cuh).
//
// Direct: a lane writes its strips, 16 bytes at once; requires rows of C that start on 16-byte boundaries. Staged: the
// warp passes a few rows at a time through shared memory, so that adjacent lanes write adjacent floats, in full lines
// for any alignment.
//
// If beta is 0, C is not read: it may hold NaN.
#pragma once

#include "thread_tile.cuh"

struct Output {
    float* data;
    int rows;
    int columns;  // also the number of floats from a row to the next
    float alpha;
    float beta;

    __device__ __forceinline__ bool vectors() const
    {
        return columns % STRIP == 0 && reinterpret_cast<size_t>(data) % sizeof(float4) == 0;
    }

    __device__ __forceinline__ float updated(float sum, const float* old) const
    {
        return alpha * sum + (beta != 0.0f ? beta * *old : 0.0f);
    }

    __device__ __forceinline__ void write(int row, int column, float sum) const
    {
        float* to = data + static_cast<size_t>(row) * columns + column;
        if (row < rows && column < columns) *to = updated(sum, to);
    }

    __device__ __forceinline__ void write(int row, int column, float4 sum) const
    {
        float* to = data + static_cast<size_t>(row) * columns + column;
        if (row >= rows || column >= columns) return;
        const float4 old = beta != 0.0f ? *reinterpret_cast<const float4*>(to) : float4{};
        *reinterpret_cast<float4*>(to) = {updated(sum.x, &old.x), updated(sum.y, &old.y), updated(sum.z, &old.z),
                                          updated(sum.w, &old.w)};
    }
};

// A warp tile begins at (row, column) of C; the calling lane is at (lane_y, lane_x) of LANES_Y x LANES_X.
template <int ROWS, int COLUMNS, int LANES_Y, int LANES_X>
__device__ __forceinline__ void write_directly(const Output& C, const float (&sum)[ROWS * COLUMNS], int row, int column,
                                               int lane_y, int lane_x)
{
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int n = 0; n < COLUMNS; n += STRIP) {
            const float* strip = &sum[m * COLUMNS + n];
            C.write(row + owned<LANES_Y>(m, lane_y), column + owned<LANES_X>(n, lane_x),
                    float4{strip[0], strip[1], strip[2], strip[3]});
        }
}

// The same for any C, through `slab`: LANES_Y rows of the warp tile in shared memory, private to the warp.
template <int ROWS, int COLUMNS, int LANES_Y, int LANES_X>
__device__ __forceinline__ void write_staged(const Output& C, const float (&sum)[ROWS * COLUMNS], int row, int column,
                                             int lane_y, int lane_x, float* slab)
{
    constexpr int WIDTH = COLUMNS * LANES_X;
    const int lane = lane_y * LANES_X + lane_x;
    const bool vectors = C.vectors();
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n += STRIP) {
            const float* strip = &sum[m * COLUMNS + n];
            *reinterpret_cast<float4*>(slab + lane_y * WIDTH + owned<LANES_X>(n, lane_x)) = {strip[0], strip[1],
                                                                                             strip[2], strip[3]};
        }
        __syncwarp();
        if (vectors) {
#pragma unroll 1
            for (int i = lane * STRIP; i < LANES_Y * WIDTH; i += LANES_Y * LANES_X * STRIP)
                C.write(row + owned<LANES_Y>(m, i / WIDTH), column + i % WIDTH, *reinterpret_cast<float4*>(slab + i));
        } else {
#pragma unroll 1
            for (int i = lane; i < LANES_Y * WIDTH; i += LANES_Y * LANES_X)
                C.write(row + owned<LANES_Y>(m, i / WIDTH), column + i % WIDTH, slab[i]);
        }
        __syncwarp();
    }
}
