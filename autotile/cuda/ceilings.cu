// Kernels that reach the ceilings of a GPU: DRAM and L2 bandwidth, FMA and tensor-core rates, empty launches.
//
// All are persistent, one wave of blocks, and repeat their work `rounds` times. The first thread of the first block
// counts how many clock cycles and nanoseconds the launches took, which gives the clock under this load. Each kernel
// writes a result that shows that the work was done; the host checks it.

typedef unsigned int word_t;
typedef unsigned long long count_t;

struct Elapsed {
    count_t cycles, nanoseconds;
};

__device__ __forceinline__ count_t nanoseconds_now()
{
    count_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Measures from its construction to `stop`, in one thread.
struct Stopwatch {
    count_t cycles, nanoseconds;

    __device__ __forceinline__ Stopwatch() : cycles(clock64()), nanoseconds(nanoseconds_now()) {}

    __device__ __forceinline__ void stop(Elapsed* elapsed) const
    {
        if (blockIdx.x > 0 || threadIdx.x > 0) return;
        elapsed->cycles += static_cast<count_t>(clock64()) - cycles;
        elapsed->nanoseconds += nanoseconds_now() - nanoseconds;
    }
};

extern "C" __global__ void empty() {}

// Memory. Loads and stores of 16 bytes a thread, UNROLL of them in flight; ld.global.cg reads through the L2 and not
// the L1. Volatile assembly is neither removed nor merged.

constexpr int UNROLL = 4;

__device__ __forceinline__ uint4 load(const uint4* from)
{
    uint4 quad;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
                 : "l"(from));
    return quad;
}

__device__ __forceinline__ void store(uint4* to, const uint4& quad)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(quad.x), "r"(quad.y), "r"(quad.z),
                 "r"(quad.w)
                 : "memory");
}

// sums[thread] = sum of the words that the thread read: with words of 1, their number
extern "C" __global__ void __launch_bounds__(512) read_words(const uint4* from, count_t quads, int rounds, word_t* sums,
                                                             Elapsed* elapsed)
{
    const Stopwatch watch;
    const count_t first = blockIdx.x * static_cast<count_t>(blockDim.x) + threadIdx.x;
    const count_t stride = static_cast<count_t>(gridDim.x) * blockDim.x;
    word_t sum = 0;
    for (int round = 0; round < rounds; ++round)
        for (count_t i = first; i < quads; i += UNROLL * stride) {
            uint4 quad[UNROLL] = {};
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
                if (i + k * stride < quads) quad[k] = load(from + i + k * stride);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) sum += quad[k].x + quad[k].y + quad[k].z + quad[k].w;
        }
    sums[first] = sum;
    watch.stop(elapsed);
}

// to[0:quads] = from[0:quads]
extern "C" __global__ void __launch_bounds__(512) copy_words(const uint4* from, uint4* to, count_t quads, int rounds,
                                                             Elapsed* elapsed)
{
    const Stopwatch watch;
    const count_t first = blockIdx.x * static_cast<count_t>(blockDim.x) + threadIdx.x;
    const count_t stride = static_cast<count_t>(gridDim.x) * blockDim.x;
    for (int round = 0; round < rounds; ++round)
        for (count_t i = first; i < quads; i += UNROLL * stride) {
            uint4 quad[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
                if (i + k * stride < quads) quad[k] = load(from + i + k * stride);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
                if (i + k * stride < quads) store(to + i + k * stride, quad[k]);
        }
    watch.stop(elapsed);
}

// Fused multiply-adds in CHAINS independent chains a thread, which hide the latency of an FMA. With factor = step = 1
// chain c ends at c + FMAS * rounds, exactly; the compiler knows neither value.

constexpr int CHAINS = 8;
constexpr int FMAS = 64;  // of each chain in a round

template <typename Number>
__device__ __forceinline__ void multiply_add_chains(Number factor, Number step, int rounds, Number* sums)
{
    Number chain[CHAINS];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) chain[c] = c;
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int i = 0; i < FMAS; ++i)
#pragma unroll
            for (int c = 0; c < CHAINS; ++c) chain[c] = fma(chain[c], factor, step);
    Number sum = 0;
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sum += chain[c];
    sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256) fma_float32(float factor, float step, int rounds, float* sums,
                                                              Elapsed* elapsed)
{
    const Stopwatch watch;
    multiply_add_chains(factor, step, rounds, sums);
    watch.stop(elapsed);
}

