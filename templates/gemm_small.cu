// Skinny products: M or N is small, K is long, and the time is that of reading one large matrix once.
//
//     C = alpha * op(A) * op(B) + beta * C        op(A) is M x K, op(B) is K x N, C is M x N, row-major
//
// op(A) is A, or its transpose if TRANS_A (A is then stored K x M); op(B) likewise. A and B are fp32, fp16 or bf16,
// accumulation is in fp32; C has the type of A and B, or fp32 if OUT_FP32. blockIdx.z is the batch index.
//
// Idea. One operand is *small*: at most a few rows of op(A) (SMALL_A = 1) or columns of op(B) (SMALL_A = 0), indexed by
// q. The other is *large*; its columns of op(B), or rows of op(A), are indexed by p. Each element of the large operand
// is used in only as many multiply-adds as there are q, so staging it in shared memory gains nothing: each thread reads
// its own vectors of VEC elements directly into registers, ahead of use. It reads many of them, since what counts is
// the number of bytes in flight: 4.3 TB/s times 1 us of latency are 32 KiB on each of 132 SMs.
//
// The layout of the large matrix determines the work distribution. K_LANES threads share a p, the others spread along
// p:
//
//     k along its rows:  p |==== ==== ====>  a vector is VEC values of k for one p; a thread has LOADS values of p
//     p along its rows:  k |==== ==== ====>  a vector is VEC values of p for one k; a thread has LOADS * VEC values of p
//
// The small operand is read by all threads. A tile of it, R values of q and deep enough for many rounds, is held in
// shared memory as fp32, arranged for 16-byte reads; the next tile is copied while this one is used. With k along the
// rows, lanes read different k, 16 bytes each: a smaller K_LANES means fewer bytes per warp, which is the limit for
// R = 16 in fp32.
//
// Pipeline. A round is UNROLL steps of all threads. While one round is multiplied, the vectors of the next one are in
// flight (`next`, `now`). Elements beyond a ragged end of K read as zero; p beyond the matrix is clamped, computed and
// never stored.
//
// Reduction. Lanes that share a p reduce with warp shuffles, warps through shared memory, and SPLIT_K blocks through a
// workspace: the last block to arrive adds the parts in their order, so the result is reproducible.
//
// Alignment. If not all rows of the large matrix start on a vector boundary, vectors are assembled from single
// elements, without prefetching a round: any VEC is correct, a smaller one may be faster.
//
// Macros
//   SMALL_A      1: A is the small operand (M is small); 0: B is (N is small)
//   R            values of q that a block computes at once
//   THREADS      threads per block
//   K_LANES      threads that share a p and differ in k
//   LOADS        vectors that a thread reads per step
//   VEC          elements per vector: 1, 2, 4 or 8
//   UNROLL       steps per round
//   SPLIT_K      blocks that share an output, each with a part of K
//   SMALL_KIB    KiB of shared memory for two tiles of the small operand, at least one round each
//   MIN_BLOCKS   minimum resident blocks per SM; caps the registers per thread
//
// Launch: THREADS threads; grid.x is the number of blocks along p, grid.y of parts of K, grid.z batch times blocks
// along q.

#include "cp_async.cuh"
#include "element.cuh"

#ifndef R
#define SMALL_A 1
#define R 1
#define THREADS 512
#define K_LANES 64
#define LOADS 2
#define VEC 4
#define UNROLL 2
#define SPLIT_K 1
#define SMALL_KIB 16
#define MIN_BLOCKS 2
#define TRANS_A 0
#define TRANS_B 1
#define OUT_FP32 0
#define DTYPE float
#endif

#if OUT_FP32
typedef float Output;
#else
typedef DTYPE Output;
#endif
typedef Stored<DTYPE>::type In;
typedef Stored<Output>::type Out;

constexpr int WARP = 32;
constexpr bool ALONG_K = SMALL_A ? TRANS_B : !TRANS_A;        // whether k runs along the rows of the large matrix
constexpr bool SMALL_ALONG_K = SMALL_A ? !TRANS_A : TRANS_B;  // the same for the small one
constexpr int P_LANES = THREADS / K_LANES;
constexpr int PER_THREAD = ALONG_K ? LOADS : LOADS * VEC;     // values of p
constexpr int BP = P_LANES * PER_THREAD;                      // values of p per block
constexpr int K_A_LANE = ALONG_K ? VEC : 1;                   // values of k that a lane multiplies per step
constexpr int ROUND = UNROLL * K_LANES * K_A_LANE;            // depth of a round

static_assert(THREADS % K_LANES == 0, "lanes along k and along p make up the block");

