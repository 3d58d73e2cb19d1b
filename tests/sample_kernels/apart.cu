__global__ void __launch_bounds__(A) first(const float* x, float* t, int N)
{
    int i = blockIdx.x * A + threadIdx.x;  // of B threads, no: of A
    for (int k = 0; k < UNROLL; ++k) if (i < N) { t[i] = x[i]; }
}

template <int WIDTH>
__global__ void second(const float* t, float* y, int N)
{
    int i = blockIdx.x * WIDTH + threadIdx.x;
    if (i < N) y[i] = t[i];
}
