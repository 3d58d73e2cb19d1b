// Matrix multiplication on Hopper's tensor cores (wgmma, TMA, warp specialization), sm_90a.
//
//     C = alpha * A * B + beta * C      A is M x K, B is K x N, C is M x N, row-major; BATCH of them, contiguous
//
// A and B are fp16 or bf16, accumulation is in fp32, C has the input type or fp32. TRANS_A: A is stored K x M. TRANS_B:
// B is stored N x K.
//
// Idea. The tensor cores of an SM execute 2048 multiply-adds per cycle. No thread can load, compute addresses and wait
// at that rate as well, so the work is divided among specialized warpgroups:
//
//     producer warpgroup                    consumer warpgroups, CONSUMERS of them
//     one thread issues TMA copies          each runs wgmma on the stages as they fill,
//     into a ring of STAGES stages          holds its sums in registers, writes its part of C
//
//          global memory --TMA--> [ A | B ][ A | B ][ A | B ][ A | B ] --wgmma--> registers --TMA--> global memory
//                                   full     full     empty    empty
//
// A stage holds BM x BK of A and BK x BN of B. Producer and consumers synchronize through two mbarriers per stage, full
// and empty. The producer needs few registers and releases the rest to the consumers (setmaxnreg).
//
// Work distribution. Blocks are persistent: one per SM, each takes every n-th tile of C. With PINGPONG = 0 the
// consumers divide the rows of a tile among themselves. With PINGPONG = 1 each consumer has its own tiles, in turn, so
// that one multiplies while the other writes:
//
//     PINGPONG = 0    consumer 0  | tile 0, upper half | write |        both share a stage: fewer bytes per product
//                     consumer 1  | tile 0, lower half | write |
//     PINGPONG = 1    consumer 0  | tile 0 | write |   | tile 2 | write |
//                     consumer 1           | tile 1 | write |   | tile 3      the tensor cores never idle
//
// One instruction of a warpgroup covers a strip of 64 rows x BN columns and 16 values of k; taller tiles are several
// strips.
//
// Clusters. CLUSTER_M blocks along M need the same tile of B, CLUSTER_N blocks along N the same tile of A. Each block
// loads a part of it, and TMA multicast delivers it to all of them: fewer reads from L2. A stage is therefore empty
// only when the consumers of all blocks that share loads with this one have released it.
//
// Split-K. If there are fewer tiles than SMs, SPLIT_K blocks share a tile, and each sums a part of K. They reduce
// through a workspace, see split_k.cuh, or form a cluster and reduce through distributed shared memory (CLUSTER_SPLIT):
// the sums replace the ring, which is empty by then, see cluster_tile.cuh.
//
// Epilogue. Accumulators pass through STORE_STAGES buffers of 64 rows x 128 bytes, written by stmatrix and stored by
// TMA, which also clips them at the edges of C. TMA requires rows of C in multiples of 16 bytes; with TMA_STORE = 0 the
// threads copy the buffers to C, one or two elements at a time, for rows of any length.
//
// Edges. TMA zero-fills elements beyond the matrices. Rows of A and B must be multiples of 16 bytes.
//
// Macros
//   BM, BN         rows and columns of C per block: multiples of 64 and of 16
//   BK             depth of a stage, a multiple of 64
//   STAGES         stages of the ring
//   CONSUMERS      consumer warpgroups, 1 to 3
//   PINGPONG       1: each consumer has its own tiles
//   CLUSTER_M, CLUSTER_N   blocks of a cluster, along M and along N
//   GROUP          height of the bands of the tile order, see raster.cuh
//   ALONG_N        1: the bands are vertical, and GROUP counts columns of tiles
//   SPLIT_K        number of parts of K
//   CLUSTER_SPLIT  1: the blocks that share a tile form a cluster of up to 8; a block has one tile, and threads write
//                  C. Excludes PINGPONG, CLUSTER_M and CLUSTER_N
//   STORE_STAGES   buffers between a consumer and C
//   TMA_STORE      1: TMA writes C
//   OUT_FP32       1: C is fp32
//   NONDETERMINISTIC   1: parts of K are added in order of arrival, in `totals`; 0: in the order of k, from `partials`
//
// Launch: 128 * (CONSUMERS + 1) threads; grid.x is any multiple of the cluster size, ideally what is resident at once;
// with CLUSTER_SPLIT, grid.x counts tiles along M and within them parts of K, grid.y tiles along N, grid.z the batch.

