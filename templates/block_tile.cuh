// The block tile of C in `sgemm` and `sgemm_ws`, which define the macros used here: work distribution, main loop over
// k, and epilogue. Loading the tiles of A and B into shared memory is left to the two templates.
//
// With FRAGMENTS = 2, a thread reads the fragments of the next k before it multiplies those of the current one, across
// tile boundaries too.
#pragma once

#include "operand_tile.cuh"
#include "share.cuh"
#include "split_k.cuh"
#include "thread_tile.cuh"
#include "write_tile.cuh"

constexpr int WARP = 32;
constexpr int WARPS_X = BN / WN;
constexpr int WARPS_Y = BM / WM;
constexpr int LANES_X = WN / TN;
constexpr int LANES_Y = WM / TM;
constexpr int MULTIPLIERS = WARP * WARPS_X * WARPS_Y;  // threads that multiply

static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the block");
static_assert(LANES_X * LANES_Y == WARP && LANES_X * TN == WN && LANES_Y * TM == WM, "lanes must tile the warp");
static_assert(BK % UNROLL == 0 && UNROLL % 8 == 0, "unrolled steps must divide the tile, and swizzles them");

using LayoutA = TileLayout<BM, BK, !TRANS_A, SWIZZLE>;
using LayoutB = TileLayout<BN, BK, TRANS_B, SWIZZLE>;

template <typename Layout, int THREADS>
using CarrierOf = Carrier<Layout, VEC, ASYNC == 2 || (ASYNC == 1 && !Layout::ALONG_K), THREADS>;

struct Stage {
    float A[LayoutA::FLOATS];
    float B[LayoutB::FLOATS];
};

__device__ __forceinline__ Share share_of_block(int M, int N, int K)
{
    return share_of(blockIdx.x, (M - 1) / BM + 1, (N - 1) / BN + 1, (K - 1) / BK + 1, GROUP, SPLIT_K);
}

// Position in the block tile of computing thread number `thread`.
struct Owner {
    unsigned thread;
    int warp, lane_x, lane_y;
    int row, column;  // origin of its warp tile

    __device__ __forceinline__ explicit Owner(unsigned thread)
        : thread(thread), warp(thread / WARP), lane_x(thread % WARP % LANES_X), lane_y(thread % WARP / LANES_X),
          row(warp / WARPS_X * WM), column(warp % WARPS_X * WN)
    {
    }
};

// sum += A * B over `steps` tiles, starting with `stage`. Once a tile has been read completely, `turn(more)` returns
// the next one, or any readable stage if there are no more.
template <typename Turn>
__device__ __forceinline__ void multiply(float (&sum)[TM * TN], const Owner& owner, int steps, const Stage& stage,
                                         const Turn& turn)
{
    const unsigned first_A = owner.row + owner.lane_y * STRIP;  // first row and first column of this thread
    const unsigned first_B = owner.column + owner.lane_x * STRIP;
    const float* lines_A = stage.A + first_A;
    const float* lines_B = stage.B + first_B;
    float a[FRAGMENTS][TM];
    float b[FRAGMENTS][TN];
    const auto read = [&](int k) {
        read_fragment<LayoutA, LANES_Y>(a[k % FRAGMENTS], lines_A, k);
        read_fragment<LayoutB, LANES_X>(b[k % FRAGMENTS], lines_B, k);
    };
    if (FRAGMENTS == 2) read(0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll 1
        for (int first_k = 0; first_k < BK; first_k += UNROLL) {
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                if (FRAGMENTS == 1) {
                    read(k);
                    add_outer_product<TM, TN>(sum, a[0], b[0]);
                }
                if (k + 1 == UNROLL && first_k + UNROLL == BK) {
                    const Stage& next = turn(step + 1 < steps);
                    lines_A = next.A + first_A;
                    lines_B = next.B + first_B;
                } else if (k + 1 == UNROLL) {
                    lines_A += UNROLL * LayoutA::PITCH;
                    lines_B += UNROLL * LayoutB::PITCH;
                }
                if (FRAGMENTS == 2) {
                    read((k + 1) % UNROLL);
                    add_outer_product<TM, TN>(sum, a[k % FRAGMENTS], b[k % FRAGMENTS]);
                }
            }
        }
    }
}

// Reduce the parts of K and write C from the block that finishes last. The computing threads synchronize at named
// barrier BARRIER; all tiles have been consumed, so their shared memory, `smem`, is reused.
template <int BARRIER>
__device__ __forceinline__ void deliver(float (&sum)[TM * TN], const Owner& owner, const Share& share, Output to,
                                        float* partials, float* totals, unsigned* counters, float* smem)
{
    if (SPLIT_K > 1) {
        float* parts = NONDETERMINISTIC ? totals : partials;
        parts += share.tile_number * split_k_floats<MULTIPLIERS, TM * TN>(SPLIT_K, NONDETERMINISTIC);
        unsigned* tickets = counters + share.tile_number;
        if (!split_k_finish<MULTIPLIERS, NONDETERMINISTIC>(sum, parts, tickets, share.split, SPLIT_K, owner.thread,
                                                           BARRIER))
            return;
    }

    to.data += static_cast<size_t>(share.product) * to.rows * to.columns;
    const int row = share.tile.row * BM + owner.row;
    const int column = share.tile.column * BN + owner.column;
    if (!STAGED_STORE && to.vectors()) {
        write_directly<TM, TN, LANES_Y, LANES_X>(to, sum, row, column, owner.lane_y, owner.lane_x);
    } else {
        asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(MULTIPLIERS) : "memory");
        write_staged<TM, TN, LANES_Y, LANES_X>(to, sum, row, column, owner.lane_y, owner.lane_x,
                                               smem + owner.warp * (LANES_Y * WN));
    }
}
