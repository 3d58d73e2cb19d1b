// Matrix multiplication, step 3 of 3: register tiles (SGEMM).
//
//     C = alpha * A * B + beta * C        A is M x K, B is K x N, C is M x N, fp32, row-major
//
// Idea. Step 2 reads two floats from shared memory for every multiply-add, and shared memory cannot feed the
// arithmetic units at that rate. So tile once more: a block owns BM x BN elements of C, a thread owns TM x TN of them
// and keeps them in registers. For each k it reads TM floats of A and TN of B and multiplies all pairs, an outer
// product:
//
//                        b b b b                TN floats from the tile of B
//                      +---------
//                    a | c c c c
//                    a | c c c c                TM * TN multiply-adds for TM + TN floats:
//                    a | c c c c                8 x 8 per thread needs 1/4 float each, step 2 needed 2
//                    a | c c c c
//
//                        K                              BN
//                 +-----+-----+-----+             +-----------+
//              BM |     | BK  |     |          BK |  tile of  |     the tile of A is stored transposed, so that
//                 |     |     |     |             |     B     |     both fragments are contiguous and one 128-bit
//                 +-----+-----+-----+             +-----------+     read brings 4 floats
//
// Work distribution. A thread's TM x TN elements are not contiguous but strips of 4 x 4 spread evenly over the block,
// so that adjacent threads access adjacent 16-byte chunks: shared reads have no bank conflicts, stores to C are
// coalesced.
//
//     columns of the tile:   |t0  |t1  |t2  |t3  | ... |t0  |t1  |t2  |t3  | ...    "t0": 4 floats of thread column 0
//                             strip 0                   strip 1
//
// A warp covers LANES_X x (32 / LANES_X) of those threads: the closer to square, the fewer distinct floats per k.
//
// Pipeline. While a tile is multiplied, the next one is in flight from global memory to registers (`fetch`); it is
// stored to shared memory (`stash`) after the multiplication. With two stages, tiles alternate between two buffers and
// one barrier per tile is enough.
//
// Arithmetic intensity. A float of A serves BN multiply-adds, a float of B serves BM: BM * BN / (2 * (BM + BN)) FLOP
// per byte from global memory, 32 for 128 x 128 (step 2: 8 for 32 x 32).
//
// Edges. Rows and columns beyond the matrix are clamped to the last one: their products are computed and never stored.
// Only k beyond K must contribute nothing, so a last tile that K does not fill, and only that one, is loaded element by
// element and zero-filled.
//
// Alignment. Vectors wider than one float require every row to start on a vector boundary. This is checked once per
// launch, from the sizes and the pointers, so any VEC is correct for any M, N, K and any pointers; where the check
// fails, all tiles take the scalar path and a smaller VEC is faster.
//
// Macros
//   BM, BN       rows and columns of C per block
//   BK           depth of the tiles in shared memory
//   TM, TN       rows and columns of C per thread, multiples of 4
//   LANES_X      threads of a warp side by side along N
//   VEC          floats per global load or store: 1, 2 or 4
//   STAGES       buffers in shared memory: 1 or 2
//   PAD          floats of padding per row of the transposed tile; 4 spreads the transposing stores over more banks
//   UNROLL       unrolled steps of k
//   MIN_BLOCKS   minimum resident blocks per SM; caps the registers per thread
//
// Launch: THREADS threads in one dimension; grid.x counts tiles down the rows of C, grid.y across its columns.
//
// Next: asynchronous copies (cp.async, TMA) bypass registers; tensor cores give up fp32.

#ifndef BM
#define BM 128
#define BN 128
#define BK 8
#define TM 8
#define TN 8
#define LANES_X 8
#define VEC 4
#define STAGES 2
#define PAD 4
#define UNROLL 8
#define MIN_BLOCKS 2
#endif

constexpr int WARP = 32;
constexpr int STRIP = 4;          // floats per 128-bit shared-memory read
constexpr int K_UNROLL = UNROLL;  // a pragma requires a constant, not a macro

constexpr int THREADS_X = BN / TN;
constexpr int THREADS_Y = BM / TM;
constexpr int THREADS = THREADS_X * THREADS_Y;

// Trips in which all threads copy one tile, one vector per thread and trip.
constexpr int A_TRIPS = BM * BK / (VEC * THREADS);
constexpr int B_TRIPS = BK * BN / (VEC * THREADS);