// A vector in registers, read by one access, or by two if it has 32 bytes.
constexpr int ACCESS_BYTES = VEC * sizeof(In) < 16 ? VEC * sizeof(In) : 16;
constexpr int ACCESSES = VEC * sizeof(In) / ACCESS_BYTES;

template <int BYTES>
struct Access;
template <>
struct Access<2> {
    typedef unsigned short type;
};
template <>
struct Access<4> {
    typedef unsigned type;
};
template <>
struct Access<8> {
    typedef uint2 type;
};
template <>
struct Access<16> {
    typedef uint4 type;
};

union Vector {
    Access<ACCESS_BYTES>::type access[ACCESSES];
    In lane[VEC];
};

__device__ __forceinline__ int p_lane() { return ALONG_K ? threadIdx.x / K_LANES : threadIdx.x % P_LANES; }
__device__ __forceinline__ int k_lane() { return ALONG_K ? threadIdx.x % K_LANES : threadIdx.x / P_LANES; }

// Offsets of a thread's vectors and values from the block's first p and the round's first k.
__device__ __forceinline__ int p_of_load(int i) { return (p_lane() + i * P_LANES) * (ALONG_K ? 1 : VEC); }
__device__ __forceinline__ int p_of_value(int j) { return ALONG_K ? p_of_load(j) : p_of_load(j / VEC) + j % VEC; }
__device__ __forceinline__ int k_of_step(int u) { return (u * K_LANES + k_lane()) * K_A_LANE; }

struct Large {
    const In* matrix;
    int P;
    int K;
    int first_p;

    __device__ __forceinline__ int pitch() const { return ALONG_K ? K : P; }

    __device__ __forceinline__ bool has_whole_vectors() const
    {
        return pitch() % VEC == 0 && reinterpret_cast<size_t>(matrix) % ACCESS_BYTES == 0;
    }

    __device__ __forceinline__ const In* at(int p, int k) const
    {
        return matrix + static_cast<size_t>(ALONG_K ? p : k) * pitch() + (ALONG_K ? k : p);
    }

    // Loads the vectors of the round at k0; K and `end` are whole rounds away from k0, or K ends within the round.
    template <bool WHOLE_VECTORS>
    __device__ __forceinline__ void load(Vector (&to)[UNROLL][LOADS], int k0, int end) const
    {
        if (k0 >= end) return;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int k = k0 + k_of_step(u);
                const int p = first_p + p_of_load(i);
                if (WHOLE_VECTORS) {
                    const auto* from = reinterpret_cast<const Access<ACCESS_BYTES>::type*>(
                        at(min(p, P - (ALONG_K ? 1 : VEC)), k));
#pragma unroll
                    for (int a = 0; a < ACCESSES; ++a)
                        to[u][i].access[a] = k < K ? __ldcs(from + a) : Access<ACCESS_BYTES>::type{};
                } else {
#pragma unroll
                    for (int v = 0; v < VEC; ++v) {
                        const int kv = ALONG_K ? k + v : k;
                        const int pv = min(ALONG_K ? p : p + v, P - 1);
                        to[u][i].lane[v] = kv < K ? __ldcs(at(pv, kv)) : In{};
                    }
                }
            }
    }
};

// A tile of the small operand in shared memory: a lane's share of a step, K_A_LANE rows of R values, is contiguous.
// Padding after each share lets lanes that read 16 bytes at a time start in different banks.
constexpr int SHARE = K_A_LANE * R;
constexpr int SHARE_PITCH = SHARE + (ALONG_K && SHARE % 8 == 0 ? 4 : 0);
constexpr int SHARE_VEC = SHARE < 4 ? SHARE : 4;
constexpr int TILE_BUDGET = SMALL_KIB * 128 / R;  // values of k that fit into half of SMALL_KIB
constexpr int DEPTH = TILE_BUDGET > ROUND ? TILE_BUDGET / ROUND * ROUND : ROUND;
constexpr int TILE_FLOATS = DEPTH / K_A_LANE * SHARE_PITCH;
__shared__ __align__(16) float shared[2 * TILE_FLOATS];

__device__ __forceinline__ int place_of(int r, int k) { return k / K_A_LANE * SHARE_PITCH + k % K_A_LANE * R + r; }

struct Small {
    const In* matrix;
    int Q;
    int K;
    int first_q;

