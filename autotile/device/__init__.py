"""Everything that touches the CUDA toolchain or a GPU: NVRTC, cubins, launches, verifying, timing.

NVRTC and the cubin cache need no GPU. The rest runs inside the GPU worker process, or in the program that calls a
served kernel; the tuning process itself never creates a CUDA context.
"""
