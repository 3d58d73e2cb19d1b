// A tile of C of which each block of a cluster has summed a part of K: they add the parts up and write C together.
//
// Each block leaves its part in its own shared memory. After a barrier of the cluster, each adds up a share of the tile
// from all of them and writes it to C:
//
//     block 0   part 0 in shared memory   [ share 0 | share 1 | share 2 ]      share 0: part 0 + part 1 + part 2
//     block 1   part 1                    [ share 0 | share 1 | share 2 ]      share 1: part 1 + part 2 + part 0
//     block 2   part 2                    [ share 0 | share 1 | share 2 ]      share 2: part 2 + part 0 + part 1
//
// Each begins with its own part, so that they do not all read from one block at a time; a number is always added up in
// the same order. Nothing goes through a workspace, and no block reads all parts alone. A share is made of quads, 4
// neighbours in a row, taken in turn by the threads of the cluster. Rows beyond C are neither left nor read.
#pragma once

#include "cluster.cuh"
#include "output_quads.cuh"

// BLOCKS of THREADS threads share a tile.
template <int ROWS, int COLUMNS, int BLOCKS, int THREADS>
struct ClusterTile {
    static constexpr int QUAD = 4;
    static constexpr int ROW_QUADS = COLUMNS / QUAD;
    static constexpr int PITCH = COLUMNS + 8;  // floats; with the 8, neighbouring rows begin in different banks
    static constexpr int BYTES = ROWS * PITCH * sizeof(float);
    static constexpr int STEP = BLOCKS * THREADS;  // quads from one of a thread to its next
    static constexpr int QUADS = (ROWS * ROW_QUADS - 1) / STEP + 1;  // of a thread
    static constexpr int AT_ONCE = QUADS < 4 ? QUADS : 4;  // of them on their way to it

    // Leaves the sums of a strip, as wgmma.cuh draws them, in the part that begins at `part`. The strip begins at row
    // `first` of the tile, of which `rows` exist.
    static __device__ __forceinline__ void leave(float* part, const float (&sum)[COLUMNS / 2], int first, int rows)
    {
        const int lane = threadIdx.x % 32;
        const int row = first + threadIdx.x % 128 / 32 * 16 + lane / 4;
        float* to = part + row * PITCH + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (row + half * 8 < rows)
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i += 4)
                    *reinterpret_cast<float2*>(to + half * 8 * PITCH + i * 2) = {sum[i + half * 2], sum[i + half * 2 + 1]};
    }

    // Writes this block's share of the tile that begins at (row, column) of C; `rows` of it exist.
    template <typename Element, typename Out>
    static __device__ __forceinline__ void write(const float* part, int rank, const OutputQuads<Element, Out>& to, int row,
                                                 int column, int rows)
    {
        const int count = min(rows, ROWS) * ROW_QUADS;
#pragma unroll 1
        for (int first = rank * THREADS + threadIdx.x; first < count; first += AT_ONCE * STEP) {
            float sum[AT_ONCE][QUAD] = {};
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int quad = first + i * STEP;
                if (quad < count) add_up(sum[i], part + quad / ROW_QUADS * PITCH + quad % ROW_QUADS * QUAD, rank);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int quad = first + i * STEP;
                if (quad < count) to.update(row + quad / ROW_QUADS, column + quad % ROW_QUADS * QUAD, sum[i]);
            }
        }
    }

    // Adds up the quads that lie in all blocks where `here` lies in this one, of number `rank`.
    static __device__ __forceinline__ void add_up(float (&sum)[QUAD], const float* here, int rank)
    {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const int block = rank + i < BLOCKS ? rank + i : rank + i - BLOCKS;
            const float4 quad = load_from_rank(reinterpret_cast<const float4*>(here), block);
            sum[0] += quad.x;
            sum[1] += quad.y;
            sum[2] += quad.z;
            sum[3] += quad.w;
        }
    }
};
