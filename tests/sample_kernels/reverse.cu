#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __launch_bounds__(BLOCK) reverse(const float* x, float* between, float* y, int N) {
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK) between[i] = 2.0f * x[i];
    cg::this_grid().sync();
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK) y[i] = between[(i + 7) % N];
}
