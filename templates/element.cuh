// The 16-bit element types by name, and their conversion to and from fp32.
//
// Kernels move elements as raw bits and compute in fp32, so they need only these two conversions. Including cuda_fp16.h
// and cuda_bf16.h would triple the compile time.
#pragma once

struct __half;
struct __nv_bfloat16;

// Storage type of an element.
template <typename Element>
struct Stored {
    typedef unsigned short type;
};
template <>
struct Stored<float> {
    typedef float type;
};

// Conversion of two adjacent elements in 32 bits, the first in the low half, from fp32 (round to nearest) and to fp32.
template <typename Element>
__device__ __forceinline__ unsigned pack(float first, float second);
template <typename Element>
__device__ __forceinline__ float2 unpack(unsigned pair);

template <>
__device__ __forceinline__ unsigned pack<__half>(float first, float second)
{
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float first, float second)
{
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

template <>
__device__ __forceinline__ float2 unpack<__half>(unsigned pair)
{
    float2 both;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(both.x), "=f"(both.y)
        : "r"(pair));
    return both;
}

// bfloat16 is the upper half of fp32.
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned pair)
{
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Conversion of one stored element to fp32 and back. fp32 passes through unchanged, for any Element.
template <typename Element>
__device__ __forceinline__ float widen(unsigned short stored)
{
    return unpack<Element>(stored).x;
}
template <typename Element>
__device__ __forceinline__ float widen(float stored)
{
    return stored;
}
template <typename Element>
__device__ __forceinline__ void narrow(unsigned short& stored, float value)
{
    stored = static_cast<unsigned short>(pack<Element>(value, 0.0f));
}
template <typename Element>
__device__ __forceinline__ void narrow(float& stored, float value)
{
    stored = value;
}

// Conversion of adjacent elements to fp32.
template <typename Element, int COUNT>
__device__ __forceinline__ void widen(float (&to)[COUNT], const unsigned short (&stored)[COUNT])
{
#pragma unroll
    for (int i = 0; i + 1 < COUNT; i += 2) {
        const float2 both = unpack<Element>(stored[i] | static_cast<unsigned>(stored[i + 1]) << 16);
        to[i] = both.x;
        to[i + 1] = both.y;
    }
    if (COUNT % 2 != 0) to[COUNT - 1] = widen<Element>(stored[COUNT - 1]);
}
template <typename Element, int COUNT>
__device__ __forceinline__ void widen(float (&to)[COUNT], const float (&stored)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = stored[i];
}
