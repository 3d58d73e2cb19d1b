"""Child processes: compile workers, the GPU worker, compute-sanitizer. No other package starts or kills one."""
