"""Generate a C++ header that chooses a configuration from the sizes and launches it through the driver API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from autotile.core.device import EXPRESSION_NAMES, limits_for
from autotile.core.model import Config, Resources, Value, config_key
from autotile.core.text import shown_text
from autotile.database.winners import StoredRule, Winner
from autotile.errors import InputError
from autotile.exchange.cpp_code import argument_fields, launch_values, literal, map_rules, to_cpp, workspace_code
from autotile.families.rule import FamilyRule, Feature, Leaf, Split, Traits
from autotile.kernel.expressions import Expression
from autotile.kernel.problem import capability_of, runs_on
from autotile.kernel.spec import KernelSpec, Launch


def family_code(spec: KernelSpec, rules: Sequence[StoredRule], numbers: Mapping[str, int]) -> dict[str, str]:
    """Return the functions of family rules, and the code of `choose` that calls them.

    A rule that is not in force, or has a configuration that the header lacks, is left out.

    Parameters
    ----------
    numbers
        Indices of the header's configurations, by `config_key`.
    """
    known = [
        stored
        for stored in rules
        if stored.rule.in_force and all(config_key(one.config) in numbers for one in stored.rule.configs)
    ]
    functions = [line for number, stored in enumerate(known) for line in _Family(spec, stored, numbers, number).lines()]
    calls = [line for number, stored in enumerate(known) for line in _call(stored, number)]
    return {
        "families": "\n".join(["", *functions, ""]) if functions else "",
        "by_family": "".join(f"    {line}\n" for line in calls),
    }


def _call(stored: StoredRule, number: int) -> Iterator[str]:
    same_gpu = f"device.name == {literal(stored.device.name)}"
    yield f"if (best.tier != Tier::exact && {same_gpu} && family_{number}::holds(sizes)) {{"
    yield f"    for (const std::size_t config : family_{number}::order(sizes, device)) {{"
    yield "        const Cubin* cubin = detail::usable(config, sizes, device);"
    yield "        if (cubin != nullptr) return {config, cubin, Tier::family};"
    yield "    }"
    yield "}"


class _Family:
    """C++ code of one rule: a namespace with two functions."""

    def __init__(self, spec: KernelSpec, stored: StoredRule, numbers: Mapping[str, int], number: int) -> None:
        self._spec = spec
        self._rule: FamilyRule = stored.rule
        self._gpu = stored.device.name
        self._numbers = [numbers[config_key(one.config)] for one in stored.rule.configs]
        self._number = number
        self._symbols = {name: f"sizes.{name}" for name in spec.sizes}
        resident = [one.blocks_per_sm for one in stored.rule.configs]
        configs = [one.config for one in stored.rule.configs]
        self._traits = Traits.of(spec, stored.device, configs, resident, [stored.rule.family.largest])

    def lines(self) -> Iterator[str]:
        """Yield the lines of the namespace."""
        rule, names = self._rule, self._spec.sizes
        yield f"/// {rule.family} on {shown_text(self._gpu)}, learned from {len(rule.points)} of its problems."
        yield f"namespace family_{self._number} {{"
        yield ""
        yield "inline bool holds(const Sizes& sizes) {"
        yield f"    return {' && '.join(self._holds(name) for name in names)};"
        yield "}"
        yield ""
        yield "/// Configurations, best first: if one violates a rule or a limit, the next is launched."
        size = len(self._numbers)
        yield f"inline std::array<std::size_t, {size}> order([[maybe_unused]] const Sizes& sizes,"
        yield "                                         [[maybe_unused]] const Device& device) {"
        yield from self._branch(rule.tree, "    ")
        yield "}"
        yield ""
        yield f"}}  // namespace family_{self._number}"

    def _holds(self, name: str) -> str:
        parts = []
        for low, high in self._rule.family.extents[name].parts:
            size = f"sizes.{name}"
            parts.append(f"{size} == {low}" if low == high else f"({low} <= {size} && {size} <= {high})")
        return f"({' || '.join(parts)})"

    def _branch(self, tree: Leaf | Split, indent: str) -> Iterator[str]:
        if isinstance(tree, Leaf):
            yield f"{indent}return {{{', '.join(str(self._numbers[number]) for number in tree.order)}}};"
            return
        yield f"{indent}if ({self._value(tree.feature)} <= {float(tree.at_most)!r}) {{  // {tree.feature}"
        yield from self._branch(tree.then, indent + "    ")
        yield f"{indent}}}"
        yield from self._branch(tree.otherwise, indent)

    def _value(self, feature: Feature) -> str:
        """Return a feature as an expression of type double."""
        match feature.kind:
            case "size":
                value = f"double(sizes.{feature.of})"
            case "alignment":
                value = f"detail::alignment(sizes.{feature.of})"
            case "outputs":
                value = self._outputs()
            case "intensity":
                value = f"{self._work(flops=True)} / std::max({self._work(flops=False)}, 1.0)"
            case "blocks":
                value = self._blocks(feature.config)
            case "waves":
                value = f"{self._blocks(feature.config)} / {float(self._traits.slots[feature.config])!r}"
            case "work_ratio":
                value = f"{self._rounds(feature.config)} / ({self._rounds(feature.over)})"
            case unknown:
                raise ValueError(f"unsupported kind of feature {unknown!r}")
        return value

    def _outputs(self) -> str:
        written = [buffer for buffer in self._spec.buffers if buffer.is_written]
        products = (" * ".join(f"double({to_cpp(e, self._symbols)})" for e in buffer.shape) for buffer in written)
        return " + ".join(products)

    def _work(self, *, flops: bool) -> str:
        expression = self._spec.work.flops if flops else self._spec.work.bytes
        return f"double({to_cpp(expression, self._symbols)})" if expression is not None else "0.0"

    def _blocks(self, config: int) -> str:
        return f"detail::blocks({self._numbers[config]}, sizes, device)"

    def _rounds(self, config: int) -> str:
        """Return the number of outputs of the busiest SM, as a C++ expression."""
        tile, sms = float(self._traits.tile[config]), float(self._traits.sm_count)
        return f"std::ceil({self._blocks(config)} / {sms!r}) * {tile!r}"


_PLACEHOLDER = re.compile(r"@@(\w+)@@")
_KINDS = {bool: "bool", int: "std::int64_t", float: "double", str: "std::string_view"}
_QUERIED = {
    "sm_count": "MULTIPROCESSOR_COUNT",
    "warp_size": "WARP_SIZE",
    "max_threads_per_block": "MAX_THREADS_PER_BLOCK",
    "max_threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "max_blocks_per_sm": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "registers_per_block": "MAX_REGISTERS_PER_BLOCK",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "smem_per_block_bytes": "MAX_SHARED_MEMORY_PER_BLOCK",
    "smem_per_block_optin_bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "smem_per_sm_bytes": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "smem_reserved_per_block_bytes": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "l2_bytes": "L2_CACHE_SIZE",
}
"""Device properties that the driver can be queried for, with the suffix of the driver's attribute."""
_ALWAYS = ("max_threads_per_block", "registers_per_block", "smem_per_block_optin_bytes")
"""Properties that are needed to check the limits of any launch."""


