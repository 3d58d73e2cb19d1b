// Matrix multiplication on tensor cores with ldmatrix and mma.sync: compute capability 8.0 and later.
//
//     C = alpha * op(A) * op(B) + beta * C        op(A) is M x K, op(B) is K x N, C is M x N, row-major, fp16 or bf16
//
// op(A) is A, or its transpose if TRANS_A (A is then stored K x M); op(B) likewise (N x K if TRANS_B). Accumulation is
// in fp32. C has the type of A and B, or fp32 if OUT_FP32. blockIdx.z is the batch index.
//
// Idea. A block computes BM x BN of C, a warp WM x WN of it, in pieces of 16 x 8, one mma.sync each. mma.cuh shows the
// distribution of a piece over the lanes. Operands take this path:
//
//     global memory --cp.async--> ring of STAGES tiles in shared memory --ldmatrix--> registers --mma.sync--> sums
//
//     step          0     1     2     3   ...       While one step of BK is multiplied, the copies of the STAGES - 1
//     copied     0 1 2    3     4     5             steps ahead are in flight. One barrier per step: it ensures that
//     multiplied    0     1     2     3             the next tile has arrived and the previous one is free.
//
// Fragments are double-buffered as well (FRAGMENTS = 2): while the tensor cores process k .. k + 15, ldmatrix loads
// k + 16 .. k + 31. FRAGMENTS = 1 halves the registers for fragments, and other warps must hide the latency.
//
// What limits it. Per tile, a warp reads WM + WN rows for WM * WN products: 1/32 element per product for 64 x 64, and
// shared memory is half busy when the tensor cores are two thirds busy, which is the best this loop reaches on an H200.
// Narrow products are limited by the latency of a step; there, K_WARPS groups of warps share a step, each WK = BK /
// K_WARPS deep.
//
//     BM x BN, K_WARPS = 2:     k  0 .. WK - 1      WK .. BK - 1         their sums are added at the end, always in
//                                  group 0          group 1              this order, so results are reproducible
//
// Any size, any alignment: tile_stream.cuh uses the widest copies that the rows of each operand allow and zero-fills
// elements beyond the matrix.
//
// Few tiles. SPLIT_K blocks share a tile, each with a part of K. shared_sums.cuh describes the reduction and the
// epilogue.
//
// Accuracy. mma.sync truncates its fp32 sums instead of rounding them, always toward zero: the relative error grows
// with the number of steps, to 1e-3 at K = 500,000. A 16-bit C hides it. For an fp32 C, the accumulators are added in
// rounded fp32 to a second set after every 4096 values of k. That set lives in local memory and costs no registers.
//
// Macros
//   BM, BN          rows and columns of C per block
//   BK              depth of the tiles in shared memory
//   WM, WN          rows and columns of C per warp, multiples of 16
//   K_WARPS         groups of warps that share the depth of a tile
//   STAGES          tiles in the ring, at least 2
//   FRAGMENTS       sets of fragments: 1, or 2 for double buffering
//   SPLIT_K         blocks that share a tile, each with a part of K
//   CLUSTER_SPLIT   1: these blocks form a cluster (compute capability 9.0, up to 8 blocks)
//   GROUP           rows of tiles per band of the block order (raster.cuh)
//   MIN_BLOCKS      minimum resident blocks per SM; caps the registers per thread
//
// Launch: THREADS threads; grid.x is the number of tiles, grid.y the number of parts of K, grid.z the batch size;
// dynamic shared memory holds the ring or the sums, whichever is larger.
//
// Next: Hopper's wgmma reads operands from shared memory without ldmatrix, and TMA copies without occupying threads.

#include "element.cuh"
#include "mma.cuh"
#include "output_quads.cuh"
#include "raster.cuh"
#include "shared_sums.cuh"
#include "tile_stream.cuh"

#ifndef BM
#define BM 128
#define BN 128
#define BK 64
#define WM 64
#define WN 64
#define K_WARPS 1
#define STAGES 3
#define FRAGMENTS 2
#define SPLIT_K 1
#define CLUSTER_SPLIT 0
#define GROUP 8
#define MIN_BLOCKS 1
#define TRANS_A 0
#define TRANS_B 0
#define OUT_FP32 0
#define NONDETERMINISTIC 0
#define DTYPE __nv_bfloat16
#endif

