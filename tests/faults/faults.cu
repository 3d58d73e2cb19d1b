// y = 2 x + 1, or a fault: an error that a kernel template has in one configuration and not in the others.
//
//   THREADS  threads per block
//   FAULT    kind of fault, one of the names below
//
// Launch: one thread per element, ceil(n / THREADS) blocks of THREADS threads.

enum Fault {
    none,
    // addresses
    illegal_address,     // far from anything mapped
    misaligned_address,  // a vector of four, aligned as a scalar only
    write_outside,       // one element past the end
    write_overhang,      // 256 KiB past the end, as by a tile that extends beyond the last rows
    write_far,           // a terabyte past the end
    write_astray,        // the tuner's copy of the input, as by a stray pointer
    // time
    infinite_loop,
    over_deadline,  // finite, a minute per launch
    slow,           // a tenth of a second per launch
    // the kernel aborts
    assertion,
    trap,
    recursion,  // infinite, until the stack overflows
    // results
    wrong_element,
    nan_only,
    unwritten,      // the last quarter
    changed_input,  // one element of x
    wrong_sometimes,  // in one launch of fifty
    prints,           // correct, but prints a thousand lines per launch
    // results that depend on earlier launches
    wrong_later,   // one element, from the 30th launch on
    hangs_later,   // from the 40th launch on
    stores_once,   // only at the first launch of a size; later ones leave the output as it is
    keeps_result,  // later launches of a size write what the first one has computed
    skips_work,    // a millisecond of work, unless the output is right already
    // correct by chance; only compute-sanitizer finds them
    shared_race,         // each warp writes what the others read, with no barrier between
    uninitialized_read,  // reads its output before it writes it
    divergent_barrier,   // the warps of a block wait at two barriers
    // resources
    shared_memory,           // static shared memory that the search space does not state
    shared_memory_declared,  // dynamic shared memory beyond the limit
    registers,               // 96 live values in each of 1024 threads
    device_memory,           // a terabyte
    // the compiler
    compile_error,
    compile_minutes,  // a tree of 262,144 types
    compile_memory,   // a table of 16 GiB, emitted by the compiler
};

typedef unsigned int word_t;
typedef unsigned long long wide_t;

__device__ constexpr wide_t SECOND = 1000000000;  // in nanoseconds
__device__ float scratch[FAULT == device_memory ? 1ull << 38 : 1];
__device__ word_t launches;
constexpr bool REMEMBERS = FAULT == stores_once || FAULT == keeps_result;
__device__ int kept_for[REMEMBERS ? 1 << 20 : 1];  // size for which an element was computed
__device__ float kept[FAULT == keeps_result ? 1 << 20 : 1];
__device__ float table[FAULT == compile_memory ? 1ull << 32 : 1] = {1.0f};

__device__ wide_t now_ns() {
    wide_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
}

__device__ void spin(wide_t ns) {
    for (const wide_t start = now_ns(); now_ns() - start < ns;) {
    }
}

// Find the copy of x by its first elements, anywhere in the 2 MiB page that the driver maps, and change it.
__device__ void change_copy(const float* x, int n, int i, int threads) {
    constexpr wide_t PAGE = 2 << 20;
    float* page = (float*)((wide_t)x & ~(PAGE - 1));
    for (int k = i; k + 8 < (int)(PAGE / sizeof(float)); k += threads) {
        const bool alike = page[k] == x[0] && page[k + 1] == x[1] && page[k + 2] == x[2] && page[k + 3] == x[3];
        if (alike && (page + k + n < x || page + k > x + n)) page[k + 5] = -1.0f;
    }
}

__device__ __noinline__ float descend(float x, int depth) {
    volatile float frame[64];
    frame[depth % 64] = x;
    return depth < 0 ? x : descend(x + frame[(depth + 1) % 64], depth + 1) + frame[depth % 64];
}

__device__ float many_registers(const float* x, int i, int n) {
    constexpr int VALUES = 96;
    float value[VALUES], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < VALUES; ++k) value[k] = x[(i + k) % n];
    for (int turn = 0; turn < n; ++turn)
#pragma unroll
        for (int k = 0; k < VALUES; ++k) value[k] = value[k] * value[(k + 1) % VALUES] + 1.0f;
#pragma unroll
    for (int k = 0; k < VALUES; ++k) sum += value[k];
    return sum;
}

template <int DEPTH, wide_t ID>
struct Tree {
    static constexpr word_t leaves = Tree<DEPTH - 1, 2 * ID>::leaves + Tree<DEPTH - 1, 2 * ID + 1>::leaves;
};
template <wide_t ID>
struct Tree<0, ID> {
    static constexpr word_t leaves = 1;
};

