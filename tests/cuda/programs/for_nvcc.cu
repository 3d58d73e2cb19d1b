#include <vector>
#include <limits>
extern "C" __global__ void plain(float* x) { x[threadIdx.x] = std::numeric_limits<float>::infinity(); }
template <int B, class T> __global__ void scale(T* x, int n) { x[threadIdx.x] *= B + TILE; }
namespace inner { __global__ void fill(float* x, double d) { x[0] = d; } }
float host(const std::vector<float>& v) { return v[0]; }
