"""Efficiency of search methods on recorded spaces.

    python benchmarks/search.py --data DIR [--seeds 20] [--budget 400] [--batch 1] [--methods NAME ...]
                                [--as-session [--workers 16] [--gpus 1]] [--estimates] [--seed 0] [--work DIR]
                                [--processes N] [--output FILE.json] [--plot FILE.svg]

Every ``.npz`` in the folder is a recorded space (see `search_methods.RecordedSpace`), which each method searches once
per seed. Each run is stored as a small file in the work folder, so that an interrupted benchmark resumes. The table
gives the ratio of the best possible to the best found time after a number of measurements: the mean over the spaces of
the mean over the seeds, with its standard error over the seeds. A failed configuration counts as a measurement.

With ``--as-session``, each sampler of autotile is asked one at a time, and as a tuning session asks it: candidates are
compiled ahead, and a trial is chosen while another runs and one is queued. The two are compared by the number of
candidates that were measured; failures, which take no GPU time in a session, do not count in either. With
``--estimates``, each of the two is also asked with estimated times, for the spaces whose launches are known: recordings
of autotile, and those that ``spaces`` describes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# one thread per process: parallelism is over the runs
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
import search_methods
from provenance import provenance
from rich.console import Console
from rich.progress import track
from rich.table import Table
from search_methods import RecordedSpace, all_methods, proposals_digest, timed

COUNTS = (5, 10, 25, 50, 100, 200, 400)
"""Numbers of measurements in the columns of the table."""

SPACES: dict[str, RecordedSpace] = {}
"""The recorded spaces, which the processes inherit."""

Curves = dict[str, dict[str, np.ndarray]]
"""Ratio reached, by method and space, shape (seeds, measurements)."""


def main() -> None:
    """Run the missing searches, print the table and write the figures."""
    arguments = parse()
    spaces = SPACES
    spaces.update({path.stem: RecordedSpace.read(path) for path in sorted(arguments.data.glob("*.npz"))})
    if not spaces:
        raise SystemExit(f"{arguments.data} holds no .npz: expected a folder of recorded spaces")
    search_methods.SESSION_WORKERS, search_methods.SESSION_GPUS = arguments.workers, arguments.gpus
    arguments.work.mkdir(parents=True, exist_ok=True)
    jobs = [(m, s, seed) for seed in seeds_of(arguments) for m in arguments.methods for s in spaces]
    missing = [job for job in jobs if not kept(arguments, *job).is_file()]
    work = partial(replay, arguments)
    with get_context("fork").Pool(arguments.processes) as pool:
        for _ in track(pool.imap_unordered(work, missing), f"{len(missing)} runs", len(missing)):
            pass
    curves, cost, errors = collect(arguments, spaces)
    show(curves, cost, arguments)
    for name in arguments.names if arguments.as_session else ():
        compare_pairs(curves, f"measured:{name}", f"session:{name}", arguments)
    for name in arguments.names if arguments.estimates else ():
        compare_pairs(curves, f"measured:{name}", f"measured-estimated:{name}", arguments)
        compare_pairs(curves, f"session:{name}", f"session-estimated:{name}", arguments)
    for method, error in errors.items():
        print(f"{method} failed: {error}")
    report = {
        **provenance(),
        "spaces": list(spaces),
        "seeds": arguments.seeds,
        "batch": arguments.batch,
        "gpus": arguments.gpus,
    }
    report |= {"budget": arguments.budget, "methods": summary(curves, cost, arguments), "errors": errors}
    report |= {"proposals": proposals_digest(), "first_seed": arguments.seed}
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(curves, arguments.plot)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded spaces")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", type=int, default=400, help="measurements per run")
    parser.add_argument("--batch", type=int, default=1, help="proposals made at a time")
    parser.add_argument("--methods", nargs="+", help="see search_methods.py (default: all installed)")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--as-session", action="store_true", help="compare with the proposals of a tuning session")
    parser.add_argument("--estimates", action="store_true", help="compare with searches that have estimated times")
    parser.add_argument("--workers", type=int, default=16, help="compile workers of the session")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the session")
    parser.add_argument("--work", type=Path, default=Path("search-runs"), help="folder of the stored runs")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="image file to write; requires matplotlib")
    arguments = parser.parse_args()
    if arguments.as_session or arguments.estimates:
        kinds = ["measured", "session", *(["measured-estimated", "session-estimated"] if arguments.estimates else [])]
        arguments.names = [name for name in arguments.methods or ["feasible"] if ":" not in name]
        arguments.methods = [f"{kind}:{name}" for name in arguments.names for kind in kinds]
    arguments.methods = arguments.methods or all_methods()
    return arguments


def seeds_of(arguments: argparse.Namespace) -> range:
    """Return the seeds of the runs."""
    return range(arguments.seed, arguments.seed + arguments.seeds)


def kept(arguments: argparse.Namespace, method: str, space: str, seed: int) -> Path:
    """Return the file of one run; its name contains a digest of the recording, so that a changed one is redone."""
    digest = hashlib.sha256((arguments.data / f"{space}.npz").read_bytes()).hexdigest()[:8]
    gpus = f"-{arguments.gpus}-gpus" if arguments.gpus > 1 and method.startswith("session") else ""
    name = f"{method.replace(':', '+')}{gpus}-{space}-{digest}-{seed}-{arguments.budget}-{arguments.batch}.json"
    return Path(arguments.work / name)


def replay(arguments: argparse.Namespace, job: tuple[str, str, int]) -> None:
    """Run one method on one space with one seed and store the measured rows."""
    method, space, seed = job
    path = kept(arguments, *job)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(timed(method, SPACES[space], seed, arguments.budget, arguments.batch)))
    whole.replace(path)


def collect(
    arguments: argparse.Namespace, spaces: dict[str, RecordedSpace]
) -> tuple[Curves, dict[str, float], dict[str, str]]:
    """Return curves, milliseconds per measurement, and errors by method; a method that failed anywhere has no curve."""
    curves: Curves = {}
    cost: dict[str, float] = {}
    errors: dict[str, str] = {}
    for method in arguments.methods:
        runs = {
            space: [json.loads(kept(arguments, method, space, seed).read_text()) for seed in seeds_of(arguments)]
            for space in spaces
        }
        failed = [run["error"] for each in runs.values() for run in each if run["error"]]
        if failed:
            errors[method] = failed[0]
            continue
        curves[method] = {
            name: np.array([spaces[name].reached(run["rows"], arguments.budget) for run in each])
            for name, each in runs.items()
        }
        cost[method] = 1e3 * float(np.median([r["seconds_a_measurement"] for each in runs.values() for r in each]))
    return curves, cost, errors


def averages(by_space: dict[str, np.ndarray], counts: list[int]) -> Iterator[tuple[float, float]]:
    """Yield the mean over the spaces and its standard error for each count."""
    for count in counts:
        reached = [each[:, count - 1] for each in by_space.values()]
        squares = sum(each.var(ddof=1) / len(each) for each in reached) if len(reached[0]) > 1 else np.nan
        yield float(np.mean([each.mean() for each in reached])), float(np.sqrt(squares) / len(reached))


def counts_of(arguments: argparse.Namespace) -> list[int]:
    """Return the numbers of measurements to state, the last of which is the budget."""
    return [*(count for count in COUNTS if count < arguments.budget), arguments.budget]


def summary(curves: Curves, cost: dict[str, float], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, rounded to their precision."""
    counts = counts_of(arguments)
    return {
        method: {
            "ms_a_measurement": round(cost[method], 3),
            "mean": {
                str(count): [round(mean, 4), round(error, 4)]
                for count, (mean, error) in zip(counts, averages(by_space, counts), strict=True)
            },
            "spaces": {
                name: {str(count): round(float(each[:, count - 1].mean()), 4) for count in counts}
                for name, each in by_space.items()
            },
        }
        for method, by_space in curves.items()
    }


