// Streaming the tiles of an operand from global to shared memory, at any size and alignment.
//
// The widest copy that all rows of the matrix allow (16, 8 or 4 bytes, or single 16-bit elements through registers) is
// determined once, from the pointer and the pitch. Chunks beyond the matrix are zero-filled. The swizzle defines the
// position of a chunk in a tile: `Swizzle::place(row, chunk)`, in chunks from the start of the tile.
#pragma once

#include "cp_async.cuh"

constexpr int CHUNK_BYTES = 16;  // widest copy of a thread

// A tile is OUTER rows of op(A), or columns of op(B), by DEPTH of k. In memory and in the tile, either k or outer runs
// along the rows. Per tile, a thread copies one chunk and those ROWS_A_TRIP, 2 * ROWS_A_TRIP, ... rows below it.
template <typename Element, int OUTER, int DEPTH, bool K_ALONG_ROWS, int THREADS, typename Swizzle>
struct Stream {
    static constexpr int CHUNK = CHUNK_BYTES / static_cast<int>(sizeof(Element));  // elements per chunk
    static constexpr int ROW = K_ALONG_ROWS ? DEPTH : OUTER;
    static constexpr int ROWS = K_ALONG_ROWS ? OUTER : DEPTH;
    static constexpr int TILE_BYTES = ROWS * ROW * static_cast<int>(sizeof(Element));
    static constexpr int ROW_CHUNKS = ROW / CHUNK;
    static constexpr int ROWS_A_TRIP = THREADS / ROW_CHUNKS;
    static constexpr int TRIPS = (ROWS - 1) / ROWS_A_TRIP + 1;
    static_assert(THREADS % ROW_CHUNKS == 0, "a trip must cover whole rows");

    const Element* from;  // the thread's first chunk of the next tile
    int pitch;            // elements from row to row in memory
    int rows_left;        // inside the matrix, from the thread's first row and column on; may be <= 0
    int columns_left;
    int granule;          // bytes per copy: 16, 8, 4 or 2

    __device__ __forceinline__ Stream(const Element* matrix, int first_outer, int outer, int first_k, int K)
    {
        pitch = K_ALONG_ROWS ? K : outer;
        const int row = (K_ALONG_ROWS ? first_outer : first_k) + row_in_tile();
        const int column = (K_ALONG_ROWS ? first_k : first_outer) + chunk_in_row() * CHUNK;
        from = matrix + static_cast<size_t>(row) * pitch + column;
        rows_left = (K_ALONG_ROWS ? outer : K) - row;
        columns_left = pitch - column;
        const unsigned pitch_bytes = pitch * static_cast<unsigned>(sizeof(Element));
        const unsigned bits = static_cast<unsigned>(reinterpret_cast<size_t>(matrix)) | pitch_bytes | CHUNK_BYTES;
        granule = bits & -bits;  // the lowest set bit: the largest power of 2 that divides all three
    }

    static __device__ __forceinline__ int row_in_tile() { return threadIdx.x / ROW_CHUNKS; }
    static __device__ __forceinline__ int chunk_in_row() { return threadIdx.x % ROW_CHUNKS; }

    template <int GRANULE>
    __device__ __forceinline__ void copy_chunk(unsigned char* tile, const Element* source, int trip) const
    {
        const int row = trip * ROWS_A_TRIP;
        if (ROWS % ROWS_A_TRIP != 0 && row_in_tile() + row >= ROWS) return;
        unsigned char* to = tile + Swizzle::place(row_in_tile() + row, chunk_in_row()) * CHUNK_BYTES;
        const int inside = row < rows_left ? columns_left : 0;
        if constexpr (GRANULE > 2) {
            constexpr int AT_ONCE = GRANULE / sizeof(Element);
#pragma unroll
            for (int i = 0; i < CHUNK; i += AT_ONCE)
                cp_async<GRANULE>(to + i * sizeof(Element), source + i, i < inside ? GRANULE : 0);
        } else {
            unsigned element[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) element[i] = i < inside ? source[i] : 0;
            *reinterpret_cast<uint4*>(to) = {element[0] | element[1] << 16, element[2] | element[3] << 16,
                                             element[4] | element[5] << 16, element[6] | element[7] << 16};
        }
    }

    template <int GRANULE>
    __device__ __forceinline__ void copy_chunks(unsigned char* tile) const
    {
        const Element* source = from;
        const size_t stride = static_cast<size_t>(ROWS_A_TRIP) * pitch;
        constexpr int AT_ONCE = GRANULE == 16 ? TRIPS : 1;  // only the common path is unrolled
#pragma unroll AT_ONCE
        for (int trip = 0; trip < TRIPS; ++trip, source += stride) copy_chunk<GRANULE>(tile, source, trip);
    }

    // Starts the copy of the next tile.
    __device__ __forceinline__ void copy(unsigned char* tile)
    {
        if (granule == 16) copy_chunks<16>(tile);
        else if (granule == 8) copy_chunks<8>(tile);
        else if (sizeof(Element) == 4 || granule == 4) copy_chunks<4>(tile);
        else copy_chunks<2>(tile);
        from += K_ALONG_ROWS ? DEPTH : static_cast<size_t>(DEPTH) * pitch;
        (K_ALONG_ROWS ? columns_left : rows_left) -= DEPTH;
    }
};
