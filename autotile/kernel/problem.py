"""Problems (sizes and dtype): the devices that support them, the default where a file declares none, and rates."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from autotile.core.device import DeviceProperties, version_of
from autotile.core.dtypes import DTYPES, dtype_name
from autotile.core.model import Config, Problem, Sizes, Value, Values
from autotile.core.text import NOTHING, bandwidth_text, flops_text, percent_text
from autotile.errors import DeviceError, ProblemError, SpecError
from autotile.kernel.arguments import TENSOR_MAP_CAPABILITY
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import KernelSpec, Parameter, Rule

ARCHITECTURE = r"sm_(\d+)(\d)a?"
"""Pattern of an NVRTC target, such as ``sm_90`` or ``sm_90a``: major and one-digit minor compute capability."""

CAPABILITY = r"\d+\.\d"

CLUSTER_CAPABILITY = "9.0"
"""Thread block clusters: CUDA C++ Programming Guide, features per compute capability."""

_EMBEDDED = {"5.3", "6.2", "7.2", "8.7", "10.1", "11.0"}
"""Compute capabilities of Jetson and DRIVE (developer.nvidia.com/cuda-gpus)."""

MAX_SIZE = 2**31 - 1
"""By convention, sizes are passed to kernels as int32."""


def capability_of(architecture: str) -> str:
    """Return the compute capability of a target: ``"9.0"`` for ``sm_90a``."""
    match = re.fullmatch(ARCHITECTURE, architecture)
    if match is None:
        raise ValueError(f"{architecture!r} is not a target such as sm_90a")
    return f"{match[1]}.{match[2]}"


def is_below(capability: str, other: str) -> bool:
    """Return True if a compute capability is lower than another."""
    return version_of(capability) < version_of(other)


def runs_on(target: str, capability: str) -> bool:
    """Return True if a cubin for a target runs on a device of a compute capability.

    A cubin runs on devices of the same major version and the same or a higher minor version. A cubin with
    architecture-specific features, such as ``sm_90a``, and one for an embedded chip run on that compute capability
    only: CUDA C++ Programming Guide, binary compatibility.
    """
    built = capability_of(target)
    if target.endswith("a") or {built, capability} & _EMBEDDED:
        return built == capability
    return version_of(built)[0] == version_of(capability)[0] and not is_below(capability, built)


def unsupported_reason(spec: KernelSpec, device: DeviceProperties) -> str:
    """Return why a device cannot run the kernel in any configuration, as one line; "" if it can."""
    has = f"{device.name} has {device.compute_capability}"
    if spec.architecture is not None and capability_of(spec.architecture) != device.compute_capability:
        expected = capability_of(spec.architecture)
        return (
            f"{spec.name} is compiled for {spec.architecture} only, which requires compute capability {expected}, but "
            f"{has}; choose a device of capability {expected}, or another kernel"
        )
    minimum, purpose = _min_capability(spec)
    if not minimum or not is_below(device.compute_capability, minimum):
        return ""
    need = f"{spec.name} needs compute capability {minimum}{purpose}"
    return f"{need}, but {has}; choose a newer device, or another kernel"


def target_conflict(spec: KernelSpec) -> str:
    """Return why the declared target and compute capability exclude every device, as one line; "" if they do not."""
    minimum, purpose = _min_capability(spec)
    if spec.architecture is None or not minimum or not is_below(capability_of(spec.architecture), minimum):
        return ""
    needed = f"{minimum}{purpose or ', its minimum_compute_capability'}"
    return (
        f"{spec.architecture} runs on compute capability {capability_of(spec.architecture)} only, but the kernel "
        f"needs {needed}; no device meets both, so change one"
    )


def check_device(spec: KernelSpec, device: DeviceProperties) -> None:
    """Raise if a device cannot run the kernel."""
    reason = unsupported_reason(spec, device)
    if reason:
        raise DeviceError(reason)


def _min_capability(spec: KernelSpec) -> tuple[str, str]:
    """Return the lowest sufficient compute capability, "" if any is, and the features that need it if not declared."""
    declared = spec.minimum_compute_capability or ""
    features = {"tensor maps": TENSOR_MAP_CAPABILITY} if spec.tensor_maps else {}
    if not declared and any(step.launch.cluster for step in spec.steps):  # else the first gate checks configurations
        features["clusters"] = CLUSTER_CAPABILITY
    required = max(features.values(), key=version_of, default="")
    if required and (not declared or is_below(declared, required)):
        used = " and ".join(name for name, capability in features.items() if capability == required)
        return required, f" for its {used}"
    return declared, ""


_FLOAT64_BYTES = 8


def resolve_problem(spec: KernelSpec, sizes: Sizes, dtype: str | None = None, *, defaults: bool = False) -> Problem:
    """Check sizes and dtype, and complete them with the kernel's defaults, in the order of its file.

    Flags, and sizes with a default of 1, may be omitted; with ``defaults``, all may. The dtype is one of the kernel's
    element types, by name or as for `autotile.core.dtypes.dtype_name`; None for the first. Raise `ProblemError` if a
    size is missing, unknown, not positive or over 2**31 - 1, a flag is not 0 or 1, an array would be empty, or the
    kernel does not support the dtype.
    """
    problem = completed_problem(spec, sizes, dtype, defaults=defaults)
    names = spec.shaped(problem, spec.default).names
    for buffer in spec.buffers:
        shape = buffer.extents(names)
        if min(shape) < 1:
            raise ProblemError(f"{problem} is too small: its array {buffer.name} would have the shape {shape}")
    return problem


def completed_problem(
    declared: Any, sizes: Sizes, dtype: str | None, *, defaults: bool, conditions: tuple[str, ...] = ()
) -> Problem:
    """Check sizes and dtype against the names that a `KernelSpec` or an operation declares; see `resolve_problem`.

    ``conditions`` are flags that messages do not ask for. NumPy integers are accepted, and booleans for flags.
    """
    unknown = [name for name in sizes if name not in declared.sizes]
    missing = [name for name in declared.sizes if name not in sizes and not declared.is_optional(name)]
    if unknown or (missing and not defaults):
        expected = " ".join(f"{name}={value}" for name, value in declared.sizes.items() if name not in conditions)
        fault = f"has no size {unknown[0]!r}" if unknown else f"needs the size {missing[0]}"
        raise ProblemError(f"{declared.name} {fault}; give its sizes like {expected}")
    values: dict[str, int] = {}
    for name, default in declared.sizes.items():
        given: object = sizes.get(name, default)
        is_flag = name in declared.flags or name in conditions
        try:
            if isinstance(given, bool) and not is_flag:
                raise TypeError
            value = values[name] = operator.index(given)  # type: ignore[arg-type]
        except TypeError:
            what = "0 or 1" if is_flag else f"a whole number such as {default}"
            raise ProblemError(f"{'flag' if is_flag else 'size'} {name} is {given!r}, expected {what}") from None
        if is_flag and value not in (0, 1):
            raise ProblemError(f"flag {name} is {value}, expected 0 or 1")
        if not is_flag and not 1 <= value <= MAX_SIZE:
            raise ProblemError(f"size {name} is {value}, expected 1 to {MAX_SIZE}")
    chosen = declared.dtypes[0] if dtype is None else dtype_name(dtype)
    if chosen not in declared.dtypes:
        supported = ", ".join(declared.dtypes)
        raise ProblemError(f"{declared.name} does not support dtype {chosen!r}; it supports {supported}")
    return Problem(declared.name, values, chosen)


def size_distance(a: Sizes, b: Sizes) -> tuple[int, float]:
    """Return the distance of two problems of a kernel: differing flags, then doublings summed over all sizes.

    Names that only one of them has are ignored.
    """
    pairs = [(a[name], b[name]) for name in a.keys() & b.keys() if a[name] != b[name]]
    flags = sum(1 for pair in pairs if 0 in pair)  # a size is at least 1
    return flags, math.fsum(abs(math.log2(first / second)) for first, second in pairs if first and second)


def check_memory(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> None:
    """Raise if tuning a problem needs more memory than the device has, in the default configuration.

    Tuning holds each buffer once, a second copy of each input (to check that it is unchanged), and each output in
    float64.
    """
    needed_bytes = device.l2_bytes
    names = spec.shaped(problem, spec.default).names
    for buffer in spec.buffers:
        elements = math.prod(buffer.extents(names))
        element_bytes = DTYPES[buffer.element_type(problem.dtype, problem.sizes)].size_bytes
        needed_bytes += elements * element_bytes * (2 if buffer.is_initialized else 1)
        if buffer.is_written:
            needed_bytes += elements * _FLOAT64_BYTES
    if needed_bytes > device.memory_bytes:
        raise ProblemError(
            f"{problem} needs {needed_bytes / 2**30:,.1f} GiB of device memory to tune, "
            f"but {device.name} has {device.memory_bytes / 2**30:,.1f} GiB; choose smaller sizes"
        )


_MAX_STEPS = 200_000
"""Maximum number of partial configurations that are examined, which takes about a second."""
_MAX_THREADS = 1024
"""Threads of a block on every device since compute capability 2.0."""


def derived_default(
    parameters: Sequence[Parameter], rules: Sequence[Rule], blocks: Sequence[Sequence[Expression]], sizes: Sizes
) -> dict[str, Value] | None:
    """Return the first valid configuration in the order of distance from the middle of each parameter's values.

    The search is depth-first; a condition is checked as soon as its last parameter has a value. It meets the rules at
    the default sizes, except those about ``device.*``; and the product of the block dimensions of each step is 1 to
    1024 where it depends on parameters and sizes only. Return None where none is found in the first 200,000 steps. If a
    rule had no value for a configuration that was examined, its `SpecError` is raised instead.
    """
    position = {parameter.name: index for index, parameter in enumerate(parameters)}
    known = {*sizes, *position}
    due: list[list[Sequence[Expression]]] = [[] for _ in parameters]  # by the last parameter that each depends on
    rules_alone = [(rule.expression,) for rule in rules]
    for group in (*rules_alone, *blocks):
        names = frozenset().union(*(expression.names for expression in group))
        if names <= known:
            due[max((position[name] for name in names if name in position), default=0)].append(group)
    steps = 0
    failure: SpecError | None = None

    def holds(index: int, chosen: Values) -> bool:
        nonlocal failure
        values = {**sizes, **chosen}
        try:
            for group in due[index]:
                found = [expression.value(values) for expression in group]
                is_rule = group[0].kind == "boolean"
                if not (found[0] if is_rule else 1 <= math.prod(map(int, found)) <= _MAX_THREADS):
                    return False
        except SpecError as error:
            failure = failure or error
            return False
        return True

    def completions(index: int, chosen: dict[str, Value]) -> Iterator[dict[str, Value]]:
        nonlocal steps
        if index == len(parameters):
            yield dict(chosen)
            return
        name, values = parameters[index]
        middle = (len(values) - 1) // 2
        for place in sorted(range(len(values)), key=lambda place: abs(place - middle)):
            steps += 1
            if steps > _MAX_STEPS:
                return
            chosen[name] = values[place]
            if holds(index, chosen):
                yield from completions(index + 1, chosen)
            del chosen[name]

    found = next(completions(0, {}), None)
    if found is None and failure is not None:
        raise failure
    return found


_FP32 = "float32"


class Workrate(msgspec.Struct, frozen=True):
    """Amount of work of a problem, from which a time gives a rate."""

    flops: int | None
    """Floating-point operations; None if the search-space file does not state them."""
    bytes: int | None
    """Minimum memory traffic, reads and writes; None if the search-space file does not state it."""
    dtype: str
    """Element type. Where no unit is stated, only float32 rates are given in percent of a peak, that of fp32."""
    unit: str | None = None
    """Arithmetic unit that does the operations, one of `autotile.core.ceilings.ARITHMETIC`; None if the search-space
    file does not state it."""
    passes: int = 1
    """Operations of the unit for each one of `flops`."""

    @classmethod
    def of(cls, spec: KernelSpec, problem: Problem, config: Config | None = None) -> Workrate:
        """Evaluate the ``[work]`` section of a search-space file for a problem.

        Work that depends on parameters is known only with a configuration.
        """
        names = {**problem.names, **(config or {})}

        def amount(expression: Expression | None) -> int | None:
            """Return a value; None if there is none, a name is unknown, or the value overflows 64 bits."""
            if expression is None or not expression.names <= names.keys():
                return None
            with suppress(SpecError):
                return int(expression.evaluate(names))
            return None

        unit = None
        if spec.work.unit is not None:
            from autotile.core.ceilings import unit_ceiling

            unit = unit_ceiling(spec.work.unit, problem.dtype)
        return cls(amount(spec.work.flops), amount(spec.work.bytes), problem.dtype, unit, spec.work.passes)

    def text(self, time_us: float | None, device: DeviceProperties | None) -> str:
        """Format the rate that a time gives, relative to a peak: ``28.7 TFLOP/s (42.9 % of fp32 peak)``.

        Operations are compared with the peak of their unit by the figures of the device, fp32 where it is not stated,
        and bytes with the memory bandwidth, as in the roofline model. The larger fraction belongs to the limiter, so
        that rate is the one given; without a percentage if the device is unknown.
        """
        if time_us is None:
            return NOTHING
        from autotile.core.ceilings import FMA_FP32, arithmetic_peak, peak_text

        flops_per_s = self.flops / time_us * 1e6 if self.flops is not None else None
        bytes_per_s = self.bytes / time_us * 1e6 if self.bytes is not None else None
        unit = self.unit or FMA_FP32
        peak_flops_per_s = arithmetic_peak(device, unit) / self.passes if device else 0.0
        bandwidth = device.memory_bandwidth_bytes_per_s if device else 0.0
        compute = (flops_per_s or 0.0) / peak_flops_per_s if peak_flops_per_s > 0.0 else 0.0
        memory = (bytes_per_s or 0.0) / bandwidth if bandwidth > 0.0 else 0.0
        is_unknown = self.unit is not None and not peak_flops_per_s  # the memory may be further from its limit
        if flops_per_s is not None and (bytes_per_s is None or is_unknown or compute >= memory):
            peak = peak_text(unit, self.passes)
            if unit == FMA_FP32:
                peak = "fp32 peak" if compute <= 1.0 else "the CUDA cores' fp32 peak"  # exceeded by tensor cores
            is_known = self.unit is not None or self.dtype == _FP32
            percentage = f" ({percent_text(compute)} of {peak})" if compute and is_known else ""
            return flops_text(flops_per_s) + percentage
        if bytes_per_s is not None:
            percentage = f" ({percent_text(memory)} of bandwidth)" if memory else ""
            return bandwidth_text(bytes_per_s) + percentage
        return NOTHING
