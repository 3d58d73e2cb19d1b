// result[0:n] = sums[0:n], rounded to DTYPE; both are aligned to 16 bytes.
#if DTYPE_IS_BFLOAT16
#include <cuda_bf16.h>
#define DTYPE __nv_bfloat16
#define ROUNDED(x) __float2bfloat16_rn(x)
#else
#include <cuda_fp16.h>
#define DTYPE __half
#define ROUNDED(x) __float2half_rn(x)
#endif

#define WIDTH 8  // elements of a thread: one 16-byte store

extern "C" __global__ void __launch_bounds__(256)
round_sums(const float* __restrict__ sums, DTYPE* __restrict__ result, unsigned long long n) {
    const unsigned long long i = (blockIdx.x * 256ull + threadIdx.x) * WIDTH;
    if (i + WIDTH <= n) {
        const float4* wide = reinterpret_cast<const float4*>(sums + i);
        const float4 low = __ldcs(wide), high = __ldcs(wide + 1);
        const float values[WIDTH] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        alignas(16) DTYPE rounded[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) rounded[j] = ROUNDED(values[j]);
        *reinterpret_cast<uint4*>(result + i) = *reinterpret_cast<const uint4*>(rounded);
    } else {
        for (unsigned long long j = i; j < n; ++j) result[j] = ROUNDED(sums[j]);
    }
}
