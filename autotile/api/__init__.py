"""Public Python API: one function for each command of the command line, under the command's name.

The functions take plain values and print nothing. They return frozen dataclasses with a one-line repr and, in
notebooks, an HTML table. The package imports none of its modules: each loads only the libraries that it needs.
"""
