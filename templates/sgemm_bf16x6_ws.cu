// Matrix multiplication with fp32 accuracy on Hopper's tensor cores, by six products of bf16 limbs (wgmma, TMA),
// sm_90a.
//
//     C = alpha * A * op(B) + beta * C      A is M x K, op(B) is K x N, C is M x N, row-major, fp32; BATCH of each
//
// op(B) is B, or its transpose if TRANS_B (B is then stored N x K).
//
// Idea. bf16_limbs.cuh explains how six limb products give one of fp32 accuracy. Here each warp has a single role:
//
//     producer, one thread   issues TMA copies of fp32 tiles of A and B into a ring of STAGES
//     splitters, 3 warps     split tiles of B into limbs, into a ring of LIMB_STAGES
//     consumers, warpgroups  split their 64 rows of A in registers, issue wgmma, accumulate, write C
//
//     global --TMA--> [ A | B ] ring --> B: splitters --> [ b0 | b1 | b2 ] ring --wgmma--> products --FADD--> sums --> C
//                         `--------> A: consumer's registers: a0, a1, a2 ---------'
//
// Every element is split once per block, and never by a warp that the tensor cores wait for. A goes from registers to
// wgmma, so that shared memory serves only the three limbs of B.
//
// A step is 32 values of k: 12 wgmma into `products`, which start from zero, and one fp32 addition per accumulator into
// the sums. While one consumer adds and splits its rows of A for the next step, the wgmma of the other consumer run. A
// consumer executes nothing alongside its own wgmma, which read A from its registers while they run.
//
// Order of k. A lane's four elements adjacent along k are those that wgmma numbers 2 t, 2 t + 1, 2 t + 8, 2 t + 9, with
// t = lane % 4; the splitters permute the k of B in the same way (`slot_of`).
//
// Tiles, split-K: blocks are persistent and process tiles as described in tile_schedule.cuh; SPLIT_K as in split_k.cuh.
//
// Rows of A and B must be multiples of 16 bytes. Infinities and tiny numbers are handled as in sgemm_bf16x6.cu, which
// also supports any row length and layout.
//
// Macros
//   CONSUMERS      consumer warpgroups, 1 or 2, each with 64 rows of C
//   BN             columns of C per block: 64 or 128
//   STAGES         stages of the ring of fp32 tiles
//   LIMB_STAGES    stages of the ring of limbs
//   GROUP          height of the bands of the tile order, see raster.cuh
//   SPLIT_K        number of parts of K
//
// Launch: 128 * (CONSUMERS + 1) threads; any grid.x, ideally what is resident at once.

#ifndef BN
#define CONSUMERS 2
#define BN 128
#define STAGES 4
#define LIMB_STAGES 3
#define GROUP 8
#define SPLIT_K 1
#define TRANS_B 0
#define NONDETERMINISTIC 0
#endif

#include "bf16_limbs.cuh"
#include "mbarrier.cuh"
#include "plain_fp32.cuh"
#include "split_k.cuh"
#include "tile_schedule.cuh"
#include "tma.cuh"
#include "wgmma_limbs.cuh"

constexpr int WARP = 32;
constexpr int WARPGROUP = 128;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int BM = 64 * CONSUMERS;
constexpr int BK = 32;           // 128 bytes, the width of TMA's swizzle
constexpr int PIECE = 16;        // depth of a wgmma
constexpr int PIECES = BK / PIECE;
constexpr int SUMS = BN / 2;     // per thread
constexpr int SPLITTERS = 96;    // threads
constexpr int SLAB = 64;         // columns per 128-byte row of limbs
constexpr int STAGE_BYTES = (BM + BN) * BK * sizeof(float);
static_assert(BN % SLAB == 0, "limbs of B lie in whole slabs");

using Schedule = TileSchedule<BM, BN, BK, 1, 1, SPLIT_K, GROUP, false>;

