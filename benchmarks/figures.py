"""Generate the measured figures of README.md and two pages of docs/ from the committed records.

    python benchmarks/figures.py            # rewrite the figures of every page
    python benchmarks/figures.py --check    # exit with 1 if a page differs from the records

A page holds each figure between ``<!-- figures: NAME -->`` and ``<!-- end -->``; the text between them is replaced by
the return value of the function of that name in `FIGURES`. The records are JSON files in ``benchmarks/results/``, each
written by the benchmark given in its ``command``, and the recordings in ``recordings/``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.text import percent_text
from autotile.exchange.recording import read_recording

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ("guide", "tuning", "serving", "distributed", "database", "reports", "python", "from-kernel-tuner", "scaling")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in DOCS))
BLOCK = re.compile(r"(<!-- figures: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
KERNEL_TUNER = "Kernel Tuner 1.5"
SIDES = ("torch", "autotile")


def main() -> None:
    """Rewrite or check every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    stale = [page for page in PAGES if renewed(page) != page.read_text(encoding="utf-8")]
    for page in stale:
        print(f"{page.relative_to(ROOT)} {'differs from the records' if check else 'rewritten'}")
        if not check:
            page.write_text(renewed(page), encoding="utf-8")
    raise SystemExit(1 if check and stale else 0)


def renewed(page: Path) -> str:
    """Return the text of a page with its figures regenerated."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{FIGURES[found[2]]().strip()}\n{found[3]}"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


def record(name: str) -> dict[str, Any]:
    """Read a record; ``name`` is its path below ``benchmarks/results/`` without ``.json``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def source(name: str) -> str:
    """Return the sentence that names a record and the command that wrote it."""
    found = record(name)
    return f"`{found['command']}`, {found['date']}: [record](REC/{name}.json)."


def recorded(pattern: str) -> list[str]:
    """Return the names of the records on all GPUs that match a pattern."""
    paths = [path for gpu in ("h200", "h100") for path in sorted((RESULTS / gpu).glob(f"{pattern}.json"))]
    return [str(path.relative_to(RESULTS).with_suffix("")) for path in paths]


def linked(text: str, page: str) -> str:
    """Make the links to records relative to the folder of a page."""
    return text.replace("REC/", "../benchmarks/results/" if page == "guide" else "benchmarks/results/")


def ladder() -> str:
    """Return TFLOP/s of the naive kernel, the tiled kernel, `sgemm_2d` and cuBLAS."""
    found = record("h200/ladder")
    kernels = ("matmul_naive", "matmul_tiled", "sgemm_2d", "cuBLAS")
    rates = {(tuple(row["shape"]), row["kernel"]): row["tflops_per_s"] for row in found["rows"]}
    shapes = dict.fromkeys(shape for shape, _ in rates)
    rows = [(" x ".join(map(str, shape)), *(f"{rates[shape, kernel]:.1f}" for kernel in kernels)) for shape in shapes]
    shown = table(("M x N x K", "`matmul_naive`", "`matmul_tiled`", "`sgemm_2d`", "cuBLAS"), rows)
    text = (
        f"TFLOP/s in fp32 after {found['trials']} trials of tuning each, medians of {found['rounds']} interleaved "
        f"rounds; every product agreed with float64. {source('h200/ladder')}"
    )
    return linked(f"{shown}\n\n{text}", "readme")


def gemm() -> str:
    """Return the speed-ups over cuBLAS of the configurations that ship, over all shapes of `gemm.py`."""
    found = record("h200/gemm")["dtypes"]
    names = {"float32": "fp32, all kernels", "cuda_cores": "fp32, CUDA cores alone", "bfloat16": "bf16"}
    parts = {"float32": found["float32"], "cuda_cores": found["float32"]["cuda_cores"], "bfloat16": found["bfloat16"]}
    rows = []
    for key, name in names.items():
        cubes = [cube_text(found["bfloat16" if key == "bfloat16" else "float32"]["rows"], n, key) for n in (4096, 8192)]
        rows.append((name, f"{parts[key]['geometric_mean']:.2f}", f"{parts[key]['least']:.2f}", *cubes))
    count = len(found["float32"]["rows"])
    shown = table(("", "geometric mean of the speed-ups", "smallest", "4096 cubed", "8192 cubed"), rows)
    return linked(f"{shown}\n\n{count} shapes. {source('h200/gemm')}", "readme")


