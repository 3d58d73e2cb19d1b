// Epilogue for sums distributed over threads, groups of warps and blocks: through shared memory to rows of C.
//
// Tensor cores leave each thread with pairs of floats scattered over its warp's tile. They pass through shared memory
// once, so that one thread gets 4 adjacent elements of a row, a quad, and reads and writes C with one access. If
// several groups of warps or several blocks hold parts of a tile, they are also reduced here, in a fixed order:
//
//     warps' registers  -->  [group][row][column] in shared memory  -->  thread t: quads t, t + THREADS, ... of C
//
// Several blocks may share a tile. On compute capability 9.0 they may form a cluster (up to 8 blocks along blockIdx.y):
// each reduces its share of the quads from the shared memory of all. Otherwise the parts go through a workspace, and
// the last block to arrive reduces them all (split_k.cuh).
#pragma once

#include "cluster.cuh"
#include "split_k.cuh"

constexpr int QUAD = 4;

// ROW_PITCH is the distance between rows in shared memory, in floats; GROUPS is the number of tiles of sums there.
template <int ROWS, int COLUMNS, int ROW_PITCH, int THREADS, int GROUPS, int SPLITS, bool IN_CLUSTER, bool BY_ATOMICS>
struct SharedSums {
    static constexpr int PITCH = ROW_PITCH;
    static constexpr int TILE_FLOATS = ROWS * PITCH;
    static constexpr int PEERS = IN_CLUSTER ? SPLITS : 1;
    static constexpr int QUADS = (ROWS * COLUMNS / QUAD - 1) / (THREADS * PEERS) + 1;  // per thread
    static constexpr bool SOME_HAVE_FEWER = ROWS * COLUMNS % (QUAD * THREADS * PEERS) != 0;
    static constexpr bool BY_WORKSPACE = SPLITS > 1 && !IN_CLUSTER;
    static constexpr size_t WORKSPACE_FLOATS = split_k_floats<THREADS, QUADS * QUAD>(SPLITS, BY_ATOMICS);

    // `tiles` holds the sums, just written. In the block (or blocks) with all parts of the tile, `write(row, column,
    // sums)` is called once for each quad of the tile. `parts` and `ticket` are the tile's share of the workspaces.
    // Must be called by all threads.
    template <typename Write>
    static __device__ __forceinline__ void deliver(float* tiles, float* parts, unsigned* ticket, const Write& write)
    {
        if constexpr (IN_CLUSTER) cluster_barrier();
        else __syncthreads();
        if constexpr (BY_WORKSPACE) {
            float mine[QUADS * QUAD] = {};
#pragma unroll
            for (int i = 0; i < QUADS; ++i) Quad(i).template add_to<GROUPS>(&mine[i * QUAD], tiles);
            if (!split_k_finish<THREADS, BY_ATOMICS>(mine, parts, ticket, blockIdx.y, SPLITS, threadIdx.x)) return;
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                const float* sum = &mine[i * QUAD];
                if (Quad(i).exists()) *Quad(i).in(tiles) = {sum[0], sum[1], sum[2], sum[3]};
            }
        }
#pragma unroll 4
        for (int i = 0; i < QUADS; ++i) {
            const Quad quad(i);
            float total[QUAD] = {};
            quad.template add_to<BY_WORKSPACE ? 1 : GROUPS>(total, tiles);
            if (quad.exists()) write(quad.row, quad.column, total);
        }
        if constexpr (IN_CLUSTER) cluster_barrier();  // shared memory must stay valid until the others have read it
    }

private:
    struct Quad {
        int row;
        int column;

        // Quad number i of this thread.
        __device__ __forceinline__ explicit Quad(int i)
        {
            const int peer = IN_CLUSTER ? blockIdx.y : 0;
            const int index = (i * PEERS + peer) * THREADS + threadIdx.x;
            row = index / (COLUMNS / QUAD);
            column = index % (COLUMNS / QUAD) * QUAD;
        }

        __device__ __forceinline__ bool exists() const { return !SOME_HAVE_FEWER || row < ROWS; }

        __device__ __forceinline__ float4* in(float* tile) const
        {
            return reinterpret_cast<float4*>(tile + row * PITCH + column);
        }

        // Adds the first PARTS tiles of all peers.
        template <int PARTS>
        __device__ __forceinline__ void add_to(float* sum, float* tiles) const
        {
            if (!exists()) return;
#pragma unroll
            for (int peer = 0; peer < PEERS; ++peer)
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    float4* here = in(tiles + part * TILE_FLOATS);
                    float4 quad;
                    if constexpr (IN_CLUSTER) quad = load_from_rank(here, peer);
                    else quad = *here;
                    sum[0] += quad.x;
                    sum[1] += quad.y;
                    sum[2] += quad.z;
                    sum[3] += quad.w;
                }
        }
    };
};
