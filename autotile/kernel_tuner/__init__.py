"""Kernel Tuner's interface on autotile's engine: change the import of a script from ``kernel_tuner`` to this package.

See docs/from-kernel-tuner.md for what each argument does here.
"""
