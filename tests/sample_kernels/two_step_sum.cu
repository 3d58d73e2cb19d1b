template <int THREADS>
__device__ float block_sum(float value)
{
    __shared__ float partial[THREADS];
    partial[threadIdx.x] = value;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    __syncthreads();
    return partial[0];
}

__global__ void partial_sums(const float* x, float* partials, int N)
{
    float sum = 0.0f;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK) sum += x[i];
    sum = block_sum<BLOCK>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void total(const float* partials, float* y, int count)
{
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count - WRONG; i += LAST) sum += partials[i];
    sum = block_sum<LAST>(sum);
    if (threadIdx.x == 0) y[0] = sum;
}
