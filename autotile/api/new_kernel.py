"""A new kernel to begin with: a small source, its search-space file, and a test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotile.core.argument_types import checked
from autotile.core.text import Part, Result
from autotile.errors import InputError
from autotile.kernel.expressions import is_c_identifier, is_keyword
from autotile.settings import user_path

_SOURCE = """\
// y = a x + y, where each thread computes PER_THREAD elements, BLOCK apart.
// BLOCK and PER_THREAD are parameters of NAME.toml; each configuration is compiled with its values as macros.
__global__ void __launch_bounds__(BLOCK)
NAME(const float* __restrict__ x, float* __restrict__ y, float a, int N)
{
    const int first = blockIdx.x * BLOCK * PER_THREAD + threadIdx.x;
#pragma unroll
    for (int step = 0; step < PER_THREAD; ++step) {
        const int i = first + step * BLOCK;
        if (i < N) y[i] = a * x[i] + y[i];
    }
}
"""

_SPACE = """\
# The search space of NAME.cu; docs/file-format.md describes every section.
#   autotile space NAME.toml             how many configurations are valid
#   autotile tune NAME.toml N=16777216   find the fastest one

[kernel]
name = "NAME"
template = "NAME.cu"
entry = "NAME"            # the __global__ function
summary = "y = a x + y"

[problem]
sizes = { N = 16777216 }  # sizes that the best configuration depends on, with their defaults
ragged = { N = 100003 }   # every configuration must be right here, too: no multiple of a tile

[parameters]              # values to try; each is a macro in the source
BLOCK = [64, 128, 256, 512, 1024]
PER_THREAD = [1, 2, 4, 8]

[default]                 # is served until the kernel is tuned, and compared with the winner
BLOCK = 256
PER_THREAD = 4

[rules]                   # conditions that every configuration must meet
modest_tile = "BLOCK * PER_THREAD <= 4096"

[launch]                  # expressions over parameters and sizes
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK * PER_THREAD)"]

[arguments]               # in the order of the function's parameters
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "inout" }
a = { scalar = "float32", value = 1.0, check = 0.75 }
N = { scalar = "int32", value = "N" }

[reference]               # the expected result; it is computed in float64
outputs = { y = "a * x + y" }

[work]                    # for TFLOP/s and GB/s
flops = "2 * N"
bytes = "12 * N"
"""

_TEST = '''\
"""Tests of the kernel NAME: the first two need no GPU."""

from pathlib import Path

import pytest

import autotile

SPACE = Path(__file__).with_name("NAME.toml")
HAS_GPU = bool(autotile.devices().gpus)


def test_the_space_has_valid_configurations():
    assert autotile.space(SPACE, device="h200").valid > 1


def test_the_default_is_valid_and_compiles():
    explanation = autotile.explain(SPACE, device="h200")
    assert all(check.holds for check in explanation.checks), explanation.fault
    assert not explanation.fault


@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device on this machine")
def test_a_few_configurations_are_right(tmp_path):
    options = autotile.TuneOptions(trials=4, finals=2)
    result = autotile.tune(SPACE, N=1 << 20, database=tmp_path / "test.db", options=options, progress=False)
    assert result.winner is not None
    assert result.outcomes.get("wrong_result", 0) == 0
'''

_FILES = {"{}.cu": _SOURCE, "{}.toml": _SPACE, "test_{}.py": _TEST}
_MAX_NAME = 64


@dataclass(frozen=True, slots=True, repr=False)
class NewKernel(Result):
    """Files of a new kernel.

    Attributes
    ----------
    name
        Name of the kernel.
    source, space, test
        Paths of its source, its search-space file and its test.
    """

    name: str
    source: Path
    space: Path
    test: Path

    def _headline(self) -> str:
        return f"{self.name}: {self.source}, {self.space}, {self.test}"

    def _parts(self) -> Iterator[Part]:
        """Yield the files, and the command to go on with."""
        yield [
            ("source", str(self.source)),
            ("search space", str(self.space)),
            ("test", f"{self.test}, for pytest"),
            ("tune it", f"autotile tune {self.space} N=16777216"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the name and the paths."""
        return {"name": self.name, "source": str(self.source), "space": str(self.space), "test": str(self.test)}


@checked
def new(name: str, folder: str | Path = ".") -> NewKernel:
    """Write a small kernel, its search-space file and a test of it, which tune as they are.

    Parameters
    ----------
    name
        Name of the kernel and of its function, a C identifier.
    folder
        Folder of the files, which must exist.

    Raises
    ------
    InputError
        The name is not a C identifier or is reserved, a file exists, or a file cannot be written. Nothing is written
        then.
    """
    _check_name(name)
    target = user_path(str(folder), "a folder")
    if not target.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; make it first, or name another")
    contents = {target / pattern.format(name): re.sub(r"\bNAME\b", name, text) for pattern, text in _FILES.items()}
    for path in contents:
        if path.exists() or path.is_symlink():
            raise InputError(f"{path} exists already, and nothing is overwritten; choose another name or folder")
    written: list[Path] = []
    try:
        for path, text in contents.items():
            with path.open("x") as file:  # fails if another process has made it meanwhile
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise InputError(f"cannot write {error.filename}: {error.strerror}") from None
    source, space, test = contents
    return NewKernel(name, source, space, test)


def _check_name(name: str) -> None:
    if not is_c_identifier(name) or not name[0].isalpha() or len(name) > _MAX_NAME:
        raise InputError(
            f"{name[:_MAX_NAME]!r} cannot be the name of a kernel: use letters, digits and '_', a letter first, "
            f"{_MAX_NAME} characters at most"
        )
    if is_keyword(name) or name in ("x", "y", "a", "N", "BLOCK", "PER_THREAD", "main"):
        raise InputError(f"{name!r} is a keyword, or a name in the kernel that is written; choose another")
