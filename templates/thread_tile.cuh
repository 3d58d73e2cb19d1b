// The innermost level of an fp32 product: what a thread owns, what it reads, and the order in which it multiplies.
//
// Of a warp's tile a thread owns strips of 4 rows, LANES strips apart, and strips of 4 columns likewise, so that lanes
// side by side read 16-byte pieces side by side: shared memory serves them without bank conflicts, and several lanes
// that read the same piece are served at once.
//
// The order. An SM of this kind has registers in two banks, the even and the odd ones, and reads one register of each
// in a cycle, while a multiply-add wants three: its a, its b and the sum. Speed depends on operands that are still held
// from the instruction before (".reuse" in the machine code). Along a row of sums all share their a; and where the next
// row is walked backwards, like a snake, the turn shares its b:
//
//     a0:  b0 b1 b2 b3  |        each step reads one new b and one sum; a turn one new a and one sum
//                       v
//     a1:  b3 b2 b1 b0
//
// Walked forwards each time, a turn would read three registers and cost a cycle more. The shorter side of the tile is
// the one that is walked along: the compiler finds better registers then.
#pragma once

constexpr int STRIP = 4;  // floats in a 128-bit read

// Sums of zero. Left to itself the compiler clears registers in aligned pairs, and the sums then lie in the banks that
// the pairs prescribe, often those of their b; so it is not told that these are zeros.
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

// `place` in shared memory with the bits of `floats` changed in its address.
__device__ __forceinline__ const float* swapped(const float* place, unsigned floats)
{
    return static_cast<const float*>(__cvta_shared_to_generic(__cvta_generic_to_shared(place) ^ floats * sizeof(float)));
}

// What a thread needs of line k of a tile that lies as Layout says (operand_tile.cuh); `tile` points to the first row
// that the thread owns in line 0. Strips are LANES strips apart, so a swizzle changes the address of the first one and
// of those within its 32 floats in one place; all else is constant and part of the instruction.
template <typename Layout, int LANES, int COUNT>
__device__ __forceinline__ void read_fragment(float (&fragment)[COUNT], const float* tile, int k)
{
    static_assert(COUNT % STRIP == 0, "a thread owns whole strips");
#pragma unroll
    for (int i = 0; i < COUNT; i += STRIP) {
        const int row = i * LANES;  // after the first one
        const float* place =
            Layout::SWIZZLED ? swapped(tile, row % 32 ^ Layout::swizzle(k)) + row / 32 * 32 : tile + row;
        const float4 strip = *reinterpret_cast<const float4*>(place + k * Layout::PITCH);
        fragment[i] = strip.x, fragment[i + 1] = strip.y, fragment[i + 2] = strip.z, fragment[i + 3] = strip.w;
    }
}

// sum[m][n] += a[m] * b[n], in the order of the snake.
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
