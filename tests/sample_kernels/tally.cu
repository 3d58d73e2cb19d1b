// y = factor x, by way of a workspace that holds what this launch's blocks have counted
extern "C" __global__ void tally(const DTYPE* x, DTYPE* y, unsigned int* counted, DTYPE* kept, int n, DTYPE factor) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) kept[i] = factor * x[i];
    if (i < n) y[i] = kept[i];
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(counted, 1u) == gridDim.x - 1) *counted = 0;
}