@dataclass(frozen=True, slots=True)
class HeaderCubin:
    """A compiled configuration, and the name of the cubin file beside the header."""

    target: str
    flags: Mapping[str, int]
    config: Config
    resources: Resources
    file: str
    symbols: Mapping[str, str] = field(default_factory=dict)
    """Name in the cubin of each entry; one that is not listed has its own name."""


def write_header(
    spec: KernelSpec,
    dtype: str,
    winners: Sequence[Winner],
    cubins: Sequence[HeaderCubin],
    *,
    rules: Sequence[StoredRule] = (),
    stem: str,
    version: str,
) -> str:
    """Return the text of the header.

    Parameters
    ----------
    spec, dtype
        The kernel, and the element type that it is compiled for.
    winners
        Winners in order of preference: among those at equal distance the first is chosen.
    cubins
        Cubins of the default configuration and of the winners' configurations; a winner without one is left out.
    rules
        Rules of the kernel's families, newest first.
    stem
        Prefix of the cubins' file names.
    version
        Version of autotile.

    Raises
    ------
    InputError
        The kernel has several steps, or uses a device property that the driver cannot be queried for and that differs
        between the architectures.
    """
    launch = _only_launch(spec)
    configs = {config_key(config): config for config in (*(c.config for c in cubins), spec.default)}
    numbers = {key: number for number, key in enumerate(configs)}
    symbols = {p.name: f"config.{p.name}" for p in spec.parameters} | {name: f"sizes.{name}" for name in spec.sizes}
    known = [winner for winner in winners if config_key(winner.config) in numbers]
    filled = {
        "title": f"{spec.name}: {spec.summary or 'a tuned kernel'}".replace("\\", "/"),
        "version": version,
        "stem": stem,
        "name": spec.name,
        "namespace": namespace_of(spec, dtype),
        "sizes": _lines(f"    std::int64_t {name} = {literal(default)};" for name, default in spec.sizes.items()),
        "parameters": _lines(f"    {_KINDS[type(p.values[0])]} {p.name};" for p in spec.parameters),
        "arguments": _lines(f"    {line}" for line in argument_fields(spec, dtype)),
        "and_flags": " and the flags of a problem" if spec.flags else "",
        "cubin_flags": "".join(f"    std::int64_t {name};\n" for name in spec.compiled_names),
        "configs": _lines(
            f"    {_aggregate(c[p.name] for p in spec.parameters)},  // {n}" for n, c in enumerate(configs.values())
        ),
        "default_config": str(numbers[config_key(spec.default)]),
        "tuned": _lines(_tuned(spec, winner, numbers) for winner in known) or '    {{}, 0, 0.0, "", 0},  // nothing',
        "tuned_count": str(len(known)),
        "cubins": _lines(_cubin(spec, cubin, numbers) for cubin in cubins),
        "rules": _lines(f"    {line}" for line in _rules(spec, dtype, symbols)),
        "grid": _dimensions(launch.grid, symbols),
        "block": _dimensions(launch.block, symbols),
        "dynamic_smem_bytes": to_cpp(launch.dynamic_smem_bytes, symbols) if launch.dynamic_smem_bytes else "0",
        "flags_differ": "".join(f" || cubin.{name} != sizes.{name}" for name in spec.compiled_names),
        "flag_distance": " + ".join(f"int(from.sizes.{name} != sizes.{name})" for name in spec.flags) or "0",
        "size_distance": _size_distance(spec),
        **_device(spec, [cubin.target for cubin in cubins]),
        **launch_values(spec, dtype, symbols),
        **workspace_code(spec),
        **family_code(spec, rules, numbers),
    }
    template = files("autotile.exchange").joinpath("header_template.hpp").read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda match: filled[match[1]], template)


