__global__ void copy(const float* from, float* to, int N)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < N) to[i] = from[i];
}

__global__ void sweep(const float* from, float* to, int stride, int N)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < N) to[i] = i < stride ? from[i] : from[i] + from[i - stride];
}