struct Shared {
    alignas(1024) unsigned char A[STAGES][BM * BK * 4];
    alignas(1024) unsigned char B[STAGES][BN * BK * 4];
    alignas(1024) unsigned char limbs[LIMB_STAGES][LIMBS][BN * BK * 2];
    Barrier arrived[STAGES];     // a tile of A and of B has arrived
    Barrier read[STAGES];        // all warps that need them have read them
    Barrier split[LIMB_STAGES];  // the tile of B is split
    Barrier used[LIMB_STAGES];   // its limbs have been used
};

// Producer: one thread that keeps the ring full.
__device__ __forceinline__ void produce(Shared& shared, const Schedule& schedule, const TensorMap& A_map,
                                        const TensorMap& B_map)
{
    Ring<STAGES> ring;
    for (int unit = schedule.first(); unit < schedule.units(); unit += schedule.step()) {
        const Work work = schedule.work(unit, 0);
        for (int i = 0; i < work.depth; ++i) {
            const int k = work.first_k + i * BK;
            Barrier* arrived = &shared.arrived[ring.stage];
            mbarrier_wait(&shared.read[ring.stage], ring.parity ^ 1);
            mbarrier_expect(arrived, STAGE_BYTES);
            tma_load<1>(shared_address(shared.A[ring.stage]), A_map, shared_address(arrived), k, work.row, work.batch, 0);
            tma_load<1>(shared_address(shared.B[ring.stage]), B_map, shared_address(arrived), TRANS_B ? k : work.column,
                        TRANS_B ? work.column : k, work.batch, 0);
            ring.advance();
        }
    }
}

// Position of k among the 16 of a piece.
__device__ __forceinline__ int slot_of(int k) { return k / 4 * 2 + k % 2 + k % 4 / 2 * 8; }

// Splits four elements, adjacent along the columns or along k, into pairs.
struct Split4 {
    unsigned first[LIMBS];
    unsigned second[LIMBS];

    __device__ __forceinline__ explicit Split4(const float4& x)
    {
        split(first[0], first[1], first[2], x.x, x.y);
        split(second[0], second[1], second[2], x.z, x.w);
    }
};

// A tile of B with one line per k, to limbs in slabs of 64 columns, 128 bytes per k.
__device__ __forceinline__ void split_across(unsigned char (&limbs)[LIMBS][BN * BK * 2], const unsigned char* B, int thread)
{
    constexpr int QUADS = BN / 4;
#pragma unroll 4
    for (int i = thread; i < BK * QUADS; i += SPLITTERS) {
        const int k = i / QUADS;
        const int n = i % QUADS * 4;
        const Split4 parts(*reinterpret_cast<const float4*>(B + (k * BN + n) * 4));
        const int row = k / PIECE * PIECE + slot_of(k % PIECE);
        const unsigned to = tma_swizzled<128>(n / SLAB * (BK * 128) + row * 128 + n % SLAB * 2);
#pragma unroll
        for (int limb = 0; limb < LIMBS; ++limb)
            *reinterpret_cast<uint2*>(limbs[limb] + to) = {parts.first[limb], parts.second[limb]};
    }
}

// A tile of B with one line per column, to limbs in rows of 64 bytes, one per column.
__device__ __forceinline__ void split_along(unsigned char (&limbs)[LIMBS][BN * BK * 2], const unsigned char* B, int thread)
{
#pragma unroll 1
    for (int i = thread; i < BN * PIECES; i += SPLITTERS) {
        const int n = i % BN;
        const int piece = i / BN;
        unsigned slots[LIMBS][2][4];  // first and second half of the 16
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned from = tma_swizzled<128>(n * 128 + (piece * 4 + t) * 16);
            const Split4 parts(*reinterpret_cast<const float4*>(B + from));
#pragma unroll
            for (int limb = 0; limb < LIMBS; ++limb) {
                slots[limb][0][t] = parts.first[limb];
                slots[limb][1][t] = parts.second[limb];
            }
        }
#pragma unroll
        for (int limb = 0; limb < LIMBS; ++limb)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned(&four)[4] = slots[limb][half];
                const unsigned to = tma_swizzled<64>(n * 64 + piece * 32 + half * 16);
                *reinterpret_cast<uint4*>(limbs[limb] + to) = {four[0], four[1], four[2], four[3]};
            }
    }
}

