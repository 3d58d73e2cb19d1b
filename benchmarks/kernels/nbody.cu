// Acceleration of N bodies by their gravity, all pairs. X, Y, Z: positions; M: masses; AX, AY, AZ: accelerations (N).

#define SOFTENING 0.01f

extern "C" __global__ void __launch_bounds__(BLOCK)
nbody(const float* __restrict__ X, const float* __restrict__ Y, const float* __restrict__ Z,
      const float* __restrict__ M, float* __restrict__ AX, float* __restrict__ AY, float* __restrict__ AZ, int N)
{
    const int first = blockIdx.x * BLOCK * BODIES + threadIdx.x;
    float x[BODIES], y[BODIES], z[BODIES], ax[BODIES], ay[BODIES], az[BODIES];
    #pragma unroll
    for (int b = 0; b < BODIES; ++b) {
        const int i = first + b * BLOCK;
        x[b] = i < N ? X[i] : 0.0f;
        y[b] = i < N ? Y[i] : 0.0f;
        z[b] = i < N ? Z[i] : 0.0f;
        ax[b] = ay[b] = az[b] = 0.0f;
    }
#if STAGED
    __shared__ float4 tile[BLOCK * WIDTH];
#endif
    for (int start = 0; start < N; start += BLOCK * WIDTH) {
#if STAGED
        #pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const int j = start + w * BLOCK + threadIdx.x;
            tile[w * BLOCK + threadIdx.x] = j < N ? make_float4(X[j], Y[j], Z[j], M[j]) : make_float4(0, 0, 0, 0);
        }
        __syncthreads();
#endif
        #pragma unroll UNROLL
        for (int k = 0; k < BLOCK * WIDTH; ++k) {
#if STAGED
            const float4 other = tile[k];
#else
            const int j = start + k;
            const float4 other = j < N ? make_float4(X[j], Y[j], Z[j], M[j]) : make_float4(0, 0, 0, 0);
#endif
            #pragma unroll
            for (int b = 0; b < BODIES; ++b) {
                const float dx = other.x - x[b], dy = other.y - y[b], dz = other.z - z[b];
                const float square = dx * dx + dy * dy + dz * dz + SOFTENING;
#if RSQRT
                const float inverse = rsqrtf(square);
#else
                const float inverse = 1.0f / sqrtf(square);
#endif
                const float weight = other.w * inverse * inverse * inverse;
                ax[b] += weight * dx;
                ay[b] += weight * dy;
                az[b] += weight * dz;
            }
        }
#if STAGED
        __syncthreads();
#endif
    }
    #pragma unroll
    for (int b = 0; b < BODIES; ++b) {
        const int i = first + b * BLOCK;
        if (i < N) {
            AX[i] = ax[b];
            AY[i] = ay[b];
            AZ[i] = az[b];
        }
    }
}