#if CLUSTER_SPLIT
#define CLUSTER __cluster_dims__(1, SPLIT_K, 1)
#else
#define CLUSTER
#endif

#if OUT_FP32
typedef float Output;
#else
typedef DTYPE Output;
#endif
typedef Stored<DTYPE>::type In;
typedef Stored<Output>::type Out;

constexpr int WARP = 32;
constexpr int WARPS_N = BN / WN;
constexpr int GROUP_THREADS = WARP * (BM / WM) * WARPS_N;
constexpr int THREADS = GROUP_THREADS * K_WARPS;
constexpr int WK = BK / K_WARPS;
constexpr int PIECE = 16;  // depth of an mma.sync

static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && WN % 16 == 0, "warps must tile the block, pieces the warp");
static_assert(WK % (FRAGMENTS * PIECE) == 0, "fragments take turns");

// Copies of the operands into shared memory (tile_stream.cuh).
template <int OUTER, bool K_ALONG_ROWS>
using Operand = Stream<In, OUTER, BK, K_ALONG_ROWS, THREADS, MatrixSwizzle<(K_ALONG_ROWS ? BK : OUTER) / CHUNK>>;
typedef Operand<BM, !TRANS_A> StreamA;
typedef Operand<BN, TRANS_B> StreamB;

extern __shared__ __align__(128) unsigned char shared[];
constexpr int SLOT_BYTES = StreamA::TILE_BYTES + StreamB::TILE_BYTES;
constexpr int RING_BYTES = STAGES * SLOT_BYTES;

// Position in the block tile of this thread's warp tile.
struct Warp {
    int row;
    int column;
    int k;

    __device__ __forceinline__ Warp()
    {
        const int warp = threadIdx.x % GROUP_THREADS / WARP;
        row = warp / WARPS_N * WM;
        column = warp % WARPS_N * WN;
        k = threadIdx.x / GROUP_THREADS * WK;
    }
};

// Fragments of a warp for one piece of k.
struct Fragments {
    unsigned a[WM / 16][4];
    unsigned b[WN / 16][4];

    __device__ __forceinline__ void load(const unsigned char* slot, const Warp& warp, int k)
    {
#pragma unroll
        for (int m = 0; m < WM / 16; ++m)
            load_piece<SIDE_A, !TRANS_A, StreamA::ROW>(a[m], slot, warp.row + m * 16, warp.k + k);
#pragma unroll
        for (int n = 0; n < WN / 16; ++n)
            load_piece<SIDE_B, TRANS_B, StreamB::ROW>(b[n], slot + StreamA::TILE_BYTES, warp.column + n * 16, warp.k + k);
    }
};

// Accumulators of a thread: 4 per 16 x 8 piece, pieces in row-major order.
constexpr int SUMS = WM * WN / WARP;

__device__ __forceinline__ int first_sum(int m, int n) { return (m * (WN / 8) + n) * 4; }

__device__ __forceinline__ void multiply(float (&sum)[SUMS], const Fragments& with)
{
#pragma unroll
    for (int m = 0; m < WM / 16; ++m)
#pragma unroll
        for (int n = 0; n < WN / 8; ++n)
            multiply_add<DTYPE>(&sum[first_sum(m, n)], with.a[m], &with.b[n / 2][n % 2 * 2]);
}

// Sums of long products in rounded fp32; see "Accuracy". `volatile` keeps them out of registers.
constexpr int STEPS_A_MOVE = 4096 * K_WARPS / BK;

struct LongSums {
    volatile float total[SUMS];

    __device__ __forceinline__ void move(float (&sum)[SUMS], bool first)
    {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            total[i] = first ? sum[i] : total[i] + sum[i];
            sum[i] = 0.0f;
        }
    }

    __device__ __forceinline__ void add_to(float (&sum)[SUMS])
    {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sum[i] += total[i];
    }
};

