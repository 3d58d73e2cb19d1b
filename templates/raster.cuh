// Order in which blocks process the tiles of C.
//
// Blocks start in the order of their index, one wave at a time. In row-by-row order, a wave would need few rows of A
// and all of B. In bands of `group` rows of tiles, column by column within a band, a wave covers a nearly square patch
// of C and needs the fewest distinct bytes, so that more of them hit in the L2 cache:
//
//     group = 1    0 1 2 3 4 5         group = 2    0 2 4 6 8 A
//                  6 7 8 9 A B                      1 3 5 7 9 B
//
// The last band may be lower. Any group >= 1 is valid.
#pragma once

struct Tile {
    int row;
    int column;
};

__device__ __forceinline__ Tile raster(int linear, int tiles_m, int tiles_n, int group)
{
    const int band = linear / (group * tiles_n);
    const int first_row = band * group;
    const int within = linear - first_row * tiles_n;
    const int height = tiles_m - first_row;
    if (height >= group) return {first_row + within % group, within / group};  // group is usually a constant
    return {first_row + within % height, within / height};
}
