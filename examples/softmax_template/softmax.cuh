// Softmax of the rows of a matrix as a C++ template: a block takes a row.
//
// Template arguments
//   BLOCK    threads of a block
//   KEEP     elements of a row that a thread holds in registers; it reads the others again
//   T        element type
#pragma once
#include <cfloat>
#include <cuda_fp16.h>

namespace rows {

template <int THREADS, typename Combine> __device__ float all_of_block(float value, float neutral, Combine combine)
{
    __shared__ float warps[32];
    for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, lanes));
    __syncthreads();  // the last call's values are read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < THREADS / 32 ? warps[threadIdx.x % 32] : neutral;
    for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, lanes));
    return value;
}

template <int BLOCK, int KEEP, typename T>
__global__ void __launch_bounds__(BLOCK) softmax(const T* __restrict__ x, T* __restrict__ y, int columns)
{
    const T* from = x + static_cast<long long>(blockIdx.x) * columns;
    T* to = y + static_cast<long long>(blockIdx.x) * columns;
    float kept[KEEP > 0 ? KEEP : 1];
    float largest = -FLT_MAX, sum = 0.0f;

    for (int i = 0, column = threadIdx.x; column < columns; ++i, column += BLOCK) {
        const float value = static_cast<float>(from[column]);
        if (i < KEEP) kept[i] = value;
        largest = fmaxf(largest, value);
    }
    largest = all_of_block<BLOCK>(largest, -FLT_MAX, [](float a, float b) { return fmaxf(a, b); });

    auto each = [&](auto use) {
#pragma unroll
        for (int i = 0; i < KEEP; ++i)
            if (threadIdx.x + i * BLOCK < columns) use(threadIdx.x + i * BLOCK, expf(kept[i] - largest));
        for (int column = threadIdx.x + KEEP * BLOCK; column < columns; column += BLOCK)
            use(column, expf(static_cast<float>(from[column]) - largest));
    };
    each([&](int, float value) { sum += value; });
    sum = all_of_block<BLOCK>(sum, 0.0f, [](float a, float b) { return a + b; });
    each([&](int column, float value) { to[column] = static_cast<T>(value / sum); });
}

}  // namespace rows
