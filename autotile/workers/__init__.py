"""Child processes: compile workers, the GPU worker, compute-sanitizer and search strategies.

No other package starts or kills a process.
"""
