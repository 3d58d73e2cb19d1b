// wgmma: matrix products of a warpgroup, 4 warps, with operands in shared memory (sm_90a).
//
// One instruction multiplies 64 x 16 elements of A by 16 x N of B, both 16-bit floats in shared memory, and accumulates
// into 64 x N fp32 sums in the registers of the 128 threads. It is asynchronous: `wgmma_begin`, some products,
// `wgmma_commit` closes a group, `wgmma_wait<n>` returns when all but the last n groups have completed. Until then the
// sums and the operands must not be accessed.
//
// Lane l of warp w holds these of the 64 x N sums:
//
//     sum[4 j + 0], sum[4 j + 1]   row 16 w + l / 4,      columns 8 j + l % 4 * 2 and the next
//     sum[4 j + 2], sum[4 j + 3]   row 16 w + l / 4 + 8,  the same columns
//
// Operands are given by descriptors. Both lie in slabs of 128-byte rows as TMA writes them with its 128-byte swizzle:
//
//     k along the rows ("K-major")                  rows of A or columns of B along them ("MN-major")
//
//               64 elements of k                                 64 rows of A or columns of B
//             +------------------+                             +------------------+
//     row 0   | k 0 ........ 63  |                       k 0   | 0 ............ 63|   64 .. 127 are in the
//     row 1   |                  |                       k 1   |                  |   next slab, `stride`
//      ...    +------------------+                        ...  +------------------+   bytes on
//
// In both layouts, 8 rows form a swizzle pattern of 1024 bytes. From the PTX ISA, "Asynchronous warpgroup level
// multiply-and-accumulate instructions" and "Matrix descriptor".
#pragma once

#include "element.cuh"


template <typename Element>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<__nv_bfloat16> = true;

// Descriptor of the operand at `address`. Bits 0-13: address, 16-29: bytes from slab to slab, 32-45: bytes from pattern
// to pattern, each / 16; bits 62-63: 1 for the 128-byte swizzle.
__device__ __forceinline__ unsigned long long wgmma_operand(unsigned address, unsigned slab_stride)
{
    constexpr unsigned long long PATTERN = 1024 / 16;
    constexpr unsigned long long SWIZZLE_128 = 1;
    return (address >> 4 & 0x3fff) | static_cast<unsigned long long>(slab_stride >> 4) << 16 | PATTERN << 32 |
           SWIZZLE_128 << 62;
}

// Orders earlier register accesses before the following products.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers per thread, for the whole warpgroup; the kernel's initial count is determined by __launch_bounds__.
template <int REGISTERS>
__device__ __forceinline__ void claim_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void release_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Inline assembly lists its operands one by one: names and constraints for 8 to 128 sums.
#define WGMMA_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_SUMS_32 WGMMA_SUMS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_SUMS_48 WGMMA_SUMS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_SUMS_64 WGMMA_SUMS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_SUMS_80 WGMMA_SUMS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_SUMS_96 WGMMA_SUMS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_SUMS_112 WGMMA_SUMS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_SUMS_128 WGMMA_SUMS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_SUMS_144 WGMMA_SUMS_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_SUMS_160 WGMMA_SUMS_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_SUMS_176 WGMMA_SUMS_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_SUMS_192 WGMMA_SUMS_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_SUMS_208 WGMMA_SUMS_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_SUMS_224 WGMMA_SUMS_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_SUMS_240 WGMMA_SUMS_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_SUMS_256 WGMMA_SUMS_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_8(i) \
    "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), \
        "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define WGMMA_REGISTERS_16 WGMMA_8(0)
#define WGMMA_REGISTERS_32 WGMMA_REGISTERS_16, WGMMA_8(8)
#define WGMMA_REGISTERS_48 WGMMA_REGISTERS_32, WGMMA_8(16)
#define WGMMA_REGISTERS_64 WGMMA_REGISTERS_48, WGMMA_8(24)
#define WGMMA_REGISTERS_80 WGMMA_REGISTERS_64, WGMMA_8(32)
#define WGMMA_REGISTERS_96 WGMMA_REGISTERS_80, WGMMA_8(40)
#define WGMMA_REGISTERS_112 WGMMA_REGISTERS_96, WGMMA_8(48)
#define WGMMA_REGISTERS_128 WGMMA_REGISTERS_112, WGMMA_8(56)
#define WGMMA_REGISTERS_144 WGMMA_REGISTERS_128, WGMMA_8(64)
#define WGMMA_REGISTERS_160 WGMMA_REGISTERS_144, WGMMA_8(72)
#define WGMMA_REGISTERS_176 WGMMA_REGISTERS_160, WGMMA_8(80)
#define WGMMA_REGISTERS_192 WGMMA_REGISTERS_176, WGMMA_8(88)
#define WGMMA_REGISTERS_208 WGMMA_REGISTERS_192, WGMMA_8(96)
#define WGMMA_REGISTERS_224 WGMMA_REGISTERS_208, WGMMA_8(104)
#define WGMMA_REGISTERS_240 WGMMA_REGISTERS_224, WGMMA_8(112)
#define WGMMA_REGISTERS_256 WGMMA_REGISTERS_240, WGMMA_8(120)

#define WGMMA_PRODUCT(N, TYPE, A, B, ADD, A_ACROSS, B_ACROSS)                                                        \
    asm volatile(                                                                                                    \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                                       \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_SUMS_##N "}, %" #A ", %" #B       \
        ", add, 1, 1, %" #A_ACROSS ", %" #B_ACROSS ";\n}"                                                            \
        : WGMMA_REGISTERS_##N                                                                                        \
        : "l"(a), "l"(b), "r"(add), "n"(A_MN_MAJOR), "n"(B_MN_MAJOR))

// sum = a * b, plus sum if `add` is not 0. One overload per N; the numbers are the operands after the sums.
#define WGMMA(N, A, B, ADD, A_ACROSS, B_ACROSS)                                                                      \
    template <typename Element, int A_MN_MAJOR, int B_MN_MAJOR>                                                      \
    __device__ __forceinline__ void wgmma(float(&sum)[N / 2], unsigned long long a, unsigned long long b, int add)   \
    {                                                                                                                \
        if constexpr (is_bfloat16<Element>)                                                                          \
            WGMMA_PRODUCT(N, "bf16", A, B, ADD, A_ACROSS, B_ACROSS);                                                 \
        else                                                                                                         \
            WGMMA_PRODUCT(N, "f16", A, B, ADD, A_ACROSS, B_ACROSS);                                                  \
    }

WGMMA(16, 8, 9, 10, 11, 12)
WGMMA(32, 16, 17, 18, 19, 20)
WGMMA(48, 24, 25, 26, 27, 28)
WGMMA(64, 32, 33, 34, 35, 36)
WGMMA(80, 40, 41, 42, 43, 44)
WGMMA(96, 48, 49, 50, 51, 52)
WGMMA(112, 56, 57, 58, 59, 60)
WGMMA(128, 64, 65, 66, 67, 68)
WGMMA(144, 72, 73, 74, 75, 76)
WGMMA(160, 80, 81, 82, 83, 84)
WGMMA(176, 88, 89, 90, 91, 92)
WGMMA(192, 96, 97, 98, 99, 100)
WGMMA(208, 104, 105, 106, 107, 108)
WGMMA(224, 112, 113, 114, 115, 116)
WGMMA(240, 120, 121, 122, 123, 124)
WGMMA(256, 128, 129, 130, 131, 132)
