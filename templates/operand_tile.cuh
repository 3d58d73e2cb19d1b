// Copying the tiles of one operand from global to shared memory.
//
// A tile is ROWS x DEPTH: rows of A or columns of B, by steps of k. In shared memory it always has one line per k, so
// that the rows a thread needs for one k are contiguous and one 128-bit read returns 4 of them. In global memory either
// the rows of one k are contiguous (ALONG_K false), and the tile is copied as it is, or the k of one row are (ALONG_K
// true), and it is transposed by the copy:
//
//     global, ALONG_K false     global, ALONG_K true        shared
//         k0  r0 r1 r2 ...          r0  k0 k1 k2 ...            k0  r0 r1 r2 ... pad
//         k1  r0 r1 r2 ...          r1  k0 k1 k2 ...            k1  r0 r1 r2 ... pad
//
// CP_ASYNC: cp.async, which bypasses registers but can transpose only one float at a time. Otherwise `start` loads a
// tile into registers, WIDTH floats per load, and `finish` stores it: fewer instructions if the tile is transposed.
//
// When transposing, a warp reads 8 k of several rows, whole 32-byte sectors, and writes them to as many lines of shared
// memory, which would all fall into the same banks. Either 4 floats of padding after each line shift the next one by 4
// banks; or, without padding, the lines are swizzled: chunks of 4 floats are permuted, chunk p of line k to p ^ k % 8.
//
//     padded     k0  p0 p1 p2 p3 ... pad               swizzled    k0  p0 p1 p2 p3 p4 p5 p6 p7 ...
//                k1      p0 p1 p2 p3 ... pad                       k1  p1 p0 p3 p2 p5 p4 p7 p6 ...
//                k2          p0 p1 p2 p3 ... pad                   k2  p2 p3 p0 p1 p6 p7 p4 p5 ...
//
// The fast path copies whole chunks of WIDTH floats and skips rows beyond the matrix. It requires every row (or every
// k) to start on a boundary of WIDTH floats, and a tile that K fills. Other tiles, at most one per block where vectors
// fit, take the careful path, float by float, with zero fill.
#pragma once

#include "cp_async.cuh"

// An operand from a block's first row on.
struct Operand {
    const float* data;
    unsigned pitch;  // floats from a row to the next (ALONG_K), or from a k to the next
    int rows;        // rows of the matrix from here on; may exceed the tile's
    int depth;       // extent of the matrix along k
};

// Layout of a tile in shared memory. A SWIZZLED tile must start on a 128-byte boundary.
template <int ROWS_, int DEPTH_, bool ALONG_K_, bool SWIZZLE_>
struct TileLayout {
    static constexpr int ROWS = ROWS_;
    static constexpr int DEPTH = DEPTH_;
    static constexpr bool ALONG_K = ALONG_K_;
    static constexpr bool SWIZZLED = SWIZZLE_ && ALONG_K;
    static constexpr int PITCH = ROWS + (ALONG_K && !SWIZZLE_ ? 4 : 0);  // floats from a k to the next
    static constexpr int FLOATS = DEPTH * PITCH;
    static_assert(!SWIZZLED || ROWS % 32 == 0, "8 pieces of a line trade places");

    // Bits that the position of a row within line k is XORed with.
    static __device__ constexpr unsigned swizzle(unsigned k) { return SWIZZLED ? k % 8 * 4 : 0; }
    static __device__ constexpr unsigned place(unsigned row, unsigned k) { return k * PITCH + (row ^ swizzle(k)); }
};

// The operand of batch index `product`, starting at tile number `tile` of its `rows` rows.
template <typename Layout>
__device__ __forceinline__ Operand operand_at(const float* data, int product, int tile, int rows, int depth)
{
    const int row = tile * Layout::ROWS;
    data += static_cast<size_t>(product) * rows * depth + static_cast<size_t>(row) * (Layout::ALONG_K ? depth : 1);
    return {data, static_cast<unsigned>(Layout::ALONG_K ? depth : rows), rows - row, depth};
}

template <typename Layout, int WIDTH, bool CP_ASYNC, int THREADS>
class Carrier {
public:
    // `first_k` is the start of the first tile, a multiple of DEPTH.
    __device__ __forceinline__ Carrier(const Operand& operand, int first_k)
        : from(operand), next(operand.data + offset(row(), first_k + k(), operand.pitch)), next_k(first_k)
    {
        const bool boundary = reinterpret_cast<size_t>(operand.data) % (WIDTH * sizeof(float)) == 0;
        vectors = WIDTH == 1 || (boundary && operand.pitch % WIDTH == 0);
    }

    // Issue the copy of the next tile. With or without CP_ASYNC, the caller commits the group afterwards.
    __device__ __forceinline__ void start(float* tile)
    {
        fast = vectors && next_k + DEPTH <= from.depth;
        if (!fast)
            send_carefully(tile);
        else if constexpr (CP_ASYNC)
            send(tile);
        else
            fetch();
        next_k += DEPTH;
        next += ALONG_K ? DEPTH : static_cast<size_t>(from.pitch) * DEPTH;
    }

