template <int B, class T> __global__ void __launch_bounds__(B) scale(T* x, T by) { x[threadIdx.x] *= by; }
namespace inner { __global__ void fill(float* x) { x[threadIdx.x] = 1; } }
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
__global__ void twice(int* x) { x[threadIdx.x] *= 2; }
static __global__ void own(float* x) { x[0] = BLOCK; }