def cube_text(rows: Sequence[dict[str, Any]], n: int, key: str) -> str:
    """Return the rate at n cubed and the speed-up over cuBLAS as text."""
    row = next(row for row in rows if list(row["shape"]) == [n, n, n])
    part = row["cuda_cores"] if key == "cuda_cores" else row
    return f"{part['tflops_per_s']:.0f} TFLOP/s, {part['ratio']:.2f}"


def recordings() -> str:
    """Return the fastest recorded configuration of each recording."""
    rows = []
    for path in sorted((ROOT / "recordings").glob("*.npz")):
        found = read_recording(path)
        header = found.header
        times_us = np.where(found.ok, found.columns["time_us"], np.inf)
        sizes = header.problem.sizes
        flops = 2 * sizes["M"] * sizes["N"] * sizes["K"]
        kernel = f"`{header.problem.kernel}`" + (", bf16" if header.problem.dtype == "bfloat16" else "")
        shape = " x ".join(str(sizes[name]) for name in "MNK")
        rows.append((kernel, shape, f"{len(found):,}", f"{flops / float(times_us.min()) / 1e6:.1f}"))
    return table(("kernel", "M x N x K", "recorded configurations", "fastest, TFLOP/s"), rows)


def peers() -> str:
    """Return the comparison with Kernel Tuner, from four records."""
    speed, faults = record("h200/tuning_speed"), record("h200/faults")["faults"]
    repeat, search = record("h200/repeatability"), record("h200/search_on_gpu")
    rates = {
        tool: np.median([r["configurations"] / r["wall_s"] for r in speed["rounds"] if r["tool"] == tool])
        for tool in ("autotile", "kernel-tuner")
    }
    well = {"as expected", "survived"}
    survived = {tool: sum(row[tool]["verdict"] in well for row in faults) for tool in ("autotile", "kernel_tuner")}
    right = {
        name: sum(run[name] <= 0.01 for run in repeat["runs"]) for name in ("winner_loss", "mean_of_7_winner_loss")
    }
    found = {
        name: np.mean([run["found"][-1] for run in search["runs"] if run["sampler"] == name])
        for name in dict.fromkeys(run["sampler"] for run in search["runs"])
    }
    rival = max((name for name in found if name.startswith("kernel-tuner")), key=lambda name: found[name])
    runs = len(repeat["runs"])
    rows = [
        ("configurations a second, verified, whole process", *(f"{rates[t]:.1f}" for t in rates), "h200/tuning_speed"),
        (f"faulty kernels survived, of {len(faults)}", *survived.values(), "h200/faults"),
        (f"winner within 1 % of the best, of {runs} runs, half disturbed", *right.values(), "h200/repeatability"),
        ("best of all over the best after 100 measurements", f"{found['feasible']:.3f}",
         f"{found[rival]:.3f} ({rival.partition(':')[2]})", "h200/search_on_gpu"),
    ]  # fmt: skip
    shown = table(
        ("", "autotile", KERNEL_TUNER, "record"), [(*row[:-1], f"[{row[-1]}](REC/{row[-1]}.json)") for row in rows]
    )
    return linked(shown, "readme")


def enumeration() -> str:
    """Return time and memory of enumerating a large space."""
    found = record("enumeration")
    names = {"autotile": "autotile", "kernel_tuner": "Kernel Tuner"}
    rows = [
        (
            f"{names[tool]} {found['versions'][tool]}",
            f"{part['median_s']:.3f} ({part['least_s']:.3f} to {part['most_s']:.3f})",
            f"{part['peak_mb']:.0f}",
        )
        for tool, part in found["summary"].items()
    ]
    shown = table(("", "seconds, median (min to max)", "peak memory, MB"), rows)
    valid, rounds = found["summary"]["autotile"]["valid"], len(found["rounds"])
    text = f"{valid:,} valid configurations, {rounds} fresh processes each. {source('enumeration')}"
    return linked(f"{shown}\n\n{text}", "readme")