    // Store to shared memory what `start` left in registers.
    __device__ __forceinline__ void finish(float* tile)
    {
        if constexpr (!CP_ASYNC)
            if (fast) stash(tile);
    }

private:
    static constexpr int ROWS = Layout::ROWS;
    static constexpr int DEPTH = Layout::DEPTH;
    static constexpr bool ALONG_K = Layout::ALONG_K;
    static constexpr int PIECE = ALONG_K && CP_ASYNC ? 1 : WIDTH;  // floats per copy
    static constexpr int BYTES = PIECE * sizeof(float);

    // The threads cover one span, all rows of one k or of 8 k, and then the next one.
    static constexpr int STEP = ALONG_K ? 8 : 1;
    static constexpr int WORD = ALONG_K ? PIECE : 1;  // floats of a chunk along k
    static constexpr int SPAN = ROWS * STEP / PIECE;
    static constexpr int SPANS_A_TRIP = THREADS > SPAN ? THREADS / SPAN : 1;
    static constexpr int TRIPS_A_SPAN = THREADS > SPAN ? 1 : SPAN / THREADS;
    static constexpr int TRIPS = (DEPTH / STEP * TRIPS_A_SPAN + SPANS_A_TRIP - 1) / SPANS_A_TRIP;
    static_assert(DEPTH % STEP == 0 && ROWS % PIECE == 0, "a tile is made of whole pieces");
    static_assert(THREADS % SPAN == 0 || SPAN % THREADS == 0, "threads and spans must divide each other");

    // Position of this thread's first chunk in a tile, and the offset of the chunk of a later trip from it.
    static __device__ __forceinline__ unsigned row()
    {
        const unsigned within = threadIdx.x % SPAN;
        return ALONG_K ? within / (STEP / WORD) : within * PIECE;
    }
    static __device__ __forceinline__ unsigned k()
    {
        return threadIdx.x / SPAN * STEP + (ALONG_K ? threadIdx.x % (STEP / WORD) * PIECE : 0);
    }
    static __device__ constexpr int rows_on(int trip) { return trip % TRIPS_A_SPAN * THREADS * PIECE / STEP; }
    static __device__ constexpr int k_on(int trip) { return trip / TRIPS_A_SPAN * SPANS_A_TRIP * STEP; }

    static __device__ __forceinline__ size_t offset(unsigned row, unsigned k, unsigned pitch)
    {
        return ALONG_K ? static_cast<size_t>(row) * pitch + k : static_cast<size_t>(k) * pitch + row;
    }

    __device__ __forceinline__ const float* source(int trip) const
    {
        return next + offset(rows_on(trip), k_on(trip), from.pitch);
    }
    // The offsets that no swizzle changes come last, as they are the same for all threads.
    __device__ __forceinline__ float* target(float* tile, int trip, int v = 0) const
    {
        return tile + Layout::place(row() + rows_on(trip) % 32, k() + v) + k_on(trip) * Layout::PITCH +
               rows_on(trip) / 32 * 32;
    }
    __device__ __forceinline__ bool in_tile(int trip) const
    {
        return k_on(trip) + SPANS_A_TRIP * STEP <= DEPTH || k_on(trip) + static_cast<int>(k()) < DEPTH;
    }
    __device__ __forceinline__ bool in_matrix(int trip) const
    {
        return rows_on(trip) + static_cast<int>(row()) < from.rows;
    }

    __device__ __forceinline__ void send(float* tile) const
    {
#pragma unroll
        for (int i = 0; i < TRIPS; ++i)
            if (in_tile(i)) cp_async<BYTES>(target(tile, i), source(i), in_matrix(i) ? BYTES : 0);
    }

    __device__ __forceinline__ void send_carefully(float* tile) const
    {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * DEPTH; i += THREADS) {
            const int row = ALONG_K ? i / DEPTH : i % ROWS;
            const int k = ALONG_K ? i % DEPTH : i / ROWS;
            const bool there = row < from.rows && next_k + k < from.depth;
            const float* data = from.data + offset(row, next_k + k, from.pitch);
            cp_async<sizeof(float)>(tile + Layout::place(row, k), data, there ? sizeof(float) : 0);
        }
    }

    __device__ __forceinline__ void fetch()
    {
#pragma unroll
        for (int i = 0; i < TRIPS; ++i) {
            cargo[i] = {};
            if (in_tile(i) && in_matrix(i)) cargo[i] = *reinterpret_cast<const Piece*>(source(i));
        }
    }

    __device__ __forceinline__ void stash(float* tile) const
    {
#pragma unroll
        for (int i = 0; i < TRIPS; ++i) {
            if (!in_tile(i)) break;
            if constexpr (ALONG_K) {
#pragma unroll
                for (int v = 0; v < PIECE; ++v) *target(tile, i, v) = cargo[i].lane[v];
            } else {
                *reinterpret_cast<Piece*>(target(tile, i)) = cargo[i];
            }
        }
    }

    struct __align__(BYTES) Piece {
        float lane[PIECE];
    };

    Operand from;
    const float* next;  // this thread's first chunk of the next tile
    int next_k;
    bool vectors;
    bool fast;
    Piece cargo[CP_ASYNC ? 1 : TRIPS];
};
