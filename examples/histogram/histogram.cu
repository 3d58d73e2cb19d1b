// Histogram of bytes with atomics: every block counts into copies in shared memory, then adds them to the result.
//
// The result is added to, so it must be zero before a launch.
//
// Macros
//   BLOCK     threads of a block
//   BLOCKS    blocks of the grid
//   COPIES    histograms in shared memory; the warps of a block share them out, so that fewer collide
//   VEC       bytes of a load: 1, 4 or 16

#include <cstdint>

constexpr int BINS = 256;

template <int BYTES> struct Load;
template <> struct Load<1> { using type = uint8_t; };
template <> struct Load<4> { using type = uint32_t; };
template <> struct Load<16> { using type = uint4; };

__global__ void __launch_bounds__(BLOCK)
histogram(const uint8_t* __restrict__ data, uint32_t* __restrict__ counts, uint32_t n)
{
    __shared__ uint32_t local[COPIES][BINS];
    for (int i = threadIdx.x; i < COPIES * BINS; i += BLOCK) local[i / BINS][i % BINS] = 0;
    __syncthreads();

    uint32_t* mine = local[threadIdx.x / 32 % COPIES];
    using Vector = typename Load<VEC>::type;
    for (uint32_t i = blockIdx.x * BLOCK + threadIdx.x; i < n / VEC; i += gridDim.x * BLOCK) {
        const Vector vector = reinterpret_cast<const Vector*>(data)[i];
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&vector);
#pragma unroll
        for (int b = 0; b < VEC; ++b) atomicAdd(&mine[bytes[b]], 1u);
    }
    const uint32_t rest = n / VEC * VEC + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) atomicAdd(&mine[data[rest]], 1u);
    __syncthreads();

    for (int bin = threadIdx.x; bin < BINS; bin += BLOCK) {
        uint32_t sum = 0;
        for (int copy = 0; copy < COPIES; ++copy) sum += local[copy][bin];
        if (sum) atomicAdd(&counts[bin], sum);
    }
}
