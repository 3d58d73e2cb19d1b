// C = alpha * sum + beta * C for four adjacent elements of a row, with one access if the rows of C allow it.
//
// If beta is 0, C is not read: it may hold NaN.
#pragma once

#include "element.cuh"

// A matrix of `Out`, the storage type of `Element` or fp32.
template <typename Element, typename Out>
class OutputQuads {
public:
    __device__ __forceinline__ OutputQuads(Out* C, int rows, int columns, float alpha, float beta)
        : C(C), rows(rows), columns(columns), alpha(alpha), beta(beta),
          whole(columns % 4 == 0 && reinterpret_cast<size_t>(C) % sizeof(Quad) == 0)
    {
    }

    // Updates those of the four elements that lie inside the matrix.
    __device__ __forceinline__ void update(int row, int column, const float* sum) const
    {
        if (row >= rows) return;
        Out* to = C + static_cast<size_t>(row) * columns + column;
        if (whole && column + 4 <= columns) {
            Quad quad = {};
            if (beta != 0.0f) quad = *reinterpret_cast<Quad*>(to);
#pragma unroll
            for (int i = 0; i < 4; ++i) update(quad.lane[i], sum[i]);
            *reinterpret_cast<Quad*>(to) = quad;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (column + i < columns) update(to[i], sum[i]);
    }

private:
    struct alignas(4 * sizeof(Out)) Quad {
        Out lane[4];
    };

    __device__ __forceinline__ void update(Out& element, float sum) const
    {
        narrow<Element>(element, alpha * sum + (beta != 0.0f ? beta * widen<Element>(element) : 0.0f));
    }

    Out* C;
    int rows, columns;
    float alpha, beta;
    bool whole;
};
