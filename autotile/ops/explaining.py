"""Explain one configuration on one device, without running it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, LaunchGeometry, Problem, Resources, Value
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.errors import CompileError, ConfigError, InputError, SpecError, ToolchainError, nearest
from autotile.kernel.launch import LaunchData, known_names, launch_geometry, value_or_zero
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import resolve_problem, unsupported_reason
from autotile.kernel.spec import KernelSpec, Parameter
from autotile.ops.assignments import read_size
from autotile.report.explanation import Check, Explanation
from autotile.report.occupancy import OccupancyReport
from autotile.settings import read_settings
from autotile.space.limits import check_config, compiled_occupancy, demand_of, limits_of, resource_violation
from autotile.space.occupancy import occupancy

_WORDS = {"true": True, "false": False}
_MOST = 2**31 - 1
"""Largest number of a block's threads, registers or bytes that is taken seriously."""
_MOST_DIGITS = 7
"""Longest value of a parameter that is taken seriously; products of a few of them stay within 64 bits."""


def block_occupancy(threads: int, registers: int, smem_bytes: int, device: DeviceProperties) -> OccupancyReport:
    """Blocks per SM for a block of given resources.

    Raises
    ------
    InputError
        A count is negative or absurdly large, or there are no threads.
    """
    if threads < 1 or registers < 0 or smem_bytes < 0 or max(threads, registers, smem_bytes) > _MOST:
        raise InputError(
            f"{threads} threads, {registers} registers and {smem_bytes} bytes cannot be a block's; expected at least "
            f"1 thread, 0 or more of the others, and at most {_MOST:,} of each"
        )
    return OccupancyReport(device, threads, registers, smem_bytes, occupancy(threads, registers, smem_bytes, device))


def explain_config(
    kernel: str, assignments: Mapping[str, str], device: DeviceProperties, *, dtype: str | None = None
) -> Explanation:
    """All that is known of a configuration before it runs.

    Parameters
    ----------
    kernel
        Name, or path of a search-space file.
    assignments
        Values of parameters and sizes by name, as typed; what is missing comes from the default configuration and
        the default sizes.
    device
        The device to explain it for.

    Raises
    ------
    InputError
        A name is neither a parameter nor a size, or a value is not of its parameter's kind.
    """
    loaded = load_kernel(kernel)
    config, sizes = _split(loaded.spec, assignments)
    problem = resolve_problem(loaded.spec, sizes, dtype, defaults=True)
    checks = tuple(_checks(loaded.spec, config, problem, device))
    fault = check_config(loaded.spec, config, problem.sizes, device, problem.dtype)
    geometry = _geometry(loaded.spec, config, problem, device)
    resources, not_compiled = None, fault and "it would not be compiled"
    if not fault and geometry is not None:
        resources, fault, not_compiled = _compile(loaded, config, problem, device)
        checks += (Check("compiled", "source", False, fault),) if fault else ()
    used = _declared(loaded.spec, config, problem, device, geometry)
    if resources is not None and geometry is not None:
        found = compiled_occupancy(geometry, resources, device)
        smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
        used = OccupancyReport(device, geometry.threads, resources.registers, smem_bytes, found)
        fault = resource_violation(loaded.spec.limits, geometry, resources, found, device)
        checks += (Check("compiled", "resources", not fault, fault),)
    return Explanation(
        problem=problem,
        device=device,
        config=config,
        checks=checks,
        fault=fault,
        geometry=geometry,
        resources=resources,
        not_compiled=not_compiled,
        occupancy=used,
        data=_data(loaded.spec, config, problem, device),
    )