def show(curves: Curves, cost: dict[str, float], arguments: argparse.Namespace) -> None:
    """Print one line per method, the best last, and compare the first method with the others on each space."""
    counts = counts_of(arguments)
    table = Table("method", *(f"after {count}" for count in counts), "ms each", box=None)
    middle = max(count for count in counts if count <= 100) - 1
    order = sorted(curves, key=lambda method: np.mean([each[:, middle].mean() for each in curves[method].values()]))
    for method in order:
        cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in averages(curves[method], counts)]
        table.add_row(method, *cells, f"{cost[method]:.2f}")
    Console(width=120).print(table)
    if len(curves) > 1:
        compare(curves, counts, arguments.methods[0])


def compare(curves: Curves, counts: list[int], ours: str) -> None:
    """Print one method and the best of all others, by space."""
    others = [method for method in curves if method != ours]
    table = Table("space", *(f"{ours} / best other after {count}" for count in counts), box=None)
    for space, reached in curves[ours].items():
        cells = []
        for count in counts:
            rival = max(others, key=lambda method: curves[method][space][:, count - 1].mean())
            rivals = curves[rival][space][:, count - 1].mean()
            cells.append(f"{reached[:, count - 1].mean():.3f} / {rivals:.3f} {rival.partition(':')[2] or rival}")
        table.add_row(space, *cells)
    Console(width=160).print(table)


def compare_pairs(curves: Curves, first: str, second: str, arguments: argparse.Namespace) -> None:
    """Print, for each space, the ratio that two methods reach, and the difference."""
    counts = counts_of(arguments)
    one, other = curves[first], curves[second]
    table = Table(f"{second} against {first}", *(f"after {count}" for count in counts), box=None)
    for space in one:
        pairs = [(one[space][:, count - 1].mean(), other[space][:, count - 1].mean()) for count in counts]
        table.add_row(space, *(f"{after:.3f} {after - before:+.3f}" for before, after in pairs))
    cells = []
    for (before, error), (after, other_error) in zip(averages(one, counts), averages(other, counts), strict=True):
        cells.append(f"{after:.3f} {after - before:+.3f} ± {np.hypot(error, other_error):.3f}")
    table.add_row("mean", *cells)
    Console(width=200).print(table)


def plot(curves: Curves, path: Path) -> None:
    """Plot the mean over the spaces against the number of measurements."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    ranked = sorted(curves, key=lambda method: -np.mean([each[:, :200].mean() for each in curves[method].values()]))
    for place, method in enumerate(ranked):
        mean = np.mean([each.mean(axis=0) for each in curves[method].values()], axis=0)
        shown = place < 8
        style: dict[str, Any] = {"label": method, "lw": 1.6} if shown else {"color": "0.8", "lw": 0.8, "zorder": 0}
        axes.plot(np.arange(1, len(mean) + 1), mean, **style)
    axes.set(xscale="log", xlim=(10, None), ylim=(0.6, 1.005))
    axes.set(xlabel="measurements", ylabel="best possible / best found time, mean over the spaces")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="the eight best; all others in grey", title_fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
