// Copies a matrix of 16-bit elements to rows that begin at multiples of 16 bytes, with zeros behind each row.
//
//     row 0: a a a a a|row 1: b b b b b|row 2 ...      to      a a a a a 0 0 0 | b b b b b 0 0 0 | ...
//
// It is limited by memory: each thread stores 16 bytes at a time, and loads as many. A row of the matrix may begin at
// any element, so what a thread stores is spread over two aligned 16-byte words:
//
//     words      | . . . 0 1 2 3 4 | 5 6 7 . . . . . |         shifted by 3 elements: | 0 1 2 3 4 5 6 7 |
//
// The thread loads both and shifts them into place. The second is the next thread's first, and comes from the L1 cache.
#pragma once

constexpr unsigned CHUNK = 8;  // elements: 16 bytes

// A matrix as it is stored, row after row, and its copy, whose rows are multiples of UNIT elements. The address of the
// matrix is a multiple of 2, that of the copy a multiple of 16. The copy has fewer than 2^32 chunks.
template <unsigned UNIT>
class PaddedRows {
    static_assert(UNIT % CHUNK == 0, "rows of the copy are whole chunks");

public:
    __device__ __forceinline__ PaddedRows(const unsigned short* from, uint4* to, unsigned rows, unsigned length)
        : from(from), end(from + static_cast<size_t>(rows) * length), to(to), length(length),
          row_chunks(((length - 1) / UNIT + 1) * (UNIT / CHUNK)), chunks(rows * row_chunks)
    {
    }

    // Chunks of the copy.
    __device__ __forceinline__ unsigned count() const { return chunks; }

    __device__ __forceinline__ void copy(unsigned chunk) const { to[chunk] = load(chunk); }

private:
    // A chunk of the copy.
    __device__ __forceinline__ uint4 load(unsigned chunk) const
    {
        const unsigned row = chunk / row_chunks;
        const unsigned first = (chunk - row * row_chunks) * CHUNK;
        if (first >= length) return {};
        const unsigned short* at = from + static_cast<size_t>(row) * length + first;
        const unsigned behind = static_cast<unsigned>(reinterpret_cast<size_t>(at)) / sizeof(*at) % CHUNK;
        const unsigned short* word = at - behind;
        const unsigned kept = min(length - first, CHUNK);
        if (word < from || word + (behind ? 2 : 1) * CHUNK > end) return load_single(at, kept);
        const uint4 low = __ldcs(reinterpret_cast<const uint4*>(word));
        const uint4 high = behind ? __ldcs(reinterpret_cast<const uint4*>(word) + 1) : uint4{};
        // By two words of 32 bits, by one, and by half of one.
        const bool two = behind & 4, one = behind & 2;
        const unsigned a = two ? low.z : low.x, b = two ? low.w : low.y, c = two ? high.x : low.z;
        const unsigned d = two ? high.y : low.w, e = two ? high.z : high.x, f = two ? high.w : high.y;
        const unsigned half = behind % 2 * 16;
        uint4 both;
        both.x = __funnelshift_r(one ? b : a, one ? c : b, half);
        both.y = __funnelshift_r(one ? c : b, one ? d : c, half);
        both.z = __funnelshift_r(one ? d : c, one ? e : d, half);
        both.w = __funnelshift_r(one ? e : d, one ? f : e, half);
        if (kept < CHUNK) {
            both.x &= mask(kept, 0);
            both.y &= mask(kept, 2);
            both.z &= mask(kept, 4);
            both.w &= mask(kept, 6);
        }
        return both;
    }

    // Mask of the elements `index` and `index + 1` if `kept` of them remain.
    static __device__ __forceinline__ unsigned mask(unsigned kept, unsigned index)
    {
        return kept > index + 1 ? 0xffffffffu : kept > index ? 0xffffu : 0u;
    }

    // At the two ends of the matrix a word may reach outside it.
    static __device__ __forceinline__ uint4 load_single(const unsigned short* at, unsigned kept)
    {
        unsigned pair[CHUNK / 2] = {};
#pragma unroll
        for (unsigned i = 0; i < CHUNK; ++i)
            if (i < kept) pair[i / 2] |= static_cast<unsigned>(at[i]) << i % 2 * 16;
        return {pair[0], pair[1], pair[2], pair[3]};
    }

    const unsigned short* from;
    const unsigned short* end;
    uint4* to;
    unsigned length;      // of a row, in elements
    unsigned row_chunks;  // of a row of the copy
    unsigned chunks;
};
