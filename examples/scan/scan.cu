// Inclusive scan (prefix sum) of int32 in three kernels: every block scans its tile, one block scans the tiles' sums,
// every block adds the sum of the tiles before it.
//
// Macros
//   BLOCK    threads of a block
//   ITEMS    consecutive elements of a thread
//   LAST     threads of the block that scans the tiles' sums

// Inclusive scan of one value per thread over a block.
template <int THREADS> __device__ int scan_block(int value)
{
    __shared__ int warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffff, value, step);
        if (lane >= step) value += before;
    }
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    int offset = 0;
    for (int w = 0; w < warp; ++w) offset += warps[w];
    __syncthreads();  // the next call writes `warps`
    return value + offset;
}

__global__ void __launch_bounds__(BLOCK) scan_tiles(const int* __restrict__ x, int* __restrict__ y, int* sums, int n)
{
    const long long first = (static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x) * ITEMS;
    int items[ITEMS], total = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        total += first + i < n ? x[first + i] : 0;
        items[i] = total;
    }
    const int inclusive = scan_block<BLOCK>(total);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (first + i < n) y[first + i] = items[i] + inclusive - total;
    if (threadIdx.x == BLOCK - 1) sums[blockIdx.x] = inclusive;
}

__global__ void __launch_bounds__(LAST) scan_sums(int* sums, int tiles)
{
    __shared__ int carry;
    if (threadIdx.x == 0) carry = 0;
    for (int start = 0; start < tiles; start += LAST) {
        const int i = start + threadIdx.x;
        const int inclusive = scan_block<LAST>(i < tiles ? sums[i] : 0) + carry;
        if (i < tiles) sums[i] = inclusive;
        __syncthreads();
        if (threadIdx.x == LAST - 1) carry = inclusive;
        __syncthreads();
    }
}

__global__ void __launch_bounds__(BLOCK) add_before(int* __restrict__ y, const int* __restrict__ sums, int n)
{
    if (blockIdx.x == 0) return;
    const int before = sums[blockIdx.x - 1];
    const long long start = static_cast<long long>(blockIdx.x) * BLOCK * ITEMS;
    for (int i = threadIdx.x; i < BLOCK * ITEMS && start + i < n; i += BLOCK) y[start + i] += before;
}
