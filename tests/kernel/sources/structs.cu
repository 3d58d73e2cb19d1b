#include <cuda_fp16.h>
struct Inner { short small; float* y; };
struct P {
    bool flag; long long n; unsigned char tag; float3 origin; uchar4 color; float2 corners[2]; double4 box;
    const float* x; Inner inner; __half weights[3]; float2 factor; signed char last;
};
extern "C" __global__ void k(P p) {}
