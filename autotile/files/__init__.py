"""What is read from files: kernels and their search spaces, settings, and the figures of known GPUs."""
