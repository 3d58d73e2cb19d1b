extern "C" __global__ void sum(DTYPE* x) {
    __shared__ DTYPE tile[TILE];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] += tile[TILE - 1 - threadIdx.x];
}
