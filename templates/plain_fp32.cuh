// Fallback for numbers that bf16 limbs cannot represent: infinities, NaN, and values that round to them.
//
// Sums with a contribution from such a number are not finite. They are recomputed in plain fp32, one by one: slow, but
// rare, and with the result of fp32 arithmetic.
#pragma once

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Row `row` of A times column `column` of B, as stored in memory; A is M x K and B is K x N unless TRANSPOSED. The
// arguments are passed by value: an object would have to reside in memory to have an address.
template <bool TRANSPOSED_A, bool TRANSPOSED_B>
__device__ __noinline__ float plain_sum(const float* A, const float* B, int row, int column, int M, int N, int K)
{
    float sum = 0.0f;
    for (int k = 0; k < K; ++k)
        sum += A[TRANSPOSED_A ? static_cast<size_t>(k) * M + row : static_cast<size_t>(row) * K + k] *
               B[TRANSPOSED_B ? static_cast<size_t>(column) * K + k : static_cast<size_t>(k) * N + column];
    return sum;
}

// The operands of C = op(A) * op(B).
template <bool TRANSPOSED_A, bool TRANSPOSED_B>
struct Factors {
    const float* A;
    const float* B;
    int M, N, K;

    // Recomputes those of COUNT adjacent sums of a row that lie in C and are not finite.
    template <int COUNT>
    __device__ __forceinline__ void mend(float* sums, int row, int column) const
    {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!is_finite(sums[i]) && row < M && column + i < N)
                sums[i] = plain_sum<TRANSPOSED_A, TRANSPOSED_B>(A, B, row, column + i, M, N, K);
    }
};
