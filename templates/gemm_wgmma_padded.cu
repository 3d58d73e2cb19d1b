// Matrix multiplication on Hopper's tensor cores for matrices whose rows are not multiples of 16 bytes, sm_90a.
//
//     C = alpha * A * B + beta * C      sizes, layouts, types and batches are those of gemm_wgmma.cu
//
// TMA reads rows that begin at multiples of 16 bytes only, and other copies are too slow to feed wgmma. So both factors
// are copied first, to workspaces whose rows are multiples of ROW_UNIT elements, with zeros behind each row:
//
//     A    | row 0: a a a a a|row 1: b b b b b|row 2 ...        A_padded    | a a a a a 0 0 0 | b b b b b 0 0 0 | ...
//
// Then the kernel of gemm_wgmma.cu multiplies them. It is given the true M, N and K; only its tensor maps are of the
// workspaces. The zeros that are behind the rows along K add nothing; along M and N, they lead to elements that lie
// outside C and are not written. C is written by the threads, as its rows have any length.
//
// The copy is worth its time, as it moves each element once, while a product of large matrices uses each of them
// thousands of times.
//
// Macros
//   ROW_UNIT       padded rows are multiples of as many elements, a multiple of 8
//   BM, BN         the others are those of gemm_wgmma.cu: rows and columns of C per block
//   BK             depth of a stage
//   STAGES         stages of the ring
//   CONSUMERS      consumer warpgroups
//   PINGPONG       1: each consumer has its own tiles
//   CLUSTER_M, CLUSTER_N   blocks of a cluster, along M and along N
//   GROUP          height of the bands of the tile order
//   ALONG_N        1: the bands are vertical
//   SPLIT_K        number of parts of K
//   CLUSTER_SPLIT  1: the blocks that share a tile form a cluster
//
// Launch: pad_rows with blocks of COPIERS threads, any number of them; then gemm_wgmma as gemm_wgmma.cu says.

#ifndef BM
#define ROW_UNIT 64
#define BM 128
#define BN 256
#define BK 64
#define STAGES 4
#define CONSUMERS 2
#define PINGPONG 0
#define CLUSTER_M 1
#define CLUSTER_N 1
#define GROUP 16
#define ALONG_N 0
#define SPLIT_K 1
#define CLUSTER_SPLIT 0
#define TRANS_A 0
#define TRANS_B 0
#define OUT_FP32 0
#define NONDETERMINISTIC 0
#define DTYPE __nv_bfloat16
#endif

// The parameters that gemm_wgmma.cu has besides: the threads write C, through one buffer.
constexpr int STORE_STAGES = 1;
constexpr int TMA_STORE = 0;

#include "gemm_wgmma.cu"
#include "padded_rows.cuh"

constexpr int COPIERS = 256;  // threads of a block that copies
constexpr int COPYING = 8;    // such blocks per SM: all of its threads, whose loads hide the latency of memory

// Copies A and B. At any time, all threads copy adjacent chunks.
extern "C" __global__ void __launch_bounds__(COPIERS, COPYING)
pad_rows(const unsigned short* __restrict__ A, const unsigned short* __restrict__ B, uint4* A_padded, uint4* B_padded,
         int M, int N, int K, int batches)
{
    const PaddedRows<ROW_UNIT> first(A, A_padded, batches * (TRANS_A ? K : M), TRANS_A ? M : K);
    const PaddedRows<ROW_UNIT> second(B, B_padded, batches * (TRANS_B ? N : K), TRANS_B ? K : N);
    const unsigned step = gridDim.x * COPIERS;
    const unsigned chunks = first.count() + second.count();
    for (unsigned chunk = blockIdx.x * COPIERS + threadIdx.x; chunk < chunks; chunk += step) {
        if (chunk < first.count())
            first.copy(chunk);
        else
            second.copy(chunk - first.count());
    }
}
