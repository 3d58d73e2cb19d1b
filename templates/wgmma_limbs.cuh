// wgmma with A in registers and B in shared memory, for operands that are split into limbs on the fly (sm_90a).
//
// A warp holds 16 x 16 of A as drawn in mma.cuh. B has rows of 128 bytes, or of 64 if k runs along them, since a stage
// holds only 32 of k; wgmma.cuh describes the rest.
#pragma once

#include "wgmma.cuh"

// Descriptor of a piece of B with k along rows of 64 bytes: 8 rows form a pattern of 512 bytes; 2 is its swizzle mode.
__device__ __forceinline__ unsigned long long wgmma_operand_64(unsigned address)
{
    constexpr unsigned long long PATTERN = 512 / 16;
    constexpr unsigned long long SWIZZLE_64 = 2;
    return (address >> 4 & 0x3fff) | 1ull << 16 | PATTERN << 32 | SWIZZLE_64 << 62;
}

// Marks the results of wgmma as written: the compiler considers them written at issue and would read them before the
// wait.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sum)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// sum = a * b, plus sum if `add` is not 0; a and b are bf16. One overload per N; the numbers are the operands after the
// sums.
#define WGMMA_FROM_REGISTERS(N, A0, A1, A2, A3, B, ADD, ACROSS)                                                        \
    template <int B_MN_MAJOR>                                                                                        \
    __device__ __forceinline__ void wgmma_from_registers(float(&sum)[N / 2], const unsigned(&a)[4],                  \
                                                         unsigned long long b, int add)                              \
    {                                                                                                                \
        asm volatile(                                                                                                \
            "{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                                   \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_SUMS_##N "}, {%" #A0 ", %" #A1        \
            ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1, %" #ACROSS ";\n}"                                            \
            : WGMMA_REGISTERS_##N                                                                                    \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B_MN_MAJOR));                        \
    }

WGMMA_FROM_REGISTERS(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_FROM_REGISTERS(128, 64, 65, 66, 67, 68, 69, 70)
