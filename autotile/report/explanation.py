"""One configuration on one device: which rules and limits it meets, what it uses, how many blocks an SM holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.tables import below, facts, table, title
from autotile.core.device import DeviceProperties
from autotile.core.model import LaunchGeometry, Problem, Resources, Value, config_text
from autotile.core.text import bytes_text, device_text
from autotile.kernel.arguments import Workspace
from autotile.kernel.launch import LaunchData
from autotile.kernel.tensor_maps import TensorMap
from autotile.report.occupancy import OccupancyReport, occupancy_document, occupancy_sentence, occupancy_table

CheckKind = Literal["device", "value", "rule", "heuristic", "limit", "compiled"]


@dataclass(frozen=True, slots=True)
class Check:
    """One condition that a configuration has to meet, or what the search asks of it before it tries it (heuristic)."""

    kind: CheckKind
    name: str
    holds: bool
    detail: str
    """A rule's expression; else what is wrong, empty where it holds."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of a configuration without running it.

    Attributes
    ----------
    checks
        Values, rules and limits in the order they are applied, and what the compiled resources give.
    fault
        Why it cannot be used: the rule or limit that it breaks, or the compiler's error; empty where it can.
    geometry
        None where the launch cannot be worked out.
    resources
        What the compiler says; None where it was not compiled, and ``not_compiled`` says why.
    occupancy
        From the compiled resources, else from what the search-space file declares.
    data
        Workspaces and tensor maps; None where they cannot be worked out.
    """

    problem: Problem
    device: DeviceProperties
    config: Mapping[str, Value]
    checks: tuple[Check, ...]
    fault: str
    geometry: LaunchGeometry | None
    resources: Resources | None
    not_compiled: str
    occupancy: OccupancyReport | None
    data: LaunchData | None

    def to_json(self) -> dict[str, Any]:
        """Everything, with null where something is not known."""
        geometry, resources = self.geometry, self.resources
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": {
                "name": self.device.name,
                "source": self.device.source,
                "compute_capability": self.device.compute_capability,
            },
            "config": dict(self.config),
            "valid": not self.fault,
            "fault": self.fault,
            "checks": [
                {"kind": check.kind, "name": check.name, "holds": check.holds, "detail": check.detail}
                for check in self.checks
            ],
            "geometry": {
                "grid": list(geometry.grid),
                "block": list(geometry.block),
                "blocks": geometry.blocks,
                "threads": geometry.threads,
                "dynamic_smem_bytes": geometry.dynamic_smem_bytes,
            }
            if geometry is not None
            else None,
            "workspaces": [{**asdict(each), "bytes": each.size_bytes} for each in self.data.workspaces]
            if self.data is not None
            else None,
            "tensor_maps": [asdict(each) for each in self.data.tensor_maps] if self.data is not None else None,
            "resources": {
                "registers": resources.registers,
                "static_smem_bytes": resources.static_smem_bytes,
                "stack_bytes": resources.stack_bytes,
                "spill_bytes": resources.spill_bytes,
                "spill_store_bytes": resources.spill_store_bytes,
                "spill_load_bytes": resources.spill_load_bytes,
            }
            if resources is not None
            else None,
            "not_compiled": self.not_compiled,
            "occupancy": occupancy_document(self.occupancy.found) | {"compiled": resources is not None}
            if self.occupancy is not None
            else None,
        }

    def __rich__(self) -> RenderableType:
        """Verdict, checks, launch and resources, occupancy."""
        parts: list[RenderableType] = [
            title(f"{self.problem} on {device_text(self.device)}"),
            facts(self._facts()),
            below(self._checks()),
        ]
        if self.occupancy is not None:
            used = self.occupancy
            shown = occupancy_table(self.device, used.threads, used.registers, used.smem_bytes, used.found)
            source = "compiled" if self.resources is not None else "declared by the search-space file"
            answer = facts([("resources", source), ("occupancy", occupancy_sentence(self.device, used.found))])
            parts += [below(shown), below(answer)]
        return Group(*parts)

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "configuration", config_text(self.config)
        known = "valid" if self.resources is not None else "valid, as far as is known without compiling"
        yield "verdict", self.fault or known
        if self.geometry is not None:
            grid, block = (_by(dims) for dims in (self.geometry.grid, self.geometry.block))
            yield "grid", f"{grid}: {self.geometry.blocks:,} blocks"
            yield "block", f"{block}: {self.geometry.threads:,} threads"
        if self.resources is not None:
            yield "registers", f"{self.resources.registers} a thread"
            yield "spills", f"{self.resources.spill_bytes:,} B"
            yield "shared memory", self._shared_memory(self.resources)
        else:
            yield "not compiled", self.not_compiled
        if self.data is not None:
            yield from map(_workspace_fact, self.data.workspaces)
            yield from map(_tensor_map_fact, self.data.tensor_maps)

    def _shared_memory(self, resources: Resources) -> str:
        dynamic = self.geometry.dynamic_smem_bytes if self.geometry is not None else 0
        return f"{resources.static_smem_bytes:,} B static, {dynamic:,} B dynamic"

    def _checks(self) -> Table:
        shown = table("check", "name", "met", "detail")
        for check in self.checks:
            shown.add_row(
                check.kind,
                check.name,
                "yes" if check.holds else "no",
                check.detail,
                style=None if check.holds else "bold red",
            )
        return shown


def _workspace_fact(workspace: Workspace) -> tuple[str, str]:
    if not workspace.size_bytes:
        return "workspace", f"{workspace.name}: none for this configuration"
    zeroed = ", zero before and after" if workspace.zeroed else ""
    shape = f"{_by(workspace.shape)} {workspace.dtype}"
    return "workspace", f"{workspace.name}: {shape}, {bytes_text(workspace.size_bytes)}{zeroed}"


def _tensor_map_fact(tensor_map: TensorMap) -> tuple[str, str]:
    if tensor_map.is_absent:
        return "tensor map", f"{tensor_map.name}: none for this configuration"
    swizzle = f"{tensor_map.swizzle_bytes} B swizzle" if tensor_map.swizzle_bytes else "no swizzle"
    box = f"{tensor_map.buffer} in boxes of {_by(tensor_map.box)} {tensor_map.dtype}"
    return "tensor map", f"{tensor_map.name}: {box}, {swizzle}"


def _by(dimensions: tuple[int, ...]) -> str:
    return " x ".join(f"{dimension:,}" for dimension in dimensions)
