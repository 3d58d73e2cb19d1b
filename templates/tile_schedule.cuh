// Assignment of tiles of C and parts of K to blocks.
//
// Work is divided into units: a tile for each block of a cluster, and one of SPLITS parts of K. There are two
// schedules, with the same members.
#pragma once

#include "raster.cuh"

// Work of one block in one unit.
struct Work {
    int row, column, batch;  // of the tile's first element
    int tile;                // index among all tiles
    int split;
    int first_k, depth;  // its part of K; the depth is in stages of DEPTH

    template <int DEPTH, int SPLITS>
    __device__ __forceinline__ void take_part(int K, int part)
    {
        const long long k_tiles = (K - 1) / DEPTH + 1;
        const int begin = static_cast<int>(k_tiles * part / SPLITS);
        split = part;
        first_k = begin * DEPTH;
        depth = static_cast<int>(k_tiles * (part + 1) / SPLITS) - begin;
    }
};

// Persistent blocks. Clusters are numbered from 0; cluster c of n takes units c, c + n, c + 2n, ...: units that run
// concurrently are adjacent in C (raster.cuh), and all tiles of one part of K precede the next part.
//
// A tile has ROWS x COLUMNS elements and advances DEPTH of k at a time; a cluster is BLOCKS_M x BLOCKS_N blocks; bands
// are BAND tiles high, or wide if ACROSS.
template <int ROWS, int COLUMNS, int DEPTH, int BLOCKS_M, int BLOCKS_N, int SPLITS, int BAND, bool ACROSS>
struct TileSchedule {
    static constexpr int BLOCKS = BLOCKS_M * BLOCKS_N;

    int M, N, K, batches;
    int clusters_m, clusters_n;  // number of clusters along M and N

    __device__ __forceinline__ TileSchedule(int M, int N, int K, int batches)
        : M(M), N(N), K(K), batches(batches),
          clusters_m((M - 1) / (ROWS * BLOCKS_M) + 1), clusters_n((N - 1) / (COLUMNS * BLOCKS_N) + 1)
    {
    }

    __device__ __forceinline__ int units() const { return clusters_m * clusters_n * batches * SPLITS; }
    __device__ __forceinline__ int first() const { return blockIdx.x / BLOCKS; }
    __device__ __forceinline__ int step() const { return gridDim.x / BLOCKS; }

    // Work of block `rank` of its cluster.
    __device__ __forceinline__ Work work(int unit, int rank) const
    {
        const int tiles = clusters_m * clusters_n;
        const int round = unit < tiles ? 0 : unit / tiles;  // no needless division before the first load
        const int linear = unit - round * tiles;
        const Tile at =
            ACROSS ? raster(linear, clusters_n, clusters_m, BAND) : raster(linear, clusters_m, clusters_n, BAND);
        Work work;
        work.row = ((ACROSS ? at.column : at.row) * BLOCKS_M + rank % BLOCKS_M) * ROWS;
        work.column = ((ACROSS ? at.row : at.column) * BLOCKS_N + rank / BLOCKS_M) * COLUMNS;
        work.batch = round / SPLITS;
        work.tile = (work.batch * tiles + linear) * BLOCKS + rank;
        work.take_part<DEPTH, SPLITS>(K, round % SPLITS);
        return work;
    }
};

// One unit per block, determined by the grid: SPLITS consecutive blocks along x hold the parts of a tile, y counts
// tiles along N, z the batch.
template <int ROWS, int COLUMNS, int DEPTH, int SPLITS>
struct OneTile {
    int M, N, K;

    __device__ __forceinline__ OneTile(int M, int N, int K, int) : M(M), N(N), K(K) {}

    __device__ __forceinline__ int units() const { return 1; }
    __device__ __forceinline__ int first() const { return 0; }
    __device__ __forceinline__ int step() const { return 1; }

    __device__ __forceinline__ Work work(int = 0, int = 0) const
    {
        Work work = {};
        work.row = blockIdx.x / SPLITS * ROWS;
        work.column = blockIdx.y * COLUMNS;
        work.batch = blockIdx.z;
        work.take_part<DEPTH, SPLITS>(K, blockIdx.x % SPLITS);
        return work;
    }
};