static_assert(TM % STRIP == 0 && TN % STRIP == 0, "a thread's tile is made of 4 x 4 strips");
static_assert(THREADS_X % LANES_X == 0 && THREADS_Y % (WARP / LANES_X) == 0, "warps must tile the block");
static_assert(A_TRIPS * VEC * THREADS == BM * BK && B_TRIPS * VEC * THREADS == BK * BN, "trips must be whole");
static_assert(STRIP % VEC == 0 && PAD % STRIP == 0, "128-bit reads must stay aligned");

template <int WIDTH>
struct __align__(WIDTH * sizeof(float)) Vector {
    float lane[WIDTH];
};

// One pair of tiles in shared memory: A[k][row], transposed, and B[k][column].
struct Tiles {
    float A[BK][BM + PAD];
    float B[BK][BN];
};

// A thread's share of the next pair of tiles.
struct Cargo {
    Vector<VEC> a[A_TRIPS];
    Vector<VEC> b[B_TRIPS];
};

// The operands from a block's first row of A and first column of B on.
struct Operands {
    const float* A;
    const float* B;
    int rows;     // of A from the block's first on; may exceed BM
    int columns;  // of B from the block's first on; may exceed BN
    int K;
    int N;
    bool vectors;  // every row starts on a vector boundary
};

__device__ __forceinline__ bool on_vector_boundary(const void* pointer)
{
    return reinterpret_cast<size_t>(pointer) % sizeof(Vector<VEC>) == 0;
}

// Position of this thread's trip `i` in a tile whose rows hold `width` floats.
__device__ __forceinline__ int tile_row(int i, int width)
{
    return (threadIdx.x + i * THREADS) / (width / VEC);
}

__device__ __forceinline__ int tile_column(int i, int width)
{
    return (threadIdx.x + i * THREADS) % (width / VEC) * VEC;
}

// Global memory to registers: the tiles that start at k0.
__device__ __forceinline__ void fetch(Cargo& cargo, const Operands& from, int k0)
{
    const int depth = from.K - k0;
    const float* A = from.A + k0;
    const float* B = from.B + static_cast<size_t>(k0) * from.N;
    if (from.vectors && depth >= BK) {
#pragma unroll
        for (int i = 0; i < A_TRIPS; ++i) {
            const size_t row = min(tile_row(i, BK), from.rows - 1);
            cargo.a[i] = *reinterpret_cast<const Vector<VEC>*>(A + row * from.K + tile_column(i, BK));
        }
#pragma unroll
        for (int i = 0; i < B_TRIPS; ++i) {
            const size_t k = tile_row(i, BN);
            const int column = min(tile_column(i, BN), from.columns - VEC);
            cargo.b[i] = *reinterpret_cast<const Vector<VEC>*>(B + k * from.N + column);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < A_TRIPS; ++i) {
        const size_t row = min(tile_row(i, BK), from.rows - 1);
        const int k = tile_column(i, BK);
#pragma unroll
        for (int v = 0; v < VEC; ++v) cargo.a[i].lane[v] = k + v < depth ? A[row * from.K + k + v] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < B_TRIPS; ++i) {
        const int k = tile_row(i, BN);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const int column = min(tile_column(i, BN) + v, from.columns - 1);
            cargo.b[i].lane[v] = k < depth ? B[static_cast<size_t>(k) * from.N + column] : 0.0f;
        }
    }
}

// Registers to shared memory; A is transposed by the stores.
__device__ __forceinline__ void stash(Tiles& tiles, const Cargo& cargo)
{
#pragma unroll
    for (int i = 0; i < A_TRIPS; ++i)
#pragma unroll
        for (int v = 0; v < VEC; ++v) tiles.A[tile_column(i, BK) + v][tile_row(i, BK)] = cargo.a[i].lane[v];
#pragma unroll
    for (int i = 0; i < B_TRIPS; ++i)
        *reinterpret_cast<Vector<VEC>*>(&tiles.B[tile_row(i, BN)][tile_column(i, BN)]) = cargo.b[i];
}

// First row or column, in the block tile, of strip `i` of a thread.
__device__ __forceinline__ int strip_start(int i, int thread, int threads) { return (i * threads + thread) * STRIP; }