extern "C" __global__ void __launch_bounds__(256) fma_float64(double factor, double step, int rounds, double* sums,
                                                              Elapsed* elapsed)
{
    const Stopwatch watch;
    multiply_add_chains(factor, step, rounds, sums);
    watch.stop(elapsed);
}

// Pairs of fp16 numbers, whose integers end at 2048: the sign of the step alternates from round to round. After an odd
// number of rounds, both halves of a chain are at FMAS.
extern "C" __global__ void __launch_bounds__(256) fma_float16(word_t factor, word_t step, int rounds, word_t* chains,
                                                              Elapsed* elapsed)
{
    const Stopwatch watch;
    word_t chain[CHAINS];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) chain[c] = 0;
    for (int round = 0; round < rounds; ++round, step ^= 0x80008000u)
#pragma unroll
        for (int i = 0; i < FMAS; ++i)
#pragma unroll
            for (int c = 0; c < CHAINS; ++c)
                asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(chain[c]) : "r"(factor), "r"(step));
    const count_t thread = blockIdx.x * static_cast<count_t>(blockDim.x) + threadIdx.x;
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) chains[thread * CHAINS + c] = chain[c];
    watch.stop(elapsed);
}

// Tensor cores, by warps. Each warp holds A_TILES tiles of A, 16 rows of 32 bytes of k, and B_TILES of B, 8 columns of
// 32 bytes of k, and adds each product DEPTH times: PRODUCTS[a][b] = DEPTH * A[a] * B[b]. From zero again in each
// round, so that rounding errors stay small. The first warp writes its products.
//
// Lane l holds in register i of A the 4 bytes at l % 4 * 4 + i / 2 * 16 of row l / 4 + i % 2 * 8, in register i of B
// those at l % 4 * 4 + i * 16 of column l / 4, and of a product (row l / 4 and l / 4 + 8) x (columns l % 4 * 2 and the
// next): the same for all types of 32 bits and less (PTX ISA, "Matrix Fragments for mma").

#if __CUDA_ARCH__ >= 800
constexpr int A_TILES = 2;
constexpr int B_TILES = 4;
constexpr int DEPTH = 32;

#define MMA(NAME, SHAPE, TYPE)                                                                                    \
    struct NAME {                                                                                                 \
        static __device__ __forceinline__ void add(float (&sum)[4], const word_t (&a)[4], const word_t (&b)[2])   \
        {                                                                                                         \
            asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, "        \
                         "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                          \
                         : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                     \
        }                                                                                                         \
    };

template <typename Mma>
__device__ __forceinline__ void warp_products(const word_t* A, const word_t* B, int rounds, float* products)
{
    const int lane = threadIdx.x % 32;
    word_t a[A_TILES][4], b[B_TILES][2];
#pragma unroll
    for (int tile = 0; tile < A_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[tile][i] = A[tile * 128 + (lane / 4 + i % 2 * 8) * 8 + lane % 4 + i / 2 * 4];
#pragma unroll
    for (int tile = 0; tile < B_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) b[tile][i] = B[tile * 64 + lane / 4 * 8 + lane % 4 + i * 4];
    float sum[A_TILES][B_TILES][4] = {};
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < A_TILES * B_TILES * 4; ++i) sum[i / 4 / B_TILES][i / 4 % B_TILES][i % 4] = 0.0f;
#pragma unroll 4
        for (int i = 0; i < DEPTH; ++i)
#pragma unroll
            for (int tile = 0; tile < A_TILES * B_TILES; ++tile)
                Mma::add(sum[tile / B_TILES][tile % B_TILES], a[tile / B_TILES], b[tile % B_TILES]);
    }
    if (blockIdx.x > 0 || threadIdx.x >= 32) return;