def until() -> str:
    """Return where a search with ``--until`` stops."""
    found = record("until")
    names = {"recordings": "shipped", "search": "chosen by", "choosing": "chosen by, too", "final": "held out"}
    rows = [
        (
            names[row["spaces"]],
            f"`--until {row['gain']:.0%}`" if row["gain"] else "by itself",
            "{:.0f} ({} to {})".format(*row["trials"]),
            *("{} ({})".format(*map(percent_text, row[kind])) for kind in ("loss", "lost")),
            percent_text(row["within"], 0),
        )
        for row in found["rows"]
    ]
    heads = ("spaces", "", "trials, median (min to max)", "loss, mean (max)", "lost by ending", "within the gain")
    shown = table(heads, rows)
    text = f"{found['seeds']} seeds, at most {found['limit']} trials; lost: against the same search's best."
    return linked(f"{shown}\n\n{text} {source('until')}", "guide")


def occupancy() -> str:
    """Return how often the occupancy calculator and the driver agree."""
    found = record("h200/occupancy")
    agreed, total = (sum(row[key] for row in found["kernels"].values()) for key in ("agreed", "configurations"))
    kernels = ", ".join(f"`{name}`" for name in found["kernels"])
    return linked(
        f"Blocks per SM equal to the driver's on {agreed:,} of {total:,} compiled configurations of {kernels}. "
        f"{source('h200/occupancy')}",
        "readme",
    )


def dispatch() -> str:
    """Return the host time of a call, compared with other libraries."""
    found = record("h200/dispatch")
    times = {**found["calls_us"], **found["others_us"]}
    shown = table(("call", "us"), [(name, f"{time_us:.2f}") for name, time_us in times.items()])
    return linked(f"{shown}\n\n{source('h200/dispatch')}", "guide")


def host_cost() -> str:
    """Return the host time of a product in a program, beside that of PyTorch and CuPy, by the newest record."""
    names = [name for name in recorded("dispatch") if record(name).get("products_us")]
    if not names:
        return "There is no record yet."
    found = record(name := max(names, key=lambda name: str(record(name)["date"])))
    rows = [
        (product, peer, f"{calls[peer]:.1f}", own, f"{calls[own]:.1f}", f"{calls[own] / calls[peer]:.2f}")
        for product, calls in found["products_us"].items()
        for peer, own in zip(list(calls)[::2], list(calls)[1::2], strict=True)
    ]
    shown = table(("product M x N x K, kernel", "call", "us", "of autotile", "us", "ratio"), rows)
    return linked(f"{shown}\n\nHost time of a call, {found['device']}. {source(name)}", "guide")


def stutter() -> str:
    """Return the host time of first calls at sizes that a process has not seen."""
    parts = []
    for name in recorded("stutter"):
        found = record(name)
        calls = dict.fromkeys((who, call) for call in ("first", "second") for who in SIDES)
        rows = [
            (
                *(dtype, state),
                *(
                    " / ".join(f"{phases[f'{state} {call}'][who][key]:.2f}" for key in ("median", "p99", "worst"))
                    for who, call in calls
                ),
            )
            for dtype, phases in found["ms"].items()
            for state in ("cold", "warm")
        ]
        shown = table(("dtype", "process", *(f"{who}, {call} call" for who, call in calls)), rows)
        parts.append(f"{shown}\n\n{found['sizes']:,} sizes each, {found['device']}. {source(name)}")
    return linked("\n\n".join(parts) or "There is no record yet.", "guide")


def models() -> str:
    """Return the times of whole models in PyTorch, and with autotile."""
    parts = []
    for gpu in ("h200", "h100"):
        names = [name for name in recorded("models*") if name.startswith(gpu)]
        rows = [row for name in names for row in record(name)["rows"] if "ratio" in row]
        modes = dict.fromkeys(row["mode"] for row in rows)
        cells: dict[tuple[str, str, str], dict[str, str]] = {}
        for row in rows:
            times = " -> ".join(f"{row[side]['wall_ms']:.3g}" for side in SIDES)
            text = f"{row['ratio'][0]:.2f} ({times})"
            mark = "" if row["verdict"] == "ok" else f", {row['verdict']}"
            cells.setdefault((row["model"], row["cell"], row["dtype"]), {})[row["mode"]] = text + mark
        if rows:
            lines = [(*key, *(found.get(mode, "") for mode in modes)) for key, found in cells.items()]
            device = record(names[0])["device"]
            sources = " ".join(source(name) for name in names)
            parts.append(f"{table(('model', 'size', 'dtype', *modes), lines)}\n\n{device}. {sources}")
    return linked("\n\n".join(parts) or "There is no record yet.", "guide")


