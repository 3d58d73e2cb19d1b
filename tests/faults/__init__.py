"""Kernels with faults, and workers that stand in for a GPU."""
