"""One module a step, numbered in order; a released step is never changed."""
