// Warp-level tensor-core products: ldmatrix, mma.sync m16n8k16, and the swizzle that makes ldmatrix free of bank
// conflicts.
//
// A warp multiplies a 16 x 16 piece of A by a 16 x 8 piece of B and accumulates into a 16 x 8 piece of C. The operands
// are 16-bit floats, the sums fp32. Every lane holds its share of each piece, a fragment, in registers. Lane l holds of
// C
//
//     sum[0], sum[1]   row l / 4,      columns l % 4 * 2 and the next
//     sum[2], sum[3]   row l / 4 + 8,  the same columns
//
// `ldmatrix` loads the fragments of A and B from shared memory. It moves 8 x 8 matrices; each lane supplies the address
// of one row, 16 bytes, and 4 matrices form a 16 x 16 piece. An operand is indexed here as (outer, k), where outer is a
// row of A or a column of B. The 4 matrices go to registers in the order that mma.sync requires: A takes a whole piece
// in one instruction, B takes half of it, 8 columns, which must be in adjacent registers.
//
//                     A:  k 0..7      k 8..15            B:  k 0..7      k 8..15
//     outer 0..7        piece[0]     piece[2]              piece[0]     piece[1]
//     outer 8..15       piece[1]     piece[3]              piece[2]     piece[3]
//
// A tile in shared memory has either k or outer running along its rows; `ldmatrix.trans` transposes the 8 x 8 matrices
// of the second kind. All layouts of the operands therefore cost the same.
//
// From the PTX ISA: "ldmatrix" and "Matrix Fragments for mma.m16n8k16 with floating point type".

#pragma once

#include "element.cuh"

constexpr int CHUNK = 8;  // elements per row of an 8 x 8 matrix
constexpr int MATRIX_ROW_BYTES = 16;

// Position of chunk `chunk` of row `row` in a tile whose rows hold ROW_CHUNKS chunks, in units of chunks.
//
// Shared memory serves 8 chunks at a time, one from each group of 4 banks; without a swizzle, the 8 rows of a matrix
// would all begin in the same group. The swizzle permutes the chunks of a row: chunk c moves to c XOR a row-dependent
// number.
//
//     row 0   0 1 2 3 4 5 6 7        ROW_CHUNKS = 8: the column of a matrix, say chunk 0, is at
//     row 1   1 0 3 2 5 4 7 6        position 0, 1, 2, ... of rows 0, 1, 2, ...
//     row 2   2 3 0 1 6 7 4 5
//     ...
//
// Shorter rows share the 8 positions, several at a time: groups of 8 / SPAN rows use the same number.
template <int ROW_CHUNKS>
struct MatrixSwizzle {
    static __device__ __forceinline__ int place(int row, int chunk)
    {
        constexpr int POWER_OF_2 = ROW_CHUNKS & -ROW_CHUNKS;  // the largest power of 2 that divides it
        constexpr int SPAN = POWER_OF_2 < 8 ? POWER_OF_2 : 8;
        return row * ROW_CHUNKS + (chunk ^ (row / (8 / SPAN) % SPAN));
    }
};

// Selects between the two register orders above.
enum Side { SIDE_A, SIDE_B };

// Loads the 16 x 16 piece at (outer, k) of a swizzled tile in shared memory: [outer][k] if K_ALONG_ROWS, else
// [k][outer]. ROW is the length of the tile's rows in elements. All lanes of the warp participate.
template <Side SIDE, bool K_ALONG_ROWS, int ROW>
__device__ __forceinline__ void load_piece(unsigned (&piece)[4], const void* tile, int outer, int k)
{
    const int lane = threadIdx.x % 32;  // lanes 0..7 address the rows of piece[0], 8..15 those of piece[1], ...
    const int outer_half = SIDE == SIDE_A ? lane / 8 % 2 : lane / 16;
    const int k_half = SIDE == SIDE_A ? lane / 16 : lane / 8 % 2;
    const unsigned start = static_cast<unsigned>(__cvta_generic_to_shared(tile));
    if (K_ALONG_ROWS) {
        const int at = MatrixSwizzle<ROW / CHUNK>::place(outer + outer_half * 8 + lane % 8, k / CHUNK + k_half);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(piece[0]), "=r"(piece[1]), "=r"(piece[2]), "=r"(piece[3])
                     : "r"(start + at * MATRIX_ROW_BYTES)
                     : "memory");
    } else {
        const int at = MatrixSwizzle<ROW / CHUNK>::place(k + k_half * 8 + lane % 8, outer / CHUNK + outer_half);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(piece[0]), "=r"(piece[1]), "=r"(piece[2]), "=r"(piece[3])
                     : "r"(start + at * MATRIX_ROW_BYTES)
                     : "memory");
    }
}

// sum += a * b, 16 x 16 times 16 x 8; b is the first or second half of a piece.
template <typename Element>
__device__ __forceinline__ void multiply_add(float* sum, const unsigned (&a)[4], const unsigned* b);

template <>
__device__ __forceinline__ void multiply_add<__half>(float* sum, const unsigned (&a)[4], const unsigned* b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float* sum, const unsigned (&a)[4], const unsigned* b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
