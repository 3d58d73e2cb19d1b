// A block's share of a matrix product: a tile of C, of one product of a batch, over one part of K.
//
// Blocks are numbered by tile, then by part of K, then by product, so that concurrent blocks work on neighboring tiles
// (see raster.cuh) and read the same part of K.
#pragma once

#include "raster.cuh"

struct Share {
    int product;
    Tile tile;
    int split;          // index of the part of K
    int first_step;     // first step of BK
    int last_step;      // end of the range, exclusive
    size_t tile_number; // over all products; indexes what all parts of K share
};

__device__ __forceinline__ Share share_of(unsigned block, int tiles_m, int tiles_n, int steps, int group, int splits)
{
    const unsigned tiles = static_cast<unsigned>(tiles_m) * tiles_n;
    const unsigned tile = block % tiles;
    const int split = block / tiles % splits;
    const int product = block / tiles / splits;
    return {product,
            raster(tile, tiles_m, tiles_n, group),
            split,
            static_cast<int>(static_cast<long long>(steps) * split / splits),
            static_cast<int>(static_cast<long long>(steps) * (split + 1) / splits),
            static_cast<size_t>(product) * tiles + tile};
}
