"""Public Python API: one function for each command of the command line, under the command's name.

=========================== ======================================================================
`autotile.api.tuning`       ``tune``, ``tune_family`` and ``record``
`autotile.api.results`      ``best``, ``list``, ``families``, ``recordings``, ``trials``, ``misses``, ``db_...``
`autotile.api.verification` ``verify``
`autotile.api.inspection`   ``space``, ``explain`` and ``occupancy``
`autotile.api.devices`      ``devices`` and ``measure_device``
`autotile.api.doctor`       ``doctor``
`autotile.api.databases`    ``diff``, ``merge`` and ``clean``
`autotile.api.exchange`     ``export``, ``import_`` and ``bundle``
`autotile.api.targets`      kernel, problem and device from the arguments of these functions
`autotile.api.explanation`  values of ``explain``
`autotile.api.listings`     values of the functions of `autotile.api.results`
`autotile.api.progress`     the progress line of ``tune`` and others
=========================== ======================================================================

The functions take plain values and print nothing. They return frozen dataclasses with a one-line repr and, in
notebooks, an HTML table. The package imports none of its modules: each loads only the libraries that it needs.
"""
