// Matrix multiplication with fp32 accuracy on tensor cores, by six products of bf16 limbs: compute capability >= 8.0.
//
//     C = alpha * op(A) * op(B) + beta * C        op(A) is M x K, op(B) is K x N, C is M x N, row-major, all fp32
//
// op(A) is A, or its transpose if TRANS_A (A is then stored K x M); op(B) likewise (N x K if TRANS_B). blockIdx.z is
// the batch index.
//
// Idea. Tensor cores multiply bf16 ten times as fast as CUDA cores multiply fp32. An fp32 number is the sum of three
// bf16 limbs, and six of the nine limb products give a product to within the rounding of fp32: bf16_limbs.cuh explains
// how, and how the accumulation keeps that accuracy. Errors are those of fp32 arithmetic, or smaller for long sums, at
// more than its speed.
//
// Data path. Numbers stay fp32 as long as possible, in global and in shared memory; limbs exist in registers only:
//
//     global memory --cp.async--> ring of STAGES tiles --16-byte reads--> fp32 --split--> limbs --mma.sync--> products
//                                                                                                              |
//                     C <-- shared memory, one quad per thread <-- sums <----- fp32 addition ------------------'
//
// Splitting costs 5.5 instructions per element, and every warp splits what it reads. For 16 values of k, a warp tile of
// WM x WN needs (WM + WN) / 2 elements per lane and 6 * WM * WN / 128 mma.sync: for 64 x 64, 352 instructions alongside
// 192 products of 6 cycles each. Two warps per scheduler overlap the two; smaller warp tiles split more than they
// multiply.
//
// Ring, steps, groups of warps along k, and split-K are those of gemm_mma.cu, which explains them.
//
// Infinities and NaN appear as non-finite sums and are recomputed (plain_fp32.cuh). Numbers below 1e-33 lose accuracy,
// as their limbs fall below the range of bf16.
//
// Macros
//   BM, BN          rows and columns of C per block
//   BK              depth of the tiles in shared memory
//   WM, WN          rows and columns of C per warp, multiples of 16
//   K_WARPS         groups of warps that share the depth of a tile
//   STAGES          tiles in the ring, at least 2
//   UNROLL          unrolled pieces of 16 k
//   SPLIT_K         blocks that share a tile, each with a part of K
//   CLUSTER_SPLIT   1: these blocks form a cluster (compute capability 9.0, up to 8 blocks)
//   GROUP           rows of tiles per band of the block order (raster.cuh)
//   MIN_BLOCKS      minimum resident blocks per SM; caps the registers per thread
//
// Launch: THREADS threads; grid.x is the number of tiles, grid.y the number of parts of K, grid.z the batch size;
// dynamic shared memory holds the ring or the sums, whichever is larger.

#include "bf16_limbs.cuh"
#include "fp32_lines.cuh"
#include "output_quads.cuh"
#include "plain_fp32.cuh"
#include "raster.cuh"
#include "shared_sums.cuh"
#include "tile_stream.cuh"

#ifndef BM
#define BM 128
#define BN 128
#define BK 32
#define WM 64
#define WN 32
#define K_WARPS 1
#define STAGES 3
#define UNROLL 1
#define SPLIT_K 1
#define CLUSTER_SPLIT 0
#define GROUP 8
#define MIN_BLOCKS 1
#define TRANS_A 0
#define TRANS_B 0
#define NONDETERMINISTIC 0
#endif

#if CLUSTER_SPLIT
#define CLUSTER __cluster_dims__(1, SPLIT_K, 1)
#else
#define CLUSTER
#endif

constexpr int WARP = 32;
constexpr int WARPS_N = BN / WN;
constexpr int GROUP_THREADS = WARP * (BM / WM) * WARPS_N;
constexpr int THREADS = GROUP_THREADS * K_WARPS;
constexpr int WK = BK / K_WARPS;
constexpr int PIECE = 16;  // depth of an mma.sync

static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && WN % 16 == 0, "warps must tile the block, pieces the warp");
static_assert(WK % (UNROLL * PIECE) == 0, "unrolled pieces must divide the depth of a warp");

// Copies of the operands into shared memory, and reads from there into lines.
template <int OUTER, bool K_ALONG_ROWS, int WARP_OUTER>
struct Operand {
    static constexpr int ROW = K_ALONG_ROWS ? BK : OUTER;
    static constexpr int LINES = !K_ALONG_ROWS && WARP_OUTER % 32 == 0 ? 4 : 2;  // lines per read
    typedef LineReader<K_ALONG_ROWS, ROW, LINES> Reader;
    typedef Stream<float, OUTER, BK, K_ALONG_ROWS, THREADS, typename Reader::Swizzle> Copier;
};
typedef Operand<BM, !TRANS_A, WM> OperandA;
typedef Operand<BN, TRANS_B, WN> OperandB;

extern __shared__ __align__(128) unsigned char shared[];
constexpr int SLOT_BYTES = OperandA::Copier::TILE_BYTES + OperandB::Copier::TILE_BYTES;

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

// Reads the lines of one operand for a piece of k and splits them.
template <typename From, int LINES, int COUNT>
__device__ __forceinline__ void read_lines(Line (&lines)[COUNT], const unsigned char* tile, int outer, int k)
{
#pragma unroll
    for (int first = 0; first < COUNT; first += LINES) {
        float read[LINES][4];
        From::Reader::read(read, tile, outer + first * 8, k);
#pragma unroll
        for (int j = 0; j < LINES; ++j) lines[first + j].split_from(read[j]);
    }
}

