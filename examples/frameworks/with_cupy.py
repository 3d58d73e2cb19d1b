"""CuPy: serve a kernel by name, launch it, and capture it in a CUDA graph."""

import cupy

import autotile

n = 1024
a, b = (cupy.random.standard_normal((n, n), dtype=cupy.float32) for _ in range(2))

kernel = autotile.get_best_kernel("sgemm", M=n, N=n, K=n)
c = kernel(a, b)  # a new array
kernel(a, b, c)  # or an existing array
print(kernel.explain())
print("largest difference from CuPy's product:", float(abs(c - a @ b).max()))

launch = kernel.bind(a, b, c)  # checked once; a call costs no more than the driver's launch
with cupy.cuda.Stream(non_blocking=True) as stream:
    stream.begin_capture()
    launch()
    graph = stream.end_capture()
    c.fill(0)
    graph.launch(stream)
    stream.synchronize()
print("from a graph:", float(abs(c - a @ b).max()))
