"""Host overhead of a call: autotile's dispatch compared with CuPy, Triton and PyTorch on a tiny input, in one run.

    python benchmarks/dispatch.py [--rounds 50] [--output dispatch.json]

Times are host times in microseconds per call: the time of a burst of launches that fits into the GPU's queue, divided
by their number. The table gives the median over many bursts, with the contenders interleaved, and the minimum, because
on a shared virtual machine the same calls can cost half as much again for seconds at a time. A graph holds one launch,
so that launching it is comparable. The first call of a process, imports and memory are measured in fresh processes with
a warm database and cubin cache and with compiled modules, as in an installed package, for a small kernel tuned by this
run and for the largest that ships with autotile. A run takes about a minute.

A second table compares whole calls of small products that allocate their result, by PyTorch and by autotile: plain,
recorded by autograd, and as `linear`; and of CuPy arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from dispatch_peers import triton_calls
from provenance import provenance
from rich.console import Console
from rich.table import Table

import autotile
from autotile.core.model import LaunchGeometry
from autotile.cuda.function import ParameterBlock, driver_launch

Call = Callable[[], Any]
SIZE = 64
KERNEL = "sgemm_2d"
FIRST_CALLS = ((KERNEL, SIZE), ("sgemm", 4096))
"""Kernels and sizes whose first call is timed."""
BURST = 300
"""Launches queued at once: fewer than the 1,024 that a stream holds before the host blocks."""
TARGETS_US = {
    "get_best_kernel again": 1.0,
    "bound kernel, CuPy arrays": 3.5,
    "bound kernel, torch tensors": 4.5,
    "pre-bound launch": 2.0,
}
FIRST_CALL = """
import json, time
t = [time.perf_counter()]
import numpy; t.append(time.perf_counter())
import autotile; t.append(time.perf_counter())
import cupy; cupy.zeros(1); cupy.cuda.Device().synchronize(); t.append(time.perf_counter())
kernel = autotile.get_best_kernel({kernel!r}, M={size}, N={size}, K={size}); t.append(time.perf_counter())
a = cupy.zeros(({size}, {size}), cupy.float32); c = cupy.zeros_like(a); cupy.cuda.Device().synchronize()
t.append(time.perf_counter())
kernel(a, a, c); cupy.cuda.Device().synchronize(); t.append(time.perf_counter())
import sys
loaded = [name for name in ("optuna", "sqlalchemy", "kernel_tuner", "cuda.bindings.nvrtc") if name in sys.modules]
print(json.dumps(dict(tier=kernel.tier, loaded=loaded, steps_ms=[1e3 * (b - a) for a, b in zip(t, t[1:])])))
"""
MEMORY = """
import json, tracemalloc
import autotile, cupy
sizes = range(256, 256 + {count})
autotile.get_best_kernel({kernel!r}, M=255, N=255, K=255)
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
kernels = [autotile.get_best_kernel({kernel!r}, M=n, N=n, K=n) for n in sizes]
print(json.dumps((tracemalloc.get_traced_memory()[0] - before) / len(kernels)))
"""


def main() -> None:
    """Measure, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="bursts per contender")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes per first call")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "AUTOTILE_DB": f"{folder}/autotile.db",
            "AUTOTILE_CACHE": f"{folder}/cache",
            "PYTHONPYCACHEPREFIX": f"{folder}/modules",
        }
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sizes = {"M": SIZE, "N": SIZE, "K": SIZE}
        autotile.tune(KERNEL, options=autotile.TuneOptions(trials=4, finals=2), **sizes)
        ours, others = _contenders(sizes)
        times_us = _race({**ours, **others}, arguments.rounds)
        products = {name: _race(calls, arguments.rounds) for name, calls in _products().items()}
        first = {name: _first_call(name, size, arguments.processes) for name, size in FIRST_CALLS}
        kernel_bytes = _in_fresh_process(MEMORY.format(kernel=KERNEL, count=200))
    document = {
        **provenance(),
        "rounds": arguments.rounds,
        "calls_us": {name: statistics.median(times_us[name]) for name in ours},
        "others_us": {name: statistics.median(times_us[name]) for name in others},
        "least_us": {name: min(times) for name, times in times_us.items()},
        "products_us": {
            name: {call: statistics.median(times) for call, times in found.items()} for name, found in products.items()
        },
        "first_calls": first,
        "bytes_a_served_kernel": kernel_bytes,
    }
    _show(document)
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1))


def _contenders(sizes: dict[str, int]) -> tuple[dict[str, Call], dict[str, Call]]:
    """Return the calls of autotile, and the calls that they are compared with."""
    a, b, c = (cupy.zeros((SIZE, SIZE), cupy.float32) for _ in range(3))
    x, y, z = (torch.zeros((SIZE, SIZE), device="cuda") for _ in range(3))
    kernel = autotile.get_best_kernel(KERNEL, **sizes)
    bound = kernel.bind(a, b, c)
    raw = cupy.RawKernel(
        'extern "C" __global__ void tiny(const float* a, const float* b, float* c, int m, int n, int k, float s, '
        "float t) { if (m < 0) c[0] = a[0] * b[0] * s * t * n * k; }",
        "tiny",
    )
    scalars = (*map(np.int32, sizes.values()), np.float32(1), np.float32(0))
    block = ParameterBlock([*(np.uint64(array.data.ptr) for array in (a, b, c)), *scalars])
    plain = driver_launch(raw.kernel.ptr, LaunchGeometry((1, 1, 1), (32, 1, 1), 0))
    ours = {
        "get_best_kernel again": lambda: autotile.get_best_kernel(KERNEL, M=SIZE, N=SIZE, K=SIZE),
        "bound kernel, CuPy arrays": lambda: kernel(a, b, c),
        "bound kernel, torch tensors": lambda: kernel(x, y, z),
        "pre-bound launch": bound,
        "graph of one launch": _captured(bound),
    }
    others = {
        "the driver's own call": lambda: plain(0, block.address, 0),
        "CuPy RawKernel": lambda: raw((1,), (32,), (a, b, c, *scalars)),
        **triton_calls(x, y, z),
        "torch.mm": lambda: torch.mm(x, y, out=z),
    }
    return ours, others


