"""Sessions on the GPUs and cores of several machines, through a scheduler of Dask.

The session's end is `gpus`, the other end `worker`; `compilers` is both ends of the compile farm. They import Dask, and
are imported with ``--scheduler`` and by ``autotile worker`` only.
"""