// Splitter: converts tiles of B to limbs as they arrive. `thread` is the index among all splitters.
__device__ __forceinline__ void split_tiles(Shared& shared, const Schedule& schedule, int thread)
{
    Ring<STAGES> from;
    Ring<LIMB_STAGES> to;
    for (int unit = schedule.first(); unit < schedule.units(); unit += schedule.step()) {
        const Work work = schedule.work(unit, 0);
        for (int i = 0; i < work.depth; ++i) {
            mbarrier_wait(&shared.arrived[from.stage], from.parity);
            mbarrier_wait(&shared.used[to.stage], to.parity ^ 1);
            if (TRANS_B)
                split_along(shared.limbs[to.stage], shared.B[from.stage], thread);
            else
                split_across(shared.limbs[to.stage], shared.B[from.stage], thread);
            tma_fence();  // makes the stores visible to wgmma
            mbarrier_arrive(&shared.split[to.stage]);
            mbarrier_arrive(&shared.read[from.stage]);
            from.advance();
            to.advance();
        }
    }
}

// A lane's share of A for one step: limbs of two rows, 8 apart, in the order of wgmma fragments.
struct LimbsOfA {
    unsigned piece[PIECES][LIMBS][4];

    __device__ __forceinline__ void read(const unsigned char* A, int first_row)
    {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + half * 8 + lane / 4;
                const unsigned from = tma_swizzled<128>(row * 128 + (p * 4 + lane % 4) * 16);
                const Split4 parts(*reinterpret_cast<const float4*>(A + from));
#pragma unroll
                for (int limb = 0; limb < LIMBS; ++limb) {
                    piece[p][limb][half] = parts.first[limb];
                    piece[p][limb][2 + half] = parts.second[limb];
                }
            }
    }
};

__device__ __forceinline__ unsigned long long limb_of_B(const unsigned char* limb, int piece)
{
    const unsigned address = shared_address(limb);
    return TRANS_B ? wgmma_operand_64(address + piece * 32) : wgmma_operand(address + piece * PIECE * 128, BK * 128);
}

// Positions of a consumer in the two rings.
struct Rings {
    Ring<STAGES> A;
    Ring<LIMB_STAGES> B;
};

// The sums of one tile. `first_row` is the first of this warp's 16 rows of the tile.
__device__ __forceinline__ void multiply(float (&sum)[SUMS], Shared& shared, Rings& rings, int depth, int first_row)
{
    LimbsOfA a;
    auto next_of_A = [&] {
        mbarrier_wait(&shared.arrived[rings.A.stage], rings.A.parity);
        a.read(shared.A[rings.A.stage], first_row);
        mbarrier_arrive(&shared.read[rings.A.stage]);
        rings.A.advance();
    };

#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
    next_of_A();
#pragma unroll 1
    for (int step = 0; step < depth; ++step) {
        float products[SUMS];
        mbarrier_wait(&shared.split[rings.B.stage], rings.B.parity);
        const auto& limbs = shared.limbs[rings.B.stage];
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < LIMB_PAIRS; ++i)
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                wgmma_from_registers<!TRANS_B>(products, a.piece[p][limb_pair(i).a], limb_of_B(limbs[limb_pair(i).b], p),
                                               i | p);
        wgmma_commit();
        wgmma_wait<0>();
        hold(products);
        mbarrier_arrive(&shared.used[rings.B.stage]);
        rings.B.advance();
        if (step + 1 < depth) next_of_A();
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sum[i] += products[i];
    }
}

