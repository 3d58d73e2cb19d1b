template <typename T>
__global__ void naive(const T* x, T* y, T scale, int n) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    if (i < n) y[i] = FACTOR * scale * x[i] + x[(i + 1) % n];
}

extern "C" __global__ void __launch_bounds__(BLOCK) smooth(const float* x, float* y, float scale, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = 2 * scale * x[i] + x[(i + 1) % n] + ERROR;
}

extern "C" __global__ void keys(const unsigned long long* x, unsigned long long* y, float scale, int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = (1ull << 60) + i + x[i] + ADDED;
}
