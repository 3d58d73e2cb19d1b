"""Kernel Tuner's strategies by the names of its modules, such as ``strategies.minimize``."""
