// SGEMM by specialised warps: C = alpha * op(A) * op(B) + beta * C in fp32 on Hopper's CUDA cores.
//
//     op(A) is M x K, op(B) is K x N, C is M x N, row-major, BATCH of each one after another.
//     A is stored M x K (or K x M where TRANS_A), B is stored K x N (or N x K where TRANS_B).
//
// Idea. In `sgemm` every warp copies and multiplies, and all of them meet at a barrier for each tile: instructions that
// are no multiply-adds, and moments in which nobody multiplies. Here 4 warps only copy (producers), all others only
// multiply (consumers), and they meet at no barrier. A stage of the ring is handed over by a pair of mbarriers:
//
//     producers   wait until empty -> copy a tile of A and of B -> full
//     consumers   wait until full  -> multiply                  -> empty
//
// so a consumer that is ahead goes on as long as there are full stages. The loop of a consumer is little but
// multiply-adds and reads from shared memory: 96 reads and about 50 others for 2048 multiply-adds with 16 x 8 sums a
// thread and BK = 16.
//
// Registers. Producers need few, consumers many: `setmaxnreg` moves them over, in steps of 8 for 4 warps at a time.
// With 8 consumer warps on an SM each thread may have about 220, enough for 128 sums and two sets of fragments.
//
// Tiles, the order of the multiply-adds, edges, split-K and writing are those of `sgemm`; see there.
//
// Macros
//   BM, BN        rows and columns of C that a block computes
//   BK            depth of the tiles in shared memory
//   WM, WN        rows and columns that a consumer warp computes
//   TM, TN        rows and columns that a thread computes, multiples of 4
//   STAGES        stages of the ring
//   VEC           floats in one global load: 1, 2 or 4
//   ASYNC         1: tiles that are transposed go through registers; 2: all by cp.async
//   UNROLL        steps of k unrolled
//   FRAGMENTS     1: read, then multiply; 2: read ahead
//   GROUP         rows of tiles that blocks walk down together (raster.cuh)
//   SPLIT_K       parts of K
//   STAGED_STORE  1: C is always written through shared memory, in whole lines; 0: only where its rows do not start
//                 on 16-byte boundaries
//   MIN_BLOCKS    blocks on an SM: 1 with 8 consumer warps, 2 with 4
//
// Launch: THREADS threads in one dimension, the producers first; blocks numbered as share.cuh says.

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

#include "mbarrier.cuh"
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
constexpr int CONSUMERS = WARP * WARPS_X * WARPS_Y;
constexpr int PRODUCERS = 4 * WARP;  // as many as setmaxnreg speaks to
constexpr int THREADS = PRODUCERS + CONSUMERS;
constexpr int PAD = 4;

static_assert(BM % WM == 0 && BN % WN == 0, "warps must tile the block");
static_assert(LANES_X * LANES_Y == WARP && LANES_X * TN == WN && LANES_Y * TM == WM, "lanes must tile the warp");
static_assert(BK % UNROLL == 0 && UNROLL % FRAGMENTS == 0, "unrolled steps must divide the tile");

template <int ROWS, bool ALONG_K>
using Carry = Carrier<ROWS, BK, ALONG_K, VEC, ASYNC == 2 || !ALONG_K, PAD, PRODUCERS>;
using CarrierA = Carry<BM, !TRANS_A>;
using CarrierB = Carry<BN, TRANS_B>;

struct Stage {
    float A[CarrierA::FLOATS];
    float B[CarrierB::FLOATS];
};

// Registers of a thread. A block starts with an even share of what its SM has, in steps of 8 a thread. A producer keeps
// what it holds of a tile and about 24 more; the consumers divide what the producers give back, and never ask for more:
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
    int slot = 0;
    unsigned parity = 1;
