extern "C" __global__ void counted(const float* x, float* y, unsigned int* counts, int n) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i < n) y[i] = x[i] + atomicAdd(&counts[i], 1u);
}

extern "C" __global__ void __launch_bounds__(BLOCK) same(const float* x, float* y, unsigned int* counts, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = x[i] + counts[i];
}
