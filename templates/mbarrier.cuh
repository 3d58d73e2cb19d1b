// mbarrier: a barrier in shared memory that counts arrivals and bytes (sm_90 and later).
//
// A barrier is set up for so many arrivals a phase. A phase ends when all of them have come and as many bytes as were
// announced have been written by asynchronous copies; then the next phase begins by itself. Phases are told apart by
// their parity: `mbarrier_wait(barrier, p)` returns once the phase of parity p has ended. On a fresh barrier, phase 0
// is running, and a wait for parity 1 returns at once.
//
// A ring of stages needs two barriers a stage:
//
//     producer:  wait empty -> announce bytes on full, start copies that report to full
//     consumer:  wait full  -> use the stage                -> arrive at empty
//
// From the PTX ISA, "mbarrier".
#pragma once

using Barrier = unsigned long long;  // its storage: 8 bytes, aligned to 8

__device__ __forceinline__ unsigned shared_address(const void* pointer)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(Barrier* barrier, unsigned arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster; a barrier of the block
// or the cluster must follow.
__device__ __forceinline__ void mbarrier_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces `bytes` of asynchronous copies to come in this phase.
__device__ __forceinline__ void mbarrier_expect(Barrier* barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Barrier* barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at the same place. Only asynchronous copies and wgmma are
// ordered by it here, and they need no fence; `.release.cluster` would bring a fence of the whole device with each
// arrival, and cost a third of a matrix product's speed.
__device__ __forceinline__ void mbarrier_arrive_at(Barrier* barrier, unsigned rank)
{
    asm volatile(
        "{\n"
        "  .reg .b32 there;\n"
        "  mapa.shared::cluster.u32 there, %0, %1;\n"
        "  mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(Barrier* barrier, unsigned parity)
{
    unsigned ended;
    asm volatile(
        "{\n"
        "  .reg .pred ended;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "  selp.b32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return ended != 0;
}

__device__ __forceinline__ void mbarrier_wait(Barrier* barrier, unsigned parity)
{
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// A place in a ring of stages, and the parity of the round that the ring is in.
template <int SLOTS>
struct Ring {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance()
    {
        if (++stage == SLOTS) {
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ void skip(int count)
    {
        const int beyond = stage + count;
        stage = beyond % SLOTS;
        parity ^= beyond / SLOTS & 1;
    }
};
