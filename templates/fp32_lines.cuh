// Reading lines of fp32 operands, 4 elements adjacent along k, from a tile in shared memory (bf16_limbs.cuh).
//
// Lane l needs k = l % 4 * 4 + 0..3 for several outer indices: rows of A or columns of B. A tile has one of two
// layouts:
//
//     K along its rows      outer 8 j + l / 4 for line j: one 16-byte read returns one line
//     outer along its rows  outer l / 4 * LINES + j for line j: 4 reads, one per k, return LINES lines
//
// In the second layout the outer indices of a lane are adjacent in memory, which permutes the rows or columns of C
// among the lanes; `outer_of` returns the mapping.
//
// Shared memory serves 8 lanes at a time if their 16-byte chunks lie in 8 different groups of banks. These lanes have
// two values of l / 4 and all values of l % 4: the swizzle moves two adjacent rows of the first layout to different
// halves of 8 chunks, and four rows of the second layout that are 4 apart to different quarters.
#pragma once

template <bool K_ALONG_ROWS, int ROW_CHUNKS>
struct LineSwizzle {
    static __device__ __forceinline__ int place(int row, int chunk)
    {
        const int change = ROW_CHUNKS % 8 != 0 ? 0 : K_ALONG_ROWS ? row % 2 * 4 : row / 4 % 4 * 2;
        return row * ROW_CHUNKS + (chunk ^ change);
    }
};

// Lines of one operand: LINES of them, 2 or 4, covering 8 * LINES outer indices.
template <bool K_ALONG_ROWS, int ROW, int LINES>
struct LineReader {
    typedef LineSwizzle<K_ALONG_ROWS, ROW / 4> Swizzle;

    // Outer index of element `index` (0 to 7) of line `j` in tensor-core order.
    static __device__ __forceinline__ int outer_of(int j, int index)
    {
        const int within = j % LINES;
        return j / LINES * LINES * 8 + (K_ALONG_ROWS ? within * 8 + index : index * LINES + within);
    }

    // Reads the lines of the part of the tile that begins at `outer`.
    static __device__ __forceinline__ void read(float (&line)[LINES][4], const unsigned char* tile, int outer, int k)
    {
        const int lane = threadIdx.x % 32;
        const float* floats = reinterpret_cast<const float*>(tile);
        if constexpr (K_ALONG_ROWS) {
#pragma unroll
            for (int j = 0; j < LINES; ++j) {
                const int at = Swizzle::place(outer + j * 8 + lane / 4, k / 4 + lane % 4);
                const float4 read = *reinterpret_cast<const float4*>(floats + at * 4);
                line[j][0] = read.x, line[j][1] = read.y, line[j][2] = read.z, line[j][3] = read.w;
            }
        } else {
            const int column = outer + lane / 4 * LINES;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = Swizzle::place(k + lane % 4 * 4 + i, column / 4) * 4 + column % 4;
                if constexpr (LINES == 4) {
                    const float4 read = *reinterpret_cast<const float4*>(floats + at);
                    line[0][i] = read.x, line[1][i] = read.y, line[2][i] = read.z, line[3][i] = read.w;
                } else {
                    const float2 read = *reinterpret_cast<const float2*>(floats + at);
                    line[0][i] = read.x, line[1][i] = read.y;
                }
            }
        }
    }
};