def _only_launch(spec: KernelSpec) -> Launch:
    """Return the launches of a call.

    Raises
    ------
    InputError
        A call launches several kernels, or passes a scalar that depends on more than the problem.
    """
    if not spec.has_one_launch:
        raise InputError(
            f"{spec.name} has several steps, and a header launches one kernel only; serve it from Python, or from a "
            "bundle (`autotile export --format bundle`)"
        )
    if spec.shaping:
        raise InputError(
            f"arrays or the reference of {spec.name} depend on the parameters {', '.join(spec.shaping)}, which a "
            "header cannot tell its caller; serve it from Python, or from a bundle (`autotile export --format bundle`)"
        )
    for scalar in spec.scalars:
        if scalar.is_per_launch:
            raise InputError(
                f"the scalar {scalar.name} of {spec.name} depends on parameters or on the device, which a header "
                "cannot pass; make it a macro of the template"
            )
    return spec.steps[0].launch


def namespace_of(spec: KernelSpec, dtype: str) -> str:
    """Return the kernel's namespace within ``autotile``; a kernel with several element types has one for each."""
    name = spec.name.replace("-", "_")
    return name if len(spec.dtypes) == 1 else f"{name}_{dtype}"


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _aggregate(values: Iterable[Value]) -> str:
    return "{" + ", ".join(map(literal, values)) + "}"


