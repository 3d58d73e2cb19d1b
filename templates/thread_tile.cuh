// Innermost level of an fp32 product: the elements that a thread owns, the fragments it reads, and the order in which
// it multiplies.
//
// Of a warp tile, a thread owns strips of 4 rows, LANES strips apart, and strips of 4 columns likewise, so that
// adjacent lanes read adjacent 16-byte chunks: shared memory serves them without bank conflicts, and broadcasts a chunk
// to all lanes that read it.
//
// Order. An SM of this kind has its registers in two banks, even and odd, and reads one register of each per cycle,
// while a multiply-add needs three: its a, its b and the sum. The rate depends on operands that are still cached from
// the previous instruction (".reuse" in machine code). Along a row of sums, all share their a; and if the next row is
// traversed backwards, in serpentine order, the turn shares its b:
//
//     a0:  b0 b1 b2 b3  |        each step reads one new b and one sum; a turn one new a and one sum
//                       v
//     a1:  b3 b2 b1 b0
//
// If every row were traversed forwards, a turn would read three registers and cost one more cycle. The inner loop runs
// along the shorter side of the tile: the compiler then finds a better register allocation.
#pragma once

constexpr int STRIP = 4;  // floats per 128-bit read

// Sums of zero. By default the compiler clears registers in aligned pairs, which determines the banks of the sums,
// often those of their b; inline assembly hides from it that these are zeros.
template <int COUNT>
__device__ __forceinline__ void clear(float (&sum)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sum[i]));
}

// Row (or column) of element `i` of the thread at position `lane` of LANES.
template <int LANES>
__device__ __forceinline__ int owned(int i, int lane)
{
    return (i / STRIP * LANES + lane) * STRIP + i % STRIP;
}

// Pointer `place` into shared memory with the bits of `floats` flipped in its address.
__device__ __forceinline__ const float* swapped(const float* place, unsigned floats)
{
    return static_cast<const float*>(__cvta_shared_to_generic(__cvta_generic_to_shared(place) ^ floats * sizeof(float)));
}

// A thread's fragment of line k of a tile with the given Layout (operand_tile.cuh); `tile` points to the first row that
// the thread owns in line 0. Strips are LANES strips apart, so a swizzle changes the addresses of the first strip and
// of those within its 32 floats at once; everything else is constant and part of the instruction.
template <typename Layout, int LANES, int COUNT>
__device__ __forceinline__ void read_fragment(float (&fragment)[COUNT], const float* tile, int k)
{
    static_assert(COUNT % STRIP == 0, "a thread owns whole strips");
#pragma unroll
    for (int i = 0; i < COUNT; i += STRIP) {
        const int row = i * LANES;  // relative to the first one
        const float* place =
            Layout::SWIZZLED ? swapped(tile, row % 32 ^ Layout::swizzle(k)) + row / 32 * 32 : tile + row;
        const float4 strip = *reinterpret_cast<const float4*>(place + k * Layout::PITCH);
        fragment[i] = strip.x, fragment[i + 1] = strip.y, fragment[i + 2] = strip.z, fragment[i + 3] = strip.w;
    }
}

// sum[m][n] += a[m] * b[n], in serpentine order.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void add_outer_product(float (&sum)[ROWS * COLUMNS], const float (&a)[ROWS],
                                                  const float (&b)[COLUMNS])
{
    constexpr bool ALONG_ROWS = COLUMNS <= ROWS;
    constexpr int LONG = ALONG_ROWS ? ROWS : COLUMNS;
    constexpr int SHORT = ALONG_ROWS ? COLUMNS : ROWS;
#pragma unroll
    for (int i = 0; i < LONG; ++i)
#pragma unroll
        for (int j = 0; j < SHORT; ++j) {
            const int walked = i % 2 == 0 ? j : SHORT - 1 - j;
            const int m = ALONG_ROWS ? i : walked;
            const int n = ALONG_ROWS ? walked : i;
            sum[m * COLUMNS + n] += a[m] * b[n];
        }
}
