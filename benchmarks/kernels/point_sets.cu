// Gaussian overlap of two sets of N points, summed over the second set. AX, AY: first set, SA: its widths; BX, BY, SB:
// the second; D: sums (N).

extern "C" __global__ void __launch_bounds__(BLOCK)
point_sets(const float* __restrict__ AX, const float* __restrict__ AY, const float* __restrict__ SA,
           const float* __restrict__ BX, const float* __restrict__ BY, const float* __restrict__ SB,
           float* __restrict__ D, int N)
{
    const int first = blockIdx.x * BLOCK * POINTS + threadIdx.x;
    float x[POINTS], y[POINTS], width[POINTS], sum[POINTS];
    #pragma unroll
    for (int p = 0; p < POINTS; ++p) {
        const int i = first + p * BLOCK;
        x[p] = i < N ? AX[i] : 0.0f;
        y[p] = i < N ? AY[i] : 0.0f;
        width[p] = i < N ? SA[i] : 1.0f;
        sum[p] = 0.0f;
    }
#if STAGED
    __shared__ float bx[BLOCK * WIDTH], by[BLOCK * WIDTH], sb[BLOCK * WIDTH];
#endif
    for (int start = 0; start < N; start += BLOCK * WIDTH) {
        const int count = min(BLOCK * WIDTH, N - start);
#if STAGED
        for (int k = threadIdx.x; k < count; k += BLOCK) {
            bx[k] = BX[start + k];
            by[k] = BY[start + k];
            sb[k] = SB[start + k];
        }
        __syncthreads();
#else
        const float *bx = BX + start, *by = BY + start, *sb = SB + start;
#endif
        #pragma unroll UNROLL
        for (int k = 0; k < count; ++k)
            #pragma unroll
            for (int p = 0; p < POINTS; ++p) {
                const float dx = bx[k] - x[p], dy = by[k] - y[p];
                const float spread = width[p] * width[p] + sb[k] * sb[k] + 0.1f;
#if FAST
                sum[p] += __expf(__fdividef(-(dx * dx + dy * dy), spread));
#else
                sum[p] += expf(-(dx * dx + dy * dy) / spread);
#endif
            }
#if STAGED
        __syncthreads();
#endif
    }
    #pragma unroll
    for (int p = 0; p < POINTS; ++p) {
        const int i = first + p * BLOCK;
        if (i < N) D[i] = sum[p];
    }
}
