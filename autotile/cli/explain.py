"""``autotile explain``: one configuration on one device."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.arguments import DatabaseOption, DeviceOption, DtypeOption, JsonOption, KernelArgument, LibraryOption
from autotile.cli.best import contenders_table
from autotile.cli.occupancy import limits_table, occupancy_values
from autotile.cli.output import NOTHING_FOUND, examples, notice, show
from autotile.cli.tables import below, device_document, facts, table, title
from autotile.core.model import LaunchGeometry, Resources
from autotile.core.text import device_text, occupancy_text

if TYPE_CHECKING:
    from autotile.api.explanation import Explanation, OperationExplanation
    from autotile.kernel.launch import LaunchData


def explain(
    kernel: KernelArgument,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Parameters and sizes in any order, such as BM=64 M=4096; the others have their defaults.",
            show_default=False,
        ),
    ] = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    database: DatabaseOption = None,
    library: LibraryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Explain one configuration on one device.

    Shows which rules and limits it meets, its launch geometry, registers and shared memory, and what limits its
    occupancy. It is compiled if NVRTC is installed; no GPU is needed. Exits with 1 if the configuration cannot be used.

    For an operation, such as matmul: shows which kernel or library computes a problem, and why.
    """
    from autotile.api import inspection
    from autotile.api.explanation import OperationExplanation
    from autotile.cli.assignments import read_sizes, read_values
    from autotile.kernel.library import load_kernel
    from autotile.kernel.operation import find_operation

    is_operation = find_operation(kernel) is not None
    words = assignments or []
    values = read_sizes(words) if is_operation else read_values(load_kernel(kernel).spec, words)
    explanation = inspection.explain(kernel, values, dtype=dtype, device=device, database=database, library=library)
    for text in explanation.notices:
        notice(text)
    if isinstance(explanation, OperationExplanation):
        show(explanation, operation_table, operation_document, as_json=as_json)
        return
    show(explanation, explanation_table, explanation_document, as_json=as_json)
    if explanation.fault:
        raise typer.Exit(NOTHING_FOUND)


def operation_table(explanation: OperationExplanation) -> RenderableType:
    """Render who computes a problem of an operation, why, and the contenders."""
    return Group(
        title(f"{explanation.problem} on {device_text(explanation.device)}"),
        facts([("computed by", explanation.served), ("tier", explanation.tier)]),
        below(contenders_table(explanation.contenders)),
        below(explanation.text),
    )


def operation_document(explanation: OperationExplanation) -> dict[str, Any]:
    """Return the explanation of an operation for JSON."""
    return {
        "operation": explanation.problem.kernel,
        "problem": dict(explanation.problem.sizes),
        "dtype": explanation.problem.dtype,
        "device": device_document(explanation.device),
        "served": explanation.served,
        "library": explanation.is_library,
        "tier": explanation.tier,
        "config": dict(explanation.config),
        "contenders": [contender.to_json() for contender in explanation.contenders],
        "kernels": {name: dict(sizes) for name, sizes in explanation.kernels.items()},
        "explain": explanation.text,
    }


def explanation_table(explanation: Explanation) -> RenderableType:
    """Render the verdict and the launch, the checks, and the limits of the occupancy."""
    device = explanation.device
    parts: list[RenderableType] = [
        title(f"{explanation.problem} on {device_text(device)}"),
        facts(explanation.facts()),
        below(_checks_table(explanation)),
    ]
    if explanation.block is not None and explanation.occupancy is not None:
        source = "compiled" if explanation.resources is not None else "declared by the search-space file"
        result = facts([("resources", source), ("occupancy", occupancy_text(device, explanation.occupancy))])
        parts += [below(limits_table(device, explanation.block, explanation.occupancy)), below(result)]
    return Group(*parts)


def _checks_table(explanation: Explanation) -> Table:
    checks = table("check", "name", "met", "detail")
    for check in explanation.checks:
        met, style = ("yes", None) if check.holds else ("no", "bold red")
        checks.add_row(check.kind, check.name, met, check.detail, style=style)
    return checks


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation for JSON, with null for what is unknown."""
    device, occupancy = explanation.device, explanation.occupancy
    compiled = explanation.resources is not None
    return {
        "kernel": explanation.problem.kernel,
        "problem": dict(explanation.problem.sizes),
        "dtype": explanation.problem.dtype,
        "device": {**device_document(device), "compute_capability": device.compute_capability},
        "config": dict(explanation.config),
        "valid": not explanation.fault,
        "fault": explanation.fault,
        "checks": [asdict(check) for check in explanation.checks],
        "geometry": _geometry_document(explanation.geometry),
        **_steps_document(explanation),
        **_data_document(explanation.data),
        "resources": _resources_document(explanation.resources),
        "not_compiled": explanation.not_compiled,
        "occupancy": {**occupancy_values(occupancy), "compiled": compiled} if occupancy is not None else None,
    }


def _steps_document(explanation: Explanation) -> dict[str, Any]:
    """Return the launches of a call and the compiled steps, where a call is more than one launch."""
    if len(explanation.launches) < 2:
        return {}
    return {
        "launches": [
            {"step": one.step, **(_geometry_document(one.geometry) or {}), "arguments": list(one.arguments)}
            for one in explanation.launches
        ],
        "steps": [
            {
                "entry": step.entry,
                **(_geometry_document(step.geometry) or {}),
                "resources": _resources_document(step.resources),
                "occupancy": occupancy_values(step.occupancy),
            }
            for step in explanation.steps
        ],
    }


def _geometry_document(geometry: LaunchGeometry | None) -> dict[str, Any] | None:
    if geometry is None:
        return None
    return {
        "grid": list(geometry.grid),
        "block": list(geometry.block),
        "blocks": geometry.blocks,
        "threads": geometry.threads,
        "dynamic_smem_bytes": geometry.dynamic_smem_bytes,
    }


def _data_document(data: LaunchData | None) -> dict[str, Any]:
    if data is None:
        return {"workspaces": None, "tensor_maps": None}
    return {
        "workspaces": [{**asdict(workspace), "bytes": workspace.size_bytes} for workspace in data.workspaces],
        "tensor_maps": [asdict(tensor_map) for tensor_map in data.tensor_maps],
    }


def _resources_document(resources: Resources | None) -> dict[str, Any] | None:
    if resources is None:
        return None
    return {
        "registers": resources.registers,
        "static_smem_bytes": resources.static_smem_bytes,
        "stack_bytes": resources.stack_bytes,
        "spill_bytes": resources.spill_bytes,
        "spill_store_bytes": resources.spill_store_bytes,
        "spill_load_bytes": resources.spill_load_bytes,
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile explain matmul_tiled TILE=32 --device rtx-3060",
            "autotile explain matmul M=1000 N=1000 K=1000 --dtype float32",
            "autotile explain sgemm_2d BM=128 BN=128 M=4096 N=4096 K=4096 --json",
        )
    )(explain)
