// What both kernels share: the sum of what a thread reads of a row, and the sum over the threads of a row.

template <int WIDTH> struct Vector;
template <> struct Vector<1> { using type = float; };
template <> struct Vector<2> { using type = float2; };
template <> struct Vector<4> { using type = float4; };

__device__ float total(float v) { return v; }
__device__ float total(float2 v) { return v.x + v.y; }
__device__ float total(float4 v) { return (v.x + v.y) + (v.z + v.w); }

template <typename Load> __device__ float strided_sum(const Load* row, int count, int first, int stride)
{
    float sum = 0.0f;
#pragma unroll UNROLL
    for (int i = first; i < count; i += stride) sum += total(row[i]);
    return sum;
}

// Sum of the vectors first, first + stride, ... of a row; of single floats if the rows are not aligned to vectors.
template <int WIDTH> __device__ float sum_of_share(const float* row, int n, int first, int stride)
{
    using Load = typename Vector<WIDTH>::type;
    const bool is_aligned = n % WIDTH == 0 && reinterpret_cast<size_t>(row) % sizeof(Load) == 0;
    return is_aligned ? strided_sum(reinterpret_cast<const Load*>(row), n / WIDTH, first, stride)
                      : strided_sum(row, n, first, stride);
}

// Sum over the THREADS threads of consecutive threadIdx.x, a power of two, for each of ROWS values of threadIdx.y; valid
// in the first of them. All threads of the block call it.
template <int THREADS, int ROWS> __device__ float sum_over_threads(float value)
{
    constexpr int WIDTH = THREADS < 32 ? THREADS : 32;
    for (int lanes = WIDTH / 2; lanes > 0; lanes /= 2) value += __shfl_down_sync(0xffffffff, value, lanes, WIDTH);
    if (THREADS <= 32) return value;
    __shared__ float warps[ROWS][(THREADS + 31) / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.y][threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x < THREADS / 32 ? warps[threadIdx.y][threadIdx.x] : 0.0f;
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_down_sync(0xffffffff, value, lanes);
    return value;
}
