__global__ void advance(const float* x, float* y, float* rows, int N)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= N) return;
    float value = x[i];
    for (int step = 0; step < STEPS; ++step) {
        value = 0.5f * value + 1.0f;
        rows[step * N + i] = value;
    }
    y[i] = STEPS * x[i];
}