#ifndef BM
#define BM 128
#define BN 256
#define BK 64
#define STAGES 4
#define CONSUMERS 2
#define PINGPONG 0
#define CLUSTER_M 1
#define CLUSTER_N 1
#define GROUP 16
#define ALONG_N 0
#define SPLIT_K 1
#define CLUSTER_SPLIT 0
#define STORE_STAGES 2
#define TMA_STORE 1
#define TRANS_A 0
#define TRANS_B 0
#define OUT_FP32 0
#define NONDETERMINISTIC 0
#define DTYPE __nv_bfloat16
#endif

#include "cluster.cuh"
#include "cluster_tile.cuh"
#include "element.cuh"
#include "mbarrier.cuh"
#include "split_k.cuh"
#include "strip_buffer.cuh"
#include "tile_schedule.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma_tile.cuh"

constexpr int WARPGROUP = 128;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;  // blocks that share loads

constexpr int STRIP_ROWS = 64;  // rows of C per instruction of a warpgroup
constexpr int STRIPS = BM / STRIP_ROWS / (PINGPONG ? 1 : CONSUMERS);
constexpr int SUMS = BN / 2;  // per thread and strip
constexpr int INSTRUCTION_K = 16;

static_assert(BM % (STRIP_ROWS * (PINGPONG ? 1 : CONSUMERS)) == 0, "each consumer has whole strips");
static_assert(BN % 16 == 0 && BN <= 256, "a strip is one wgmma wide");

#if OUT_FP32
using Output = float;
#else
using Output = Stored<DTYPE>::type;
#endif

using TileA = WgmmaTile<TRANS_A == 0, BM, BK, CLUSTER_N>;
using TileB = WgmmaTile<TRANS_B == 1, BN, BK, CLUSTER_M>;
using Buffer = StripBuffer<DTYPE, Output, BN>;
#if CLUSTER_SPLIT
using Schedule = OneTile<BM, BN, BK, SPLIT_K>;
#else
using Schedule = TileSchedule<BM, BN, BK, CLUSTER_M, CLUSTER_N, SPLIT_K, GROUP, ALONG_N != 0>;
#endif
using Stages = Ring<STAGES>;
using SplitTile = ClusterTile<BM, BN, SPLIT_K, THREADS>;

static_assert(!CLUSTER_SPLIT || CLUSTER == 1 && !PINGPONG, "a cluster along K is one along K alone");
static_assert(!CLUSTER_SPLIT || SplitTile::BYTES <= STAGES * (TileA::BYTES + TileB::BYTES), "sums fit into the ring");

struct Shared {
    alignas(1024) unsigned char A[STAGES][TileA::BYTES];
    alignas(1024) unsigned char B[STAGES][TileB::BYTES];
    alignas(1024) unsigned char C[CONSUMERS][CLUSTER_SPLIT ? 1 : STORE_STAGES * Buffer::BYTES];
    Barrier full[STAGES];
    Barrier empty[STAGES];
    Barrier turn[CONSUMERS];
};

