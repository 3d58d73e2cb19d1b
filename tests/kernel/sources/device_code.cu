#include <vector>
#define DEV static __device__
#define KERNEL(name) __global__ void name
using namespace std;
namespace a { namespace {
DEV float macro(float x) { return x; }
constexpr int div_up(int a, int b) { return (a + b - 1) / b; }
} }
struct P { int n; __device__ int get() const { return n; } P(int m) : n(m) {} };
template <class T, int N = (3 > 2)> struct Op { __device__ T operator()(T a) const { return a; } };
extern "C" {
__global__ void plain(float* x) { if (x) { x[0] = 1; } }
}
KERNEL(by_macro)(float* x) { x[0] = 1; }
template <int B> __global__ void __launch_bounds__(B) k(float* x, P p) { x[0] = p.n; }
template __global__ void k<4>(float*, P);
__host__ __device__ inline float both(float x) { return x; }
static const char* text = "int main() {";
const int table[] = {1, 2, (3)};
static_assert(sizeof(int) == (4), "size");
auto lambda = [] __device__(int x) { return x; };
