// Accelerations of N bodies, all pairs, fp32: body = (x, y, z, mass) as float4.
//
//     a[i] = sum over j of m[j] (p[j] - p[i]) / (|p[j] - p[i]|^2 + eps^2)^(3/2)
//
// Blocks pass over tiles of bodies in shared memory; each thread holds BODIES bodies of its own in registers.
//
// Macros
//   BLOCK     threads of a block
//   BODIES    bodies of a thread
//   UNROLL    bodies of a tile that are unrolled
//   EPS       softening length

__device__ void attract(float3& a, float4 from, float4 body)
{
    const float dx = body.x - from.x, dy = body.y - from.y, dz = body.z - from.z;
    const float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + EPS * EPS);
    const float pull = body.w * inverse * inverse * inverse;
    a.x += pull * dx;
    a.y += pull * dy;
    a.z += pull * dz;
}

__global__ void __launch_bounds__(BLOCK) nbody(const float4* __restrict__ bodies, float4* __restrict__ out, int n)
{
    __shared__ float4 tile[BLOCK];
    const int first = blockIdx.x * BLOCK * BODIES + threadIdx.x;
    float4 mine[BODIES];
    float3 a[BODIES];
#pragma unroll
    for (int b = 0; b < BODIES; ++b) {
        mine[b] = bodies[min(first + b * BLOCK, n - 1)];
        a[b] = make_float3(0.0f, 0.0f, 0.0f);
    }
    for (int start = 0; start < n; start += BLOCK) {
        const int j = start + threadIdx.x;
        tile[threadIdx.x] = j < n ? bodies[j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // without mass
        __syncthreads();
#pragma unroll UNROLL
        for (int k = 0; k < BLOCK; ++k)
#pragma unroll
            for (int b = 0; b < BODIES; ++b) attract(a[b], mine[b], tile[k]);
        __syncthreads();
    }
#pragma unroll
    for (int b = 0; b < BODIES; ++b)
        if (first + b * BLOCK < n) out[first + b * BLOCK] = make_float4(a[b].x, a[b].y, a[b].z, 0.0f);
}
