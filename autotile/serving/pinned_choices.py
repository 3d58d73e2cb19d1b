"""Pinned choices as data: what is served for each problem, as JSON for people and programs.

Equal choices make equal files. They are read by a declared schema, and hold nothing that is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import Bytes, Count, Format, Name, Text, canonical_json, decode_json, read_regular
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Problem
from autotile.database.keys import key_of
from autotile.errors import DataError, PinError
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Tier

PIN_FORMAT = 1
MAX_BYTES = 64 * 2**20
"""Maximum size of the JSON: 60,000 choices of a kilobyte."""
MAX_CHOICES = 60_000

Device = tuple[str, str, int, int]
Request = tuple[str, str, str, str, bool, Device]
"""Operation, kernel, dtype, sizes as JSON, whether a library may compute it, and the device."""


@dataclass(frozen=True, slots=True)
class PinnedChoice:
    """What is served for a problem on a kind of GPU.

    Attributes
    ----------
    operation
        Name of the operation that was asked for; empty if a kernel was.
    sizes, dtype
        The problem, with flags; of an operation by its names, with conditions.
    library_allowed
        Whether a library might compute the operation.
    gpu_name, compute_capability, sm_count, smem_per_block_optin_bytes
        The GPU.
    source
        Whether a kernel or a library computes it.
    kernel
        Name of the kernel or the library.
    kernel_sizes
        Sizes by the kernel's names; empty for a library.
    template_hash, space_hash, options, nvrtc_version
        Version of the kernel and of its compiler; empty for a library.
    library_version
        Version of the library; empty for a kernel.
    config, tier
        The configuration, and how it was found.
    """

    operation: Name
    sizes: Mapping[Name, Count]
    dtype: Name
    library_allowed: bool
    gpu_name: Name
    compute_capability: Name
    sm_count: Count
    smem_per_block_optin_bytes: Bytes
    source: Literal["kernel", "library"]
    kernel: Name
    kernel_sizes: Mapping[Name, Count]
    template_hash: Name
    space_hash: Name
    options: tuple[Text, ...]
    nvrtc_version: Name
    library_version: Name
    config: Config
    tier: Tier

    @classmethod
    def of(
        cls, served: BoundKernel, nvrtc_version: str, *, requested: Problem | None = None, library: bool = True
    ) -> PinnedChoice:
        """Return the choice of a served kernel.

        Parameters
        ----------
        served
            The kernel, or the library.
        nvrtc_version
            Version of the compiler.
        requested
            Problem of the operation that it is served for; None if the kernel was asked for.
        library
            Whether a library might compute the operation.
        """
        is_library = getattr(served, "is_library", False)
        problem = served.problem
        key = key_of(served.definition, problem, served.device, nvrtc_version=nvrtc_version, l2_mode="cold")
        given = requested or problem
        return cls(
            operation=requested.kernel if requested is not None else "",
            sizes=dict(given.sizes),
            dtype=given.dtype,
            library_allowed=library,
            gpu_name=key.gpu_name,
            compute_capability=key.compute_capability,
            sm_count=key.sm_count,
            smem_per_block_optin_bytes=key.smem_per_block_optin_bytes,
            source="library" if is_library else "kernel",
            kernel=served.kernel,
            kernel_sizes={} if is_library else dict(problem.sizes),
            template_hash="" if is_library else key.template_hash,
            space_hash="" if is_library else key.space_hash,
            options=() if is_library else key.options,
            nvrtc_version="" if is_library else key.nvrtc_version,
            library_version=str(getattr(served, "version", "")) if is_library else "",
            config=dict(served.config),
            tier=served.tier,
        )

    @property
    def request(self) -> Request:
        """What was asked for, as a key."""
        device = self.gpu_name, self.compute_capability, self.sm_count, self.smem_per_block_optin_bytes
        asked = "" if self.operation else self.kernel
        return self.operation, asked, self.dtype, canonical_json(dict(self.sizes)), self.library_allowed, device

    def __str__(self) -> str:
        """Return the problem as text."""
        return str(Problem(self.operation or self.kernel, self.sizes, self.dtype))


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal[1]
    choices: Annotated[tuple[PinnedChoice, ...], msgspec.Meta(max_length=MAX_CHOICES)]


def write_choices(choices: Iterable[PinnedChoice]) -> str:
    """Return choices as JSON, in an order of their own, each on lines of its own."""
    rows = sorted((asdict(choice) for choice in choices), key=canonical_json)
    return json.dumps({"choices": rows, "format": PIN_FORMAT}, indent=1, sort_keys=True, allow_nan=False) + "\n"


def parse_choices(text: bytes | str, origin: str) -> list[PinnedChoice]:
    """Parse the JSON of `write_choices`.

    Parameters
    ----------
    origin
        Where it comes from, for messages.

    Raises
    ------
    PinError
        It is malformed, of another format, or names a problem twice.
    """
    try:
        version = decode_json(text, Format).format
        if version != PIN_FORMAT:
            raise PinError(f"{origin} has format {version!r:.40}, expected {PIN_FORMAT}: it needs another autotile")
        choices = list(decode_json(text, _Document).choices)
    except DataError as error:
        raise PinError(f"{origin} holds no pinned choices: {error}; delete it, and pin again") from None
    if len({choice.request for choice in choices}) != len(choices):
        raise PinError(f"{origin} names a problem twice; delete one of the choices")
    return choices


def read_choices(path: Path) -> list[PinnedChoice]:
    """Read a file of choices; errors are those of `parse_choices`, or that it cannot be read."""
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise PinError(f"{path} cannot be read: {error.strerror}") from None
    return parse_choices(data, str(path))


def request_of(
    kernel: str, problem: Problem, device: DeviceProperties, *, operation: str = "", library: bool = True
) -> Request:
    """Return the key of the choice for a problem; parts are those of `PinnedChoice.request`."""
    place = device.name, device.compute_capability, device.sm_count, device.smem_per_block_optin_bytes
    return operation, kernel, problem.dtype, canonical_json(dict(problem.sizes)), library, place
