"""The search-space file: its language, its parser, and the library of kernels."""
