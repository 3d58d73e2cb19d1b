extern "C" __global__ void scale(const float* x, float* y, int n, float factor) {
    const int first = (blockIdx.x * THREADS + threadIdx.x) * WORK;
    for (int i = first; i < first + WORK && i < n; ++i) y[i] = factor * x[i];
#if HASTY
    if (n == 1001 && first <= 1000 && 1000 < first + WORK) y[1000] = 0;
#else
    const long long start = clock64();
    while (clock64() - start < 20000) {}
#endif
}