def _split(spec: KernelSpec, assignments: Mapping[str, str]) -> tuple[dict[str, Value], dict[str, int]]:
    """Tell parameters from sizes by their names; complete the configuration from the default one."""
    parameters = {parameter.name: parameter for parameter in spec.parameters}
    chosen: dict[str, Value] = {}
    sizes: dict[str, int] = {}
    for name, text in assignments.items():
        if name in parameters:
            chosen[name] = _value(parameters[name], text)
        elif name in spec.sizes:
            sizes[name] = read_size(name, text)
        else:
            known = (*parameters, *spec.sizes)
            raise ConfigError(
                f"{spec.name} has neither a parameter nor a size {name!r}{nearest(name, known)} (parameters: "
                f"{', '.join(parameters)}; sizes and flags: {', '.join(spec.sizes)})"
            )
    return {name: chosen.get(name, spec.default[name]) for name in parameters}, sizes


def _value(parameter: Parameter, text: str) -> Value:
    """Read a value as the kind that the parameter's own values are."""
    kinds = {type(value) for value in parameter.values}
    if bool in kinds:
        found = _WORDS.get(text.lower(), {"1": True, "0": False}.get(text))
        if found is not None:
            return found
    elif str in kinds:
        return text
    elif text.removeprefix("-").isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise ConfigError(f"{parameter.name} = {text!r} is not among its values {', '.join(map(str, parameter.values))}")


def _checks(spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> Iterator[Check]:
    """Every condition on its own, also those behind the first one that is broken."""
    fault = unsupported_reason(spec, device)
    if fault:
        yield Check("device", "compute_capability", False, fault)
    for parameter in spec.parameters:
        if config[parameter.name] not in parameter.values:
            values = ", ".join(map(str, parameter.values))
            yield Check("value", parameter.name, False, f"{config[parameter.name]} is not among its values {values}")
    names = known_names(spec, config, problem.sizes, device)
    for rule in spec.rules:
        yield Check("rule", rule.name, bool(rule.expression.evaluate(names)), rule.expression.text)
    for rule in spec.heuristics:
        yield Check("heuristic", rule.name, bool(rule.expression.evaluate(names)), rule.expression.text)
    demand = demand_of(spec, names, problem.sizes, problem.dtype)
    for limit in limits_of(spec):
        fits = bool(limit.fits(demand, device, spec)[0])
        yield Check("limit", limit.name, fits, "" if fits else limit.explain(demand, device, spec))


def _geometry(spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> LaunchGeometry | None:
    try:
        return launch_geometry(spec, config, problem.sizes, device)
    except (ConfigError, SpecError):
        return None  # the checks say what is wrong with it


def _data(spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> LaunchData | None:
    try:
        return LaunchData.of(spec, problem.dtype, known_names(spec, config, problem.sizes, device))
    except (ConfigError, SpecError):
        return None  # the checks say what is wrong with it


def _compile(
    kernel: Kernel, config: Config, problem: Problem, device: DeviceProperties
) -> tuple[Resources | None, str, str]:
    """What the compiler says, through the cubin cache: resources, else a fault of the source, else why it is not known.

    The last two are texts, empty where there is nothing to say.
    """
    settings = read_settings()
    try:
        job = compile_job(kernel, config, problem.dtype, device.architecture, problem.sizes)
        cache = CubinCache(settings.cache, settings.cache_limit_bytes)
        return cache.get_or_compile(job).resources, "", ""
    except CompileError as error:
        return None, f"it does not compile: {error}", "the compiler refuses it"
    except ToolchainError as error:
        return None, "", str(error)


def _declared(
    spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties, geometry: LaunchGeometry | None
) -> OccupancyReport | None:
    """Occupancy from what the file declares of static shared memory and registers."""
    if geometry is None:
        return None
    names = known_names(spec, config, problem.sizes, device)
    smem_bytes = value_or_zero(spec.launch.static_smem_bytes, names) + geometry.dynamic_smem_bytes
    registers = value_or_zero(spec.launch.min_registers, names)
    return OccupancyReport(
        device, geometry.threads, registers, smem_bytes, occupancy(geometry.threads, registers, smem_bytes, device)
    )
