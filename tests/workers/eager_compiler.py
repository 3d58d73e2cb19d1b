"""The compile worker, for which every compilation takes long enough to precompile its headers."""

from autotile.cuda import compiler
from autotile.workers.child import serve
from autotile.workers.compile_pool import compile_one

if __name__ == "__main__":
    compiler._SLOW_S = 0.0
    serve(compile_one)
