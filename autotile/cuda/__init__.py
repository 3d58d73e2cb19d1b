"""CUDA: compilation with NVRTC, cubins, launches, verification, timing and telemetry."""
