"""Keys of tuning results, and the hash of those parts of a search space that give a configuration its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from autotile.core.device import DeviceProperties
from autotile.core.documents import Bytes, Count, JsonObject, Name, Text, attributes, json_hash
from autotile.core.model import L2Mode, Problem
from autotile.core.text import sizes_text, source_text
from autotile.cuda.toolchain import installed_nvcc
from autotile.cuda.toolchain import nvrtc_version as installed_nvrtc
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Operation
from autotile.kernel.spec import KernelSpec, Step

ResultSource = Literal["cuda", "replayed"]


class TuningKey(msgspec.Struct, frozen=True):
    """The key of a study: results are comparable, and interchangeable for serving, exactly if their keys are equal.

    The driver is not part of the key: it is recorded with each run, and a different one only causes a warning.
    Fields that an imported result does not state are ``""`` and ``0``.
    """

    kernel: Name
    template_hash: Name
    """SHA-256 of the template and of the author's files that it includes."""
    space_hash: Name
    """See `space_hash`."""
    options: tuple[Text, ...]
    """NVRTC options in addition to those that autotile always passes."""
    dtype: Name
    sizes: Mapping[Name, Count]
    gpu_name: Name
    compute_capability: Annotated[str, Meta(pattern=r"\A(?:[0-9]{1,3}\.[0-9]{1,3})?\Z")]
    sm_count: Count
    smem_per_block_optin_bytes: Bytes
    nvrtc_version: Name
    l2_mode: L2Mode
    source: ResultSource = "cuda"
    """``"replayed"`` for times from a recording, which never mix with times that were measured."""

    @classmethod
    def for_device(cls, problem: Problem, device: DeviceProperties, **others: Any) -> TuningKey:
        """Return the key of a problem on a device, with the fields that neither of them states."""
        sizes = dict(problem.sizes)
        return cls(kernel=problem.kernel, dtype=problem.dtype, sizes=sizes, **device_fields(device), **others)

    @property
    def digest(self) -> str:
        """SHA-256 of all fields; the order of the sizes does not change it."""
        return json_hash(self.to_json())

    @property
    def version(self) -> tuple[str, str]:
        """Version of the kernel, as `version_of`."""
        return self.template_hash, self.space_hash

    @property
    def problem(self) -> Problem:
        """Kernel, sizes and dtype."""
        return Problem(self.kernel, self.sizes, self.dtype)

    @property
    def device_label(self) -> str:
        """Name of the device, with ``(replayed)`` if the times were replayed from a recording."""
        return source_text(self.gpu_name, self.source)

    def to_json(self) -> JsonObject:
        """Return every field as a JSON object."""
        values = {name: getattr(self, name) for name in _KEY_FIELDS}  # `asdict` copies each, which takes longer
        return values | {"options": list(self.options), "sizes": dict(self.sizes)}


def device_fields(device: DeviceProperties) -> JsonObject:
    """Return the fields of a key that a device gives."""
    return {
        "gpu_name": device.name,
        **attributes(device, "compute_capability", "sm_count", "smem_per_block_optin_bytes"),
        "source": "replayed" if device.source == "replayed" else "cuda",
    }


_KEY_FIELDS = TuningKey.__struct_fields__


def key_differences(tuned: TuningKey, requested: TuningKey) -> tuple[tuple[str, str, str], ...]:
    """Return the fields in which two keys differ, each with both values as text."""

    def shown(value: object) -> str:
        if isinstance(value, Mapping):
            return sizes_text(value)
        return " ".join(value) if isinstance(value, tuple) else str(value)

    pairs = ((name, getattr(tuned, name), getattr(requested, name)) for name in _KEY_FIELDS)
    return tuple((name, shown(a), shown(b)) for name, a, b in pairs if a != b)