def unseen() -> str:
    """Return what each way of serving loses at sizes that were not tuned."""
    ways = {"family": "the rule", "nearest": "nearest tuned size", "default": "default", "alone": "its own tuning"}
    rows = []
    for kernel in ("sgemm", "gemm_mma"):
        summary = record(f"h200/unseen_{kernel}")["summary"]
        cells = [", ".join(percent_text(summary[way][loss]) for loss in ("mean_loss", "worst_loss")) for way in ways]
        rows.append((f"[`{kernel}`](REC/h200/unseen_{kernel}.json)", *cells))
    return linked(table(("mean and largest loss", *ways.values()), rows), "guide")


def any_size() -> str:
    """Return the speed at sizes that nobody tuned, over that of cuBLAS."""
    names = {
        "bfloat16": "bf16",
        "float16": "fp16",
        "float32": "fp32",
        "float32_cuda_cores": "fp32, `emulate=False`",
        "bfloat16_no_library": "bf16, `library=False`",
    }
    rows, sources = [], []
    for each in recorded("any_size"):
        found = record(each)
        for name, figures in found["summary"].items():
            ratios = (figures[key] for key in ("geometric_mean", "percentile_1", "worst"))
            rows.append(
                (
                    each.partition("/")[0].upper(),
                    names.get(name, name),
                    figures["count"],
                    *(f"{ratio:.2f}" for ratio in ratios),
                )
            )
        sources.append(source(each))
    if not rows:
        return "There is no record yet."
    shown = table(("GPU", "products", "number", "geometric mean", "1st percentile", "worst"), rows)
    return linked("\n\n".join((shown, *sources)), "guide")


def load() -> str:
    """Return the load of the compilers and the GPU in sessions of five kernels, with that of an earlier version."""
    found = record("h200/load")
    rows = []
    for name in dict.fromkeys(row["kernel"] for row in found["sessions"]):
        sides = [
            {row["side"]: row for row in found["sessions"] if row["kernel"] == name}[s] for s in ("before", "after")
        ]
        busy = (
            " / ".join(percent_text(side[of], 0) for of in ("compilers_busy", "gpu_busy")) if "gpu_busy" in side else ""
            for side in sides
        )
        rates, times = ([f"{side[key]:.1f}" for side in sides] for key in ("trials_per_s", "time_us"))
        rows.append((f"`{name}`", " -> ".join(rates), " -> ".join(busy), " -> ".join(times)))
    shown = table(("kernel", "trials a second", "compilers / GPU busy", "best time, us"), rows)
    text = f"{found['cores']} cores, {found['budget_s']:.0f} s a session, each in a fresh process with empty caches."
    return linked(f"{shown}\n\n{text} {source('h200/load')}", "guide")


def report() -> str:
    """Sizes of pages, and times to write and to open them."""
    found = record("report")
    rows = [
        (
            f"{row['trials']:,}",
            f"{row['size_bytes'] / 1e6:.1f} MB",
            f"{row['write_s']:.1f} s ({row['write_cpu_s']:.1f} s)",
            f"{row['open_s']:.1f} s ({row['open_cpu_s']:.1f} s)",
        )
        for row in found["rows"]
    ]
    sizes = table(("trials", "size", "to write (on the CPU)", "to open in Chromium (on the CPU)"), rows)
    machine = found["machine"]
    text = f"On {machine['cores']} cores with a load of {machine['load']:.0f}: {source('report')}"
    return linked(f"{sizes}\n\n{text}", "guide")


def suites() -> str:
    """Return the best times of kernels of public suites, tuned with Kernel Tuner and autotile for the same time."""
    found = record("h200/suites")
    rows, ratios = [], []
    for row in sorted(found["rows"], key=lambda row: str(row["kernel"])):
        theirs, ours = ({**row["again"]["times_us"]}.get(tool) for tool in ("kernel_tuner", "autotile"))
        ratio = theirs / ours if theirs and ours else None
        ratios += [ratio] if ratio else []
        tools = [row[tool] for tool in ("kernel_tuner", "autotile")]
        rows.append(
            (
                f"`{row['kernel']}`",
                f"{theirs:,.1f}" if theirs else f"its {row['again']['passed_over']['kernel_tuner']} best fail",
                f"{ours:,.1f}",
                f"{ratio:.3f}" if ratio else "",
                " / ".join(f"{tool['tried']:,}" for tool in tools),
                " / ".join(f"{tool['wall_s']:.1f}" for tool in tools),
                f"{row['equal_after_s']:.1f}" if row.get("equal_after_s") is not None else "",
            )
        )
    headings = (KERNEL_TUNER + ", us", "autotile, us", "ratio", "tried", "seconds", "as fast after, s")
    mean = np.exp(np.mean(np.log(ratios)))
    text = (
        f"Geometric mean of the ratios {mean:.3f}, least {min(ratios):.3f}. {found['cores']} cores, {found['device']}"
    )
    command = f"`python benchmarks/suites.py --data DIR --seconds {found['seconds']:.0f}`"
    shown = table(("kernel", *headings), rows)
    return linked(f"{shown}\n\n{text}, {command}, {found['date']}: [record](REC/h200/suites.json).", "guide")


