// Split-K: several blocks share a tile of C, each sums a part of K, and the last one to arrive reduces the parts.
//
// Few tiles leave most SMs idle; splitting K yields more blocks. Each block stores its sums in a workspace and takes a
// ticket from the tile's counter. The block with the last ticket knows that all parts have been stored:
//
//     block 0:  sum of k = 0 .. K/3      -> part 0, ticket 1
//     block 1:  sum of k = K/3 .. 2K/3   -> part 1, ticket 2: the last, so part 0 + part 1 + part 2 -> C
//     block 2:  sum of k = 2K/3 .. K     -> part 2, ticket 0
//
// Ordered: every block has its own part, and the parts are added in the order of k by whichever block is last:
// bit-identical results in every run. Atomic: all blocks add into one part as they arrive: less memory, but the order
// varies. The last block resets the counter, and the part that atomics add into, to zero for the next launch.
//
// A thread's sums are COUNT floats in registers. A part stores them in register order: vector i (4 floats) of all
// THREADS threads, then vector i + 1: full lines per warp, and no edges to check.
#pragma once

// Workspace floats per tile.
template <int THREADS, int COUNT>
__host__ __device__ constexpr size_t split_k_floats(int splits, bool atomic)
{
    return (atomic ? 1 : splits) * size_t{THREADS} * COUNT;
}

// Synchronizes THREADS threads at barrier `barrier` and returns to all of them whether any passed true for `mine`.
template <int THREADS>
__device__ __forceinline__ bool barrier_or(bool mine, int barrier)
{
    int any;
    asm volatile(
        "{\n"
        "  .reg .pred mine, any;\n"
        "  setp.ne.b32 mine, %1, 0;\n"
        "  barrier.red.or.pred any, %2, %3, mine;\n"
        "  selp.b32 %0, 1, 0, any;\n"
        "}"
        : "=r"(any)
        : "r"(int{mine}), "r"(barrier), "n"(THREADS)
        : "memory");
    return any != 0;
}

__device__ __forceinline__ void atomic_add(float4* to, float4 value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x), "f"(value.y), "f"(value.z),
                 "f"(value.w)
                 : "memory");
#else
    atomicAdd(&to->x, value.x);
    atomicAdd(&to->y, value.y);
    atomicAdd(&to->z, value.z);
    atomicAdd(&to->w, value.w);
#endif
}

// Submits this block's sums. Returns true in the one block of the tile that draws the last ticket; its `sum` then holds
// the total. All THREADS threads (numbered by `thread`) must call it; they synchronize at barrier `barrier`.
//
//   parts     the tile's share of the workspace, split_k_floats(splits, BY_ATOMICS) floats, aligned to 16 bytes; zero
//             before the launch if BY_ATOMICS
//   tickets   the tile's counter, zero before the launch
template <int THREADS, bool BY_ATOMICS, int COUNT>
__device__ __forceinline__ bool split_k_finish(float (&sum)[COUNT], float* parts, unsigned* tickets, int split,
                                               int splits, int thread, int barrier = 0)
{
    static_assert(COUNT % 4 == 0, "a thread's sums travel in pieces of 4");
    constexpr int PIECES = COUNT / 4;
    float4* part = reinterpret_cast<float4*>(parts) + thread;
    float4* mine = part + (BY_ATOMICS ? 0 : static_cast<size_t>(split) * PIECES * THREADS);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const float4 piece = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
        if (BY_ATOMICS)
            atomic_add(&mine[i * THREADS], piece);
        else
            __stcg(&mine[i * THREADS], piece);
    }

    // Every thread's stores precede its barrier, and the barrier precedes the ticket.
    __threadfence();
    barrier_or<THREADS>(false, barrier);
    const bool last = barrier_or<THREADS>(thread == 0 && atomicAdd(tickets, 1) + 1 == splits, barrier);
    if (!last) return false;
    __threadfence();
    if (thread == 0) *tickets = 0;

#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = 0.0f;
    const int parts_to_add = BY_ATOMICS ? 1 : splits;
    constexpr int AT_ONCE = PIECES < 16 ? 16 / PIECES : 1;  // parts in flight
#pragma unroll AT_ONCE
    for (int s = 0; s < parts_to_add; ++s, part += PIECES * THREADS) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const float4 piece = __ldcg(&part[i * THREADS]);  // from L2, where the stores of the other blocks are
            if (BY_ATOMICS) __stcg(&part[i * THREADS], {});
            sum[4 * i] += piece.x;
            sum[4 * i + 1] += piece.y;
            sum[4 * i + 2] += piece.z;
            sum[4 * i + 3] += piece.w;
        }
    }
    return true;
}
