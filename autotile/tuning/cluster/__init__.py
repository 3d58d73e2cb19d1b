"""Sessions on the GPUs and cores of several machines, through a scheduler of Dask.

The session's end is `client` (requests), `gpus` (the backend), `lane` (sessions of one command) and `remote_sweep`;
the other end is `worker`; `compilers` is both ends of the compile farm. These import Dask, and are imported with
``--scheduler`` and by ``autotile worker`` only.
"""
