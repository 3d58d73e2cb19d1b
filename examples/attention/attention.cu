// Attention of a batch of heads, fp16 in and out, fp32 sums: out = softmax(q k^T / sqrt(D)) v, without a mask.
//
// q, k, v, out are [HEADS, L, D]. A block takes QUERIES queries of a head and passes over tiles of KEYS keys; the softmax
// is kept online: a running maximum and sum rescale the output. LANES threads share a query, each with D / LANES columns.
//
// Macros
//   D          columns of a head
//   QUERIES    queries of a block
//   KEYS       keys of a tile
//   LANES      threads of a query, a power of two up to 32

#include <cuda_fp16.h>

constexpr int PART = D / LANES;  // columns of a thread, interleaved: lane, lane + LANES, ... in pairs
constexpr int PAIRS = PART / 2;

__global__ void __launch_bounds__(QUERIES * LANES)
attention(const __half* __restrict__ q, const __half* __restrict__ k, const __half* __restrict__ v,
          __half* __restrict__ out, int L, float scale)
{
    __shared__ __half2 keys[KEYS][D / 2], values[KEYS][D / 2];
    const long long head = static_cast<long long>(blockIdx.y) * L * D;
    const int lane = threadIdx.x % LANES;
    const int query = blockIdx.x * QUERIES + threadIdx.x / LANES;
    const auto* queries = reinterpret_cast<const __half2*>(q + head) + static_cast<long long>(min(query, L - 1)) * D / 2;

    float2 mine[PAIRS], sum[PAIRS];
#pragma unroll
    for (int c = 0; c < PAIRS; ++c) {
        mine[c] = __half22float2(queries[c * LANES + lane]);
        mine[c].x *= scale;
        mine[c].y *= scale;
        sum[c] = make_float2(0.0f, 0.0f);
    }
    float largest = -INFINITY, total = 0.0f;

    for (int start = 0; start < L; start += KEYS) {
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * D / 2; i += QUERIES * LANES) {
            const int row = start + i / (D / 2);
            const long long at = static_cast<long long>(min(row, L - 1)) * D / 2 + i % (D / 2);
            keys[i / (D / 2)][i % (D / 2)] = reinterpret_cast<const __half2*>(k + head)[at];
            values[i / (D / 2)][i % (D / 2)] = reinterpret_cast<const __half2*>(v + head)[at];
        }
        __syncthreads();
        for (int j = 0; j < KEYS && start + j < L; ++j) {
            float score = 0.0f;
#pragma unroll
            for (int c = 0; c < PAIRS; ++c) {
                const float2 key = __half22float2(keys[j][c * LANES + lane]);
                score += mine[c].x * key.x + mine[c].y * key.y;
            }
#pragma unroll
            for (int lanes = LANES / 2; lanes > 0; lanes /= 2) score += __shfl_xor_sync(0xffffffff, score, lanes, LANES);
            const float next = fmaxf(largest, score);
            const float rescale = __expf(largest - next), weight = __expf(score - next);
            total = total * rescale + weight;
            largest = next;
#pragma unroll
            for (int c = 0; c < PAIRS; ++c) {
                const float2 value = __half22float2(values[j][c * LANES + lane]);
                sum[c].x = sum[c].x * rescale + weight * value.x;
                sum[c].y = sum[c].y * rescale + weight * value.y;
            }
        }
    }
    if (query >= L) return;
    auto* result = reinterpret_cast<__half2*>(out + head) + static_cast<long long>(query) * D / 2;
#pragma unroll
    for (int c = 0; c < PAIRS; ++c)
        result[c * LANES + lane] = __floats2half2_rn(sum[c].x / total, sum[c].y / total);
}
