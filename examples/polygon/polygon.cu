// Whether points lie in a polygon: a ray from a point crosses the polygon's edges an odd number of times.
//
// The edges are in constant memory, which all threads of a warp read in step.
//
// Macros
//   BLOCK     threads of a block
//   POINTS    points of a thread
//   VERTICES  vertices of the polygon
//   METHOD    how a crossing is found: 0 by comparisons and a division, 1 by a product instead of the division
//   UNROLL    edges that are unrolled

__constant__ float2 d_vertices[VERTICES];

__device__ bool crosses(float2 p, float2 a, float2 b)
{
    if ((a.y > p.y) == (b.y > p.y)) return false;
#if METHOD == 0
    return p.x < (b.x - a.x) * (p.y - a.y) / (b.y - a.y) + a.x;
#else
    const float side = (p.x - a.x) * (b.y - a.y) - (b.x - a.x) * (p.y - a.y);
    return b.y > a.y ? side < 0.0f : side > 0.0f;
#endif
}

__global__ void __launch_bounds__(BLOCK) polygon(const float2* __restrict__ points, bool* __restrict__ inside, int n)
{
    const int first = blockIdx.x * BLOCK * POINTS + threadIdx.x;
    float2 mine[POINTS];
    bool odd[POINTS] = {};
#pragma unroll
    for (int k = 0; k < POINTS; ++k) mine[k] = points[min(first + k * BLOCK, n - 1)];
    float2 a = d_vertices[VERTICES - 1];
#pragma unroll UNROLL
    for (int v = 0; v < VERTICES; ++v) {
        const float2 b = d_vertices[v];
#pragma unroll
        for (int k = 0; k < POINTS; ++k) odd[k] ^= crosses(mine[k], a, b);
        a = b;
    }
#pragma unroll
    for (int k = 0; k < POINTS; ++k)
        if (first + k * BLOCK < n) inside[first + k * BLOCK] = odd[k];
}
