// What one block of a matrix product is to do: which tile of C, of which product of a batch, over which part of K.
//
// Blocks are numbered by tile, then by part of K, then by product, so that blocks that run together work on
// neighbouring tiles (see raster.cuh) and read the same part of K.
#pragma once

#include "raster.cuh"

struct Share {
    int product;
    Tile tile;
    int split;          // which part of K
    int first_step;     // from this tile of K on,
    int last_step;      // up to this one
    size_t tile_number; // over all products, for what all parts of K have in common
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
