// fp32 numbers as sums of three bf16 limbs, and their products on tensor cores at fp32 accuracy.
//
// An fp32 has a significand of 24 bits, a bf16 one of 8 and the same range. So three limbs hold all of it:
//
//     x = x0 + x1 + x2       x0 = x rounded to bf16, x1 = the rest rounded, x2 = the rest of that, which is exact
//                            |x1| <= 2^-8 |x0|, |x2| <= 2^-17 |x0|
//
//     a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0)  +  a1 b2 + a2 b1 + a2 b2
//           `----------------- six products ----------------'     `-- 2^-24 |a b| at most --'
//
// A bf16 product is exact in fp32. What the six leave out is no more than the rounding of a single fp32 product, 2^-24,
// and a sixth of it as a rule.
// (G. Henry, P. Tang, A. Heinecke: Leveraging the bfloat16 artificial intelligence datatype for higher-precision
// computations, ARITH 2019.)
//
// Sums. mma.sync adds in fp32 but cuts off where fp32 arithmetic rounds, and over a long sum such errors pile up on one
// side. So the tensor cores sum up the six products over 16 of k only, from the smallest to the largest, and that is
// added to the running sum by an fp32 addition: K / 16 roundings in place of K. (H. Ootomo, R. Yokota: Recovering single
// precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance, 2022.)
//
// Infinities: the rest of an infinity is NaN, and so is every sum that it enters; never a wrong finite number.
#pragma once

#include "mma.cuh"

constexpr int LIMBS = 3;

// Which limbs of a and b to multiply, the smallest products first.
struct LimbPair {
    int a, b;
};
constexpr int LIMB_PAIRS = 6;
__device__ constexpr LimbPair limb_pair(int i)
{
    constexpr LimbPair PAIRS[LIMB_PAIRS] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
    return PAIRS[i];
}

// The limbs of two neighbours along k, packed as tensor cores want them.
__device__ __forceinline__ void split(unsigned& limb0, unsigned& limb1, unsigned& limb2, float first, float second)
{
    limb0 = pack<__nv_bfloat16>(first, second);
    const float2 large = unpack<__nv_bfloat16>(limb0);
    first -= large.x;
    second -= large.y;
    limb1 = pack<__nv_bfloat16>(first, second);
    const float2 middle = unpack<__nv_bfloat16>(limb1);
    limb2 = pack<__nv_bfloat16>(first - middle.x, second - middle.y);
}

// A line is what a lane holds of one row of A (or column of B): 4 neighbours along k, as limbs.
//
// The order of k within a sum is free, as long as A and B agree. Of 16 k, lane l gets k = l % 4 * 4 + 0..3; so the four
// that mma.sync calls l % 4 * 2, the next, and the two 8 further on lie side by side in memory.
struct Line {
    unsigned early[LIMBS];  // the first two
    unsigned late[LIMBS];

    __device__ __forceinline__ void split_from(const float (&x)[4])
    {
        split(early[0], early[1], early[2], x[0], x[1]);
        split(late[0], late[1], late[2], x[2], x[3]);
    }
};

// sum += A * B over 16 of k for a piece of 16 rows, whose halves are `top` and `bottom`, and pieces of 8 columns. The
// products of one pair of limbs follow each other, so that each hides its latency behind AT_ONCE - 1 others.
constexpr int AT_ONCE = 4;

template <int COUNT>
__device__ __forceinline__ void multiply_add(float* sum, const Line& top, const Line& bottom, const Line (&columns)[COUNT])
{
#pragma unroll
    for (int first = 0; first < COUNT; first += AT_ONCE) {
        float products[AT_ONCE][4] = {};
#pragma unroll
        for (int i = 0; i < LIMB_PAIRS; ++i) {
            const LimbPair pair = limb_pair(i);
            const unsigned a[4] = {top.early[pair.a], bottom.early[pair.a], top.late[pair.a], bottom.late[pair.a]};
#pragma unroll
            for (int n = 0; n < AT_ONCE && first + n < COUNT; ++n) {
                const unsigned b[2] = {columns[first + n].early[pair.b], columns[first + n].late[pair.b]};
                multiply_add<__nv_bfloat16>(products[n], a, b);
            }
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE && first + n < COUNT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[(first + n) * 4 + i] += products[n][i];
    }
}
