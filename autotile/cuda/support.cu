// Support kernels of the GPU worker: fill, compare, reduce, a float64 matrix product for references, and a kernel that
// takes a fixed number of clock cycles.
// DTYPE is the element type of compare_elements, float if none is given; the other kernels do not depend on it.
#ifndef DTYPE
#define DTYPE float
#endif
#if DTYPE_IS_HALF
#include <cuda_fp16.h>
#endif
#if DTYPE_IS_BFLOAT16
#include <cuda_bf16.h>
#endif

typedef unsigned int word_t;
typedef unsigned long long count_t;

#define INFINITE __longlong_as_double(0x7ff0000000000000ll)
#define NOT_A_NUMBER __longlong_as_double(0x7ff8000000000000ll)

__device__ count_t first_element() { return blockIdx.x * (count_t)blockDim.x + threadIdx.x; }
__device__ count_t stride() { return (count_t)gridDim.x * blockDim.x; }

// words[0:n] = pattern
extern "C" __global__ void fill_words(word_t* words, count_t n, word_t pattern) {
    for (count_t i = first_element(); i < n; i += stride()) words[i] = pattern;
}

// result[0] += number of words[0:n] that differ from the pattern
extern "C" __global__ void count_unlike_pattern(const word_t* words, count_t n, word_t pattern, count_t* result) {
    count_t unlike = 0;
    for (count_t i = first_element(); i < n; i += stride()) unlike += words[i] != pattern;
    if (unlike) atomicAdd(result, unlike);
}

__device__ count_t mixed(count_t bits) {  // the finalizer of SplitMix64
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
    return bits ^ (bits >> 31);
}

// result[0:2] += hashes of words[0:n] and their places; the order of the sums does not matter
extern "C" __global__ void hash_words(const word_t* words, count_t n, count_t* result) {
    count_t first = 0, second = 0;
    for (count_t i = first_element(); i < n; i += stride()) {
        const count_t place = mixed((i + 1) * 0x9e3779b97f4a7c15ull);
        first += mixed(place ^ words[i]);
        second += mixed(~place + words[i]);
    }
    atomicAdd(result, first);
    atomicAdd(result + 1, second);
}

// result[0] += number of words in which a[0:n] and b[0:n] differ
extern "C" __global__ void count_unlike(const word_t* a, const word_t* b, count_t n, count_t* result) {
    count_t unlike = 0;
    for (count_t i = first_element(); i < n; i += stride()) unlike += a[i] != b[i];
    if (unlike) atomicAdd(result, unlike);
}

#if !DTYPE_IS_COMPLEX
// The real number that the bits of an element stand for.
__device__ double decoded(DTYPE bits) {
#if DTYPE_IS_HALF || DTYPE_IS_BFLOAT16
    return (double)(float)bits;
#elif DTYPE_IS_E4M3 || DTYPE_IS_E5M2
    constexpr int FRACTION_BITS = DTYPE_IS_E4M3 ? 3 : 2, BIAS = DTYPE_IS_E4M3 ? 7 : 15;
    const int magnitude = bits & 0x7f, exponent = magnitude >> FRACTION_BITS;
    const int fraction = magnitude & ((1 << FRACTION_BITS) - 1);
    const bool is_special = DTYPE_IS_E4M3 ? magnitude == 0x7f : exponent == 31;
    const double value = is_special ? (DTYPE_IS_E5M2 && fraction == 0 ? INFINITE : NOT_A_NUMBER)
                         : exponent ? ldexp((double)((1 << FRACTION_BITS) + fraction), exponent - BIAS - FRACTION_BITS)
                                    : ldexp((double)fraction, 1 - BIAS - FRACTION_BITS);
    return bits & 0x80 ? -value : value;
#else
    return (double)bits;
#endif
}
#endif

// Size of an expected value and its distance from an element; of complex ones, the moduli. An 8-bit float saturates.
#if DTYPE_IS_COMPLEX
typedef double2 wanted_t;
__device__ double size_of(wanted_t want) { return hypot(want.x, want.y); }
__device__ double distance(DTYPE got, wanted_t want) { return hypot((double)got.x - want.x, (double)got.y - want.y); }
#else
typedef double wanted_t;
__device__ double size_of(wanted_t want) { return fabs(want); }
__device__ double distance(DTYPE got, wanted_t want) {
#ifdef LARGEST
    want = fmin(fmax(want, -LARGEST), LARGEST);
#endif
    return fabs(decoded(got) - want);
}
#endif

