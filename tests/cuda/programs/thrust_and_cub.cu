#include <thrust/complex.h>
#include <cub/cub.cuh>
template <int B> __global__ void k(int* x, thrust::complex<float>* y) {
    using Reduce = cub::BlockReduce<int, B>;
    __shared__ typename Reduce::TempStorage storage;
    int sum = Reduce(storage).Sum(x[threadIdx.x]);
    if (threadIdx.x == 0) x[0] = sum;
    y[0] *= y[1];
}