// Accumulators of a thread: 4 per 16 x 8 piece, pieces in row-major order.
constexpr int SUMS = WM * WN / WARP;

__device__ __forceinline__ void multiply(float (&sum)[SUMS], const unsigned char* slot, const Warp& warp, int k)
{
    Line columns[WN / 8];
    read_lines<OperandB, OperandB::LINES>(columns, slot + OperandA::Copier::TILE_BYTES, warp.column, warp.k + k);
    constexpr int ROWS = OperandA::LINES * 8;
#pragma unroll
    for (int row = 0; row < WM; row += ROWS) {
        Line rows[OperandA::LINES];
        read_lines<OperandA, OperandA::LINES>(rows, slot, warp.row + row, warp.k + k);
#pragma unroll
        for (int m = 0; m < ROWS / 16; ++m)
            multiply_add(&sum[(row / 16 + m) * (WN / 8) * 4], rows[2 * m], rows[2 * m + 1], columns);
    }
}

// sum += op(A) * op(B) over `steps` steps of BK.
__device__ __forceinline__ void accumulate(float (&sum)[SUMS], OperandA::Copier& copier_a, OperandB::Copier& copier_b,
                                           const Warp& warp, int steps)
{
    auto copy = [&](int step) {
        if (step < steps) {
            unsigned char* slot = shared + step % STAGES * SLOT_BYTES;
            copier_a.copy(slot);
            copier_b.copy(slot + OperandA::Copier::TILE_BYTES);
        }
        cp_async_commit();  // empty groups at the end keep the group count constant
    };

#pragma unroll 1
    for (int step = 1 - STAGES; step < steps; ++step) {  // before step 0, only copies are issued
        if (step >= 0) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
        }
        copy(step + STAGES - 1);  // into the slot that all warps have released before this barrier
        if (step < 0) continue;
        const unsigned char* slot = shared + step % STAGES * SLOT_BYTES;
#pragma unroll 1
        for (int first = 0; first < WK; first += UNROLL * PIECE)
#pragma unroll
            for (int piece = 0; piece < UNROLL; ++piece) multiply(sum, slot, warp, first + piece * PIECE);
    }
    cp_async_wait<0>();
    __syncthreads();
}

// Epilogue. In shared memory, padding puts rows that are written at once into different banks.
typedef SharedSums<BM, BN, BN + (TRANS_B ? 8 : 4), THREADS, K_WARPS, SPLIT_K, CLUSTER_SPLIT, NONDETERMINISTIC> WayOut;

__device__ __forceinline__ void leave_in_shared(const float (&sum)[SUMS], const Warp& warp)
{
    const int lane = threadIdx.x % WARP;
    float* tile = reinterpret_cast<float*>(shared) + threadIdx.x / GROUP_THREADS * WayOut::TILE_FLOATS;
    float* corner = tile + warp.row * WayOut::PITCH + warp.column;
    constexpr int LINES = OperandB::LINES;
#pragma unroll
    for (int half = 0; half < WM / 8; ++half) {
        float* row = corner + OperandA::Reader::outer_of(half, lane / 4) * WayOut::PITCH;
#pragma unroll
        for (int n = 0; n < WN / 8; n += LINES)
#pragma unroll
            for (int side = 0; side < 2; ++side)
#pragma unroll
                for (int j = 0; j < LINES; ++j)
                    row[OperandB::Reader::outer_of(n + j, lane % 4 * 2 + side)] =
                        sum[(half / 2 * (WN / 8) + n + j) * 4 + half % 2 * 2 + side];
    }
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm_bf16x6(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, float* partials,
             float* totals, unsigned* counters, int M, int N, int K, float alpha, float beta)
{
    const Tile tile = raster(blockIdx.x, (M - 1) / BM + 1, (N - 1) / BN + 1, GROUP);
    const int first_row = tile.row * BM;
    const int first_column = tile.column * BN;
    const size_t batch = blockIdx.z;
    A += batch * M * K;
    B += batch * N * K;

    // The parts of K are whole steps and differ by at most one.
    const int split = blockIdx.y;
    const long long all_steps = (K - 1) / BK + 1;
    const int first_step = static_cast<int>(all_steps * split / SPLIT_K);
    const int steps = static_cast<int>(all_steps * (split + 1) / SPLIT_K) - first_step;
    OperandA::Copier copier_a(A, first_row, M, first_step * BK, K);
    OperandB::Copier copier_b(B, first_column, N, first_step * BK, K);

    const Warp warp;
    float sum[SUMS] = {};
    accumulate(sum, copier_a, copier_b, warp, steps);
    leave_in_shared(sum, warp);

    const size_t index = batch * gridDim.x + blockIdx.x;
    float* parts = (NONDETERMINISTIC ? totals : partials) + index * WayOut::WORKSPACE_FLOATS;
    const Factors<TRANS_A, TRANS_B> factors = {A, B, M, N, K};
    const OutputQuads<float, float> to(C + batch * M * N, M, N, alpha, beta);
    WayOut::deliver(reinterpret_cast<float*>(shared), parts, counters + index, [&](int row, int column, float* sums) {
        row += first_row;
        column += first_column;
        factors.mend<QUAD>(sums, row, column);
        to.update(row, column, sums);
    });
}
