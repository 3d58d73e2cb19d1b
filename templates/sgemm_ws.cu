// Warp-specialized SGEMM: C = alpha * op(A) * op(B) + beta * C in fp32 on Hopper's CUDA cores.
//
//     op(A) is M x K, op(B) is K x N, C is M x N, row-major, BATCH of each, contiguous.
//     A is stored M x K (or K x M if TRANS_A), B is stored K x N (or N x K if TRANS_B).
//
// Idea. In `sgemm` every warp both copies and multiplies, and all of them synchronize at a barrier for each tile: this
// costs instructions other than multiply-adds, and times at which no warp multiplies. Here 4 warps only copy
// (producers), all others only multiply (consumers), and no block-wide barrier is needed. Each stage of the ring is
// handed over by a pair of mbarriers:
//
//     producers   wait until empty -> copy a tile of A and of B -> full
//     consumers   wait until full  -> multiply                  -> empty
//
// A consumer that is ahead continues as long as there are full stages. Its loop contains little but multiply-adds and
// reads from shared memory: 96 reads and about 50 others for 2048 multiply-adds with 16 x 8 sums per thread and BK =
// 16.
//
// Registers. Producers need few, consumers many: `setmaxnreg` moves them, in steps of 8 for 4 warps at a time. With 8
// consumer warps on an SM each thread can have about 220, enough for 128 sums and two sets of fragments.
//
// Tiles, the order of the multiply-adds, edges, split-K and the epilogue are those of `sgemm`; see there.
//
// Macros
//   BM, BN        rows and columns of C per block
//   BK            depth of the tiles in shared memory
//   WM, WN        rows and columns per consumer warp
//   TM, TN        rows and columns per thread, multiples of 4
//   STAGES        stages of the ring
//   VEC           floats per global load: 1, 2 or 4
//   ASYNC         1: transposed tiles go through registers; 2: all use cp.async
//   SWIZZLE       how a transposed tile avoids bank conflicts. 0: padding after each line; 1: permuted chunks
//   UNROLL        unrolled steps of k
//   FRAGMENTS     1: read, then multiply; 2: double-buffered fragments
//   GROUP         rows of tiles per band of the block order (raster.cuh)
//   SPLIT_K       number of parts of K
//   STAGED_STORE  1: C is always written through shared memory, in full lines; 0: only if its rows do not start
//                 on 16-byte boundaries
//   MIN_BLOCKS    resident blocks per SM: 1 with 8 consumer warps, 2 with 4
//
// Launch: THREADS threads in one dimension, the producers first; blocks numbered as described in share.cuh.

#ifndef BM
#define BM 128
#define BN 128
#define BK 16
#define WM 64
#define WN 64
#define TM 16
#define TN 8
#define STAGES 3
#define VEC 4
#define ASYNC 1
#define SWIZZLE 0
#define UNROLL 8
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
#include "mbarrier.cuh"

constexpr int CONSUMERS = MULTIPLIERS;
constexpr int PRODUCERS = 4 * WARP;  // one warpgroup, the granularity of setmaxnreg
constexpr int THREADS = PRODUCERS + CONSUMERS;
using CarrierA = CarrierOf<LayoutA, PRODUCERS>;
using CarrierB = CarrierOf<LayoutB, PRODUCERS>;

// Registers per thread. A block starts with an even share of its SM's registers, in steps of 8 per thread. A producer
// keeps its share of a tile and about 24 more; the consumers divide what the producers release, and never request more:
// they would wait for it forever.
constexpr int HELD = ASYNC == 2 ? 0 : ((TRANS_A ? 0 : BM) + (TRANS_B ? BN : 0)) * BK / PRODUCERS;
constexpr int PRODUCER_REGISTERS = HELD <= 16 ? 40 : (HELD + 24) / 8 * 8;
constexpr int SHARED_OUT = 65536 / (MIN_BLOCKS * THREADS) / 8 * 8 * THREADS;
constexpr int LEFT = (SHARED_OUT - PRODUCERS * PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGISTERS = LEFT < 240 ? LEFT : 240;

struct Handover {
    Stage* stages;
    Barrier* full;
    Barrier* empty;
};

// Copy the tiles that `share` needs, one after another.
__device__ __forceinline__ void produce(const Handover& handover, const Operand& A, const Operand& B,
                                        const Share& share)
{
    CarrierA carrier_A(A, share.first_step * BK);
    CarrierB carrier_B(B, share.first_step * BK);
    Ring<STAGES> at;
#pragma unroll 1
    for (int step = share.first_step; step < share.last_step; ++step) {
        Stage& stage = handover.stages[at.stage];
        mbarrier_wait(&handover.empty[at.stage], at.parity ^ 1);  // in the first round, all are empty
        carrier_A.start(stage.A);
        carrier_B.start(stage.B);
        cp_async_arrive(&handover.full[at.stage]);
        carrier_A.finish(stage.A);
        carrier_B.finish(stage.B);
        mbarrier_arrive(&handover.full[at.stage]);
        at.advance();
    }
}

// Multiply the `steps` tiles loaded by the producers.
__device__ __forceinline__ void consume(float (&sum)[TM * TN], const Handover& handover, const Owner& owner, int steps)
{
    Ring<STAGES> at;
    if (steps > 0) mbarrier_wait(&handover.full[0], 0);
    multiply(sum, owner, steps, handover.stages[0], [&](bool more) -> const Stage& {
        if (more) {
            mbarrier_arrive(&handover.empty[at.stage]);
            at.advance();
            mbarrier_wait(&handover.full[at.stage], at.parity);
        }
        return handover.stages[at.stage];
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm_ws(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, float* partials,
         float* totals, unsigned* counters, int M, int N, int K, float alpha, float beta)
{
    extern __shared__ __align__(128) float smem[];
    const Share share = share_of_block(M, N, K);

    __shared__ Barrier full[STAGES];
    __shared__ Barrier empty[STAGES];
    const Handover handover = {reinterpret_cast<Stage*>(smem), full, empty};
    if (threadIdx.x < STAGES) {
        mbarrier_init(&full[threadIdx.x], 2 * PRODUCERS);  // one arrival per thread for copies, one for stores
        mbarrier_init(&empty[threadIdx.x], CONSUMERS);
    }
    __syncthreads();

    if (threadIdx.x < PRODUCERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(handover, operand_at<LayoutA>(A, share.product, share.tile.row, M, K),
                operand_at<LayoutB>(B, share.product, share.tile.column, N, K), share);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));

    const Owner owner(threadIdx.x - PRODUCERS);
    float sum[TM * TN];
    clear(sum);
    consume(sum, handover, owner, share.last_step - share.first_step);
    constexpr int BARRIER = 1;  // named barrier of the consumers; 0 is that of all threads
    deliver<BARRIER>(sum, owner, share, {C, M, N, alpha, beta}, partials, totals, counters, smem);
}
