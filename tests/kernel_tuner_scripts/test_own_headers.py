"""The headers that a script's kernel includes are part of the keys of its results and cubins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotile.cuda.compiler import CompileJob, compile_cubin, compile_job
from autotile.kernel.library import Kernel
from autotile.kernel_tuner.parameters import ParameterCodec
from autotile.kernel_tuner.translation import ScriptKernel

PARAMS = {"block_size_x": [32, 64], "which": [1, 2]}
CODE = "%s\n__global__ void fill(float* x) { x[threadIdx.x] = VALUE; }\n"


def described(source: Any, options: Any) -> Kernel:
    arguments = [np.zeros(64, np.float32)]
    return ScriptKernel("fill", source, 64, arguments, ParameterCodec(PARAMS), options=options).build()


def job(kernel: Kernel) -> CompileJob:
    return compile_job(kernel, {"block_size_x": 64, "which": 2}, "float32", "sm_90")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (CODE % '#include "x_2.h"', lambda folder: [f"-I{folder}"]),
        (CODE % '#define H "x_2.h"\n#include H', lambda folder: ["-I", str(folder)]),
        (
            CODE % "#define STR(x) #x\n#define N(a, b) STR(a##b.h)\n#define M(a) N(x_, a)\n#include M(which)",
            lambda folder: ["-I", str(folder)],
        ),
        (CODE % '#include "x_2.h"', lambda folder: lambda params: [f"-I{folder}"] if params["which"] == 2 else []),
        (CODE % "", lambda folder: [f"-I{folder}", "--pre-include=x_2.h"]),
        (lambda params: CODE % f'#include "x_{params["which"]}.h"', lambda folder: [f"-I{folder}"]),
        (lambda params: CODE % f'#include "own/x_{params["which"]}.h"', lambda folder: []),
    ],
)
def test_a_changed_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, options: Callable[[Path], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own"
    folder.mkdir()
    for which in (1, 2):
        (folder / f"x_{which}.h").write_text("#define VALUE 1\n")
    first = described(source, options(folder))
    before = first.source_hash, job(first).key, compile_cubin(job(first)).cubin
    assert described(source, options(folder)).source_hash == before[0]
    (folder / "x_2.h").write_text("#define VALUE 2\n")
    second = described(source, options(folder))
    after = second.source_hash, job(second).key, compile_cubin(job(second)).cubin
    assert all(one != other for one, other in zip(before, after, strict=True))