// A thread's fragment of one row of a tile: COUNT strips of 4 floats.
template <int COUNT>
__device__ __forceinline__ void read_fragment(Vector<STRIP> (&fragment)[COUNT], const float* row, int thread,
                                              int threads)
{
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        fragment[i] = *reinterpret_cast<const Vector<STRIP>*>(row + strip_start(i, thread, threads));
}

// One pair of tiles: BK outer products.
__device__ __forceinline__ void multiply(float (&sum)[TM][TN], const Tiles& tiles, int tx, int ty)
{
#pragma unroll K_UNROLL
    for (int k = 0; k < BK; ++k) {
        Vector<STRIP> a[TM / STRIP];
        Vector<STRIP> b[TN / STRIP];
        read_fragment(a, tiles.A[k], ty, THREADS_Y);
        read_fragment(b, tiles.B[k], tx, THREADS_X);
#pragma unroll
        for (int m = 0; m < TM; ++m)
#pragma unroll
            for (int n = 0; n < TN; ++n)
                sum[m][n] += a[m / STRIP].lane[m % STRIP] * b[n / STRIP].lane[n % STRIP];
    }
}

// C = alpha * sum + beta * C for WIDTH adjacent elements, if they are inside the matrix. If beta is 0, C is not read:
// it may hold NaN.
template <int WIDTH>
__device__ __forceinline__ void update(float* C, const float* sum, float alpha, float beta, bool inside)
{
    Vector<WIDTH>* target = reinterpret_cast<Vector<WIDTH>*>(C);
    Vector<WIDTH> result = {};
    if (inside && beta != 0.0f) result = *target;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) result.lane[v] = alpha * sum[v] + beta * result.lane[v];
    if (inside) *target = result;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sgemm_2d(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C,
         int M, int N, int K, float alpha, float beta)
{
    __shared__ __align__(16) Tiles tiles[STAGES];

    const int first_row = blockIdx.x * BM;
    const int first_column = blockIdx.y * BN;
    const bool vectors = K % VEC == 0 && N % VEC == 0 && on_vector_boundary(A) && on_vector_boundary(B);
    const Operands from = {A + static_cast<size_t>(first_row) * K, B + first_column, M - first_row, N - first_column,
                           K, N, vectors};

    // Lanes are numbered down pairs of columns: lanes 0 and 1 share a row of threads, lanes 0 and 2 a column. Adjacent
    // lanes that read the same 16 bytes let the hardware serve a 128-bit read of a whole warp in two passes instead of
    // four.
    constexpr int LANES_Y = WARP / LANES_X;
    constexpr int WARPS_X = THREADS_X / LANES_X;
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int tx = warp % WARPS_X * LANES_X + lane / (2 * LANES_Y) * 2 + lane % 2;
    const int ty = warp / WARPS_X * LANES_Y + lane / 2 % LANES_Y;

    float sum[TM][TN] = {};
    Cargo cargo;
    fetch(cargo, from, 0);
    stash(tiles[0], cargo);
    __syncthreads();

    const int tile_count = (K - 1) / BK + 1;
    for (int tile = 0; tile < tile_count; ++tile) {
        const bool more = tile + 1 < tile_count;
        if (more) fetch(cargo, from, (tile + 1) * BK);
        multiply(sum, tiles[tile % STAGES], tx, ty);
        if (STAGES == 1) __syncthreads();  // the only buffer is still being read
        if (more) stash(tiles[(tile + 1) % STAGES], cargo);
        __syncthreads();
    }

    const bool whole_stores = N % VEC == 0 && on_vector_boundary(C);
#pragma unroll
    for (int m = 0; m < TM; ++m) {
        const int row = strip_start(m / STRIP, ty, THREADS_Y) + m % STRIP;
        const int columns = row < M - first_row ? N - first_column : 0;
        float* C_row = C + (static_cast<size_t>(first_row) + row) * N + first_column;
#pragma unroll
        for (int n = 0; n < TN; n += VEC) {
            const int column = strip_start(n / STRIP, tx, THREADS_X) + n % STRIP;
            if (whole_stores) {
                update<VEC>(C_row + column, &sum[m][n], alpha, beta, column < columns);
            } else {
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    update<1>(C_row + column + v, &sum[m][n + v], alpha, beta, column + v < columns);
            }
        }
    }
}
