// mbarrier: a barrier in shared memory that counts arrivals and bytes (sm_90 and later).
//
// A barrier is initialized with the number of arrivals per phase. A phase completes when all of them have arrived and
// asynchronous copies have written as many bytes as were announced; the next phase then begins automatically. Phases
// are distinguished by their parity: `mbarrier_wait(barrier, p)` returns once the phase of parity p has completed. On a
// new barrier, phase 0 is in progress, and a wait for parity 1 returns immediately.
//
// A ring of stages needs two barriers per stage:
//
//     producer:  wait empty -> announce bytes on full, issue copies that complete on full
//     consumer:  wait full  -> use the stage                -> arrive at empty
//
// From the PTX ISA, "mbarrier".
#pragma once

using Barrier = unsigned long long;  // 8 bytes, aligned to 8

__device__ __forceinline__ unsigned shared_address(const void* pointer)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(Barrier* barrier, unsigned arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to TMA and to the other blocks of the cluster; must be followed by a block or
// cluster barrier.
__device__ __forceinline__ void mbarrier_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces `bytes` of asynchronous copies that will complete in this phase.
__device__ __forceinline__ void mbarrier_expect(Barrier* barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Barrier* barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the barrier at the same offset in block `rank` of the cluster. Here it orders only asynchronous copies and
// wgmma, which need no fence; `.release.cluster` would add a device-wide fence to each arrival and cost a third of the
// speed of a matrix product.
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

// Position in a ring of stages, and the parity of the current round.
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