PRODUCTS = (("bfloat16", (16, 256, 256)), ("float32", (256, 256, 512)), ("bfloat16", (33, 129, 255)))
"""dtypes and sizes M, K, N of small products; the last one is not aligned."""


def _products() -> dict[str, dict[str, Call]]:
    """Return calls of products, PyTorch's and CuPy's before autotile's."""
    found = {}
    for dtype, (m, k, n) in PRODUCTS:
        kind = getattr(torch, dtype)
        a, b = (torch.randn(shape, device="cuda", dtype=kind) for shape in ((m, k), (k, n)))
        weight, bias = b.t().contiguous(), torch.randn(n, device="cuda", dtype=kind)
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        served = autotile.get_best_kernel("matmul", M=m, N=n, K=k, dtype=dtype)
        calls: dict[str, Call] = {
            "torch.mm": partial(torch.mm, a, b),
            "autotile.torch.matmul": partial(autotile.torch.matmul, a, b),
            "torch.mm, with gradient": partial(torch.mm, x, y),
            "autotile.torch.matmul, with gradient": partial(autotile.torch.matmul, x, y),
            "F.linear": partial(torch.nn.functional.linear, a, weight),
            "autotile.torch.linear": partial(autotile.torch.linear, a, weight),
            "F.linear, with bias": partial(torch.nn.functional.linear, a, weight, bias),
            "autotile.torch.linear, with bias": partial(autotile.torch.linear, a, weight, bias),
        }
        if dtype == "float32":
            of_cupy = cupy.asarray(a), cupy.asarray(b)
            calls["cupy.matmul"] = partial(cupy.matmul, *of_cupy)
            calls["autotile.matmul, CuPy arrays"] = partial(autotile.matmul, *of_cupy)
        found[f"{dtype} {m} x {n} x {k}, {served.kernel}"] = calls
    return found


def _captured(launch: Call) -> Call:
    """Capture a launch in a CUDA graph and return a function that launches the graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


def _race(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return microseconds per call for each burst, with the contenders interleaved, in another order each round.

    What a burst leaves behind, such as freed memory, would otherwise always meet the same next one.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(50):
            call()
    order, draws = list(calls.items()), random.Random(0)
    for _ in range(rounds):
        draws.shuffle(order)
        for name, call in order:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            times[name].append(1e6 * (time.perf_counter() - start) / BURST)
    return times


def _first_call(kernel: str, size: int, processes: int) -> dict[str, Any]:
    """Return medians over fresh processes, in milliseconds; one additional process first fills the caches."""
    program = FIRST_CALL.format(kernel=kernel, size=size)
    runs = [_in_fresh_process(program) for _ in range(processes + 1)][1:]
    steps = [statistics.median(step) for step in zip(*(run["steps_ms"] for run in runs), strict=True)]
    return {
        "processes": processes,
        "tier": runs[0]["tier"],
        "loaded": runs[0]["loaded"],
        "import_autotile_over_numpy_ms": steps[1],
        "get_best_kernel_ms": steps[3],
        "first_launch_ms": steps[5],
        "first_call_over_cupy_ms": steps[3] + steps[5],
    }


def _in_fresh_process(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _show(document: dict[str, Any]) -> None:
    table = Table("autotile", "us", "min", "target", "others", "us", "min")
    for name, other in zip_longest(document["calls_us"], document["others_us"], fillvalue=""):
        target = f"{TARGETS_US[name]:.1f}" if name in TARGETS_US else ""
        table.add_row(name, *_figures(document, name), target, other, *_figures(document, other))
    console = Console(width=100)
    console.print(table)
    for product, calls in document["products_us"].items():
        rows = Table(product, "us", "autotile", "us", "ratio")
        pairs = list(calls.items())
        for (peer, theirs), (own, ours) in zip(pairs[::2], pairs[1::2], strict=True):
            rows.add_row(peer, f"{theirs:.2f}", own, f"{ours:.2f}", f"{ours / theirs:.2f}")
        console.print(rows)
    for name, first in document["first_calls"].items():
        console.print(
            f"{name}: import autotile {first['import_autotile_over_numpy_ms']:.1f} ms over NumPy (target 30); first "
            f"call {first['first_call_over_cupy_ms']:.1f} ms over CuPy (target 50): get_best_kernel "
            f"{first['get_best_kernel_ms']:.1f} ({first['tier']}), first launch {first['first_launch_ms']:.1f}; loaded "
            f"modules: {', '.join(first['loaded']) or 'no compiler, no SQL engine, no Optuna'}"
        )
    console.print(f"memory: {document['bytes_a_served_kernel'] / 1024:.1f} KiB per served kernel")


def _figures(document: dict[str, Any], name: str) -> tuple[str, str]:
    """Return the median and minimum time of a contender as text, or empty strings if it has none."""
    median_us = {**document["calls_us"], **document["others_us"]}.get(name)
    return (f"{median_us:.2f}", f"{document['least_us'][name]:.2f}") if median_us is not None else ("", "")


if __name__ == "__main__":
    main()
