// Rows of a table gathered by an index, fp32: out[i] = table[index[i]].
//
// How fast this is depends on the indices: random ones miss the caches, those of real use repeat.
//
// Macros
//   BLOCK    threads of a block
//   ROWS     rows of a block
//   VEC      floats of a load: 1, 2 or 4

template <int N> struct Vector;
template <> struct Vector<1> { using type = float; };
template <> struct Vector<2> { using type = float2; };
template <> struct Vector<4> { using type = float4; };

__global__ void __launch_bounds__(BLOCK)
gather(const float* __restrict__ table, const int* __restrict__ index, float* __restrict__ out, int n, int width)
{
    using Load = typename Vector<VEC>::type;
    const int loads = width / VEC;
    for (int r = 0; r < ROWS; ++r) {
        const long long i = static_cast<long long>(blockIdx.x) * ROWS + r;
        if (i >= n) return;
        const auto* from = reinterpret_cast<const Load*>(table + static_cast<long long>(index[i]) * width);
        auto* to = reinterpret_cast<Load*>(out + i * width);
        for (int c = threadIdx.x; c < loads; c += BLOCK) to[c] = from[c];
    }
}
