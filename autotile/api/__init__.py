"""Public Python API: one function for each command, under the command's name.

======================== ================================================================
`autotile.api.inspection` ``space``, ``explain``, ``occupancy`` and ``devices``
`autotile.api.doctor`     ``doctor``
`autotile.api.targets`    the kernel, problem and device that the arguments of these denote
======================== ================================================================

A function takes plain values, prints nothing, and returns a frozen dataclass with a short repr and an HTML view for
notebooks. The package re-exports nothing: importing one module does not load the libraries that another one needs.
"""
