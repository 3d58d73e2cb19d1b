// fp32 numbers as sums of three bf16 limbs, and their products on tensor cores with fp32 accuracy.
//
// The significand of fp32 has 24 bits, that of bf16 has 8; their range is the same. Three limbs therefore hold an fp32:
//
//     x = x0 + x1 + x2       x0 = x rounded to bf16, x1 = the remainder rounded, x2 = its remainder, which is exact
//                            |x1| <= 2^-8 |x0|, |x2| <= 2^-17 |x0|
//
//     a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0)  +  a1 b2 + a2 b1 + a2 b2
//           `----------------- six products ----------------'     `-- 2^-24 |a b| at most --'
//
// A bf16 product is exact in fp32. The three omitted products amount to no more than the rounding error of a single
// fp32 product, 2^-24, and typically to a sixth of it.
// (G. Henry, P. Tang, A. Heinecke: Leveraging the bfloat16 artificial intelligence datatype for higher-precision
// computations, ARITH 2019.)
//
// Accumulation. mma.sync adds in fp32 but truncates where fp32 arithmetic rounds, and over a long sum these errors
// accumulate in one direction. The tensor cores therefore add the six products over 16 values of k only, from the
// smallest to the largest, and an fp32 addition adds the result to the running sum: K / 16 roundings instead of K.
// (H. Ootomo, R. Yokota: Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance, 2022.)
//
// Infinities: the remainder of an infinity is NaN, and so is every sum it contributes to; the result is never a wrong
// finite number.
#pragma once

#include "mma.cuh"

constexpr int LIMBS = 3;

// Pairs of limbs of a and b to multiply, the smallest products first.
struct LimbPair {
    int a, b;
};
constexpr int LIMB_PAIRS = 6;
__device__ constexpr LimbPair limb_pair(int i)
{
    constexpr LimbPair PAIRS[LIMB_PAIRS] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
    return PAIRS[i];
}

// Splits two elements adjacent along k into limbs, packed in the order of the tensor-core fragments.
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

// A line is a lane's share of one row of A (or column of B): 4 elements adjacent along k, as limbs.
//
// The order of k within a sum is arbitrary as long as A and B agree. Of 16 values of k, lane l gets k = l % 4 * 4 +
// 0..3; the four that mma.sync numbers l % 4 * 2, the next, and the two 8 further on, are thus contiguous in memory.
struct Line {
    unsigned early[LIMBS];  // the first two elements
    unsigned late[LIMBS];

    __device__ __forceinline__ void split_from(const float (&x)[4])
    {
        split(early[0], early[1], early[2], x[0], x[1]);
        split(late[0], late[1], late[2], x[2], x[3]);
    }
};

// sum += A * B over 16 values of k for 16 rows, whose halves are `top` and `bottom`, and groups of 8 columns. The
// products of one pair of limbs are issued back to back, so that each hides its latency behind AT_ONCE - 1 others.
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
