// Thread-block clusters: up to 8 co-scheduled blocks with access to each other's shared memory (sm_90 and later).
#pragma once

__device__ __forceinline__ unsigned cluster_rank()
{
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier across all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_barrier()
{
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Cluster barrier without memory ordering, except for mbarriers published by `mbarrier_publish`. The barrier above
// waits until all stores of a thread are visible to the whole device.
__device__ __forceinline__ void cluster_meet()
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait;" ::: "memory");
}

// Loads four floats from the shared memory of block `rank`, at the offset that `here` has in this block's.
__device__ __forceinline__ float4 load_from_rank(const float4* here, unsigned rank)
{
    float4 there;
    asm volatile(
        "{\n"
        "  .reg .b32 address;\n"
        "  mapa.shared::cluster.u32 address, %4, %5;\n"
        "  ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [address];\n"
        "}"
        : "=f"(there.x), "=f"(there.y), "=f"(there.z), "=f"(there.w)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(here))), "r"(rank)
        : "memory");
    return there;
}
