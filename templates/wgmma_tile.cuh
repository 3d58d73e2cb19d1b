// A tile of an operand in shared memory, as written by TMA and read by wgmma.
//
// The tile is EXTENT rows of A, or columns of B, by DEPTH of k. It consists of slabs of 128-byte rows, 64 elements
// each, as drawn in wgmma.cuh: along k if the operand is K_MAJOR in memory, else along its rows or columns. A box of
// the tensor map is a slab, or a share of its rows: SHARERS blocks of a cluster need the same tile, and each multicasts
// an equal share to all of them.
#pragma once

#include "tma.cuh"
#include "wgmma.cuh"

template <bool K_MAJOR, int EXTENT, int DEPTH, int SHARERS>
struct WgmmaTile {
    static constexpr int SLAB_ROW = 128;      // bytes, the widest swizzle
    static constexpr int SLAB_ELEMENTS = 64;  // 16-bit elements per row

    static constexpr int MN_MAJOR = K_MAJOR ? 0 : 1;
    static constexpr int ROWS = K_MAJOR ? EXTENT : DEPTH;
    static constexpr int SLABS = ((K_MAJOR ? DEPTH : EXTENT) + SLAB_ELEMENTS - 1) / SLAB_ELEMENTS;
    static constexpr int SLAB_BYTES = ROWS * SLAB_ROW;
    static constexpr int BYTES = SLABS * SLAB_BYTES;
    static constexpr int SHARE = ROWS / SHARERS;
    static_assert(DEPTH % SLAB_ELEMENTS == 0, "a tile is whole slabs deep");
    static_assert(ROWS % SHARERS == 0 && SHARE % 8 == 0, "a share is made of whole swizzle patterns");

    // Issues the copies of this block's share of the tile at row or column `first` and at `k`.
    static __device__ __forceinline__ void load(unsigned to, const TensorMap& map, unsigned barrier, int first, int k,
                                                int batch, int share, unsigned short sharers)
    {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const int along = (K_MAJOR ? k : first) + slab * SLAB_ELEMENTS;
            const int across = (K_MAJOR ? first : k) + share * SHARE;
            tma_load<SHARERS>(to + slab * SLAB_BYTES + share * SHARE * SLAB_ROW, map, barrier, along, across, batch,
                              sharers);
        }
    }

    // Descriptor of the piece at row or column `first` (a multiple of 64) and at `k` (of 16) within the tile.
    static __device__ __forceinline__ unsigned long long piece(unsigned tile, int first, int k)
    {
        const int along = K_MAJOR ? k : first;
        const int across = K_MAJOR ? first : k;
        return wgmma_operand(tile + along / SLAB_ELEMENTS * SLAB_BYTES + across * SLAB_ROW + along % SLAB_ELEMENTS * 2,
                             SLAB_BYTES);
    }
};