#pragma unroll 1
    for (int step = share.first_step; step < share.last_step; ++step) {
        Stage& stage = handover.stages[slot];
        mbarrier_wait(&handover.empty[slot], parity);
        carrier_A.start(stage.A);
        carrier_B.start(stage.B);
        cp_async_arrive(&handover.full[slot]);
        carrier_A.finish(stage.A);
        carrier_B.finish(stage.B);
        mbarrier_arrive(&handover.full[slot]);
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm_ws(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, float* partials,
         float* totals, unsigned* counters, int M, int N, int K, float alpha, float beta)
{
    extern __shared__ __align__(16) float smem[];

    const Share share = share_of(blockIdx.x, (M - 1) / BM + 1, (N - 1) / BN + 1, (K - 1) / BK + 1, GROUP, SPLIT_K);
    const int row = share.tile.row * BM;
    const int column = share.tile.column * BN;
    A += static_cast<size_t>(share.product) * M * K + static_cast<size_t>(row) * (TRANS_A ? 1 : K);
    B += static_cast<size_t>(share.product) * K * N + static_cast<size_t>(column) * (TRANS_B ? K : 1);
    C += static_cast<size_t>(share.product) * M * N;

    const Operand from_A = {A, static_cast<unsigned>(TRANS_A ? M : K), M - row, K};
    const Operand from_B = {B, static_cast<unsigned>(TRANS_B ? K : N), N - column, K};

    __shared__ Barrier full[STAGES];
    __shared__ Barrier empty[STAGES];
    const Handover handover = {reinterpret_cast<Stage*>(smem), full, empty};
    if (threadIdx.x < STAGES) {
        mbarrier_init(&full[threadIdx.x], 2 * PRODUCERS);  // each thread arrives for its copies and for its stores
        mbarrier_init(&empty[threadIdx.x], CONSUMERS / WARP);
    }
    __syncthreads();

    if (threadIdx.x < PRODUCERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(handover, from_A, from_B, share);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));

    const unsigned thread = threadIdx.x - PRODUCERS;
    const int warp = thread / WARP;
    const int lane = thread % WARP;
    const int warp_row = warp / WARPS_X * WM;
    const int warp_column = warp % WARPS_X * WN;
    const int lane_x = lane % LANES_X;
    const int lane_y = lane / LANES_X;
    const unsigned first_A = warp_row + lane_y * STRIP;  // the first row and the first column that this thread owns
    const unsigned first_B = warp_column + lane_x * STRIP;

    float sum[TM * TN];
    clear(sum);
    float a[FRAGMENTS][TM];
    float b[FRAGMENTS][TN];
    int slot = 0;
    unsigned parity = 0;
    const float* line_A = handover.stages[slot].A + first_A;
    const float* line_B = handover.stages[slot].B + first_B;
    const auto read = [&](int fragment) {
        read_fragment<LANES_Y>(a[fragment], line_A);
        read_fragment<LANES_X>(b[fragment], line_B);
    };
    if (share.first_step < share.last_step) mbarrier_wait(&full[0], 0);
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
                    __syncwarp();  // all lanes have read the stage
                    if (lane == 0) mbarrier_arrive(&empty[slot]);
                    if (++slot == STAGES) {
                        slot = 0;
                        parity ^= 1;
                    }
                    if (step + 1 < share.last_step) mbarrier_wait(&full[slot], parity);
                    line_A = handover.stages[slot].A + first_A;
                    line_B = handover.stages[slot].B + first_B;
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
        parts += share.tile_number * split_k_floats<CONSUMERS, TM * TN>(SPLIT_K, NONDETERMINISTIC);
        unsigned* tickets = counters + share.tile_number;
        constexpr int BARRIER = 1;  // of the consumers; 0 is that of all threads
        if (!split_k_finish<CONSUMERS, NONDETERMINISTIC>(sum, parts, tickets, share.split, SPLIT_K, thread, BARRIER))
            return;
    }

    const Output to = {C, M, N, alpha, beta};
    if (!STAGED_STORE && to.vectors()) {
        write_directly<TM, TN, LANES_Y, LANES_X>(to, sum, row + warp_row, column + warp_column, lane_y, lane_x);
    } else {
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // the tiles have been read, their place is free
        write_staged<TM, TN, LANES_Y, LANES_X>(to, sum, row + warp_row, column + warp_column, lane_y, lane_x,
                                               smem + warp * (LANES_Y * WN));
    }
}
