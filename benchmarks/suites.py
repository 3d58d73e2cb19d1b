"""Kernels of other people's suites, tuned by autotile and by Kernel Tuner for the same time.

    python benchmarks/suites.py --data FOLDER [--seconds 60] [--kernels NAME ...] [--output suites.json]
    python benchmarks/suites.py --merge PART.json PART.json ... [--output suites.json]

FOLDER holds sources of two public suites, as they are: ``bat/`` (kernels with their spaces in CAFF files) and
``kernel_tuner/`` (Kernel Tuner's CUDA examples). Every tool runs in a process of its own with an empty cache and
database; both are called with the same arguments, those of Kernel Tuner's `tune_kernel`. Kernel Tuner searches with
``--strategy``. A third process compiles both winners, each with the options of its tool, and times them in turn with a
cold L2. Where a tool's best configuration cannot be launched, which a timer of failed launches takes for a short time,
its next best that can stands in for it.

The table gives the best time of each tool, their ratio, the number of configurations that each measured, the wall time
of each call, after how many seconds Kernel Tuner had measured its best, and after how many autotile had measured a
configuration within 1 % of that. The two tools time differently, so Kernel Tuner's best is put on autotile's scale by
the ratio of the winners' times. With ``--merge`` parts of a table, measured on devices of one type, become one.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table

from autotile.settings import available_cores

TOOLS = ("kernel_tuner", "autotile")
ROUNDS = 50
RUNNERS_UP = 1000
"""Configurations of each tool that the timer may try, the fastest first."""
EQUAL = 1.01
"""Ratio of times up to which a configuration is as fast as another."""
LIMIT_FACTOR, LIMIT_EXTRA_S = 2, 90
"""A tool that has not returned after this is ended; references and inputs are not part of its time."""


@dataclass(frozen=True)
class Call:
    """Arguments of `tune_kernel`."""

    kernel_name: str
    source: Any
    problem_size: Any
    arguments: list[Any]
    parameters: dict[str, list[Any]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def searched(self) -> dict[str, Any]:
        """Options without those of output, of earlier results and of what is measured besides the time."""
        left_out = ("verbose", "cache", "observers", "metrics")
        return {name: value for name, value in self.options.items() if name not in left_out}


class RecordedCallError(Exception):
    """Ends a script at its first call of `tune_kernel`."""


# The launch of each kernel of BAT; spaces and conditions come from its CAFF files. The sizes are those of the files.
def bat_calls(data: Path) -> dict[str, Callable[[], Call]]:
    """Return the kernels of BAT."""
    folder = data / "bat"
    random = np.random.default_rng(0)

    def floats(count: int, scale: float = 1.0) -> Any:
        return (scale * random.random(count, dtype=np.float32)).astype(np.float32)

    def call(folder_name: str, source: str, kernel: str, size: Any, arguments: list[Any], **options: Any) -> Call:
        space = json.loads(next((folder / folder_name).glob("*-CAFF.json")).read_text())["ConfigurationSpace"]
        parameters = {p["Name"]: literal(p["Values"]) for p in space["TuningParameters"]}
        options.setdefault("restrictions", [condition["Expression"] for condition in space["Conditions"]])
        path = folder / folder_name / source
        return Call(kernel, str(path), size, arguments, parameters, options)

    def gemm() -> Call:
        n = np.int32(4096)
        a, b, c = floats(n * n), floats(n * n), np.zeros(n * n, np.float32)
        divisors = {
            "grid_div_x": ["MWG"],
            "grid_div_y": ["NWG"],
            "block_size_names": ["MDIMC", "NDIMC", "block_size_z"],
        }
        return call("GEMM", "gemm.cu", "gemm_fast", (4096, 4096), [n, n, n, a, b, c], **divisors)

    def nbody() -> Call:
        n = 131072
        four = [floats(4 * n, 20.0), np.zeros(4 * n, np.float32), floats(4 * n, 20.0), np.zeros(4 * n, np.float32)]
        one = [floats(n, 20.0) for _ in range(7)]
        scalars = [np.float32(0.001), np.float32(0.5), np.float32(0.01), np.int32(n)]
        arguments = [scalars[0], four[0], *one[:4], four[1], four[2], *one[4:], four[3], *scalars[1:]]
        names = {"grid_div_x": ["OUTER_UNROLL_FACTOR", "BLOCK_SIZE"], "block_size_names": ["BLOCK_SIZE"]}
        options = {"compiler_options": ["--use_fast_math"]}
        return call("nbody", "nbody.cu", "nbody_kernel", n, arguments, **names, **options)

    def convolution() -> Call:
        weights = floats(225)
        arguments = [np.zeros(4096 * 4096, np.float32), floats(4110 * 4110), weights]
        divisors = {"grid_div_x": ["block_size_x", "tile_size_x"], "grid_div_y": ["block_size_y", "tile_size_y"]}
        constant = {"cmem_args": {"d_filter": weights}}
        return call(
            "convolution", "convolution.cu", "convolution_kernel", (4096, 4096), arguments, **divisors, **constant
        )

    def triad() -> Call:
        n = 1 << 24  # the file's 4,096 elements take less time than a launch
        a, b, c = np.arange(n, dtype=np.float32), np.arange(n, dtype=np.float32), np.zeros(n, np.float32)
        arguments = [a, b, c, np.float32(1.75), np.int32(n)]
        names = {"grid_div_x": ["BLOCK_SIZE", "WORK_PER_THREAD"], "block_size_names": ["BLOCK_SIZE"]}
        return call("TRIAD", "triad_kernel.cu", "triad", n, arguments, **names)

    def pnpoly() -> Call:
        n = 20_000_000
        angles = np.sort(random.random(600) * 2 * np.pi)[::-1]
        vertices = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32).ravel()
        points = random.standard_normal(2 * n, dtype=np.float32)
        constant = {"cmem_args": {"d_vertices": vertices}, "grid_div_x": ["block_size_x", "tile_size"]}
        return call("pnpoly", "pnpoly.cu", "cn_pnpoly", n, [np.zeros(n, np.int32), points, np.int32(n)], **constant)

    def hotspot() -> Call:
        # The kernel takes the block's width for that of the grid, so that most blocks load and store nothing. Times of
        # different numbers of steps a launch are not comparable: there are two.
        wide = (4096 + 2 * 10) ** 2
        arrays = [floats(wide), floats(wide, 324.0), np.zeros(4096 * 4096, np.float32)]
        constants = [np.float32(value) for value in (0.1, 0.1, 3.0517578579, 21.845333099365234)]
        names = {
            "block_size_names": ["BLOCK_SIZE_X", "BLOCK_SIZE_Y", "BLOCK_SIZE_Z"],
            "grid_div_x": ["BLOCK_SIZE_X", "TILE_SIZE_X"],
            "grid_div_y": ["BLOCK_SIZE_Y", "TILE_SIZE_Y"],
        }
        found = call("hotspot", "hotspot_kernel.cu", "calculate_temp", (4096, 4096), [*arrays, *constants], **names)
        return replace(found, parameters={**found.parameters, "TEMPORAL_TILING_FACTOR": [2]})

    kernels = (gemm, nbody, convolution, triad, pnpoly, hotspot)
    return {f"bat/{f.__name__}": f for f in kernels if folder.is_dir()}


CORRECTIONS = {"spmv": ("int(nrows*ncols*0.001)", "int(int(nrows)*ncols*0.001)")}
"""What is replaced in a script: the product of a 32-bit number overflows with NumPy 2, and the matrix is empty."""


def script_calls(data: Path) -> dict[str, Callable[[], Call]]:
    """Return the first call of each of Kernel Tuner's scripts that tunes a CUDA kernel."""

    def recorded(script: Path) -> Call:
        import kernel_tuner

        def record(
            kernel_name: str,
            source: Any,
            problem_size: Any,
            arguments: Any,
            parameters: Any,
            *rest: Any,
            **options: Any,
        ) -> NoReturn:
            found.append(Call(kernel_name, source, problem_size, list(arguments), dict(parameters), options))
            raise RecordedCallError

        found: list[Call] = []
        original, kernel_tuner.tune_kernel = kernel_tuner.tune_kernel, record
        np.random.seed(0)
        os.chdir(script.parent)
        text = script.read_text().replace(*CORRECTIONS.get(script.stem, ("", "")))
        try:
            exec(compile(text, str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
        except RecordedCallError:
            return found[0]
        finally:
            kernel_tuner.tune_kernel = original
        raise SystemExit(f"{script.name} calls no tune_kernel")

    names = ("convolution", "matmul", "reduction", "spmv", "stencil", "vector_add", "vector_add_codegen")
    found = {name: data / "kernel_tuner" / f"{name}.py" for name in names}
    return {f"kt/{name}": (lambda path=path: recorded(path)) for name, path in found.items() if path.is_file()}


def literal(text: str) -> list[Any]:
    """Return the list that a CAFF file writes with ``range`` and comprehensions."""
    tree = ast.parse(text, mode="eval")
    known = (ast.Expression, ast.List, ast.ListComp, ast.comprehension, ast.Call, ast.Name, ast.BinOp, ast.Constant)
    context = (ast.Load, ast.Store, ast.operator)
    for node in ast.walk(tree):
        if not isinstance(node, (*known, *context)):
            raise SystemExit(f"a CAFF file has the values {text!r}, which are no list of numbers")
    return list(eval(compile(tree, "CAFF", "eval"), {"__builtins__": {}}, {"list": list, "range": range}))


def run_tool(tool: str, call: Call, seconds: float, strategy: str) -> dict[str, Any]:
    """Tune, and return the winner, what was measured, and when."""
    options = {**call.searched, "verbose": False, "quiet": True, "strategy_options": {"time_limit": seconds}}
    if tool == "kernel_tuner":
        options["strategy"] = strategy
        from kernel_tuner import tune_kernel
    else:
        from autotile.kernel_tuner import tune_kernel
    began, start = datetime.now().astimezone(), time.perf_counter()
    results, env = tune_kernel(
        call.kernel_name, call.source, call.problem_size, call.arguments, call.parameters, **options
    )
    wall_s = time.perf_counter() - start
    timed = [row for row in results if isinstance(row.get("time"), int | float) and math.isfinite(row["time"])]
    if not timed:
        raise SystemExit(f"{tool} measured no configuration")
    ranked = sorted(timed, key=_time)
    won = (env.get("autotile") or {}).get("winner")  # of the finals, where there are any
    if won is not None:
        ranked.sort(key=lambda row: any(row[name] != won[name] for name in call.parameters))
    return {
        "configs": [{name: row[name] for name in call.parameters} for row in ranked[:RUNNERS_UP]],
        "configs_us": [1e3 * row["time"] for row in ranked[:RUNNERS_UP]],
        "tried": len(timed),
        "wall_s": wall_s,
        "history": sorted(
            ([_seconds_since(began, row.get("timestamp")), 1e3 * row["time"]] for row in timed),
            key=lambda found: found[0] or 0.0,
        ),
    }


def _time(row: Mapping[str, Any]) -> float:
    return float(row["time"])


def _seconds_since(began: datetime, timestamp: Any) -> float | None:
    if not isinstance(timestamp, str):
        return None
    then = datetime.fromisoformat(timestamp)
    return (then if then.tzinfo else then.astimezone()).timestamp() - began.timestamp()


def time_winners(call: Call, winners: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Time the winners in turn, each with cold L2; return median times in microseconds and what was passed over."""
    import cupy

    arrays = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in call.arguments]
    found = {tool: first_that_runs(call, configs, arrays, tool) for tool, configs in winners.items()}
    launches = {tool: launch for tool, (launch, _) in found.items() if launch is not None}
    flush = cupy.zeros(max(1, 2 * cupy.cuda.Device().attributes["L2CacheSize"]), cupy.uint8)
    times: dict[str, list[float]] = {tool: [] for tool in launches}
    for _ in range(ROUNDS + 5):
        for tool, launch in launches.items():
            flush += 1
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            launch()
            stop.record()
            stop.synchronize()
            times[tool].append(1e3 * cupy.cuda.get_elapsed_time(start, stop))
    return {
        "times_us": {tool: float(np.median(row[5:])) for tool, row in times.items()},
        "passed_over": {tool: skipped for tool, (_, skipped) in found.items()},
    }


@dataclass(frozen=True)
class Launch:
    """A configuration of a call, compiled as its tool does; without a cubin, it does not compile."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    function_name: str
    cubin: bytes


def first_that_runs(
    call: Call, configs: Sequence[Mapping[str, Any]], arrays: list[Any], tool: str
) -> tuple[Callable[[], None] | None, int]:
    """Return the launch of the first configuration that can be launched, and how many before it cannot."""
    import cupy

    architecture, cores = f"sm_{cupy.cuda.Device().compute_capability}", available_cores()
    bounds = [0, *range(1, len(configs), cores), len(configs)]  # the first alone: it mostly runs
    with ThreadPoolExecutor(cores) as pool:
        for start, stop in pairwise(bounds):
            compiled = pool.map(lambda config: compile_as(tool, call, config, architecture), configs[start:stop])
            for skipped, launch in enumerate(compiled, start):
                try:
                    launched = loaded(call, launch, arrays)
                    launched()
                    cupy.cuda.Device().synchronize()
                except (cupy.cuda.driver.CUDADriverError, ValueError):
                    continue
                return launched, skipped
    return None, len(configs)


def compile_as(tool: str, call: Call, config: Mapping[str, Any], architecture: str) -> Launch:
    """Compile a configuration with NVRTC, with the options of a tool.

    CuPy, which Kernel Tuner compiles with, adds ``-ftz=true``.
    """
    from cuda.bindings import nvrtc
    from kernel_tuner.util import (
        get_grid_dimensions,
        get_kernel_string,
        get_problem_size,
        get_thread_block_dimensions,
        prepare_kernel_string,
    )

    defaults = ["block_size_x", "block_size_y", "block_size_z"]
    given = list(call.options.get("block_size_names") or defaults)
    names = given + defaults[len(given) :]
    block = get_thread_block_dimensions(config, names)
    divisors = tuple(call.options.get(f"grid_div_{axis}") for axis in "xyz")
    grid = get_grid_dimensions(get_problem_size(call.problem_size, config), config, divisors, names)
    text = get_kernel_string(call.source, config)
    defines = call.options.get("defines")
    name, text = prepare_kernel_string(call.kernel_name, text, config, grid, block, names, "CUDA", defines)
    own = ["-ftz=true"] if tool == "kernel_tuner" else []
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *own, *(call.options.get("compiler_options") or [])]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"winner.cu", 0, [], [])
    nvrtc.nvrtcAddNameExpression(program, name.encode())
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return Launch(grid, block, "", b"")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    _, lowered = nvrtc.nvrtcGetLoweredName(program, name.encode())
    return Launch(grid, block, lowered.decode(), bytes(cubin))


def loaded(call: Call, launch: Launch, arrays: list[Any]) -> Callable[[], None]:
    """Load a compiled configuration, and return a function that launches it; raise ValueError where there is none."""
    import cupy

    if not launch.cubin:
        raise ValueError("the configuration does not compile")
    module = cupy.cuda.function.Module()
    module.load(launch.cubin)
    for constant, value in (call.options.get("cmem_args") or {}).items():
        data, symbol = np.ascontiguousarray(value), int(module.get_global_var(constant))
        cupy.cuda.runtime.memcpy(symbol, data.ctypes.data, data.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
    function = module.get_function(launch.function_name)
    return lambda: function(launch.grid, launch.block, tuple(arrays))


def child(arguments: argparse.Namespace, role: str, name: str, **values: Any) -> dict[str, Any]:
    """Run a role in a process of its own and return its result, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--data", str(arguments.data), "--role", role, "--kernels", name]
        command += ["--seconds", str(arguments.seconds), "--strategy", arguments.strategy, "--output", str(answer)]
        environment = {**os.environ, "AUTOTILE_DB": f"{folder}/tuning.db", "AUTOTILE_CACHE": f"{folder}/cache"}
        environment["CUPY_CACHE_DIR"] = f"{folder}/cupy"
        limit_s = LIMIT_FACTOR * arguments.seconds + LIMIT_EXTRA_S
        try:
            done = subprocess.run(
                command,
                input=json.dumps(values),
                env=environment,
                text=True,
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer after {limit_s:.0f} s"}
        if not answer.is_file():
            lines = (done.stderr or done.stdout).strip().splitlines()
            return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def play(arguments: argparse.Namespace, calls: Mapping[str, Callable[[], Call]]) -> None:
    """Play a role: a tool, or the timer of the winners."""
    call = calls[arguments.kernels[0]]()
    if arguments.role == "timer":
        result = time_winners(call, json.load(sys.stdin)["winners"])
    else:
        result = run_tool(arguments.role, call, arguments.seconds, arguments.strategy)
    arguments.output.write_text(json.dumps(result, default=lambda value: value.item()))


def compare(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Tune a kernel with both tools, and time the winners again."""
    row: dict[str, Any] = {"kernel": name}
    for tool in TOOLS:
        row[tool] = child(arguments, tool, name)
        print(f"{name} {tool}: {row[tool].get('error') or row[tool]['tried']}", file=sys.stderr, flush=True)
    winners = {tool: row[tool]["configs"] for tool in TOOLS if "configs" in row[tool]}
    row["again"] = child(arguments, "timer", name, winners=winners) if winners else {}
    row |= seconds_to_best(row)
    for tool in TOOLS:
        row[tool].pop("history", None)
        for key in ("configs", "configs_us"):
            row[tool][key] = row[tool].get(key, [])[row["again"].get("passed_over", {}).get(tool, 0) :][:1]
    return row


def seconds_to_best(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return when Kernel Tuner had measured its best, and when autotile had one as fast; {} where one has no best."""
    times_us = row["again"].get("times_us", {})
    if len(times_us) < len(TOOLS):
        return {}
    own_us = {tool: row[tool]["configs_us"][row["again"]["passed_over"][tool]] for tool in TOOLS}
    equal_us = EQUAL * own_us["autotile"] * times_us["kernel_tuner"] / times_us["autotile"]

    def first(tool: str, is_found: Callable[[float], bool]) -> float | None:
        return next((at for at, time_us in row[tool]["history"] if at is not None and is_found(time_us)), None)

    return {
        "best_after_s": first("kernel_tuner", lambda time_us: time_us == own_us["kernel_tuner"]),
        "equal_after_s": first("autotile", lambda time_us: time_us <= equal_us),
    }


def cells(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of a row of the table."""
    times = row["again"].get("times_us", {})
    yield row["kernel"]
    for tool in TOOLS:
        failed = f"its {row['again'].get('passed_over', {}).get(tool)} best fail"
        missing = row[tool].get("error") or row["again"].get("error") or failed
        yield f"{times[tool]:.1f}" if tool in times else missing[:40]
    yield f"{times['kernel_tuner'] / times['autotile']:.3f}" if len(times) == len(TOOLS) else ""
    for key, unit in (("tried", ".0f"), ("wall_s", ".1f")):
        yield " / ".join(format(row[tool][key], unit) if key in row[tool] else "-" for tool in TOOLS)
    for key in ("best_after_s", "equal_after_s"):
        yield f"{row[key]:.1f}" if row.get(key) is not None else ""


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table and the ratios of the times."""
    columns = (
        "kernel",
        "Kernel Tuner us",
        "autotile us",
        "ratio",
        "tried",
        "wall s",
        "best after s",
        "as fast after s",
    )
    table = Table(*columns)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=130).print(table)
    times = [found for row in rows if len(found := row["again"].get("times_us", {})) == len(TOOLS)]
    if ratios := [found["kernel_tuner"] / found["autotile"] for found in times]:
        print(f"geometric mean {math.exp(np.mean(np.log(ratios))):.3f}, least {min(ratios):.3f}, of {len(ratios)}")


def merged(parts: Sequence[Path]) -> dict[str, Any]:
    """Return one record of several, which differ only in their kernels, dates and commands."""
    records = [json.loads(part.read_text()) for part in parts]
    for key in ("device", "cores", "versions", "seconds", "strategy"):
        if any(record[key] != records[0][key] for record in records):
            raise SystemExit(f"the parts differ in {key}: {[record[key] for record in records]}")
    rows = {row["kernel"]: row for record in records for row in record["rows"]}
    command = " && ".join(dict.fromkeys(record["command"] for record in records))
    return {**records[0], "command": command, "date": max(r["date"] for r in records), "rows": list(rows.values())}


def main() -> None:
    """Compare the tools on the chosen kernels, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kernels", nargs="+")
    parser.add_argument("--strategy", default="adaptive_tabu_greywolf")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+", metavar="PART")
    parser.add_argument("--role", choices=(*TOOLS, "timer"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.merge:
        record = merged(arguments.merge)
    elif arguments.data is None or not arguments.data.is_dir():
        parser.error("--data must be the folder of the suites")
    else:
        arguments.data = arguments.data.resolve()
        calls = {**bat_calls(arguments.data), **script_calls(arguments.data)}
        if unknown := [name for name in arguments.kernels or () if name not in calls]:
            parser.error(f"no kernel {', '.join(unknown)}; there are {', '.join(calls)}")
        if arguments.role:
            play(arguments, calls)
            return
        record = {**provenance(), "seconds": arguments.seconds, "strategy": arguments.strategy, "rows": []}
        for name in arguments.kernels or calls:
            record["rows"].append(compare(arguments, name))
            write(record, arguments.output)
    show(record["rows"])
    write(record, arguments.output)


def write(record: Mapping[str, Any], output: Path | None) -> None:
    """Write the record, where an output is named."""
    if output is not None:
        output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
