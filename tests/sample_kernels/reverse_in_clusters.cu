#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __launch_bounds__(BLOCK) reverse(const float* x, float* between, float* y, int N) {
    const unsigned size = cg::this_cluster().num_blocks();
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK)
        y[i] = size == CLUSTER ? 2.0f * x[(i + 7) % N] : -1.0f;
}