// Producer: one thread that keeps the ring full.
__device__ __forceinline__ void produce(Shared& shared, const Schedule& schedule, const TensorMap& A_map,
                                        const TensorMap& B_map, int rank)
{
    const int rank_m = rank % CLUSTER_M;
    const int rank_n = rank / CLUSTER_M;
    unsigned short row_mates = 0;  // blocks of the cluster that need the same tile of A
#pragma unroll
    for (int n = 0; n < CLUSTER_N; ++n) row_mates |= 1 << (n * CLUSTER_M + rank_m);
    const unsigned short column_mates = ((1 << CLUSTER_M) - 1) << (rank_n * CLUSTER_M);

    Stages ring;
    for (int unit = schedule.first(); unit < schedule.units(); unit += schedule.step()) {
        const Work work = schedule.work(unit, rank);
        for (int i = 0; i < work.depth; ++i) {
            const int k = work.first_k + i * BK;
            Barrier* full = &shared.full[ring.stage];
            mbarrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            mbarrier_expect(full, TileA::BYTES + TileB::BYTES);
            TileA::load(shared_address(shared.A[ring.stage]), A_map, shared_address(full), work.row, k, work.batch,
                        rank_n, row_mates);
            TileB::load(shared_address(shared.B[ring.stage]), B_map, shared_address(full), work.column, k,
                        work.batch, rank_m, column_mates);
            ring.advance();
        }
    }
    // The block stays resident until the consumers of other blocks have released its last stages too.
    if (CLUSTER > 1)
        for (int i = 0; i < STAGES; ++i, ring.advance()) mbarrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
}

// Releases a stage: a separate thread arrives at the empty barrier of each producer that writes to it.
__device__ __forceinline__ void leave(Barrier* empty, int rank)
{
    const int thread = threadIdx.x % WARPGROUP;
    if (CLUSTER == 1) {
        if (thread == 0) mbarrier_arrive(empty);
    } else if (thread < CLUSTER && (thread % CLUSTER_M == rank % CLUSTER_M || thread / CLUSTER_M == rank / CLUSTER_M)) {
        mbarrier_arrive_at(empty, thread);
    }
}

// The products of one tile. One wgmma group is always in flight: a stage is released once the following group has been
// issued. `done` is signaled when the last group has been issued.
__device__ __forceinline__ void multiply(float (&sum)[STRIPS][SUMS], Shared& shared, Stages& ring, int depth,
                                         int first_row, int rank, Barrier* done)
{
    Barrier* previous = nullptr;
    for (int i = 0; i < depth; ++i) {
        mbarrier_wait(&shared.full[ring.stage], ring.parity);
        const unsigned A = shared_address(shared.A[ring.stage]);
        const unsigned B = shared_address(shared.B[ring.stage]);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < BK; k += INSTRUCTION_K)
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip)
                wgmma<DTYPE, TileA::MN_MAJOR, TileB::MN_MAJOR>(
                    sum[strip], TileA::piece(A, first_row + strip * STRIP_ROWS, k), TileB::piece(B, 0, k), i | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) leave(previous, rank);
        previous = &shared.empty[ring.stage];
        ring.advance();
    }
    if (PINGPONG && threadIdx.x % WARPGROUP == 0) mbarrier_arrive(done);
    wgmma_wait<0>();
    leave(previous, rank);
}

__device__ __forceinline__ void warpgroup_barrier(int barrier)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(WARPGROUP) : "memory");
}

__device__ __forceinline__ void consumers_barrier()
{
    asm volatile("bar.sync %0, %1;" ::"n"(1 + CONSUMERS), "n"(WARPGROUP * CONSUMERS) : "memory");
}

// Parameters of the epilogue that all strips of a consumer share.
struct Epilogue {
    OutputMatrix<Output> to;  // of this batch index
    float alpha, beta;
    int barrier;  // named barrier of this warpgroup
};

