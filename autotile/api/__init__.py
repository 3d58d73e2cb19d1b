"""Functions of the public API, one for each command, and the plain values that they return."""
