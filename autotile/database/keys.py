"""What a measured result belongs to: the key of a study, and the hash of what gives a configuration its meaning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import L2Mode, Problem, canonical_json
from autotile.core.text import sizes_text
from autotile.kernel.library import Kernel
from autotile.kernel.spec import KernelSpec

ResultSource = Literal["cuda", "replayed"]


@dataclass(frozen=True, slots=True)
class TuningKey:
    """Results under equal keys may be compared and served for one another; under different keys they may not.

    The driver is no part of it: it is recorded with each run, and a change is worth a warning only.
    Unknown figures of an imported result are ``""`` and ``0``.
    """

    kernel: str
    template_hash: str
    """SHA-256 of the template with the files that it includes in quotes."""
    space_hash: str
    """See `space_hash`."""
    options: tuple[str, ...]
    """NVRTC options beyond the ones that autotile always gives."""
    dtype: str
    sizes: Mapping[str, int]
    gpu_name: str
    compute_capability: str
    sm_count: int
    smem_per_block_optin_bytes: int
    nvrtc_version: str
    l2_mode: L2Mode
    source: ResultSource = "cuda"
    """``"replayed"`` for what was read from a recording, so that it never mixes with what was measured here."""

    @classmethod
    def for_device(
        cls,
        problem: Problem,
        device: DeviceProperties,
        *,
        template_hash: str,
        space_hash: str,
        options: Iterable[str],
        nvrtc_version: str,
        l2_mode: L2Mode,
        source: ResultSource = "cuda",
    ) -> TuningKey:
        """Key of a problem on a device."""
        return cls(
            kernel=problem.kernel,
            template_hash=template_hash,
            space_hash=space_hash,
            options=tuple(options),
            dtype=problem.dtype,
            sizes=dict(problem.sizes),
            gpu_name=device.name,
            compute_capability=device.compute_capability,
            sm_count=device.sm_count,
            smem_per_block_optin_bytes=device.smem_per_block_optin_bytes,
            nvrtc_version=nvrtc_version,
            l2_mode=l2_mode,
            source=source,
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the whole key, equal for equal keys whatever the order of the sizes."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    @property
    def problem(self) -> Problem:
        """The problem that the key is about."""
        return Problem(self.kernel, self.sizes, self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of every field."""
        return asdict(self) | {"options": list(self.options)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TuningKey:
        """Inverse of `to_json`; entries that are no fields of a key are passed over.

        Raises
        ------
        KeyError
            A field is missing.
        """
        values = {field.name: data[field.name] for field in fields(cls)}
        return cls(**values | {"options": tuple(data["options"]), "sizes": dict(data["sizes"])})


def key_differences(tuned: TuningKey, asked: TuningKey) -> tuple[tuple[str, str, str], ...]:
    """Fields in which two keys differ, each with its value in the first and in the second, as text."""
    pairs = ((f.name, getattr(tuned, f.name), getattr(asked, f.name)) for f in fields(TuningKey))
    return tuple((name, _text(a), _text(b)) for name, a, b in pairs if a != b)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={size}" for name, size in value.items())
    return " ".join(value) if isinstance(value, tuple) else str(value)


def key_of(
    kernel: Kernel, problem: Problem, device: DeviceProperties, *, nvrtc_version: str, l2_mode: L2Mode
) -> TuningKey:
    """The key under which a kernel's results for a problem on a device are kept."""
    return TuningKey.for_device(
        problem,
        device,
        template_hash=kernel.source_hash,
        space_hash=space_hash(kernel.spec),
        options=kernel.spec.options,
        nvrtc_version=nvrtc_version,
        l2_mode=l2_mode,
        source="replayed" if device.source == "replayed" else "cuda",
    )


def space_hash(spec: KernelSpec) -> str:
    """Hash what gives a measured configuration of a space its meaning.

    That is the entry point, the launch, the arguments, the reference, the options, and the names of parameters and
    sizes. The lists of values, the rules, the limits, the default and the estimates of static shared memory and
    registers are left out: they only say which configurations are tried, so changing them must not invalidate what was
    measured.

    Returns
    -------
    str
        SHA-256 in hexadecimal; spaces and needless parentheses in expressions do not change it.
    """
    launch = spec.launch
    meaning = {
        "entry": spec.entry,
        "options": list(spec.options),
        "sizes": sorted(spec.sizes),
        "parameters": sorted(parameter.name for parameter in spec.parameters),
        "block": [e.canonical for e in launch.block],
        "grid": [e.canonical for e in launch.grid],
        "dynamic_smem_bytes": launch.dynamic_smem_bytes.canonical if launch.dynamic_smem_bytes else "0",
        "arguments": [argument.meaning() for argument in spec.arguments],
        "outputs": {name: e.canonical for name, e in spec.reference.outputs.items()},
        "reduction": spec.reference.reduction.canonical,
        "tolerance": spec.reference.tolerance,
        **({"architecture": spec.architecture} if spec.architecture is not None else {}),
    }
    return hashlib.sha256(canonical_json(meaning).encode()).hexdigest()


def key_text(key: TuningKey) -> str:
    """What was tuned of a kernel: sizes, dtype, and the L2 mode where it is not the usual one."""
    return f"{sizes_text(key.sizes)} {key.dtype}{' hot L2' if key.l2_mode == 'hot' else ''}"
