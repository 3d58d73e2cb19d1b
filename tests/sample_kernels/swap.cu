// Each block reads the tile of the block at the other end of its cluster, from that block's shared memory.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) swap(const float* x, float* y, int n)
{
    __shared__ float tile[THREADS];
    const int i = blockIdx.x * THREADS + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : 0.0f;
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const unsigned other = CLUSTER - 1 - blockIdx.x % CLUSTER;
    unsigned there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(tile + threadIdx.x))), "r"(other));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    const int from = (blockIdx.x - blockIdx.x % CLUSTER + other) * THREADS + threadIdx.x;
    if (from < n) y[from] = value;
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
