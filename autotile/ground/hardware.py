"""What a CUDA device can hold and how fast it can go: one frozen value, wherever the figures came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

from autotile.ground.frozen import dataclass

Source = Literal["cuda", "profile", "replayed"]


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Limits and rates of one GPU.

    The limits are the ones that the CUDA occupancy rules are stated in; a live device, a profile file and a
    recording all fill the same fields.
    """

    name: str
    compute_capability: str
    """Such as ``"9.0"``."""
    sm_count: int
    warp_size: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_block: int
    registers_per_sm: int
    max_registers_per_thread: int
    register_unit: int
    """Registers are handed out to a warp (compute capability 2 and later) or a block in multiples of this."""
    warp_unit: int
    """Warps of a block are rounded up to a multiple of this when registers are handed out."""
    smem_per_block_bytes: int
    """Shared memory a block may use without opting in."""
    smem_per_block_optin_bytes: int
    """Shared memory a block may use after opting in to more dynamic shared memory."""
    smem_per_sm_bytes: int
    smem_reserved_per_block_bytes: int
    """What the system keeps of every block's shared memory (1 KiB from compute capability 8.0)."""
    smem_unit_bytes: int
    """Shared memory is handed out in multiples of this."""
    max_block_dim: tuple[int, int, int]
    max_grid_dim: tuple[int, int, int]
    l2_bytes: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    clock_mhz: float
    """Highest SM clock."""
    fp32_lanes_per_sm: int
    """fp32 fused multiply-adds that an SM can start in one cycle."""
    source: Source = "cuda"
    driver: str = ""

    @property
    def architecture(self) -> str:
        """The compile target, such as ``"sm_90"``."""
        return "sm_" + self.compute_capability.replace(".", "")

    @property
    def max_warps_per_sm(self) -> int:
        """Warps that an SM can hold."""
        return self.max_threads_per_sm // self.warp_size

    @property
    def peak_fp32_flops_per_s(self) -> float:
        """Two operations (multiply and add) a lane and cycle, at the highest clock."""
        return 2.0 * self.sm_count * self.fp32_lanes_per_sm * self.clock_mhz * 1e6

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of every field."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceProperties:
        """Inverse of `to_json`.

        Raises
        ------
        ValueError
            A field is missing.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in data:
                value = data[field.name]
                values[field.name] = tuple(value) if isinstance(value, list) else value
            elif field.name not in ("source", "driver"):
                raise ValueError(f"device properties lack {field.name!r}")
        return cls(**values)


EXPRESSION_NAMES = tuple(f.name for f in fields(DeviceProperties) if f.type in ("int",))
"""The ``device.*`` names that an expression may use: every whole-number property."""
