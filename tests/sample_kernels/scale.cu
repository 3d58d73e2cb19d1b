extern "C" __global__ void scale(const float* x, float* y, int n, float factor) {
    const int first = (blockIdx.x * THREADS + threadIdx.x) * WORK;
    for (int i = first; i < first + WORK && i < n; ++i) y[i] = factor * x[i];
}
