// SGEMM with every lever: C = alpha * op(A) * op(B) + beta * C in fp32 on the CUDA cores.
//
//     op(A) is M x K, op(B) is K x N, C is M x N, row-major, BATCH of each one after another.
//     A is stored M x K (or K x M where TRANS_A), B is stored K x N (or N x K where TRANS_B).
//
// Idea. An SM issues one instruction a cycle to each of its four groups of 32 lanes, and a multiply-add is one
// instruction: the share of multiply-adds among all instructions is the share of the peak that can be had. So tile on
// three levels, each to save instructions or bytes of the one above:
//
//     block   BM x BN of C    tiles of A and B in shared memory: a byte from global memory serves BM or BN sums
//     warp    WM x WN         lanes that share rows or columns read the same words of shared memory
//     thread  TM x TN         in registers: (TM + TN) / 4 reads for TM * TN multiply-adds, 6 for 128 with 16 x 8
//
// Who owns what. Threads own strips of 4 x 4 spread over their warp's tile, in the order that thread_tile.cuh draws; it
// also tells why the order of the multiply-adds decides how fast registers are read.
//
// The way of a tile (operand_tile.cuh): copied as it is, or transposed, so that in shared memory it lies k by k.
//
// The pipeline. STAGES tiles are in shared memory or on their way to it. When all warps have read a tile, its place is
// free for the one STAGES further on:
//
//     tile t, k = 0 ... BK - 2    multiply
//     tile t, k = BK - 1          already in registers: wait for tile t + 1, free tile t, send for tile t + STAGES,
//                                 read the first k of tile t + 1, then multiply
//
// With two FRAGMENTS a thread reads the words of the next k before it multiplies those of this one, across the border
// of tiles too.
//
// Few tiles leave SMs idle; SPLIT_K cuts K into parts for more blocks (split_k.cuh). Where NONDETERMINISTIC allows it,
// they add up by atomics.
//
// Any M, N, K, any pointers: rows that do not start on a boundary of VEC floats are copied float by float.
//
// Macros
//   BM, BN        rows and columns of C that a block computes
//   BK            depth of the tiles in shared memory
//   WM, WN        rows and columns that a warp computes
//   TM, TN        rows and columns that a thread computes, multiples of 4
//   STAGES        tiles in shared memory, 1 to 5
//   VEC           floats in one global load: 1, 2 or 4
//   ASYNC         0: tiles go through registers; 1: only those that are transposed do, others by cp.async;
//                 2: all by cp.async, which transposes float by float
//   PAD           floats after each line of a transposed tile; 4 spreads its columns over more banks
//   UNROLL        steps of k unrolled
//   FRAGMENTS     1: read, then multiply; 2: read ahead
//   GROUP         rows of tiles that blocks walk down together (raster.cuh)
//   SPLIT_K       parts of K
//   STAGED_STORE  1: C is always written through shared memory, in whole lines; 0: only where its rows do not start
//                 on 16-byte boundaries
//   MIN_BLOCKS    blocks that must fit on an SM; caps the registers of a thread
//
// Launch: THREADS threads in one dimension; blocks in one dimension, numbered as share.cuh says.
//
// Next: sgemm_ws gives the copying to warps of its own.

#ifndef BM
#define BM 128
#define BN 128
#define BK 16
#define WM 32
#define WN 64
#define TM 8
#define TN 8
#define STAGES 3
#define VEC 4
#define ASYNC 1
#define PAD 4
#define UNROLL 16
#define FRAGMENTS 2
#define GROUP 4
#define SPLIT_K 1
#define STAGED_STORE 0
#define MIN_BLOCKS 2
#define TRANS_A 0
#define TRANS_B 0
#define NONDETERMINISTIC 0
#endif

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
constexpr int THREADS = WARP * WARPS_X * WARPS_Y;

static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the block");
static_assert(LANES_X * LANES_Y == WARP && LANES_X * TN == WN && LANES_Y * TM == WM, "lanes must tile the warp");
static_assert(BK % UNROLL == 0 && UNROLL % FRAGMENTS == 0, "unrolled steps must divide the tile");

template <int ROWS, bool ALONG_K>
using Carry = Carrier<ROWS, BK, ALONG_K, VEC, ASYNC == 2 || (ASYNC == 1 && !ALONG_K), PAD, THREADS>;
using CarrierA = Carry<BM, !TRANS_A>;
using CarrierB = Carry<BN, TRANS_B>;

struct Stage {
    float A[CarrierA::FLOATS];
    float B[CarrierB::FLOATS];
};

// The tiles in shared memory and the carriers that keep them coming.
class Pipeline {
public:
    // Send for the first tiles and wait for the very first; `count` are needed in all.
    __device__ __forceinline__ Pipeline(Stage* stages, const Operand& A, const Operand& B, int first_k, int count)
        : stages(stages), carrier_A(A, first_k), carrier_B(B, first_k), to_start(count)
    {
#pragma unroll 1
        for (int s = 0; s < STAGES; ++s) {
            if (to_start > 0) {
                start(stages[s]);
                finish(stages[s]);
            }
            cp_async_commit();
        }
        cp_async_wait<STAGES - 1>();
        __syncthreads();
    }

