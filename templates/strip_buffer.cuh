// Shared-memory buffer between the accumulators of a warpgroup and C: 64 rows of at most 128 bytes each.
//
// The accumulators are laid out as in wgmma.cuh, two adjacent elements per thread. Stored to C directly, a warp would
// access 8 rows of 16 bytes at a time; through the buffer, whole rows are written, by TMA or by the threads. Rows are
// swizzled as in tma.cuh, so that neither side has bank conflicts. Each warp fills its own 16 rows.
#pragma once

#include "element.cuh"
#include "tma.cuh"

// Two adjacent elements of C in one word.
template <typename Output>
struct PairOf {
    typedef unsigned type;
};
template <>
struct PairOf<float> {
    typedef float2 type;
};

// C as the epilogue accesses it.
template <typename Output>
struct OutputMatrix {
    Output* C;
    int M, N;
    bool pairs;  // two adjacent elements of a row may be accessed at once
};

// Element is the 16-bit type of the operands, Output the storage type of C: 16 bits of that type, or fp32. WIDTH is the
// number of columns of a strip; a buffer holds as many as the swizzles allow and as divide WIDTH.
template <typename Element, typename Output, int WIDTH>
struct StripBuffer {
    static constexpr int STRIP_BYTES = WIDTH * sizeof(Output);
    static constexpr int ROW = STRIP_BYTES % 128 == 0 ? 128 : STRIP_BYTES % 64 == 0 ? 64 : 32;  // bytes
    static constexpr int COLUMNS = ROW / sizeof(Output);
    static constexpr int BYTES = 64 * ROW;
    static constexpr int SUMS = COLUMNS / 2;  // per thread
    static constexpr bool FP32 = sizeof(Output) == 4;

    // First row of this thread's warp.
    static __device__ __forceinline__ int own() { return threadIdx.x % 128 / 32 * 16; }

    // Copies this warp's rows between the buffer and C, where the buffer begins at (row, column).
    template <bool TO_C>
    static __device__ __forceinline__ void move(unsigned char* buffer, const OutputMatrix<Output>& to, int row,
                                                int column)
    {
        if (to.pairs)
            move_units<TO_C, typename PairOf<Output>::type>(buffer, to, row, column);
        else
            move_units<TO_C, Output>(buffer, to, row, column);
    }

    template <bool TO_C, typename Unit>
    static __device__ __forceinline__ void move_units(unsigned char* buffer, const OutputMatrix<Output>& to, int row,
                                                      int column)
    {
        constexpr int UNITS = ROW / sizeof(Unit);  // per row
        const int rows = to.M - row - own();
        const int columns = to.N - column;
        Output* C = to.C + static_cast<size_t>(row + own()) * to.N + column;
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < 16 * UNITS; i += 32) {
            const int y = i / UNITS;
            const int x = i % UNITS * (sizeof(Unit) / sizeof(Output));
            if (y >= rows || x >= columns) continue;
            const unsigned offset = (own() + y) * ROW + i % UNITS * sizeof(Unit);
            Unit* here = reinterpret_cast<Unit*>(buffer + tma_swizzled<ROW>(offset));
            Unit* there = reinterpret_cast<Unit*>(C + static_cast<size_t>(y) * to.N + x);
            if (TO_C)
                *there = *here;
            else
                *here = *there;
        }
    }

    // Byte offset of a lane's elements in the buffer. In fp32, that of the pair sum[i], sum[i + 1]. In 16 bits, four 8
    // x 8 matrices move at once, in the order top left, bottom left, top right, bottom right: the offset of the row
    // that this lane addresses for sum[i] to sum[i + 7].
    static __device__ __forceinline__ unsigned place(int i)
    {
        const int lane = threadIdx.x % 32;
        const int row = own() + (FP32 ? i / 2 % 2 * 8 + lane / 4 : lane % 16);
        const int bytes = FP32 ? i / 4 * 32 + lane % 4 * 8 : (i / 4 + lane / 16) * 16;
        return tma_swizzled<ROW>(row * ROW + bytes);
    }

    // buffer = scale * sum
    static __device__ __forceinline__ void fill(unsigned buffer, const float* sum, float scale)
    {
        constexpr int STEP = FP32 ? 2 : 8;
#pragma unroll
        for (int i = 0; i < SUMS; i += STEP) {
            if constexpr (FP32)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(buffer + place(i)), "f"(scale * sum[i]),
                             "f"(scale * sum[i + 1])
                             : "memory");
            else
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                 buffer + place(i)),
                             "r"(pack<Element>(scale * sum[i], scale * sum[i + 1])),
                             "r"(pack<Element>(scale * sum[i + 2], scale * sum[i + 3])),
                             "r"(pack<Element>(scale * sum[i + 4], scale * sum[i + 5])),
                             "r"(pack<Element>(scale * sum[i + 6], scale * sum[i + 7]))
                             : "memory");
        }
    }

    // sum = alpha * sum + beta * buffer
    static __device__ __forceinline__ void blend(float* sum, unsigned buffer, float alpha, float beta)
    {
        constexpr int STEP = FP32 ? 2 : 8;
#pragma unroll
        for (int i = 0; i < SUMS; i += STEP) {
            float2 old[STEP / 2];
            read(old, buffer + place(i));
#pragma unroll
            for (int p = 0; p < STEP / 2; ++p) {
                sum[i + 2 * p] = alpha * sum[i + 2 * p] + beta * old[p].x;
                sum[i + 2 * p + 1] = alpha * sum[i + 2 * p + 1] + beta * old[p].y;
            }
        }
    }

    static __device__ __forceinline__ void read(float2 (&old)[1], unsigned at)
    {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(old[0].x), "=f"(old[0].y) : "r"(at) : "memory");
    }

    static __device__ __forceinline__ void read(float2 (&old)[4], unsigned at)
    {
        unsigned pair[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                     : "r"(at)
                     : "memory");
#pragma unroll
        for (int p = 0; p < 4; ++p) old[p] = unpack<Element>(pair[p]);
    }
};
