// A tile of C whose partial sums over K are distributed over the blocks of a cluster: they reduce and write it
// together.
//
// Each block stores its partial sums in its own shared memory. After a cluster barrier, each block reduces one share of
// the tile over all blocks and writes it to C:
//
//     block 0   part 0 in shared memory   [ share 0 | share 1 | share 2 ]      share 0: part 0 + part 1 + part 2
//     block 1   part 1                    [ share 0 | share 1 | share 2 ]      share 1: part 1 + part 2 + part 0
//     block 2   part 2                    [ share 0 | share 1 | share 2 ]      share 2: part 2 + part 0 + part 1
//
// Each block begins with its own part, so that they do not all read from the same block at once; every element is
// always added in the same order. No workspace is needed, and no block reads all parts alone. A share consists of
// quads, 4 adjacent elements of a row, assigned to the threads of the cluster in turn. Rows beyond C are neither stored
// nor read.
#pragma once

#include "cluster.cuh"
#include "output_quads.cuh"

// A tile shared by BLOCKS blocks of THREADS threads each.
template <int ROWS, int COLUMNS, int BLOCKS, int THREADS>
struct ClusterTile {
    static constexpr int QUAD = 4;
    static constexpr int ROW_QUADS = COLUMNS / QUAD;
    static constexpr int PITCH = COLUMNS + 8;  // floats; the padding of 8 shifts adjacent rows to different banks
    static constexpr int BYTES = ROWS * PITCH * sizeof(float);
    static constexpr int STEP = BLOCKS * THREADS;  // distance between two quads of a thread
    static constexpr int QUADS = (ROWS * ROW_QUADS - 1) / STEP + 1;  // per thread
    static constexpr int AT_ONCE = QUADS < 4 ? QUADS : 4;  // quads in flight

    // Stores the accumulators of a strip, laid out as in wgmma.cuh, in the part at `part`. The strip begins at row
    // `first` of the tile, of which `rows` rows exist.
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

    // Writes this block's share of the tile at (row, column) of C, of which `rows` rows exist.
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

    // Reduces the quads at the offset of `here` over all blocks, starting with this one, number `rank`.
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
