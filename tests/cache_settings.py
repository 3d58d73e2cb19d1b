"""What tests of compilations need: settings with a cubin cache and nothing else, and a slow kernel."""

from pathlib import Path

from autotile.settings import Settings

SLOW = """
template <int N, unsigned long long ID> struct Tree {
    static constexpr unsigned leaves = Tree<N - 1, 2 * ID>::leaves + Tree<N - 1, 2 * ID + 1>::leaves;
};
template <unsigned long long ID> struct Tree<0, ID> { static constexpr unsigned leaves = 1; };
extern "C" __global__ void fill(unsigned* x) { x[0] = Tree<DEPTH, 1>::leaves; }
"""
"""2 ** DEPTH types, each instantiated from another: with 16, most of a minute and more than a gigabyte."""


def cache_settings(folder: Path, limit_bytes: int = 10**8) -> Settings:
    return Settings("", folder, limit_bytes, (), ())
