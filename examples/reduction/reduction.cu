// Sum of a vector in two kernels: each block adds a part, then one block adds the blocks' sums.
//
// Macros
//   BLOCK      threads of a block in the first kernel
//   BLOCKS     blocks of the first kernel, the length of `partial`
//   VEC        floats of a load: 1, 2 or 4
//   LAST       threads of the second kernel's block

template <int N> struct Vector;
template <> struct Vector<1> { using type = float; };
template <> struct Vector<2> { using type = float2; };
template <> struct Vector<4> { using type = float4; };

__device__ float total(float v) { return v; }
__device__ float total(float2 v) { return v.x + v.y; }
__device__ float total(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// Sum over a block, valid in thread 0.
template <int THREADS> __device__ float block_sum(float value)
{
    __shared__ float warps[THREADS / 32];
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_down_sync(0xffffffff, value, lanes);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x >= 32) return 0.0f;
    value = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0.0f;
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_down_sync(0xffffffff, value, lanes);
    return value;
}

template <int THREADS, int WIDTH>
__global__ void __launch_bounds__(THREADS) add_parts(const float* __restrict__ x, float* __restrict__ partial, int n)
{
    using Load = typename Vector<WIDTH>::type;
    const Load* vectors = reinterpret_cast<const Load*>(x);
    const int count = n / WIDTH;
    float sum = 0.0f;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) sum += total(vectors[i]);
    const int rest = count * WIDTH + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) sum += x[rest];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) add_sums(const float* __restrict__ partial, float* __restrict__ result)
{
    float value = 0.0f;
    for (int i = threadIdx.x; i < BLOCKS; i += THREADS) value += partial[i];
    value = block_sum<THREADS>(value);
    if (threadIdx.x == 0) *result = value;
}