// C = alpha * sum + beta * C for a warp's 16 rows, two columns at a time. If beta is 0, C is not read.
__device__ __forceinline__ void write(float* C, float (&sum)[SUMS], const Factors<false, TRANS_B>& factors, int row,
                                      int column, float alpha, float beta)
{
    const int lane = threadIdx.x % WARP;
    const int N = factors.N;
    const bool pairs = N % 2 == 0 && reinterpret_cast<size_t>(C) % sizeof(float2) == 0;
    row += lane / 4;
    column += lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            float* pair = &sum[j * 4 + half * 2];
            const int at = column + j * 8;
            if (row >= factors.M || at >= N) continue;
            factors.mend<2>(pair, row, at);
            float* to = C + static_cast<size_t>(row) * N + at;
            if (pairs) {
                const float2 old = beta != 0.0f ? *reinterpret_cast<float2*>(to) : float2{};
                *reinterpret_cast<float2*>(to) = {alpha * pair[0] + beta * old.x, alpha * pair[1] + beta * old.y};
            } else {
                for (int i = 0; i < 2; ++i)
                    if (at + i < N) to[i] = alpha * pair[i] + (beta != 0.0f ? beta * to[i] : 0.0f);
            }
        }
}

// Distribution of the 65,536 registers: a kernel starts with an equal share per thread.
constexpr int SERVICE_REGISTERS = 72;
constexpr int CONSUMER_REGISTERS = 216;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sgemm_bf16x6_ws(const float* A, const float* B, float* C, float* partials, float* totals, unsigned* counters,
                const __grid_constant__ TensorMap A_map, const __grid_constant__ TensorMap B_map, int M, int N, int K,
                int batches, float alpha, float beta)
{
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    const Schedule schedule(M, N, K, batches);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(&shared.arrived[stage], 1);
            mbarrier_init(&shared.read[stage], CONSUMERS * WARPGROUP + SPLITTERS);
        }
        for (int stage = 0; stage < LIMB_STAGES; ++stage) {
            mbarrier_init(&shared.split[stage], SPLITTERS);
            mbarrier_init(&shared.used[stage], CONSUMERS * WARPGROUP);
        }
        mbarrier_publish();
    }
    __syncthreads();

    const int service_thread = static_cast<int>(threadIdx.x) - CONSUMERS * WARPGROUP;
    if (service_thread >= 0) {
        if (CONSUMERS > 1) release_registers<SERVICE_REGISTERS>();
        if (service_thread >= WARP) split_tiles(shared, schedule, service_thread - WARP);
        if (service_thread == 0) produce(shared, schedule, A_map, B_map);
        return;
    }
    if (CONSUMERS > 1) claim_registers<CONSUMER_REGISTERS>();
    const int consumer = threadIdx.x / WARPGROUP;
    const int first_row = threadIdx.x / WARP * 16;
    Rings rings;
    for (int unit = schedule.first(); unit < schedule.units(); unit += schedule.step()) {
        const Work work = schedule.work(unit, 0);
        float sum[SUMS];
        multiply(sum, shared, rings, work.depth, first_row);
        if (SPLIT_K > 1) {
            const int index = work.tile * CONSUMERS + consumer;
            float* parts = NONDETERMINISTIC ? totals : partials;
            parts += index * split_k_floats<WARPGROUP, SUMS>(SPLIT_K, NONDETERMINISTIC);
            if (!split_k_finish<WARPGROUP, NONDETERMINISTIC>(sum, parts, counters + index, work.split, SPLIT_K,
                                                             threadIdx.x % WARPGROUP, 1 + consumer))
                continue;
        }
        const size_t batch = work.batch;
        const Factors<false, TRANS_B> factors = {A + batch * M * K, B + batch * N * K, M, N, K};
        write(C + batch * M * N, sum, factors, work.row + first_row, work.column, alpha, beta);
    }
}
