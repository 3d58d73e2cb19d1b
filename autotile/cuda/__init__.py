"""Everything that touches the CUDA toolchain or a GPU: NVRTC, cubins, launches, verification, timing."""
