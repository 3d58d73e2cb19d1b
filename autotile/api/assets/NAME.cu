// y = a x + y, where each thread computes PER_THREAD elements, BLOCK apart.
// BLOCK and PER_THREAD are parameters of NAME.toml; each configuration is compiled with its values as macros.
__global__ void __launch_bounds__(BLOCK)
NAME_kernel(const float* __restrict__ x, float* __restrict__ y, float a, int N)
{
    const int first = blockIdx.x * BLOCK * PER_THREAD + threadIdx.x;
#pragma unroll
    for (int step = 0; step < PER_THREAD; ++step) {
        const int i = first + step * BLOCK;
        if (i < N) y[i] = a * x[i] + y[i];
    }
}
