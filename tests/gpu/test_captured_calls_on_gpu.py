"""Calls that are captured: what they were given is written, and they compute what they would compute otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotile
from autotile.kernel.inputs import read_captured_call

pytestmark = pytest.mark.gpu

N = 5000


def call(kernel: Any, x: Any, y: Any) -> None:
    kernel(x, y, factor=3.0)


def call_in_a_graph(kernel: Any, x: Any, y: Any) -> None:
    """Call it once, which captures the arguments, then in a graph of CUDA, which is launched after new inputs."""
    import cupy

    kernel(x, y, factor=3.0)
    y.fill(0)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kernel(x, y, stream=stream, factor=3.0)
        graph = stream.end_capture()
        assert not y.any()  # nothing ran yet
        graph.launch(stream)
        stream.synchronize()


@pytest.mark.parametrize("run", [call, call_in_a_graph])
def test_the_inputs_are_written_and_the_output_is_computed(
    scale_toml: Path, tmp_path: Path, run: Callable[[Any, Any, Any], None], cupy: Any
) -> None:
    x = cupy.random.default_rng(0).standard_normal(N, dtype=cupy.float32)
    y = cupy.zeros_like(x)
    folder = tmp_path / "calls"
    run(autotile.capture(autotile.get_best_kernel(scale_toml, n=N), folder), x, y)
    np.testing.assert_array_equal(y.get(), 3 * x.get())
    (written,) = folder.iterdir()
    np.testing.assert_array_equal(np.load(written / "x.npy"), x.get())
    captured = read_captured_call(folder)
    assert (captured.sizes, captured.scalars) == ({"n": N}, {"factor": 3.0})
