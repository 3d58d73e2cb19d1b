// A test writes IN, OUT and BODY.
#include <cuda_fp8.h>
extern "C" __global__ void __launch_bounds__(BLOCK) map(const IN* x, OUT* y, int N) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < N) { BODY }
}
