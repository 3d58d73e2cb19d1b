"""Record whole spaces that the default sampler was not developed on, as `search.py` reads them.

    python benchmarks/own_spaces.py FOLDER [--data SUITES] [--names NAME ...] [--seconds 110]

Measures every configuration of examples, and of kernels of other people's suites (``--data``, see suites.py), on this
machine's GPU. FOLDER/choosing has the spaces by which changes of the sampler are judged, FOLDER/final those that
nothing is chosen by. Values of a parameter are left out where a space would have more than 3,000 rows;
what is left is measured as a whole. A file that exists is not measured again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from checkouts import ROOT, environment_of
from hub_spaces import write_space
from suites import Call, bat_calls, script_calls

EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "choosing": {
        "stencil_8192": "stencil_2d/stencil_2d",
        "stencil_1000": "stencil_2d/stencil_2d H=1000 W=3000",
        "rows_4096": "row_sums/row_sums_whole",
        "heat_4096": "heat/heat",
        "polygon_20M": "polygon/polygon",
        "histogram_64M": "histogram/histogram",
    },
    "final": {
        "split_16": "row_sums/row_sums_split",
        "sum_64M": "reduction/reduction",
        "bodies_32768": "nbody/nbody",
        "convolution_4096": "convolution/convolution",
        "stencil_3000": "stencil_2d/stencil_2d H=3000 W=1000",
        "naive_1000": "matmul_naive M=1000 N=3000 K=500",
    },
}
"""Search-space file and sizes of each example, by half and name."""
SUITES = {
    "choosing": {"ktreduction": "kt/reduction", "batnbody": "bat/nbody"},
    "final": {"triad": "bat/triad", "hotspot": "bat/hotspot"},
}
"""Kernel of the suites, by half and name."""
FEWER_VALUES: Mapping[str, Mapping[str, list[int]]] = {
    "bat/triad": {"BLOCK_SIZE": [*range(32, 1025, 64)]},
    "bat/hotspot": {
        "BLOCK_SIZE_X": [16, 32, 64, 128, 256],
        "BLOCK_SIZE_Y": [1, 2, 4, 8],
        "TILE_SIZE_X": [1, 2, 4, 8],
        "TILE_SIZE_Y": [1, 2, 4, 8],
        "LOOP_UNROLL_FACTOR_T": [1, 2],
        "BLOCKS_PER_SM": [0, 2],
    },
}
BODIES = 32768
"""Bodies of BAT's n-body kernel, a quarter of the suite's, as a launch of those takes 12 ms and more."""


def main() -> None:
    """Record the spaces that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=lambda text: Path(text).resolve(), help="folder of the suites")
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--seconds", type=float, default=110.0, help="limit of each space")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        record_suite(arguments.data, arguments.one, arguments.folder)
        return
    for half in ("choosing", "final"):
        commands = {name: example(text) for name, text in EXAMPLES[half].items()}
        if arguments.data is not None:
            own = [sys.executable, str(Path(__file__)), "--data", str(arguments.data), "--one"]
            commands |= {name: [*own, kernel] for name, kernel in SUITES[half].items()}
        (arguments.folder / half).mkdir(parents=True, exist_ok=True)
        for name, command in commands.items():
            path = (arguments.folder / half / f"{name}.npz").resolve()
            if not path.is_file() and name in (arguments.names or commands):
                print(f"{half:<9} {name:<17} {run(command, path, arguments.seconds)}", flush=True)


def example(text: str) -> list[str]:
    """Return the command that measures an example; the path of the recording follows."""
    file, *sizes = text.split()
    kernel = str(ROOT / "examples" / f"{file}.toml") if "/" in file else file
    return [sys.executable, "-m", "autotile", "export", kernel, *sizes, "--format", "recording", "--measure", "-o"]


def run(command: list[str], path: Path, limit_s: float) -> str:
    """Run a command on an empty database; return what it took, or its error."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            done = subprocess.run(
                [*command, str(path)],
                env=environment_of(ROOT, Path(folder)),
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
    if done.returncode or not path.is_file():
        return f"failed: {done.stderr.strip()[-300:]}"
    return f"{time.perf_counter() - start:.1f} s"


def record_suite(data: Path, name: str, path: Path) -> None:
    """Measure every configuration of a kernel of the suites."""
    from autotile.kernel_tuner import tune_kernel

    call = {**bat_calls(data), **script_calls(data)}[name]()
    call = replace(call, parameters={**call.parameters, **FEWER_VALUES.get(name, {})})
    if name == "bat/nbody":
        call = fewer_bodies(call)
    rows, _ = tune_kernel(
        call.kernel_name,
        call.source,
        call.problem_size,
        call.arguments,
        call.parameters,
        **{**call.searched, "strategy": "brute_force", "quiet": True},
    )
    write_space(path, dict(row_of(row, call.parameters) for row in rows))


def row_of(row: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[tuple[tuple[str, Any], ...], float]:
    """Return a configuration and its time in ms; NaN for a failure."""
    found = row.get("time")
    return tuple((name, row[name]) for name in parameters), float(found) if isinstance(found, int | float) else np.nan


def fewer_bodies(call: Call) -> Call:
    """Return the n-body call with the first bodies alone."""
    count = int(call.problem_size)
    arguments = [
        array[: len(array) // count * BODIES] if isinstance(array, np.ndarray) else array for array in call.arguments
    ]
    return replace(call, problem_size=BODIES, arguments=[*arguments[:-1], np.int32(BODIES)])


if __name__ == "__main__":
    main()
