"""A program that gathers rows by indices of its own: a few rows are asked for again and again."""

import cupy as cp

import autotile

N, TABLE, WIDTH = 65536, 1_000_000, 128

gather = autotile.get_best_kernel("examples/gather/gather.toml", N=N, TABLE=TABLE, WIDTH=WIDTH)
table = cp.random.standard_normal((TABLE, WIDTH), dtype=cp.float32)
popularity = cp.random.zipf(1.5, N) % TABLE
out = gather(table, popularity.astype(cp.int32))
print(f"{out.shape} gathered by {gather.tier}")
