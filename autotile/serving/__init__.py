"""Serve tuned kernels at run time; imports nothing of the search, of Optuna or of Kernel Tuner."""
