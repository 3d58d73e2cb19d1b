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
//   SWIZZLE       how a transposed tile avoids bank conflicts. 0: a gap after each line; 1: pieces trade places
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
#define SWIZZLE 0
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

#include "block_tile.cuh"

constexpr int THREADS = MULTIPLIERS;
using CarrierA = CarrierOf<LayoutA, THREADS>;
using CarrierB = CarrierOf<LayoutB, THREADS>;

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
    __device__ __forceinline__ const Stage& turn()
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
        return current();
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
    extern __shared__ __align__(128) float smem[];
    const Share share = share_of_block(M, N, K);
    const Operand from_A = operand_at<LayoutA>(A, share.product, share.tile.row, M, K);
    const Operand from_B = operand_at<LayoutB>(B, share.product, share.tile.column, N, K);
    const int steps = share.last_step - share.first_step;
    Pipeline pipeline(reinterpret_cast<Stage*>(smem), from_A, from_B, share.first_step * BK, steps);

    const Owner owner(threadIdx.x);
    float sum[TM * TN];
    clear(sum);
    multiply(sum, owner, steps, pipeline.current(), [&](bool) -> const Stage& { return pipeline.turn(); });
    deliver<0>(sum, owner, share, {C, M, N, alpha, beta}, partials, totals, counters, smem);
}