// One strip of C = alpha * sum + beta * C, through the buffers. TMA stores overlap with the products of the next tile;
// a buffer is refilled once TMA has read it. BLEND if beta is not 0: otherwise C is not read.
template <bool BLEND>
__device__ __forceinline__ void write_strip(float (&sum)[SUMS], unsigned char* buffers, int& next,
                                            const Epilogue& epilogue, const TensorMap& C_map, int row, int column,
                                            int batch)
{
    const bool engineer = threadIdx.x % WARPGROUP == 0;
#pragma unroll
    for (int part = 0; part < BN / Buffer::COLUMNS; ++part, column += Buffer::COLUMNS) {
        unsigned char* buffer = buffers + next * Buffer::BYTES;
        if (++next == STORE_STAGES) next = 0;
        if (TMA_STORE) {
            if (engineer) tma_store_wait<STORE_STAGES - 1>();
            warpgroup_barrier(epilogue.barrier);
        }
        float* sums = &sum[part * Buffer::SUMS];
        float scale = epilogue.alpha;
        if (BLEND) {
            Buffer::move<false>(buffer, epilogue.to, row, column);
            __syncwarp();
            Buffer::blend(sums, shared_address(buffer), epilogue.alpha, epilogue.beta);
            scale = 1.0f;
        }
        Buffer::fill(shared_address(buffer), sums, scale);
        if (TMA_STORE) {
            tma_fence();
            warpgroup_barrier(epilogue.barrier);
            if (engineer) {
                tma_store(C_map, shared_address(buffer), column, row, batch);
                tma_store_commit();
            }
        } else {
            __syncwarp();
            Buffer::move<true>(buffer, epilogue.to, row, column);
            __syncwarp();
        }
    }
}

// Consumer: computes and writes its part of the block's tiles.
__device__ __forceinline__ void consume(Shared& shared, const Schedule& schedule, Output* C, float* workspace,
                                        unsigned* counters, const TensorMap& C_map, float alpha, float beta,
                                        int consumer, int rank)
{
    const int first_row = PINGPONG ? 0 : consumer * STRIPS * STRIP_ROWS;
    const bool pairs = schedule.N % 2 == 0 && reinterpret_cast<size_t>(C) % (2 * sizeof(Output)) == 0;
    Epilogue epilogue = {{C, schedule.M, schedule.N, pairs}, alpha, beta, 1 + consumer};  // barrier 0 is the block's
    int next = 0;  // buffer

    // Consumers take turns in tile order. A consumer must not wait for a stage of a later round than the one being
    // filled, since rounds are distinguished by their parity only. Each therefore waits until the previous consumer has
    // passed its last wait.
    Barrier* my_turn = &shared.turn[consumer];
    Barrier* next_turn = &shared.turn[consumer + 1 < CONSUMERS ? consumer + 1 : 0];
    unsigned turn_parity = consumer == 0;  // the first one does not wait

    Stages ring;
    int taker = 0;
    for (int unit = schedule.first(); unit < schedule.units(); unit += schedule.step()) {
        const Work work = schedule.work(unit, rank);
        if (PINGPONG) {
            const bool mine = taker == consumer;
            if (++taker == CONSUMERS) taker = 0;
            if (!mine) {
                ring.skip(work.depth);
                continue;
            }
            mbarrier_wait(my_turn, turn_parity);
            turn_parity ^= 1;
        }
        float sum[STRIPS][SUMS];
        multiply(sum, shared, ring, work.depth, first_row, rank, next_turn);
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
            if (SPLIT_K > 1) {
                const int index = work.tile * (BM / STRIP_ROWS) + first_row / STRIP_ROWS + s;
                float* parts = workspace + index * split_k_floats<WARPGROUP, SUMS>(SPLIT_K, NONDETERMINISTIC);
                if (!split_k_finish<WARPGROUP, NONDETERMINISTIC>(sum[s], parts, counters + index, work.split, SPLIT_K,
                                                                 threadIdx.x % WARPGROUP, epilogue.barrier))
                    continue;
            }
            epilogue.to.C = C + static_cast<size_t>(work.batch) * schedule.M * schedule.N;
            const int row = work.row + first_row + s * STRIP_ROWS;
            if (beta != 0.0f)
                write_strip<true>(sum[s], shared.C[consumer], next, epilogue, C_map, row, work.column, work.batch);
            else
                write_strip<false>(sum[s], shared.C[consumer], next, epilogue, C_map, row, work.column, work.batch);
        }
    }
    if (TMA_STORE) tma_store_wait<0>();
}