// Even warps wait at the first barrier, odd ones at the second: the hardware treats both as one.
__device__ void wait_apart() {
    if (threadIdx.x / 32 % 2 == 0) {
        asm volatile("bar.sync 0;" ::: "memory");
        spin(100);
    } else {
        spin(200);
        asm volatile("bar.sync 0;" ::: "memory");
    }
}

// Commit the fault, if it precedes the result; return whether to write the result. A template compiles one fault only.
template <Fault fault>
__device__ bool before(float* x, float* y, int n, int i) {
    static_assert(fault != compile_error, "this configuration is not supported");
    const bool first = i == 0;
    if constexpr (fault == illegal_address) *(volatile float*)16 = 1.0f;
    if constexpr (fault == misaligned_address) if (first) *(float4*)(y + 1) = float4{};
    if constexpr (fault == write_outside) if (first) y[n + 3] = 1.0f;
    if constexpr (fault == write_overhang) if (first) for (int k = 0; k < 1 << 16; ++k) y[n + k] = 1.0f;
    if constexpr (fault == write_far) if (first) y[1ll << 38] = 1.0f;
    if constexpr (fault == write_astray) change_copy(x, n, i, gridDim.x * blockDim.x);
    if constexpr (fault == infinite_loop) while (*(volatile float*)x == *(volatile float*)x) {}
    if constexpr (fault == over_deadline) if (first) spin(60 * SECOND);
    if constexpr (fault == slow) if (first) spin(SECOND / 10);
    if constexpr (fault == assertion) assert(i < n / 2);
    if constexpr (fault == trap) if (i == n / 2) __trap();
    if constexpr (fault == changed_input) if (first) x[7] = -1.0f;
    if constexpr (fault == prints) if (i % 1024 == 0) printf("element %d\n", i);
    if constexpr (fault == unwritten) return i < n / 4 * 3;
    if constexpr (fault == uninitialized_read) return i < n && y[i] != 2.0f * x[i] + 1.0f;
    if constexpr (fault == divergent_barrier) wait_apart();
    if constexpr (fault == hangs_later) {
        if (first && atomicAdd(&launches, 1) >= 39) while (*(volatile float*)x == *(volatile float*)x) {}
    }
    if constexpr (fault == stores_once) {
        if (i >= n || kept_for[i] == n) return false;
        kept_for[i] = n;
    }
    if constexpr (fault == skips_work) {
        if (i >= n || y[i] == 2.0f * x[i] + 1.0f) return false;
        if (threadIdx.x == 0) spin(SECOND / 1000);
    }
    return i < n;
}

// Return the result of one element, correct or wrong.
template <Fault fault>
__device__ float result(const float* x, int n, int i) {
    const float right = 2.0f * x[i] + 1.0f;
    if constexpr (fault == recursion) return right + descend(x[i], 0);
    if constexpr (fault == wrong_element) return i == n / 2 ? right + 0.5f : right;
    if constexpr (fault == nan_only) return 0.0f / (x[i] - x[i]);
    if constexpr (fault == wrong_sometimes) {
        const bool now = (now_ns() * 0x9E3779B97F4A7C15ull >> 40) % 50 == 0;
        return i == 0 && now ? right + 0.5f : right;
    }
    if constexpr (fault == wrong_later) return i == 0 && atomicAdd(&launches, 1) >= 29 ? right + 0.5f : right;
    if constexpr (fault == keeps_result) {
        if (kept_for[i] != n) kept[i] = right;
        kept_for[i] = n;
        return kept[i];
    }
    if constexpr (fault == shared_race) {
        __shared__ volatile float factor;
        if (threadIdx.x % 32 == 0) factor = 2.0f;  // while other warps read it; the value does not change
        __syncwarp(__activemask());
        return factor * x[i] + 1.0f;
    }
    if constexpr (fault == shared_memory) {
        __shared__ volatile float tile[4096];
        tile[threadIdx.x] = right;
        return tile[threadIdx.x];
    }
    if constexpr (fault == registers) return right + many_registers(x, i, n);
    if constexpr (fault == device_memory) return right + scratch[(wide_t)i << 17];
    if constexpr (fault == compile_minutes) return right * Tree<fault == compile_minutes ? 18 : 0, 1>::leaves;
    if constexpr (fault == compile_memory) return right + table[i];
    return right;
}

extern "C" __global__ void faults(float* x, float* y, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (before<FAULT>(x, y, n, i)) y[i] = result<FAULT>(x, n, i);
}
