// Crossings of a ray from each point with the edges of a polygon. The two decisions of each edge (is the point between
// its ends, is it left of it) are ramps of finite slope, so that rounding cannot flip a result.
// X, Y: points (N); VX, VY: vertices (V), the last one closes the polygon at the origin; C: sum of the weights (N).

__device__ __forceinline__ float ramp(float x)
{
#if RAMP == 0
    return fminf(fmaxf(8.0f * x, 0.0f), 1.0f);
#else
    return __saturatef(8.0f * x);
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK)
pnpoly(const float* __restrict__ X, const float* __restrict__ Y, const float* __restrict__ VX,
       const float* __restrict__ VY, float* __restrict__ C, int N, int V)
{
#if STAGED
    extern __shared__ float vertices[];
    float *sx = vertices, *sy = vertices + V;
    for (int i = threadIdx.x; i < V; i += BLOCK) {
        sx[i] = VX[i];
        sy[i] = VY[i];
    }
    __syncthreads();
#else
    const float* sx = VX;
    const float* sy = VY;
#endif
    const int first = blockIdx.x * BLOCK * TILE + threadIdx.x;
    float x[TILE], y[TILE], sum[TILE];
    #pragma unroll
    for (int t = 0; t < TILE; ++t) {
        const int i = first + t * BLOCK;
        x[t] = i < N ? X[i] : 0.0f;
        y[t] = i < N ? Y[i] : 0.0f;
        sum[t] = 0.0f;
    }
    #pragma unroll UNROLL
    for (int v = 0; v < V; ++v) {
        const float ax = sx[v], ay = sy[v];
        const float bx = v + 1 < V ? sx[v + 1] : 0.0f, by = v + 1 < V ? sy[v + 1] : 0.0f;
        #pragma unroll
        for (int t = 0; t < TILE; ++t) {
            const float between = fabsf(ramp(ay - y[t]) - ramp(by - y[t]));
            const float left = ramp((ax - x[t]) * (ax - x[t]) - (bx - y[t]) * (bx - y[t]));
            sum[t] += between * left;
        }
    }
    #pragma unroll
    for (int t = 0; t < TILE; ++t) {
        const int i = first + t * BLOCK;
        if (i < N) C[i] = sum[t];
    }
}
