// The same sum in double.
__global__ void nbody_reference(const float4* bodies, float4* out, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double x = 0.0, y = 0.0, z = 0.0;
    for (int j = 0; j < n; ++j) {
        const double dx = static_cast<double>(bodies[j].x) - bodies[i].x;
        const double dy = static_cast<double>(bodies[j].y) - bodies[i].y;
        const double dz = static_cast<double>(bodies[j].z) - bodies[i].z;
        const double inverse = rsqrt(dx * dx + dy * dy + dz * dz + static_cast<double>(EPS) * EPS);
        const double pull = bodies[j].w * inverse * inverse * inverse;
        x += pull * dx;
        y += pull * dy;
        z += pull * dz;
    }
    out[i] = make_float4(x, y, z, 0.0f);
}
