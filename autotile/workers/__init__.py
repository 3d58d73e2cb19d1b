"""Child processes: compile workers, GPU workers, compute-sanitizer, references in Python, strategies.

Nothing else starts or kills one.
"""
