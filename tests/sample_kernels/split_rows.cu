extern "C" __global__ void rows(const float* x, float* y, float* partials, int M, int N)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= M) return;
    float sum = 0.0f;
    for (int j = blockIdx.y; j < N; j += SPLIT) sum += x[row * N + j];
    if (SPLIT > 1) partials[blockIdx.y * M + row] = sum;
    else y[row] = sum;
}

extern "C" __global__ void combine(float* y, const float* partials, int M)
{
    int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= M) return;
    float sum = 0.0f;
    for (int part = 0; part < SPLIT; ++part) sum += partials[part * M + row];
    y[row] = sum;
}