#pragma unroll
    for (int tile = 0; tile < A_TILES * B_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            products[tile * 128 + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] =
                sum[tile / B_TILES][tile % B_TILES][i];
}

#define MMA_KERNEL(NAME, SHAPE, TYPE)                                                                             \
    MMA(Mma_##NAME, SHAPE, TYPE)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                          \
        mma_##NAME(const word_t* A, const word_t* B, int rounds, float* products, Elapsed* elapsed)               \
    {                                                                                                             \
        const Stopwatch watch;                                                                                    \
        warp_products<Mma_##NAME>(A, B, rounds, products);                                                        \
        watch.stop(elapsed);                                                                                      \
    }

MMA_KERNEL(float16, "m16n8k16", "f16")
MMA_KERNEL(bfloat16, "m16n8k16", "bf16")
MMA_KERNEL(tf32, "m16n8k8", "tf32")
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200  // others convert to fp16 first
MMA_KERNEL(float8_e4m3fn, "m16n8k32", "e4m3")
#endif

#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200  // others have no fp64 tensor cores
// fp64: tiles of A are 8 or 16 rows, of B 8 columns, of 4 or 16 values of k.
constexpr int A_TILES_64 = 2;
constexpr int B_TILES_64 = 2;

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
constexpr int A_64 = 8, B_64 = 4, SUMS_64 = 4, ROWS_64 = 16, K_64 = 16;

__device__ __forceinline__ void add_64(double (&sum)[SUMS_64], const double (&a)[A_64], const double (&b)[B_64])
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
          "d"(b[1]), "d"(b[2]), "d"(b[3]));
}
#else
constexpr int A_64 = 1, B_64 = 1, SUMS_64 = 2, ROWS_64 = 8, K_64 = 4;

__device__ __forceinline__ void add_64(double (&sum)[SUMS_64], const double (&a)[A_64], const double (&b)[B_64])
{
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(sum[0]), "+d"(sum[1])
                 : "d"(a[0]), "d"(b[0]));
}
#endif

