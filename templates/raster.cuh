// The order in which blocks take the tiles of C.
//
// Blocks start in the order of their index, a wave of them at a time. Row by row, a wave would need few rows of A and
// all of B; walked in bands of `group` rows of tiles, down each column of a band first, it covers a squarish patch of C
// and needs the fewest different bytes, so that more of them come from the L2 cache:
//
//     group = 1    0 1 2 3 4 5         group = 2    0 2 4 6 8 A
//                  6 7 8 9 A B                      1 3 5 7 9 B
//
// The last band may be lower. Any group from 1 on is right.
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
    if (height >= group) return {first_row + within % group, within / group};  // group is a constant as a rule
    return {first_row + within % height, within / height};
}