def simulated() -> str:
    """Return trials a second and CPU times on simulated GPUs."""
    found = record("scaling_simulated")
    rows = [
        (
            one["through"],
            one["gpus"],
            f"`{one['sampler']}`",
            f"{one['per_s']:.0f}",
            percent_text(one["gpus_busy"], 0),
            *(f"{one[key]:.1f}" if key in one else "" for key in COSTS),
            f"{one['load']:.0f}",
        )
        for one in found["simulated"]
        if one["through"] != "claims"
    ]
    names = ("parent, ms", "scheduler, ms", "GPUs' process, ms", "server, ms")
    shown = table(("through", "GPUs", "sampler", "trials a second", "GPUs busy", *names, "load"), rows)
    text = (
        f"A candidate takes {1e3 * found['seconds']:.0f} ms of a GPU. CPU time is that of a trial; of "
        f"{found['commands']} commands that share a study through PostgreSQL, their sum. The load is that of the "
        f"{found['cores']} cores before the session, other programs included."
    )
    return linked(f"{shown}\n\n{text} {source('scaling_simulated')}", "guide")


def simulated_claims() -> str:
    """Return what a claim and a store cost on a PostgreSQL server."""
    found = record("scaling_simulated")
    rows = [
        (
            one["gpus"],
            *(f"{one[key]:.0f}" for key in ("wanted_per_s", "per_s")),
            *(f"{one[key]:.1f}" for key in ("claim_ms", "store_ms", "claimant_ms_per_trial", "server_ms_per_trial")),
        )
        for one in found["simulated"]
        if one["through"] == "claims"
    ]
    rates = ("trials a second wanted", "reached")
    times = ("claim, ms", "store, ms", "claimant's CPU, ms a trial", "server's CPU, ms a trial")
    return linked(f"{table(('claimants', *rates, *times), rows)}\n\n{source('scaling_simulated')}", "guide")


COSTS = ("parent_ms_per_trial", "scheduler_ms_per_trial", "machine_ms_per_trial", "server_ms_per_trial")


def costs_of_a_trial() -> dict[str, tuple[float, str]]:
    """Return each cost of a trial in ms of one core or GPU, with its origin."""
    found = record("scaling_simulated")["simulated"]
    sessions = {(one["through"], one["gpus"], one.get("sampler")): one for one in found}
    parent = sessions["threads", 64, "feasible"]["parent_ms_per_trial"]
    dask = max((one for one in found if one["through"] == "dask"), key=lambda one: int(one["gpus"]))
    claim = max((one for one in found if one["through"] == "claims"), key=lambda one: float(one["per_s"]))
    load = [one for one in record("h200/load")["sessions"] if one["side"] == "after"]
    cores = record("h200/load")["cores"]
    compiling = [1e3 * cores * one["compilers_busy"] / one["trials_per_s"] for one in load]
    running = [one["load_ms"] + one["verify_ms"] + one["measure_ms"] for one in load]
    return {
        "parent": (parent, "one session, 64 GPUs in its process"),
        "parent with Dask": (dask["parent_ms_per_trial"], f"one session, {dask['gpus']} GPUs"),
        "scheduler": (dask["scheduler_ms_per_trial"], "a task a trial"),
        "process of the GPU": (dask["machine_ms_per_trial"], "all GPUs in one process"),
        "database": (claim["server_ms_per_trial"], "a claim and a store, the server's CPU"),
        "claims in line": (1e3 / claim["per_s"], f"{claim['gpus']} claimants that wait for each other"),
        "compilers, least": (min(compiling), "of five kernels on an H200"),
        "compilers, most": (max(compiling), "of five kernels on an H200"),
        "GPU, least": (min(running), "of five kernels on an H200"),
        "GPU, most": (max(running), "of five kernels on an H200"),
    }


