// PaddedRows of templates/padded_rows.cuh, on the CPU: rows of any length at any address, and no load outside.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::min;
struct uint4 { unsigned x, y, z, w; };

const unsigned short *first, *last;  // of the matrix
bool outside = false;

uint4 __ldcs(const uint4* from)
{
    const auto* at = reinterpret_cast<const unsigned short*>(from);
    outside |= reinterpret_cast<size_t>(from) % 16 != 0 || at < first || at + 8 > last;
    uint4 word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits)
{
    return bits ? low >> bits | high << (32 - bits) : low;
}

#include "padded_rows.cuh"

template <unsigned UNIT>
bool is_right(unsigned rows, unsigned length, unsigned offset)
{
    std::vector<uint4> room(rows * length / 8 + 4, uint4{~0u, ~0u, ~0u, ~0u});
    auto* matrix = reinterpret_cast<unsigned short*>(room.data()) + offset;
    for (unsigned i = 0; i < rows * length; ++i) matrix[i] = 1 + i;
    first = matrix, last = matrix + rows * length;
    const unsigned pitch = (length + UNIT - 1) / UNIT * UNIT;
    std::vector<uint4> copy(rows * pitch / 8, uint4{~0u, ~0u, ~0u, ~0u});
    const PaddedRows<UNIT> padded(matrix, copy.data(), rows, length);
    if (padded.count() != copy.size()) return false;
    for (unsigned chunk = 0; chunk < padded.count(); ++chunk) padded.copy(chunk);
    const auto* found = reinterpret_cast<const unsigned short*>(copy.data());
    for (unsigned i = 0; i < rows * pitch; ++i) {
        const unsigned row = i / pitch, column = i % pitch;
        if (found[i] != (column < length ? matrix[row * length + column] : 0)) return false;
    }
    return !outside;
}

int main()
{
    for (unsigned rows : {1u, 2u, 3u, 17u})
        for (unsigned length = 1; length < 140; ++length)
            for (unsigned offset = 0; offset < 9; ++offset)
                if (!is_right<8>(rows, length, offset) || !is_right<64>(rows, length, offset)) {
                    std::printf("%u x %u at %u is wrong", rows, length, offset);
                    return 1;
                }
}
