extern "C" __global__ void row_sums(const float* x, float* y, int R, int C) {
    const int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const int share = (C + PARTS - 1) / PARTS;
#if ATOMIC
    const int part = blockIdx.y;
    float sum = 0.0f;
    for (int c = part * share; c < min(C, (part + 1) * share); ++c) sum += x[(long long)row * C + c];
    atomicAdd(y + row, sum);
#else
    float total = 0.0f;
    for (int part = 0; part < PARTS; ++part) {
        float sum = 0.0f;
        for (int c = part * share; c < min(C, (part + 1) * share); ++c) sum += x[(long long)row * C + c];
        total += sum;
    }
    y[row] += total;
#endif
}