def trial_costs() -> str:
    """Return the cost of a trial, by what bears it."""
    rows = [(name, f"{cost_ms:.1f}", origin) for name, (cost_ms, origin) in costs_of_a_trial().items()]
    text = "[scaling_simulated](REC/scaling_simulated.json), [load](REC/h200/load.json)"
    return linked(f"{table(('', 'ms a trial', 'origin'), rows)}\n\nRecords: {text}.", "guide")


def past_measured() -> str:
    """Return the cores that many GPUs would take of each resource, and the GPUs that one core of it serves."""
    costs, trial_ms = costs_of_a_trial(), 1e3 * record("scaling_simulated")["seconds"]
    names = [name for name in costs if not name.startswith("GPU")]
    counts = (64, 256, 1000)
    rows = []
    for name in names:
        cost_ms = costs[name][0]
        taken = (f"{count * cost_ms / trial_ms:,.1f}" for count in counts)
        rows.append((name, *taken, f"{trial_ms / cost_ms:,.1f}"))
    wanted = ("trials a second", *(f"{1e3 * count / trial_ms:,.0f}" for count in counts), "")
    headings = (f"GPUs, {trial_ms:.0f} ms a trial", *(f"{count:,}" for count in counts), "GPUs that one core serves")
    return table(headings, [wanted, *rows])


def quick() -> str:
    """Return how soon sessions have their first trial, a good configuration, and their answer; before and now."""
    parts = []
    for each in recorded("quick"):
        found = record(each)
        names = [name for name in found["rows"][0] if name not in ("kernel", "version", "best_us")]
        kernels: dict[str, dict[str, dict[str, Any]]] = {}
        for row in found["rows"]:
            kernels.setdefault(row["kernel"], {})[row["version"]] = row
        versions = max(kernels.values(), key=len)
        unknown = dict.fromkeys(names)  # of a kernel that a version does not run

        def cells(rows: Sequence[Mapping[str, float | None]], names: Sequence[str] = names) -> list[str]:
            shown = [[f"{row[name]:.1f}" if row[name] is not None else "-" for row in rows] for name in names]
            return [" -> ".join(texts) for texts in shown]

        lines: list[tuple[Any, ...]] = [
            (f"`{kernel}`", *cells([rows.get(version, unknown) for version in versions]))
            for kernel, rows in kernels.items()
        ]
        both = [rows for rows in kernels.values() if len(rows) == len(versions)]
        medians = [
            {name: float(np.median([rows[version][name] or np.inf for rows in both])) for name in names}
            for version in versions
        ]
        lines.append(("median", *cells(medians)))
        text = f"Seconds, {found['cores']} cores, `--budget {found['budget_s']:.0f}s`, empty caches; one session each."
        parts.append(f"{table(('', *names), lines)}\n\n{found['device']}. {text} {source(each)}")
    return linked("\n\n".join(parts), "guide")


def headers() -> str:
    """Return what precompiled headers take off the compilations of a kernel."""
    found = record("headers")
    shown_of = {"cub_rows": "CUB, the example `cub_rows`", "cute_copy": "CuTe, the example `cute_copy`"}
    rows = [
        (shown_of.get(row["kernel"], f"`<{row['kernel']}>`"), *(f"{one:.1f}" for one in row["seconds"].values()))
        for row in found["rows"]
    ]
    text = f"Seconds for {found['configs']} configurations, {found['workers']} workers, {found['rounds']} rounds."
    shown = table(("template with", *found["rows"][0]["seconds"]), rows)
    return linked(f"{shown}\n\n{text} {source('headers')}", "guide")


FIGURES: dict[str, Callable[[], str]] = {
    "headers": headers,
    "quick": quick,
    "simulated": simulated,
    "simulated_claims": simulated_claims,
    "trial_costs": trial_costs,
    "past_measured": past_measured,
    "report": report,
    "ladder": ladder,
    "gemm": gemm,
    "recordings": recordings,
    "peers": peers,
    "enumeration": enumeration,
    "occupancy": occupancy,
    "until": until,
    "load": load,
    "dispatch": dispatch,
    "host_cost": host_cost,
    "stutter": stutter,
    "models": models,
    "unseen": unseen,
    "any_size": any_size,
    "suites": suites,
}

if __name__ == "__main__":
    main()