def key_of(
    kernel: Kernel, problem: Problem, device: DeviceProperties, *, nvrtc_version: str | None = None, l2_mode: L2Mode
) -> TuningKey:
    """Return the key of a kernel's results for a problem on a device, with the installed NVRTC if none is given."""
    if kernel.spec.build.compiler == "nvcc":
        nvrtc_version = f"nvcc {installed_nvcc()}".strip()
    return TuningKey.for_device(
        problem,
        device,
        template_hash=kernel.source_hash,
        space_hash=space_hash(kernel.spec),
        options=kernel.spec.options,
        nvrtc_version=installed_nvrtc() if nvrtc_version is None else nvrtc_version,
        l2_mode=l2_mode,
    )


def library_key(
    operation: Operation,
    problem: Problem,
    device: DeviceProperties,
    library: str,
    version: str,
    *,
    nvrtc_version: str | None = None,
    l2_mode: L2Mode = "cold",
) -> TuningKey:
    """Return the key of a library's results for a problem of an operation on a device.

    A library is stored as a kernel of one configuration, which has no parameters. The conditions of the problem limit
    the kernels only, and are not part of the key. Times of another version of the library are of another study.
    """
    return TuningKey.for_device(
        Problem(f"{operation.name}:{library}", operation.without_conditions(problem), problem.dtype),
        device,
        template_hash=operation.digest,
        space_hash=json_hash({"library": library, "version": version}),
        options=(),
        nvrtc_version=installed_nvrtc() if nvrtc_version is None else nvrtc_version,
        l2_mode=l2_mode,
    )


def version_of(kernel: Kernel) -> tuple[str, str]:
    """Return the hashes of a kernel's source and of its search space."""
    return kernel.source_hash, space_hash(kernel.spec)


def space_hash(spec: KernelSpec) -> str:
    """Return the hash of the parts of a search space that give a measured configuration its meaning.

    docs/internals.md lists them. Spaces and redundant parentheses in expressions do not change it.
    """

    def launch(step: Step) -> JsonObject:
        smem_bytes = step.launch.dynamic_smem_bytes
        return {
            "entry": step.entry,
            "block": [expression.canonical for expression in step.launch.block],
            "grid": [expression.canonical for expression in step.launch.grid],
            "dynamic_smem_bytes": smem_bytes.canonical if smem_bytes else "0",
            **({"cooperative": True} if step.launch.is_cooperative else {}),
        }

    passed = tuple(argument.name for argument in spec.arguments if argument.is_passed)
    if spec.has_one_launch and spec.steps[0].arguments == passed:  # it has a form of its own
        launches = launch(spec.steps[0])
    else:
        launches = {
            "steps": [
                {
                    **launch(step),
                    "arguments": list(step.arguments),
                    **({"when": step.when.canonical} if step.when is not None else {}),
                    **({"times": step.times.canonical} if step.times is not None else {}),
                    **({"swap": list(step.swap)} if step.swap else {}),
                }
                for step in spec.steps
            ]
        }
    meaning = {
        "options": list(spec.options),
        **spec.build.meaning(),
        "sizes": sorted(spec.sizes),
        "parameters": sorted(spec.default),
        **launches,
        "arguments": [argument.meaning() for argument in spec.arguments],
        **spec.reference.meaning(),
        **({"architecture": spec.architecture} if spec.architecture is not None else {}),
    }
    return json_hash(meaning)


L2_TEXTS: Mapping[L2Mode, str] = MappingProxyType({"cold": "", "hot": " hot L2", "eager": " launched by the host"})
"""How launches were repeated, as it follows the problem."""

STUDY_HEADINGS = ("kernel", "problem", "device")


def study_columns(key: TuningKey) -> tuple[str, str, str]:
    """Format what identifies a study for a person, see `STUDY_HEADINGS`."""
    return key.kernel, f"{sizes_text(key.sizes)} {key.dtype}{L2_TEXTS[key.l2_mode]}", key.device_label


def study_document(key: TuningKey) -> JsonObject:
    """Return the key of a study as JSON values, with the device as an object."""
    return {
        **key.problem.document(),
        "device": {"name": key.gpu_name, "source": key.source},
        "source": key.source,
        "l2": key.l2_mode,
    }


def versioned_document(key: TuningKey) -> JsonObject:
    """Return the key of a study as JSON values, with the versions of compiler and template."""
    return {**study_document(key), "device": key.gpu_name, **attributes(key, "nvrtc_version", "template_hash")}
