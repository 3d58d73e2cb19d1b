// __global__ void commented(int x);
#define KERNEL __global__ void macro(int y)
/* __global__ void too(int x); */
extern "C" __global__ void __launch_bounds__(BM * (BN / 2), 2)
plain(const float* __restrict__ x, float *y, int n) { const char* s = "__global__ void text(int)"; }
template <int B, typename T = std::pair<float, int>>
__global__ __launch_bounds__(B) void tiled(T const* const x, unsigned long long n, T (&a)[4], float4 b = {1, 2});
namespace n { __global__ void none(void) {} }
template <class T> struct S {};
__global__ void nested(S<float> s, const __grid_constant__ Map map, int, float x[16], int* table[]);
__global__
void
__launch_bounds__(32)
split(int
  a)
{ }
__global__ void unclosed(int a