// sum += op(A) * op(B) over `steps` steps of BK.
__device__ __forceinline__ void accumulate(float (&sum)[SUMS], StreamA& stream_a, StreamB& stream_b, const Warp& warp,
                                           int steps)
{
    auto copy = [&](int step) {
        if (step < steps) {
            unsigned char* slot = shared + step % STAGES * SLOT_BYTES;
            stream_a.copy(slot);
            stream_b.copy(slot + StreamA::TILE_BYTES);
        }
        cp_async_commit();  // empty groups at the end keep the group count constant
    };
    auto next_slot_arrived = [] {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
    };

#pragma unroll 1
    for (int step = 0; step < STAGES - 1; ++step) copy(step);
    const unsigned char* slot = shared;
    Fragments fragments[FRAGMENTS];
    LongSums long_sums;
    if (FRAGMENTS == 2) {
        next_slot_arrived();
        fragments[0].load(slot, warp, 0);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        if (FRAGMENTS == 1) next_slot_arrived();
#pragma unroll
        for (int k = 0; k < WK; k += PIECE) {
            const bool last = k + PIECE == WK;
            if (FRAGMENTS == 2 && last) next_slot_arrived();
            if (FRAGMENTS == 1) fragments[0].load(slot, warp, k);
            if (last) slot = slot + SLOT_BYTES == shared + RING_BYTES ? shared : slot + SLOT_BYTES;
            if (FRAGMENTS == 2) fragments[(k / PIECE + 1) % 2].load(slot, warp, last ? 0 : k + PIECE);
            if (k == 0) copy(step + STAGES - 1);  // into the slot released by the barrier before this step
            multiply(sum, fragments[k / PIECE % FRAGMENTS]);
        }
        if (OUT_FP32 && step % STEPS_A_MOVE == STEPS_A_MOVE - 1) long_sums.move(sum, step < STEPS_A_MOVE);
    }
    if (OUT_FP32 && steps >= STEPS_A_MOVE) long_sums.add_to(sum);
    cp_async_wait<0>();
    __syncthreads();
}

// Epilogue. In shared memory, 8 floats of padding per row put the rows of a piece into different banks.
typedef SharedSums<BM, BN, BN + 8, THREADS, K_WARPS, SPLIT_K, CLUSTER_SPLIT, NONDETERMINISTIC> WayOut;

__device__ __forceinline__ void leave_in_shared(const float (&sum)[SUMS], const Warp& warp)
{
    const int lane = threadIdx.x % WARP;
    float* tile = reinterpret_cast<float*>(shared) + threadIdx.x / GROUP_THREADS * WayOut::TILE_FLOATS;
    float* first = tile + (warp.row + lane / 4) * WayOut::PITCH + warp.column + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < WM / 16; ++m)
#pragma unroll
        for (int n = 0; n < WN / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* pair = &sum[first_sum(m, n) + half * 2];
                *reinterpret_cast<float2*>(first + (m * 16 + half * 8) * WayOut::PITCH + n * 8) = {pair[0], pair[1]};
            }
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS)
gemm_mma(const DTYPE* __restrict__ A, const DTYPE* __restrict__ B, Output* __restrict__ C, float* partials, float* totals,
         unsigned* counters, int M, int N, int K, float alpha, float beta)
{
    const Tile tile = raster(blockIdx.x, (M - 1) / BM + 1, (N - 1) / BN + 1, GROUP);
    const int first_row = tile.row * BM;
    const int first_column = tile.column * BN;
    const int split = blockIdx.y;
    const size_t batch = blockIdx.z;

    // The parts of K are whole steps and differ by at most one.
    const long long all_steps = (K - 1) / BK + 1;
    const int first_step = static_cast<int>(all_steps * split / SPLIT_K);
    const int steps = static_cast<int>(all_steps * (split + 1) / SPLIT_K) - first_step;
    StreamA stream_a(reinterpret_cast<const In*>(A) + batch * M * K, first_row, M, first_step * BK, K);
    StreamB stream_b(reinterpret_cast<const In*>(B) + batch * N * K, first_column, N, first_step * BK, K);

    const Warp warp;
    float sum[SUMS] = {};
    accumulate(sum, stream_a, stream_b, warp, steps);
    leave_in_shared(sum, warp);

    const size_t index = batch * gridDim.x + blockIdx.x;
    float* parts = (NONDETERMINISTIC ? totals : partials) + index * WayOut::WORKSPACE_FLOATS;
    const OutputQuads<DTYPE, Out> to(reinterpret_cast<Out*>(C) + batch * M * N, M, N, alpha, beta);
    WayOut::deliver(reinterpret_cast<float*>(shared), parts, counters + index, [&](int row, int column, float* sums) {
        to.update(first_row + row, first_column + column, sums);
    });
}
