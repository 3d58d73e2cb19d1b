"""Enumerate one GEMM search space with autotile and with Kernel Tuner, side by side.

    python benchmarks/enumeration.py --rounds 5 --output enumeration.json

The space is that of a register-tiled GEMM in the style of CLBlast's Xgemm kernel: 14 parameters, 8,388,608
combinations, 706,504 of them valid. Every measurement runs in a fresh process, with the tools interleaved within each
round. The measured time is the time that a tuning run waits for: from the text of the rules to a space that answers its
first look-up, without imports. The memory is the peak resident set of the process, including interpreter and imports.
Each process then sorts and hashes its configurations; the hashes must agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]

PARAMETERS: dict[str, list[int]] = {
    "MWG": [16, 32, 64, 128],  # block tile of C
    "NWG": [16, 32, 64, 128],
    "KWG": [16, 32, 64, 128],
    "MDIMC": [8, 16, 32, 64],  # threads across that tile
    "NDIMC": [8, 16, 32, 64],
    "MDIMA": [8, 16, 32, 64],  # threads across the tiles of A and B during loads
    "NDIMB": [8, 16, 32, 64],
    "KWI": [2, 8],  # unrolling over K
    "VWM": [1, 2, 4, 8],  # vector widths
    "VWN": [1, 2, 4, 8],
    "STRM": [0, 1],  # strided access within a thread
    "STRN": [0, 1],
    "SA": [0, 1],  # tiles staged in shared memory
    "SB": [0, 1],
}

RULES = {
    "whole_unrolls": "KWG % KWI == 0",
    "whole_tiles_m": "MWG % (MDIMC * VWM) == 0",
    "whole_tiles_n": "NWG % (NDIMC * VWN) == 0",
    "whole_loads_a": "MWG % (MDIMA * VWM) == 0",
    "whole_loads_b": "NWG % (NDIMB * VWN) == 0",
    "whole_rows_a": "KWG % ((MDIMC * NDIMC) // MDIMA) == 0",
    "whole_rows_b": "KWG % ((MDIMC * NDIMC) // NDIMB) == 0",
    "fits_shared_memory": "4 * KWG * (SA * MWG + SB * NWG) <= 49152",
    "fits_a_block": "MDIMC * NDIMC <= 1024",
}

TOOLS = ("autotile", "kernel_tuner")


def main() -> int:
    """Run the benchmark, or one measurement of it in a child process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each tool (default 5)")
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--measure", choices=TOOLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return 0
    rounds = [{tool: measure_in_process(tool) for tool in TOOLS} for _ in range(max(1, arguments.rounds))]
    summary = {tool: summarize([measured[tool] for measured in rounds]) for tool in TOOLS}
    print_table(summary)
    found = {(run["valid"], run["digest"]) for measured in rounds for run in measured.values()}
    agree = len(found) == 1
    print("the tools found the same configurations" if agree else f"THE TOOLS DISAGREE: {sorted(found)}")
    if arguments.output:
        arguments.output.write_text(json.dumps(report(summary, rounds, agree), indent=2) + "\n")
    return 0 if agree else 1


def measure_in_process(tool: str) -> dict[str, Any]:
    """Measure a tool in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--measure", tool]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(tool: str) -> dict[str, Any]:
    """Enumerate once and return seconds, peak memory, and a digest of the configurations."""
    build, configurations = {"autotile": prepare_autotile, "kernel_tuner": prepare_kernel_tuner}[tool]()
    before_mb = peak_mb()
    started = time.perf_counter()
    space = build()
    seconds = time.perf_counter() - started
    peak = peak_mb()
    valid, digest = fingerprint(configurations(space))
    return {"seconds": seconds, "peak_mb": peak, "imports_mb": before_mb, "valid": valid, "digest": digest}


def prepare_autotile() -> tuple[Callable[[], Any], Callable[[Any], Iterable[Any]]]:
    """Import autotile and return functions that build the space and read its configurations."""
    import numpy as np

    from autotile.core.device import device_profile
    from autotile.kernel.parser import parse_spec
    from autotile.space.search_space import enumerate_space

    text, device = search_space_file(), device_profile("h200")

    def build() -> Any:
        spec = parse_spec(text, "gemm.toml")
        space = enumerate_space(spec, spec.at(), device)
        assert space.row_of(space.config(0)) == 0
        return space

    return build, lambda space: np.stack([space.column(name) for name in PARAMETERS], axis=1)


def prepare_kernel_tuner() -> tuple[Callable[[], Any], Callable[[Any], Iterable[Any]]]:
    """Import Kernel Tuner and return functions that build the space and read its configurations."""
    from kernel_tuner.searchspace import Searchspace

    def build() -> Any:
        space = Searchspace(dict(PARAMETERS), list(RULES.values()), max_threads=1024)
        assert space.is_param_config_valid(space.list[0])
        return space

    return build, lambda space: space.list


def search_space_file() -> str:
    """Return the space as the text of a search-space file; its launch and data are irrelevant here."""
    parameters = "".join(f"{name} = {values}\n" for name, values in PARAMETERS.items())
    default = "".join(f"{name} = {values[0]}\n" for name, values in PARAMETERS.items())
    rules = "".join(f'{name} = "{rule}"\n' for name, rule in RULES.items())
    return f"""\