    // Starts the copy of the tile at k0 into shared memory. Threads run along the rows of the matrix. 4-byte elements
    // are copied asynchronously; 2-byte elements must be converted on the way.
    __device__ __forceinline__ void copy(float* tile, int k0) const
    {
        constexpr int R_STEP = SMALL_ALONG_K ? (THREADS > DEPTH ? THREADS / DEPTH : 1) : (THREADS < R ? THREADS : R);
        constexpr int K_STEP = THREADS / R_STEP;
        constexpr int TRIPS = DEPTH / K_STEP;
        static_assert(DEPTH % K_STEP == 0 && K_STEP % K_A_LANE == 0, "trips must be whole");
        const size_t q_stride = SMALL_ALONG_K ? K : 1;
        const size_t k_stride = SMALL_ALONG_K ? 1 : Q;
        const int k_start = SMALL_ALONG_K ? threadIdx.x % K_STEP : threadIdx.x / R_STEP;
#pragma unroll 1
        for (int r = SMALL_ALONG_K ? threadIdx.x / K_STEP : threadIdx.x % R_STEP; r < R; r += R_STEP) {
            const In* from = matrix + (first_q + r) * q_stride + (k0 + k_start) * k_stride;
            const int depth = first_q + r < Q ? K - k0 - k_start : 0;
            float* to = tile + place_of(r, k_start);
#pragma unroll (TRIPS < 4 ? TRIPS : 4)
            for (int k = 0; k < DEPTH; k += K_STEP) {
                if constexpr (sizeof(In) == 4)
                    cp_async<4>(to, from, k < depth ? 4 : 0);
                else
                    *to = k < depth ? widen<DTYPE>(*from) : 0.0f;
                from += K_STEP * k_stride;
                to += K_STEP / K_A_LANE * SHARE_PITCH;
            }
        }
        cp_async_commit();
    }
};

struct alignas(SHARE_VEC * sizeof(float)) ShareVector {
    float lane[SHARE_VEC];
};

// One round: every vector of the large matrix times the share of the small tile at `tile`.
__device__ __forceinline__ void multiply(float (&sum)[R][PER_THREAD], const Vector (&large)[UNROLL][LOADS],
                                         const float* tile)
{
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        float wide[LOADS][VEC];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) widen<DTYPE>(wide[i], large[u][i].lane);
        const float* share = tile + place_of(0, k_of_step(u));
#pragma unroll
        for (int first = 0; first < SHARE; first += SHARE_VEC) {
            const ShareVector small = *reinterpret_cast<const ShareVector*>(share + first);
#pragma unroll
            for (int i = 0; i < SHARE_VEC; ++i) {
                const int v = (first + i) / R;
                const int r = (first + i) % R;
#pragma unroll
                for (int j = 0; j < PER_THREAD; ++j)
                    sum[r][j] += small.lane[i] * (ALONG_K ? wide[j][v] : wide[j / VEC][j % VEC]);
            }
        }
    }
}

// sum += the products for k from `first` to `end`.
template <bool WHOLE_VECTORS>
__device__ __forceinline__ void accumulate(float (&sum)[R][PER_THREAD], const Large& large, const Small& small,
                                           int first, int end)
{
    if (first >= end) return;
    float* tile = shared;
    float* other = shared + TILE_FLOATS;
    Vector now[UNROLL][LOADS];
    Vector next[UNROLL][LOADS];
    small.copy(tile, first);
    if (WHOLE_VECTORS) large.load<true>(next, first, end);
#pragma unroll 1
    for (int k0 = first; k0 < end; k0 += DEPTH) {
        cp_async_wait<0>();
        __syncthreads();  // this tile has arrived, and no thread reads the other any more
        if (k0 + DEPTH < end) small.copy(other, k0 + DEPTH);
        const int depth = min(DEPTH, end - k0);
#pragma unroll 1
        for (int k = 0; k < depth; k += ROUND) {
            if (WHOLE_VECTORS) {
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
#pragma unroll
                    for (int i = 0; i < LOADS; ++i) now[u][i] = next[u][i];
                large.load<true>(next, k0 + k + ROUND, end);
            } else {
                large.load<false>(now, k0 + k, end);
            }
            multiply(sum, now, tile + place_of(0, k));
        }
        float* done = tile;
        tile = other;
        other = done;
    }
}

// Lanes of a warp that share a p, their distance, and the number of lane groups that remain after their reduction.
constexpr int SHARING_LANES = ALONG_K ? (K_LANES < WARP ? K_LANES : WARP) : (P_LANES < WARP ? WARP / P_LANES : 1);
constexpr int SHARING_DISTANCE = ALONG_K ? 1 : P_LANES;
constexpr int GROUPS = K_LANES / SHARING_LANES;
constexpr int ROWS_THAT_FIT = 2 * TILE_FLOATS / (GROUPS * BP);
constexpr int ROWS_AT_ONCE = ROWS_THAT_FIT < R ? ROWS_THAT_FIT : R;
static_assert(ROWS_THAT_FIT >= 1, "one value of q of all groups must fit into shared memory");

