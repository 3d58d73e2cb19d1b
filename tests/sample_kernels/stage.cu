extern "C" __global__ void stage(const float* x, float* y, int n, float factor) {
    extern __shared__ float tile[];
    __shared__ float factors[STATIC];
    const int base = blockIdx.x * TILE;
    for (int i = threadIdx.x; i < STATIC; i += 256) factors[i] = factor;
    for (int i = threadIdx.x; i < TILE; i += 256) tile[i] = base + i < n ? x[base + i] : 0.0f;
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += 256) {
        const int j = TILE - 1 - i;  // loaded by another thread
        if (base + j < n) y[base + j] = factors[j % STATIC] * tile[j];
    }
}