def _tuned(spec: KernelSpec, winner: Winner, numbers: Mapping[str, int]) -> str:
    key, time_us = winner.key, winner.measurement.time_us if winner.measurement else 0.0
    capability = key.compute_capability.replace(".", "")
    number = numbers[config_key(winner.config)]
    sizes = _aggregate(key.sizes[name] for name in spec.sizes)
    return f"    {{{sizes}, {number}, {time_us:.6g}, {literal(key.gpu_name)}, {capability}}},".replace("e+", "e")


def _cubin(spec: KernelSpec, cubin: HeaderCubin, numbers: Mapping[str, int]) -> str:
    capability = capability_of(cubin.target)
    major = capability.partition(".")[0]
    this_capability_only = not runs_on(cubin.target, f"{major}.9")
    used = cubin.resources
    symbol = cubin.symbols.get(spec.entry, spec.entry)
    flags = "".join(f"{cubin.flags[name]}, " for name in spec.compiled_names)
    number = numbers[config_key(cubin.config)]
    fields = (
        number,
        capability.replace(".", ""),
        literal(this_capability_only),
        used.registers,
        used.static_smem_bytes,
    )
    return f"    {{{', '.join(map(str, fields))}, {flags}{literal(cubin.file)}, {literal(symbol)}}},"


def _rules(spec: KernelSpec, dtype: str, symbols: Mapping[str, str]) -> Iterator[str]:
    """Yield the kernel's rules, then the constraints of clusters and tensor maps on the sizes."""
    for rule in spec.rules:
        yield f"if (!({to_cpp(rule.expression, symbols)})) return false;  // {rule.name}"
    launch = spec.steps[0].launch
    for blocks, cluster in zip(launch.grid, launch.cluster, strict=False):
        remainder = f"detail::floor_mod({to_cpp(blocks, symbols)}, {to_cpp(cluster, symbols)})"
        yield f"if ({remainder} != 0) return false;  // whole clusters"
    yield from map_rules(spec, dtype, symbols)


def _dimensions(expressions: Sequence[Expression], symbols: Mapping[str, str]) -> str:
    return ", ".join([*(to_cpp(expression, symbols) for expression in expressions), "1", "1"][:3])


def _size_distance(spec: KernelSpec) -> str:
    proper = [name for name in spec.sizes if name not in spec.flags]
    return " + ".join(f"detail::doublings(from.sizes.{name}, sizes.{name})" for name in proper)


def _device(spec: KernelSpec, targets: Sequence[str]) -> dict[str, str]:
    """Return the device fields that the kernel's expressions use, and the code that queries them."""
    used = {name.removeprefix("device.") for e in _expressions(spec) for name in e.names if name.startswith("device.")}
    fields, queries = [], []
    for name in EXPRESSION_NAMES:
        if name in _QUERIED and (name in used or name in _ALWAYS):
            fields.append(f"    std::int64_t {name} = 0;")
            queries.append(f"        found.{name} = attribute(CU_DEVICE_ATTRIBUTE_{_QUERIED[name]});")
        elif name == "memory_bytes" and name in used:
            fields.append(f"    std::int64_t {name} = 0;")
            queries.append("        std::size_t bytes = 0;")
            queries.append('        detail::check(cuDeviceTotalMem(&bytes, device), "the device\'s memory");')
            queries.append(f"        found.{name} = static_cast<std::int64_t>(bytes);")
        elif name in used:
            fields.append(f"    std::int64_t {name} = {_shared(name, targets)};  // of every architecture here")
    return {"device": _lines(fields), "device_attributes": _lines(queries)}


def _shared(name: str, targets: Sequence[str]) -> int:
    values = {int(getattr(limits_for(capability_of(target)), name)) for target in targets}
    if len(values) > 1:
        raise InputError(
            f"the kernel uses device.{name}, which the driver cannot be queried for and which differs between "
            f"{', '.join(dict.fromkeys(targets))}; write one header per architecture, with --arch"
        )
    return values.pop()


def _expressions(spec: KernelSpec) -> list[Expression]:
    launch = spec.steps[0].launch
    shared = [launch.dynamic_smem_bytes] if launch.dynamic_smem_bytes is not None else []
    return [
        *(rule.expression for rule in spec.rules),
        *launch.grid,
        *launch.block,
        *launch.cluster,
        *shared,
        *(expression for argument in spec.arguments for expression in argument.expressions),
    ]
