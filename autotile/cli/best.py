"""``autotile best``: the configuration that is served for a problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType

from autotile.cli.arguments import (
    BundleOption,
    DatabaseOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    LibraryOption,
    SizesArgument,
)
from autotile.cli.output import examples, notice, show
from autotile.cli.tables import RIGHT, Listing, below, facts, title
from autotile.core.model import config_text
from autotile.core.text import NOTHING, interval_text, occupancy_text, source_text, time_text

if TYPE_CHECKING:
    from autotile.api.results import BestResult
    from autotile.serving.choice import Contender


def best(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    database: DatabaseOption = None,
    bundle: BundleOption = None,
    library: LibraryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Show what would be served for a problem, and why.

    Tiers: exact (tuned for this problem on this GPU), family (by the rule of a family that contains it), nearest (tuned
    for other sizes), transferred (tuned on another GPU), default (not tuned); for an operation also model (a model of
    times expects it to be the fastest) and library (nothing is known that is faster).
    """
    from autotile.api import results
    from autotile.cli.assignments import read_sizes

    given = read_sizes(sizes or [])
    found = results.best(kernel, given, dtype=dtype, device=device, database=database, bundle=bundle, library=library)
    for text in found.notices:
        notice(text)
    show(found, best_table, best_document, as_json=as_json)


def best_table(result: BestResult) -> RenderableType:
    """Render the configuration with its figures, then the reason."""
    head = title(f"{result.problem} on {result.device_label}")
    parts = [head, facts(_facts(result)), below(result.explanation)]
    if result.contenders:
        parts.append(below(contenders_table(result.contenders)))
    return Group(*parts)


def contenders_table(contenders: Sequence[Contender]) -> RenderableType:
    """Render the ways to compute a problem of an operation, that which is served first."""
    rows = []
    for one in contenders:
        measured = source_text("measurement", one.source)
        known = measured if one.doubt is None else f"model, +-{100 * one.doubt:.0f} %"
        origin = NOTHING if one.time_us is None else known
        rows.append((one.kernel, time_text(one.time_us), origin, config_text(one.config) or NOTHING))
    return Listing(("computed by", f"{RIGHT}time", "known from", "configuration"), rows, ("configuration",))


def _facts(result: BestResult) -> Iterator[tuple[str, str]]:
    yield "tier", result.tier
    if result.contenders:
        yield "computed by", result.kernel
    if result.config:
        yield "configuration", config_text(result.config)
    measured, resources, is_exact = result.measurement, result.resources, result.tier == "exact"
    if measured is not None:
        interval = f"95 % interval {interval_text(measured.low_us, measured.high_us)}"
        if is_exact:
            yield "time", f"{time_text(measured.time_us)} ({interval})"
            yield "rate", result.workrate.text(measured.time_us, result.device)
        else:
            where = source_text(result.tuned_on, result.source)
            yield "time there", f"{time_text(measured.time_us)} on {where} ({interval})"
    if (compared := result.compared) is not None and compared.serves:
        low, high = compared.interval
        yield "expected", f"{compared.ratio:.2f} times as long as the {compared.base_tier} ({low:.2f} to {high:.2f})"
    if resources is not None and result.geometry is not None:
        smem_bytes = resources.static_smem_bytes + result.geometry.dynamic_smem_bytes
        yield "registers", f"{resources.registers} a thread, {resources.spill_bytes} B spilled"
        yield "shared memory", f"{smem_bytes:,} B a block"
    if result.occupancy is not None:
        yield "occupancy", occupancy_text(result.device, result.occupancy)


def best_document(result: BestResult) -> dict[str, Any]:
    """Return everything that is known of the configuration, for JSON."""
    from autotile.serving.description import resources_document

    measured = result.measurement
    return {
        "kernel": result.kernel,
        "problem": dict(result.problem.sizes),
        "dtype": result.problem.dtype,
        "tier": result.tier,
        "config": dict(result.config),
        "time_us": result.time_us,
        "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
        "device": {"name": result.device.name, "source": result.device.source},
        "source": result.source,
        "tuned_on": result.tuned_on,
        "tuned_at": result.tuned_at.isoformat() if result.tuned_at is not None else None,
        "contenders": [contender.to_json() for contender in result.contenders],
        "differences": [list(difference) for difference in result.differences],
        "aged": list(result.aged),
        "shipped": result.shipped,
        "bundle": result.bundle or None,
        "resources": resources_document(result.resources, result.geometry, result.occupancy),
        "compared": result.compared.to_json() if result.compared is not None else None,
        "unapplied": result.unapplied or None,
        "explain": result.explanation,
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile best sgemm_2d M=4096 N=4096 K=4096",
            "autotile best matmul M=1000 N=1000 K=1000 EMULATE=0 --dtype float32",
            "autotile best sgemm_2d M=1000 N=1000 K=1000 --device rtx-3090 --json",
        )
    )(best)
