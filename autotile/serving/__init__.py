"""Serve tuned kernels at run time, without importing the search, Optuna or Kernel Tuner."""
