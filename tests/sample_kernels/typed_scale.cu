#include <cfloat>
#include <vector>
template <int BLOCK, typename T>
__global__ void __launch_bounds__(BLOCK) scale(const float* x, float* y, int n)
{
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n && SIZE == n) y[i] = T(x[i] * FACTOR) + (x[i] > FLT_MAX ? INFINITY : 0);
}
int main() { std::vector<float> values; return 0; }
