// Fully parameterized SGEMM: C = alpha * op(A) * op(B) + beta * C in fp32 on the CUDA cores.
//
//     op(A) is M x K, op(B) is K x N, C is M x N, row-major, BATCH of each, contiguous.
//     A is stored M x K (or K x M if TRANS_A), B is stored K x N (or N x K if TRANS_B).
//
// Idea. An SM issues one instruction per cycle to each of its four 32-lane partitions, and a multiply-add is one
// instruction: the share of multiply-adds among all instructions bounds the fraction of the peak. Tiling on three
// levels saves instructions or bytes of the level above:
//
//     block   BM x BN of C    tiles of A and B in shared memory: a float from global memory serves BM or BN sums
//     warp    WM x WN         lanes that share rows or columns read the same words of shared memory
//     thread  TM x TN         in registers: (TM + TN) / 4 reads for TM * TN multiply-adds, 6 for 128 with 16 x 8
//
// Work distribution. Threads own strips of 4 x 4 spread over their warp's tile, in the order drawn in thread_tile.cuh,
// which also explains why the order of the multiply-adds determines the register bandwidth.
//
// Loading a tile (operand_tile.cuh): copied as it is or transposed, so that it has one line per k in shared memory.
//
// Pipeline. STAGES tiles are in shared memory or in flight to it. When all warps have read a tile, its stage is free
// for the tile STAGES further on:
//
//     tile t, k = 0 ... BK - 2    multiply
//     tile t, k = BK - 1          already in registers: wait for tile t + 1, free tile t, issue tile t + STAGES,
//                                 read the first k of tile t + 1, then multiply
//
// Few tiles leave SMs idle; SPLIT_K splits K into parts for more blocks (split_k.cuh). If NONDETERMINISTIC, the parts
// are added by atomics.
//
// Any M, N, K, any pointers: rows that do not start on a boundary of VEC floats are copied float by float.
//
// Macros
//   BM, BN        rows and columns of C per block
//   BK            depth of the tiles in shared memory
//   WM, WN        rows and columns per warp
//   TM, TN        rows and columns per thread, multiples of 4
//   STAGES        tiles in shared memory, 1 to 5
//   VEC           floats per global load: 1, 2 or 4
//   ASYNC         0: tiles go through registers; 1: only transposed tiles do, others use cp.async;
//                 2: all use cp.async, which transposes float by float
//   SWIZZLE       how a transposed tile avoids bank conflicts. 0: padding after each line; 1: permuted chunks
//   UNROLL        unrolled steps of k
//   FRAGMENTS     1: read, then multiply; 2: double-buffered fragments
//   GROUP         rows of tiles per band of the block order (raster.cuh)
//   SPLIT_K       number of parts of K
//   STAGED_STORE  1: C is always written through shared memory, in full lines; 0: only if its rows do not start
//                 on 16-byte boundaries
//   MIN_BLOCKS    minimum resident blocks per SM; caps the registers per thread
//
// Launch: THREADS threads in one dimension; blocks in one dimension, numbered as described in share.cuh.
//
// Next: sgemm_ws moves the copying to dedicated warps.

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

// The tiles in shared memory and the copiers that refill them.
class Pipeline {
public:
    // Issue the copies of the first tiles and wait for the very first; `count` tiles are needed in total.
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

    // Release the current tile, which this thread has read completely, and advance to the next one.
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
    bool underway = false;  // a tile loaded into registers by `start` is pending for `finish`
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
