// Asynchronous copies from global to shared memory that bypass registers (sm_80 and later).
//
// A thread issues copies, commits them as a group with `cp_async_commit`, and continues. `cp_async_wait<n>` returns
// when all but the last n groups of this thread have completed; a barrier then makes them visible to the block.
//
// A copy moves 4, 8 or 16 bytes to a destination aligned to its size. Only the first `valid` bytes are read; the rest
// of the destination is filled with zeros. Edges need no branch, and with `valid` = 0 nothing is read at all.
#pragma once

template <int BYTES>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid = BYTES)
{
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "the hardware copies 4, 8 or 16 bytes");
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16)  // .cg: bypass L1, since no thread of this SM reads the bytes again
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES), "r"(valid)
                     : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Arrive at an mbarrier once all copies issued by this thread so far have completed.
__device__ __forceinline__ void cp_async_arrive(void* barrier)
{
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
}