__device__ __forceinline__ void add_up_lanes(float (&sum)[R][PER_THREAD])
{
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j)
#pragma unroll
            for (int lanes = SHARING_LANES / 2; lanes > 0; lanes /= 2)
                sum[r][j] += __shfl_xor_sync(0xffffffff, sum[r][j], lanes * SHARING_DISTANCE);
}

// Calls take(r, p, total) for every output of the block, each in one thread, with the sum over all groups.
template <typename Take>
__device__ __forceinline__ void add_up_groups(const float (&sum)[R][PER_THREAD], Take take)
{
    const int group = k_lane() / SHARING_LANES;
    const bool speaks = k_lane() % SHARING_LANES == 0;
#pragma unroll
    for (int first = 0; first < R; first += ROWS_AT_ONCE) {
        const int rows = R - first < ROWS_AT_ONCE ? R - first : ROWS_AT_ONCE;
        __syncthreads();
#pragma unroll
        for (int r = 0; r < rows; ++r)
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j)
                if (speaks) shared[(group * ROWS_AT_ONCE + r) * BP + p_of_value(j)] = sum[first + r][j];
        __syncthreads();
        for (int i = threadIdx.x; i < rows * BP; i += THREADS) {
            float total = 0.0f;
            for (int g = 0; g < GROUPS; ++g) total += shared[g * ROWS_AT_ONCE * BP + i];
            take(first + i / BP, i % BP, total);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gemm_small(const DTYPE* __restrict__ A, const DTYPE* __restrict__ B, Output* __restrict__ C, float* partials,
           unsigned* counters, int M, int N, int K, float alpha, float beta)
{
    const int P = SMALL_A ? N : M;
    const int Q = SMALL_A ? M : N;
    const int blocks_q = (Q - 1) / R + 1;
    const size_t batch = blockIdx.z / blocks_q;
    const int first_q = blockIdx.z % blocks_q * R;
    const int first_p = blockIdx.x * BP;
    const In* a = reinterpret_cast<const In*>(A) + batch * M * K;
    const In* b = reinterpret_cast<const In*>(B) + batch * N * K;
    const Large large = {SMALL_A ? b : a, P, K, first_p};
    const Small small = {SMALL_A ? a : b, Q, K, first_q};

    // The parts of K are whole rounds, so that vectors stay whole.
    const long long rounds = (K - 1) / ROUND + 1;
    const int split = blockIdx.y;
    const int first = static_cast<int>(rounds * split / SPLIT_K) * ROUND;
    const int end = min(static_cast<long long>(K), rounds * (split + 1) / SPLIT_K * ROUND);
    float sum[R][PER_THREAD] = {};
    if (large.has_whole_vectors())
        accumulate<true>(sum, large, small, first, end);
    else
        accumulate<false>(sum, large, small, first, end);
    add_up_lanes(sum);

    // C = alpha * total + beta * C. If beta is 0, C is not read: it may hold NaN.
    Out* c = reinterpret_cast<Out*>(C) + batch * M * N;
    auto finish = [&](int r, int column, float total) {
        const int q = first_q + r;
        const int p = first_p + column;
        if (q >= Q || p >= P) return;
        Out& to = c[SMALL_A ? static_cast<size_t>(q) * N + p : static_cast<size_t>(p) * N + q];
        narrow<DTYPE>(to, alpha * total + (beta != 0.0f ? beta * widen<DTYPE>(to) : 0.0f));
    };
    if (SPLIT_K == 1) {
        add_up_groups(sum, finish);
        return;
    }
    const size_t tile = static_cast<size_t>(blockIdx.z) * gridDim.x + blockIdx.x;
    float* parts = partials + tile * SPLIT_K * R * BP;
    add_up_groups(sum, [&](int r, int column, float total) { __stcg(&parts[(split * R + r) * BP + column], total); });
    __threadfence();
    __syncthreads();
    if (!__syncthreads_or(threadIdx.x == 0 && atomicAdd(&counters[tile], 1) + 1 == SPLIT_K)) return;
    __threadfence();
    if (threadIdx.x == 0) counters[tile] = 0;
    for (int i = threadIdx.x; i < R * BP; i += THREADS) {
        float total = 0.0f;
#pragma unroll 8
        for (int s = 0; s < SPLIT_K; ++s) total += __ldcg(&parts[s * R * BP + i]);
        finish(i / BP, i % BP, total);
    }
}
