"""Numba: device arrays are passed as they are."""

import numpy as np
from numba import cuda

import autotile

m, n, k = 300, 200, 100
generator = np.random.default_rng(0)
a, b = generator.standard_normal((m, k), dtype=np.float32), generator.standard_normal((k, n), dtype=np.float32)

a_on_device, b_on_device = cuda.to_device(a), cuda.to_device(b)
c_on_device = cuda.device_array((m, n), np.float32)
autotile.matmul(a_on_device, b_on_device, c_on_device)
cuda.synchronize()
print("largest difference from NumPy's product:", float(np.abs(c_on_device.copy_to_host() - a @ b).max()))