    __device__ __forceinline__ const Stage& current() const { return stages[slot]; }

    // Leave the current tile, of which this thread has read everything, for the next one.
    __device__ __forceinline__ void turn()
    {
        if constexpr (STAGES == 1) {
            __syncthreads();
            if (to_start > 0) {
                start(stages[0]);
                finish(stages[0]);
            }
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
        } else {
            if (underway) finish(stages[slot == 0 ? STAGES - 1 : slot - 1]);
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            underway = to_start > 0;
            if (underway) start(stages[slot]);
            cp_async_commit();
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
    }

private:
    __device__ __forceinline__ void start(Stage& stage)
    {
        carrier_A.start(stage.A);
        carrier_B.start(stage.B);
        --to_start;
    }
    __device__ __forceinline__ void finish(Stage& stage)
    {
        carrier_A.finish(stage.A);
        carrier_B.finish(stage.B);
    }

    Stage* stages;
    CarrierA carrier_A;
    CarrierB carrier_B;
    int to_start;
    int slot = 0;
    bool underway = false;  // a tile that `start` left in registers waits for `finish`
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, float* partials, float* totals,
      unsigned* counters, int M, int N, int K, float alpha, float beta)
{
    extern __shared__ __align__(16) float smem[];
    Stage* stages = reinterpret_cast<Stage*>(smem);

    const Share share = share_of(blockIdx.x, (M - 1) / BM + 1, (N - 1) / BN + 1, (K - 1) / BK + 1, GROUP, SPLIT_K);
    const int row = share.tile.row * BM;
    const int column = share.tile.column * BN;
    A += static_cast<size_t>(share.product) * M * K + static_cast<size_t>(row) * (TRANS_A ? 1 : K);
    B += static_cast<size_t>(share.product) * K * N + static_cast<size_t>(column) * (TRANS_B ? K : 1);
    C += static_cast<size_t>(share.product) * M * N;

    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int warp_row = warp / WARPS_X * WM;
    const int warp_column = warp % WARPS_X * WN;
    const int lane_x = lane % LANES_X;
    const int lane_y = lane / LANES_X;
    const unsigned first_A = warp_row + lane_y * STRIP;  // the first row and the first column that this thread owns
    const unsigned first_B = warp_column + lane_x * STRIP;

    const Operand from_A = {A, static_cast<unsigned>(TRANS_A ? M : K), M - row, K};
    const Operand from_B = {B, static_cast<unsigned>(TRANS_B ? K : N), N - column, K};
    Pipeline pipeline(stages, from_A, from_B, share.first_step * BK, share.last_step - share.first_step);

    float sum[TM * TN];
    clear(sum);
    float a[FRAGMENTS][TM];
    float b[FRAGMENTS][TN];
    const float* line_A = pipeline.current().A + first_A;
    const float* line_B = pipeline.current().B + first_B;
    const auto read = [&](int fragment) {
        read_fragment<LANES_Y>(a[fragment], line_A);
        read_fragment<LANES_X>(b[fragment], line_B);
    };
    if (FRAGMENTS == 2) read(0);
#pragma unroll 1
    for (int step = share.first_step; step < share.last_step; ++step) {
#pragma unroll 1
        for (int first_k = 0; first_k < BK; first_k += UNROLL) {
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                if (FRAGMENTS == 1) {
                    read(0);
                    add_outer_product<TM, TN>(sum, a[0], b[0]);
                }
                if (k + 1 == UNROLL && first_k + UNROLL == BK) {
                    pipeline.turn();
                    line_A = pipeline.current().A + first_A;
                    line_B = pipeline.current().B + first_B;
                } else {
                    line_A += CarrierA::PITCH;
                    line_B += CarrierB::PITCH;
                }
                if (FRAGMENTS == 2) {
                    read((k + 1) % FRAGMENTS);
                    add_outer_product<TM, TN>(sum, a[k % FRAGMENTS], b[k % FRAGMENTS]);
                }
            }
        }
    }

    if (SPLIT_K > 1) {
        float* parts = NONDETERMINISTIC ? totals : partials;
        parts += share.tile_number * split_k_floats<THREADS, TM * TN>(SPLIT_K, NONDETERMINISTIC);
        unsigned* tickets = counters + share.tile_number;
        if (!split_k_finish<THREADS, NONDETERMINISTIC>(sum, parts, tickets, share.split, SPLIT_K, threadIdx.x)) return;
    }

    const Output to = {C, M, N, alpha, beta};
    if (!STAGED_STORE && to.vectors()) {
        write_directly<TM, TN, LANES_Y, LANES_X>(to, sum, row + warp_row, column + warp_column, lane_y, lane_x);
    } else {
        __syncthreads();  // the tiles have been read, their place serves a second time
        write_staged<TM, TN, LANES_Y, LANES_X>(to, sum, row + warp_row, column + warp_column, lane_y, lane_x,
                                               smem + warp * (LANES_Y * WN));
    }
}
