// template <int UNROLL>
namespace detail { constexpr int BLOCK = 3; }
template <int BLOCK, typename SCALAR, bool EDGE, int Z>
__global__ void __launch_bounds__(BLOCK) softmax(float* x) { x[threadIdx.x] = SCALAR(EDGE + Z + UNROLL + BLOCK); }
