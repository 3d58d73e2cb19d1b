// TMA: the tensor memory accelerator, which copies boxes of an array between global and shared memory (sm_90 and
// later).
//
// The host describes the array once in a tensor map: address, extents, strides, the box of one copy, and its layout in
// shared memory. One thread issues a copy by passing the coordinates of the box. Elements outside the array are read as
// zeros and not written, so edges need no special handling.
//
// Swizzle. The rows of a box are SPAN bytes long here: 128, 64 or 32. Read as columns, they would all begin in the same
// banks of shared memory, so TMA permutes 16-byte chunks within the rows, in the pattern that the tensor cores expect:
//
//     offset ^= (row bits of the offset) shifted onto the chunk bits; one pattern is 8 rows of 128 bytes
//
// Such boxes must start at multiples of 1024 bytes, or of 8 rows within a tile that does. From the PTX ISA,
// "cp.async.bulk.tensor" and "Swizzling modes".
#pragma once

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

__device__ __forceinline__ void tma_prefetch(const TensorMap& map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Global to shared memory: the box at (x, y, z), x along the rows. The copy completes on the mbarrier at `barrier`.
// With BLOCKS > 1 the box is multicast to the same offset in all blocks of the cluster in `mask`, and completes on each
// block's own barrier.
template <int BLOCKS>
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, unsigned barrier, int x, int y, int z,
                                         unsigned short mask)
{
    if constexpr (BLOCKS > 1)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
            "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
            "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
            : "memory");
}

// Shared to global memory. Stores are committed as groups of the issuing thread.
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned from, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when shared memory has been read by all but the last PENDING groups of this thread.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA (the async proxy).
__device__ __forceinline__ void tma_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Shared-memory offset of byte `offset` of a tile of SPAN-byte rows.
template <int SPAN>
__device__ __forceinline__ unsigned tma_swizzled(unsigned offset)
{
    static_assert(SPAN == 32 || SPAN == 64 || SPAN == 128, "the engine's swizzles span 32, 64 or 128 bytes");
    return offset ^ (offset >> 3 & (SPAN - 16));
}