[kernel]
name = "gemm"
template = "gemm.cu"
entry = "gemm"
[problem]
sizes = {{ M = 4096, N = 4096, K = 4096 }}
[parameters]
{parameters}[default]
{default}[rules]
{rules}[launch]
block = ["MDIMC", "NDIMC"]
grid = ["ceil_div(M, MWG)", "ceil_div(N, NWG)"]
[arguments]
A = {{ buffer = "float32", shape = ["M", "K"], access = "in" }}
B = {{ buffer = "float32", shape = ["K", "N"], access = "in" }}
C = {{ buffer = "float32", shape = ["M", "N"], access = "out" }}
[reference]
outputs = {{ C = "A @ B" }}
"""


def fingerprint(configurations: Iterable[Any]) -> tuple[int, str]:
    """Count configurations and hash them in sorted order."""
    import numpy as np

    values = np.asarray(configurations, dtype=np.int16)
    ordered = values[np.lexsort(values.T[::-1])]
    return len(ordered), hashlib.sha256(ordered.tobytes()).hexdigest()


def peak_mb() -> float:
    """Return the peak resident set of this process so far, in MB (10^6 bytes), as reported by Linux."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def summarize(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Reduce a tool's runs to their median and spread."""
    seconds = [run["seconds"] for run in runs]
    return {
        "median_s": statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "peak_mb": max(run["peak_mb"] for run in runs),
        "imports_mb": max(run["imports_mb"] for run in runs),
        "valid": runs[0]["valid"],
    }


def print_table(summary: dict[str, dict[str, float]]) -> None:
    """Print one line per tool."""
    combinations = prod(len(values) for values in PARAMETERS.values())
    print(f"{combinations:,} combinations\n")
    print(f"{'tool':<22}{'valid':>10}{'median s':>10}{'min':>9}{'max':>9}{'peak MB':>9}{'imports MB':>15}")
    for tool, row in summary.items():
        print(
            f"{tool + ' ' + tool_version(tool):<22}{row['valid']:>10,}{row['median_s']:>10.3f}{row['least_s']:>9.3f}"
            f"{row['most_s']:>9.3f}{row['peak_mb']:>9.0f}{row['imports_mb']:>15.0f}"
        )
    ratio = summary["kernel_tuner"]["median_s"] / summary["autotile"]["median_s"]
    print(f"\nautotile takes 1/{ratio:.1f} of Kernel Tuner's time")


def report(summary: dict[str, Any], rounds: list[dict[str, Any]], agree: bool) -> dict[str, Any]:
    """Return the JSON document of a run."""
    return {
        **provenance(),
        "benchmark": "enumeration",
        "parameters": PARAMETERS,
        "rules": RULES,
        "agree": agree,
        "summary": summary,
        "rounds": rounds,
        "versions": {"python": platform.python_version(), "numpy": version("numpy")}
        | {tool: tool_version(tool) for tool in TOOLS}
        | {"python-constraint2": version("python-constraint2")},
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
    }


def tool_version(tool: str) -> str:
    """Return the version of a tool; that of autotile is read from the measured source."""
    if tool == "autotile":
        source = (ROOT / "autotile" / "version.py").read_text()
        return next(line.split('"')[1] for line in source.splitlines() if line.startswith("__version__"))
    return version(tool)


def processor() -> str:
    """Return the model name of the processor, as reported by Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