extern "C" __global__ void __launch_bounds__(256, 2)
    mma_float64(const double* A, const double* B, int rounds, double* products, Elapsed* elapsed)
{
    const Stopwatch watch;
    const int lane = threadIdx.x % 32;
    constexpr int TILES = A_TILES_64 * B_TILES_64;
    double a[A_TILES_64][A_64], b[B_TILES_64][B_64], sum[TILES][SUMS_64] = {};
#pragma unroll
    for (int tile = 0; tile < A_TILES_64; ++tile)
#pragma unroll
        for (int i = 0; i < A_64; ++i)
            a[tile][i] = A[(tile * ROWS_64 + lane / 4 + i % 2 * 8) * K_64 + lane % 4 + i / 2 * 4];
#pragma unroll
    for (int tile = 0; tile < B_TILES_64; ++tile)
#pragma unroll
        for (int i = 0; i < B_64; ++i) b[tile][i] = B[(tile * 8 + lane / 4) * K_64 + lane % 4 + i * 4];
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < TILES * SUMS_64; ++i) sum[i / SUMS_64][i % SUMS_64] = 0.0;
#pragma unroll 4
        for (int i = 0; i < DEPTH; ++i)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) add_64(sum[tile], a[tile / B_TILES_64], b[tile % B_TILES_64]);
    }
    watch.stop(elapsed);
    if (blockIdx.x > 0 || threadIdx.x >= 32) return;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < SUMS_64; ++i)
            products[(tile * ROWS_64 + lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[tile][i];
}
#endif
#endif

// Tensor cores of Hopper, by warpgroups (wgmma): 64 rows of A by 256 columns of B, each of 128 bytes of k, in shared
// memory with the 128-byte swizzle; two warpgroups a block take turns. A round adds the product REPEATS times, from
// zero. The first warpgroup writes its product.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int WG_ROWS = 64;
constexpr int WG_COLUMNS = 256;
constexpr int WG_SUMS = WG_COLUMNS / 2;
constexpr int WG_ROW_WORDS = 32;
constexpr int REPEATS = 8;

// Bits 0-13: address, 16-29: unused with one slab, 32-45: bytes from one 8-row pattern to the next, each / 16; 62: the
// 128-byte swizzle (PTX ISA, "Matrix Descriptor Format").
__device__ __forceinline__ count_t operand(const word_t* tile)
{
    const count_t address = __cvta_generic_to_shared(tile);
    return (address >> 4 & 0x3fff) | 1ull << 16 | 1024ull / 16 << 32 | 1ull << 62;
}

// Copies rows of 128 bytes; the swizzle exchanges 16-byte chunks: chunk c of row r is at c ^ r % 8.
__device__ __forceinline__ void copy_swizzled(word_t* to, const word_t* from, int rows)
{
    for (int i = threadIdx.x; i < rows * WG_ROW_WORDS; i += blockDim.x) {
        const int row = i / WG_ROW_WORDS, chunk = i % WG_ROW_WORDS / 4;
        to[row * WG_ROW_WORDS + (chunk ^ row % 8) * 4 + i % 4] = from[i];
    }
}

#define SUM_8(i) \
    "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), \
        "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define SUM_32(i) SUM_8(i), SUM_8(i + 8), SUM_8(i + 16), SUM_8(i + 24)
#define SUM_NAMES \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, " \
    "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, " \
    "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
    "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

#define WGMMA_KERNEL(NAME, K, TYPE, MAJOR)                                                                        \
    struct Wgmma_##NAME {                                                                                         \
        static __device__ __forceinline__ void add(float (&sum)[WG_SUMS], count_t a, count_t b, int is_added)     \
        {                                                                                                         \
            asm volatile("{\n.reg .pred added;\nsetp.ne.b32 added, %130, 0;\n"                                    \
                         "wgmma.mma_async.sync.aligned.m64n256k" #K ".f32." TYPE "." TYPE " " SUM_NAMES           \
                         ", %128, %129, added, 1, 1" MAJOR ";\n}"                                                 \
                         : SUM_32(0), SUM_32(32), SUM_32(64), SUM_32(96)                                          \
                         : "l"(a), "l"(b), "r"(is_added));                                                        \
        }                                                                                                         \
    };                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                             \
        wgmma_##NAME(const word_t* A, const word_t* B, int rounds, float* product, Elapsed* elapsed)              \
    {                                                                                                             \
        warpgroup_product<Wgmma_##NAME>(A, B, rounds, product, elapsed);                                          \
    }

template <typename Wgmma>
__device__ __forceinline__ void warpgroup_product(const word_t* A, const word_t* B, int rounds, float* product,
                                                  Elapsed* elapsed)
{
    __shared__ __align__(1024) word_t a[WG_ROWS * WG_ROW_WORDS];
    __shared__ __align__(1024) word_t b[WG_COLUMNS * WG_ROW_WORDS];
    copy_swizzled(a, A, WG_ROWS);
    copy_swizzled(b, B, WG_COLUMNS);
    asm volatile("fence.proxy.async;" ::: "memory");  // wgmma reads through the asynchronous proxy
    __syncthreads();
    const Stopwatch watch;
    const count_t a_operand = operand(a), b_operand = operand(b);
    constexpr int STEPS = 4;                 // of 32 bytes of k
    constexpr count_t STEP_BYTES = 32 / 16;  // in units of a descriptor
    float sum[WG_SUMS] = {};
#pragma unroll 1
    for (int i = 0; i < rounds * REPEATS; ++i) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            Wgmma::add(sum, a_operand + k * STEP_BYTES, b_operand + k * STEP_BYTES, i % REPEATS | k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    watch.stop(elapsed);
    if (blockIdx.x > 0 || threadIdx.x >= 128) return;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < WG_SUMS; ++i)
        product[(row + i / 2 % 2 * 8) * WG_COLUMNS + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = sum[i];
}

WGMMA_KERNEL(float16, 16, "f16", ", 0, 0")
WGMMA_KERNEL(bfloat16, 16, "bf16", ", 0, 0")
WGMMA_KERNEL(tf32, 8, "tf32", "")
WGMMA_KERNEL(float8_e4m3fn, 32, "e4m3", "")
#endif
