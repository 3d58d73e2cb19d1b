"""JAX: eager calls on device arrays, exchanged through DLPack in both directions."""

import jax
import jax.numpy as jnp

import autotile

n = 1024
key_a, key_b = jax.random.split(jax.random.key(0))
a, b = jax.random.normal(key_a, (n, n)), jax.random.normal(key_b, (n, n))
jax.block_until_ready((a, b))  # JAX has its own streams

c = jnp.from_dlpack(autotile.matmul(a, b))
with jax.default_matmul_precision("highest"):
    print("largest difference from JAX's product:", float(jnp.abs(c - a @ b).max()))