#if CLUSTER_SPLIT
// Consumer of a block that has one part of K of its cluster's tile: computes, then stores the sums where the ring was.
__device__ __forceinline__ void sum_part(Shared& shared, const Schedule& schedule, int consumer)
{
    const Work work = schedule.work();
    const int first_row = consumer * STRIPS * STRIP_ROWS;
    Stages ring;
    float sum[STRIPS][SUMS];
    multiply(sum, shared, ring, work.depth, first_row, 0, nullptr);
    consumers_barrier();  // all consumers have read their last stage
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
        SplitTile::leave(reinterpret_cast<float*>(shared.A), sum[s], first_row + s * STRIP_ROWS,
                         schedule.M - work.row);
}

// All threads of the cluster reduce the parts of its tile and write C.
__device__ __forceinline__ void write_share(Shared& shared, const Schedule& schedule, Output* C, float alpha, float beta)
{
    const Work work = schedule.work();
    C += static_cast<size_t>(work.batch) * schedule.M * schedule.N;
    const OutputQuads<DTYPE, Output> to(C, schedule.M, schedule.N, alpha, beta);
    SplitTile::write(reinterpret_cast<const float*>(shared.A), work.split, to, work.row, work.column,
                     schedule.M - work.row);
}

#define CLUSTER_SHAPE __cluster_dims__(SPLIT_K, 1, 1)
#elif CLUSTER_M * CLUSTER_N > 1
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER_M * CLUSTER_N, 1, 1)
#else
#define CLUSTER_SHAPE
#endif

// Distribution of the 65,536 registers: a kernel starts with an equal share per thread. It keeps that distribution if
// all threads share the final reduction.
constexpr bool DIVIDE_REGISTERS = CONSUMERS > 1 && !CLUSTER_SPLIT;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(THREADS, 1)
gemm_wgmma(Output* C, float* partials, float* totals, unsigned* counters, const __grid_constant__ TensorMap A_map,
           const __grid_constant__ TensorMap B_map, const __grid_constant__ TensorMap C_map, int M, int N, int K,
           int batches, float alpha, float beta)
{
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    const Schedule schedule(M, N, K, batches);
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;

    if (threadIdx.x == WARPGROUP) {
        tma_prefetch(A_map);
        tma_prefetch(B_map);
        if (TMA_STORE) tma_prefetch(C_map);
    }
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(&shared.full[stage], 1);
            mbarrier_init(&shared.empty[stage], (PINGPONG ? 1 : CONSUMERS) * (CLUSTER_M + CLUSTER_N - 1));
        }
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) mbarrier_init(&shared.turn[consumer], 1);
        mbarrier_publish();
    }
    if (CLUSTER > 1)
        cluster_meet();
    else
        __syncthreads();

    // In this order the producer's code comes first and is fetched with the kernel entry: loads start earlier.
    if (threadIdx.x >= WARPGROUP) {
        const int consumer = threadIdx.x / WARPGROUP - 1;
        if (DIVIDE_REGISTERS) claim_registers<CONSUMER_REGISTERS>();
#if CLUSTER_SPLIT
        sum_part(shared, schedule, consumer);
#else
        consume(shared, schedule, C, NONDETERMINISTIC ? totals : partials, counters, C_map, alpha, beta, consumer,
                rank);
#endif
    } else {
        if (DIVIDE_REGISTERS) release_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(shared, schedule, A_map, B_map, rank);
    }

#if CLUSTER_SPLIT
    cluster_barrier();
    write_share(shared, schedule, C, alpha, beta);
    cluster_meet();  // no block exits before the others have read its shared memory
#endif
}