// An element is correct if |got - want| <= absolute + relative * max(|want|, floor); NaN never is.
// result[0] is the number of wrong elements, result[1] the complement of the lowest index of a wrong one, and result[2],
// a double, the maximum of |got - want| / max(|want|, scale), which ignores NaN; all are zero before.
extern "C" __global__ void compare_elements(const DTYPE* got, const wanted_t* want, count_t n, double relative,
                                            double absolute, double floor, double scale, count_t* result) {
    count_t wrong = 0, first = ~0ull;
    double greatest = 0.0;
    for (count_t i = first_element(); i < n; i += stride()) {
        const double away = distance(got[i], want[i]), modulus = size_of(want[i]), size = fmax(modulus, scale);
        const bool right = away <= absolute + relative * fmax(modulus, floor);
        if (!right) {
            ++wrong;
            if (i < first) first = i;
        }
        if (away > greatest * size) greatest = away / size;  // rare, as float64 division is slow
    }
    if (wrong) {
        atomicAdd(result, wrong);
        atomicMax(result + 1, ~first);
    }
    for (int lane = 16; lane > 0; lane /= 2) greatest = fmax(greatest, __shfl_down_sync(~0u, greatest, lane));
    // nonnegative doubles are ordered like their bits
    if (threadIdx.x % 32 == 0) atomicMax(result + 2, (count_t)__double_as_longlong(greatest));
}

#if DTYPE_IS_INTEGER
// Whether each element has exactly the expected value; the result is that of compare_elements, without an error.
extern "C" __global__ void compare_exactly(const DTYPE* got, const DTYPE* want, count_t n, count_t* result) {
    count_t wrong = 0, first = ~0ull;
    for (count_t i = first_element(); i < n; i += stride())
        if (got[i] != want[i]) {
            ++wrong;
            if (i < first) first = i;
        }
    if (wrong) {
        atomicAdd(result, wrong);
        atomicMax(result + 1, ~first);
    }
}
#endif

// result[0] += number of values[0:n] that are not finite; squares_of[w] = sum of the squares of the others, over those
// that warp w reads. Warps do not add to a common sum, which would depend on their order.
extern "C" __global__ void summarise(const double* values, count_t n, count_t* result, double* squares_of) {
    count_t unfinite = 0;
    double squares = 0.0;
    for (count_t i = first_element(); i < n; i += stride()) {
        const double value = values[i];
        if (isfinite(value)) squares += value * value;
        else ++unfinite;
    }
    if (unfinite) atomicAdd(result, unfinite);
    for (int lane = 16; lane > 0; lane /= 2) squares += __shfl_down_sync(~0u, squares, lane);
    if (threadIdx.x % 32 == 0) squares_of[first_element() / 32] = squares;
}

// C = A B in float64 for each of `batches` products; A is M x K, B is K x N, all row-major. Consecutive matrices A and B
// are `step_a` and `step_b` elements apart, 0 if all products share one. A block of 256 threads computes a tile of
// 64 x 64, a thread 4 x 4 elements of it, 16 apart. It is the reference, and simple on purpose.
extern "C" __global__ void __launch_bounds__(256)
    matmul_float64(const double* A, const double* B, double* C, int M, int N, int K, int batches, long long step_a,
                   long long step_b) {
    constexpr int TILE = 64, DEPTH = 16, EACH = 4, APART = 16;
    __shared__ double tile_a[DEPTH][TILE + 1], tile_b[DEPTH][TILE];
    const int tx = threadIdx.x % APART, ty = threadIdx.x / APART;
    const long long row = (long long)blockIdx.y * TILE, column = (long long)blockIdx.x * TILE;
    for (int batch = blockIdx.z; batch < batches; batch += gridDim.z) {
        const double* a = A + batch * step_a;
        const double* b = B + batch * step_b;
        double* c = C + batch * (long long)M * N;
        double sum[EACH][EACH] = {};
        for (int k = 0; k < K; k += DEPTH) {
            for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
                const int r = i / DEPTH, ka = i % DEPTH, kb = i / TILE, along = i % TILE;
                tile_a[ka][r] = (row + r < M && k + ka < K) ? a[(row + r) * K + k + ka] : 0.0;
                tile_b[kb][along] =
                    (column + along < N && k + kb < K) ? b[(long long)(k + kb) * N + column + along] : 0.0;
            }
            __syncthreads();
            for (int i = 0; i < DEPTH; ++i)
                for (int y = 0; y < EACH; ++y)
                    for (int x = 0; x < EACH; ++x) sum[y][x] += tile_a[i][ty + APART * y] * tile_b[i][tx + APART * x];
            __syncthreads();
        }
        for (int y = 0; y < EACH; ++y)
            for (int x = 0; x < EACH; ++x) {
                const long long r = row + ty + APART * y, along = column + tx + APART * x;
                if (r < M && along < N) c[r * N + along] = sum[y][x];
            }
    }
}

// Each thread executes 4 * iterations dependent multiply-adds, so the time depends on the SM clock alone.
extern "C" __global__ void __launch_bounds__(256) spin(int iterations, float* sink) {
    float a = threadIdx.x, b = a + 1.0f, c = a + 2.0f, d = a + 3.0f;
    for (int i = 0; i < iterations; ++i) {
        a = a * 0.999f + 0.5f;
        b = b * 0.999f + 0.5f;
        c = c * 0.999f + 0.5f;
        d = d * 0.999f + 0.5f;
    }
    if (a + b + c + d == -1.0f) *sink = a;  // never: the sum is positive, which the compiler does not know
}
