"""Generate a C++ header that chooses a configuration from the sizes and launches it through the driver API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import assert_never

import numpy as np

from autotile.core.device import limits_for
from autotile.core.dtypes import DTYPES
from autotile.core.model import DTYPE_BYTES, Value, config_key
from autotile.core.text import shown_text, source_text
from autotile.cuda.driver import variable_symbol
from autotile.database.paths import write_output
from autotile.database.winners import StoredRule, Winner
from autotile.errors import InputError
from autotile.exchange.bundle import BundledCubin, BundledKernel, untuned_config
from autotile.families.family import Split, Tree
from autotile.families.features import Feature, Traits
from autotile.kernel.arguments import (
    PROBLEM_DTYPE,
    BufferArgument,
    ElementType,
    Number,
    ScalarArgument,
    StructArgument,
    TensorMapArgument,
    TextureArgument,
    WorkspaceArgument,
)
from autotile.kernel.expressions import Expression, Node, evaluate, is_keyword
from autotile.kernel.problem import MAX_SIZE, capability_of, runs_on
from autotile.kernel.spec import STEP, KernelSpec
from autotile.version import __version__

_BITS = {
    "float16": "std::uint16_t",
    "bfloat16": "std::uint16_t",
    "float8_e4m3fn": "std::uint8_t",
    "float8_e5m2": "std::uint8_t",
}
"""C++ types of the bits of element types that C++ does not have."""
_C_TYPES = {"float32": "float", "float64": "double", "bool": "bool", **_BITS}
_COMPLEX_PARTS = {"complex64": "float32", "complex128": "float64"}
_MAP_TYPES = {"int8": "UINT8", "int16": "UINT16", **dict.fromkeys(("bool", "float8_e4m3fn", "float8_e5m2"), "UINT8")}
"""Driver types of dtypes that lack their own; copies preserve bits, so the unsigned type is equivalent."""


def c_type(dtype: str) -> str:
    """Return the C++ type that holds a value of an element type."""
    count, part = _parts(dtype)
    return f"std::array<{c_type(part)}, {count}>" if count else _C_TYPES.get(dtype) or f"std::{dtype}_t"


def _parts(dtype: str) -> tuple[int, str]:
    """Return the number of parts of a vector or complex number and their type; 0 and "" for any other type."""
    if DTYPES[dtype].is_complex:
        return 2, _COMPLEX_PARTS[dtype]
    return DTYPES[dtype].components, DTYPES[dtype].component_name


def _constant(value: Number, name: str) -> str:
    if isinstance(value, tuple):
        return f"{{{', '.join(_constant(one, _parts(name)[1]) for one in value)}}}"
    dtype = DTYPES[name]
    if name in _BITS:
        stored = dtype.encode(np.array([float(value)]))
        return f"0x{int(stored.view(f'uint{8 * stored.itemsize}')[0]):0{2 * stored.itemsize}x}"
    if name == "bool":
        return literal(bool(value))
    if dtype.is_integer:
        return literal(int(value)) if value < 2**63 else f"{int(value)}ULL"
    return repr(float(value)) + ("f" if name == "float32" else "")


_INFIX = ("+", "-", "*", "&", "|", "^", "/")
"""Operators of both languages."""

_CALLS = {"int": "trunc", "//": "floor_div", "%": "floor_mod", "**": "power", "<<": "shift_left", ">>": "shift_right"}
"""Functions of the header, of whole and of real numbers, that do not have the name of the operation."""


def literal(value: Value | float) -> str:
    """Return a C++ literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A character that is not printable would end the line, or could not be written.
        escaped = (
            (f"\\{c}" if c in '"\\' else c)
            if c.isprintable()
            else "".join(f"\\{byte:03o}" for byte in c.encode(errors="surrogatepass"))
            for c in value
        )
        return f'"{"".join(escaped)}"'
    if isinstance(value, float):
        return repr(value)
    if value == -(2**63):
        return f"({value + 1}LL - 1)"
    return str(value) if abs(value) <= MAX_SIZE else f"{value}LL"


def to_cpp(expression: Expression, symbols: Mapping[str, str]) -> str:
    """Return a C++ expression with the same value: 64-bit integers, doubles, booleans and ``std::string_view``.

    ``symbols`` are the C++ expressions of names: ``{"BM": "config.BM"}``; device properties are ``device.NAME`` in both
    languages. Expressions that raise in Python (division by zero, results beyond 64 bits) have undefined behavior.
    """

    def write(node: Node) -> str:
        operands, value = node.operands, node.value
        match node.operation:
            case "constant":
                return f"std::string_view({literal(value)})" if isinstance(value, str) else literal(value)
            case "name":
                return str(value) if value.startswith("device.") else symbols[value]
            case "number":
                return f"std::int64_t{{{write(operands[0])}}}"
            case "real":
                return f"static_cast<double>({write(operands[0])})"
            case "not":
                return f"!{part(operands[0])}"
            case "and" | "or" as word:
                return (" && " if word == "and" else " || ").join(map(part, operands))
            case "compare":
                parts = list(map(part, operands))
                links = zip(parts, value, parts[1:], strict=False)
                return " && ".join(f"{left} {sign} {right}" for left, sign, right in links)
            case "in":
                left, *members = map(part, operands)
                return " || ".join(f"{left} == {member}" for member in members)
            case "if":
                condition, chosen, otherwise = map(part, operands)
                return f"{condition} ? {chosen} : {otherwise}"
        if all(map(_is_constant, operands)):
            return literal(evaluate(node, {}, True))  # C++ literals are ints, and products of them may need 64 bits
        if node.operation == "float":
            return write(operands[0])
        if node.operation == "~":
            return f"~{part(operands[0])}"
        if node.operation == "-" and operands[0] == Node("constant", operands[0].kind, value=0):
            return f"-{part(operands[1])}"
        if node.operation in _INFIX:
            left, right = map(part, operands)
            return f"{left} {node.operation} {right}"
        space = "detail::real" if operands[0].kind == "real" else "detail"
        return f"{space}::{_CALLS.get(node.operation, node.operation)}({', '.join(map(write, operands))})"

    def part(node: Node) -> str:
        text = write(node)
        is_call = callable(node.value) and node.operation not in _INFIX and text.endswith(")")
        simple = is_call or node.operation in ("constant", "name", "number", "real")
        return text if (simple and not text.startswith("-")) or text.isdecimal() else f"({text})"

    return write(expression.node)


def _is_constant(node: Node) -> bool:
    return node.operation == "constant" or (callable(node.value) and all(map(_is_constant, node.operands)))


def _launch_code(spec: KernelSpec, dtype: str, cpp: Callable[[Expression], str]) -> dict[str, str]:
    """Return the C++ code of a launch by its place in the template; ``cpp`` translates an expression."""

    def fields() -> Iterator[str]:
        for buffer in spec.buffers:
            shape = ", ".join(extent.text for extent in buffer.shape)
            kind = str(buffer.dtype).replace(PROBLEM_DTYPE, dtype)
            yield f"CUdeviceptr {buffer.name} = 0;  ///< {buffer.access}, {kind}[{shape}]"
        for scalar in spec.scalars:
            if scalar.default is not None:
                name = scalar.element_type(dtype)
                bits = f"  ///< the bits of a {name}" if DTYPES[name].component.name in _BITS else ""
                yield f"{c_type(name)} {scalar.name} = {_constant(scalar.default, name)};{bits}"

    def values() -> Iterator[str]:
        arguments = spec.arguments
        pointed_to = {target for a in arguments if isinstance(a, StructArgument) for target in a.targets}
        # structs and tensor maps come last, as they may need the address of any of the others
        for argument in sorted(arguments, key=lambda one: isinstance(one, StructArgument | TensorMapArgument)):
            name = argument.name
            match argument:
                case BufferArgument():
                    if argument.is_passed or name in pointed_to:
                        yield f"CUdeviceptr value_{name} = arguments.{name};"
                case StructArgument():
                    yield from struct(argument)
                case TensorMapArgument():
                    yield from tensor_map(argument)
                case ScalarArgument():
                    kind, bound = c_type(argument.element_type(dtype)), argument.binding
                    value = f"arguments.{name}" if bound is None else f"static_cast<{kind}>({cpp(bound)})"
                    yield f"{kind} value_{name} = {value};"
                case WorkspaceArgument():
                    yield f"const std::int64_t bytes_{name} ="
                    yield f"    {bytes_of(argument)};"
                    given = f"static_cast<std::size_t>(bytes_{name}), {literal(argument.zeroed)}"
                    yield f'CUdeviceptr value_{name} = workspace(stream, "{name}", {given});'
                case TextureArgument():
                    raise InputError(
                        f"a C++ header cannot pass the texture {name}; serve the kernel from Python, or a bundle"
                    )
                case _:
                    assert_never(argument)
        # outputs are filled before a launch, and buffers copied to constant memory
        for buffer in spec.buffers:
            name, size_bytes = buffer.name, f"static_cast<std::size_t>({bytes_of(buffer)})"
            if buffer.is_initialized and not buffer.is_read:
                if not buffer.is_zeroed:
                    hint = 'use init = "zeros", or an inout buffer'
                    raise InputError(f"a C++ header cannot make the content of the output {name}; {hint}")
                yield f'detail::check(cuMemsetD8Async(arguments.{name}, 0, {size_bytes}, stream), "{name}");'
            if buffer.constant:
                given = f'"{variable_symbol(buffer.constant)}", arguments.{name}, {size_bytes}'
                yield f'detail::copy_constant(prepared.function, {given}, stream, "{buffer.constant}");'

    def by_type(kind: ElementType, text: Callable[[str], str]) -> str:
        """Return text that depends on an element type, which flags may select."""
        named = [text(dtype if name == PROBLEM_DTYPE else name) for name in kind.names]
        return named[0] if kind.condition is None else f"(({cpp(kind.condition)}) ? {named[0]} : {named[1]})"

    def element_bytes(kind: ElementType) -> str:
        return by_type(kind, lambda name: str(DTYPES[name].size_bytes))

    def bytes_of(array: BufferArgument | WorkspaceArgument) -> str:
        return " * ".join([*(f"({cpp(extent)})" for extent in array.shape), element_bytes(array.dtype)])

    def struct(argument: StructArgument) -> Iterator[str]:
        name, layout = argument.name, argument.layout(dtype)
        yield f"alignas(16) unsigned char value_{name}[{layout.size_bytes}] = {{}};"
        for offset, member, values in layout.scalars:
            kind = c_type(part := _parts(member)[1] or member)
            written = (
                f"static_cast<{kind}>({cpp(value)})" if isinstance(value, Expression) else _constant(value, part)
                for value in values
            )
            yield f"detail::put(value_{name} + {offset}, {c_type(member)}{{{', '.join(written)}}});"
        for offset, target in layout.pointers:
            yield f"detail::put(value_{name} + {offset}, value_{target});"

    def tensor_map(argument: TensorMapArgument) -> Iterator[str]:
        name, buffer = argument.name, argument.buffer
        address = f"arguments.{buffer.name}" if buffer.is_given else f"value_{buffer.name}"
        kind = by_type(buffer.dtype, lambda n: f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES.get(n, n.upper())}")
        axes = (f"{{{', '.join(map(cpp, each))}}}" for each in (buffer.shape, argument.box, argument.element_strides))
        modes = map(cpp, (argument.swizzle_bytes, argument.l2_promotion_bytes))
        given = ", ".join(
            [kind, address, element_bytes(buffer.dtype), *axes, *modes, f'"the tensor map of {buffer.name}"']
        )
        yield f"CUtensorMap value_{name}{{}};  // zeros if the configuration does not use it"
        yield f"if ({is_present(argument)}) value_{name} = detail::tensor_map<{len(buffer.shape)}>({given});"

    def is_present(argument: TensorMapArgument) -> str:
        sides = argument.box if argument.buffer.is_given else (*argument.box, *argument.buffer.shape)
        return " && ".join(f"({cpp(side)}) != 0" for side in sides)

    def rules() -> Iterator[str]:
        """Yield the ranges of sizes, the rules, and the constraints of scalars, clusters and tensor maps on the sizes.

        A rule that is a Python function is of parameters alone, and every configuration of the header meets it.
        """
        for name in spec.sizes:
            least, most = (0, 1) if name in spec.flags else (1, MAX_SIZE)
            yield f"if (sizes.{name} < {least} || sizes.{name} > {most}) return false;"
        for rule in spec.rules:
            if rule.expression.node.operation != "function":
                yield f"if (!({cpp(rule.expression)})) return false;  // {rule.name}"
        for scalar in spec.bound_scalars:
            kind, value = scalar.element_type(dtype), scalar.binding
            if kind in _BITS:
                hint = "declare it as float32, and convert it in the kernel"
                raise InputError(f"a C++ header cannot convert {scalar.name}, an expression, to {kind}; {hint}")
            if DTYPES[kind].is_integer and value is not None:
                yield f"if (!detail::holds<{c_type(kind)}>({cpp(value)})) return false;  // {scalar.name}"
        launch = spec.steps[0].launch
        for blocks, cluster in zip(launch.grid, launch.cluster, strict=False):
            remainder = f"detail::floor_mod({cpp(blocks)}, {cpp(cluster)})"
            yield f"if ({remainder} != 0) return false;  // whole clusters"
        for argument in spec.tensor_maps:  # rows are multiples of 16 bytes
            row = f"({cpp(argument.buffer.shape[-1])}) * {element_bytes(argument.buffer.dtype)}"
            yield f"if ({is_present(argument)} && {row} % 16 != 0) return false;  // {argument.name}"

    return {
        "arguments": _lines(f"    {line}" for line in fields()),
        "rules": _lines(f"    {line}" for line in rules()),
        "values": _lines(f"        {line}" for line in values()),
    }


def _family_code(spec: KernelSpec, rules: Sequence[StoredRule], numbers: Mapping[str, int]) -> dict[str, str]:
    """Return the functions of family rules, and the code of `choose` that calls them.

    A rule that is not in force, or has a configuration that the header lacks, is left out; ``numbers`` are the indices
    of the header's configurations, by `config_key`.
    """
    functions: list[str] = []
    calls: list[str] = []
    known = (
        stored
        for stored in rules
        if stored.rule.in_force and all(config_key(one.config) in numbers for one in stored.rule.configs)
    )
    for number, stored in enumerate(known):
        rule = stored.rule
        configs = [numbers[config_key(one.config)] for one in rule.configs]
        conditions = []
        for name in spec.sizes:
            size = f"sizes.{name}"
            parts = (f"({low} <= {size} && {size} <= {high})" for low, high in rule.family.extents[name].parts)
            conditions.append(f"({' || '.join(parts)})")
        functions += [
            f"/// {rule.family} on {shown_text(stored.device.name)}, learned from {len(rule.points)} of its problems.",
            f"namespace family_{number} {{",
            "",
            "inline bool holds(const Sizes& sizes) {",
            f"    return {' && '.join(conditions)};",
            "}",
            "",
            "/// Configurations, best first: if one violates a rule or a limit, the next is launched.",
            f"inline std::array<std::size_t, {len(configs)}> order([[maybe_unused]] const Sizes& sizes,",
            "                                         [[maybe_unused]] const Device& device) {",
            *_branch(spec, stored, configs),
            "}",
            "",
            f"}}  // namespace family_{number}",
        ]
        same_gpu = f"device.name == {literal(source_text(stored.device.name, stored.key.source))}"
        calls += [
            f"if (best.tier != Tier::exact && {same_gpu} && family_{number}::holds(sizes)) {{",
            f"    for (const std::size_t config : family_{number}::order(sizes, device)) {{",
            "        const Cubin* cubin = detail::usable(config, sizes, device);",
            "        if (cubin != nullptr) return {config, cubin, Tier::family};",
            "    }",
            "}",
        ]
    return {
        "families": "\n".join(["", *functions, ""]) if functions else "",
        "by_family": "".join(f"    {line}\n" for line in calls),
    }


def _branch(spec: KernelSpec, stored: StoredRule, configs: Sequence[int]) -> Iterator[str]:
    """Yield the code of a rule's tree; ``configs`` are the indices of its configurations in the header."""
    rule = stored.rule
    symbols = {DTYPE_BYTES: DTYPE_BYTES, **{name: f"sizes.{name}" for name in spec.sizes}}
    resident = [one.blocks_per_sm for one in rule.configs]
    largest = stored.key.problem.at(rule.family.largest)
    traits = Traits.of(spec, stored.device, [one.config for one in rule.configs], resident, [largest])

    def blocks(config: int) -> str:
        return f"detail::blocks({configs[config]}, sizes, device)"

    def rounds(config: int) -> str:
        """Return the number of outputs of the busiest SM."""
        return f"std::ceil({blocks(config)} / {float(traits.sm_count)!r}) * {float(traits.tile[config])!r}"

    def work(expression: Expression | None) -> str:
        return f"double({to_cpp(expression, symbols)})" if expression is not None else "0.0"

    def value(feature: Feature) -> str:
        match feature.kind:
            case "size":
                return f"double(sizes.{feature.of})"
            case "alignment":
                return f"detail::alignment(sizes.{feature.of})"
            case "outputs":
                written = [buffer for buffer in spec.buffers if buffer.is_written]
                return " + ".join(" * ".join(map(work, buffer.shape)) for buffer in written)
            case "intensity":
                return f"{work(spec.work.flops)} / std::max({work(spec.work.bytes)}, 1.0)"
            case "blocks":
                return blocks(feature.config)
            case "waves":
                return f"{blocks(feature.config)} / {float(traits.slots[feature.config])!r}"
            case "work_ratio":
                return f"{rounds(feature.config)} / ({rounds(feature.over)})"
            case unknown:
                raise ValueError(f"unsupported kind of feature {unknown!r}")

    def branch(tree: Tree, indent: str) -> Iterator[str]:
        if not isinstance(tree, Split):
            yield f"{indent}return {{{', '.join(str(configs[number]) for number in tree)}}};"
            return
        yield f"{indent}if ({value(tree.feature)} <= {float(tree.at_most)!r}) {{  // {tree.feature}"
        yield from branch(tree.then, indent + "    ")
        yield f"{indent}}}"
        yield from branch(tree.otherwise, indent)

    return branch(rule.tree, "    ")


_lines = "\n".join
_PLACEHOLDER = re.compile(r"@@(\w+)@@")
_PART = re.compile(r"@@if (\w+)@@\n(.*?)@@end@@\n", re.DOTALL)
"""Part of the template that only some kernels have."""
_KINDS = {bool: "bool", int: "std::int64_t", float: "double", str: "std::string_view"}
_OF_ARCHITECTURES = ("max_registers_per_thread", "register_unit", "warp_unit", "smem_unit_bytes", "fp32_lanes_per_sm")
"""Device properties that the driver cannot be queried for."""


def write_shipped_header(
    bundled: BundledKernel, images: Mapping[str, bytes], dtype: str, output: Path
) -> tuple[str, ...]:
    """Write a C++ header for one element type, and its cubins beside it; return the names of the cubins' files.

    ``images`` are those of the cubins by the names of their members. Raise `InputError` if a file cannot be written, or
    the kernel depends on a property of the device that a header cannot know.
    """
    beside, cubins = {}, []
    # Measured ones, cold L2, the user's own and the newest come first; the user's own are in order already.
    winners = sorted(
        (winner for winner in bundled.winners if winner.key.dtype == dtype),
        key=lambda winner: (
            winner.key.source != "cuda",
            winner.key.l2_mode != "cold",
            winner.shipped,
            -winner.tuned_at.timestamp() if winner.shipped else 0.0,
        ),
    )
    rules = [stored for stored in bundled.rules if stored.key.dtype == dtype]
    for cubin in bundled.cubins:
        if cubin.dtype == dtype:
            file = f"{output.stem}.{cubin.target}.{Path(cubin.member).stem[:12]}.cubin"
            beside[file] = images[cubin.member]
            cubins.append(replace(cubin, member=file))
    spec = bundled.kernel.spec
    text = write_header(spec, dtype, winners, cubins, rules=rules, stem=output.stem)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}; name another file") from None
    write_output(output, text)
    for file, image in beside.items():
        write_output(output.with_name(file), image, follow_link=False)
    return tuple(sorted(beside))


def write_header(
    spec: KernelSpec,
    dtype: str,
    winners: Sequence[Winner],
    cubins: Sequence[BundledCubin],
    *,
    rules: Sequence[StoredRule] = (),
    stem: str,
) -> str:
    """Return the text of the header of a kernel for an element type; names of the cubins' files begin with a stem.

    Of winners at equal distance, and of rules, the first is chosen; a winner without a cubin is left out. It is an
    `InputError` if the kernel has several steps, or uses a device property that the driver cannot be queried for and
    that differs between the architectures.
    """
    cure = "serve it from Python, or from a bundle (`autotile export --format bundle`)"
    if not spec.has_one_launch:
        raise InputError(f"{spec.name} has several steps, and a header launches one kernel only; {cure}")
    if spec.shaping:
        raise InputError(
            f"arrays or the reference of {spec.name} depend on the parameters {', '.join(spec.shaping)}, which a "
            f"header cannot tell its caller; {cure}"
        )
    launch = spec.steps[0].launch
    symbols = {
        DTYPE_BYTES: DTYPE_BYTES,
        STEP: "std::int64_t{0}",
        **{p.name: f"config.{p.name}" for p in spec.parameters},
        **{name: f"sizes.{name}" for name in spec.sizes},
    }
    untuned = untuned_config(spec, spec.at(dtype=dtype))
    configs = {config_key(config): config for config in (*(c.config for c in cubins), untuned)}
    numbers = {key: number for number, key in enumerate(configs)}
    known = [winner for winner in winners if config_key(winner.config) in numbers]
    proper = spec.proper_sizes

    def cpp(expression: Expression) -> str:
        return to_cpp(expression, symbols)

    def dimensions(expressions: Sequence[Expression]) -> str:
        return ", ".join([*map(cpp, expressions), "1", "1"][:3])

    tuned, compiled = [], []
    for winner in known:
        key, time_us = winner.key, winner.measurement.time_us if winner.measurement else 0.0
        capability = key.compute_capability.replace(".", "")
        place = f"{_aggregate(key.sizes[name] for name in spec.sizes)}, {numbers[config_key(winner.config)]}"
        gpu = literal(source_text(key.gpu_name, key.source))  # a replayed result is of no GPU: transferred
        tuned.append(f"    {{{place}, {time_us:.6g}, {gpu}, {capability}}},".replace("e+", "e"))
    for cubin in cubins:
        capability, used = capability_of(cubin.target), cubin.resources
        this_capability_only = literal(not runs_on(cubin.target, f"{capability.partition('.')[0]}.9"))
        symbol = literal(cubin.symbols.get(spec.entry, spec.entry))
        flags = "".join(f"{cubin.flags[name]}, " for name in spec.compiled_names)
        head = f"{numbers[config_key(cubin.config)]}, {capability.replace('.', '')}, {this_capability_only}"
        figures = f"{used.registers}, {used.static_smem_bytes}"
        compiled.append(f"    {{{head}, {figures}, {flags}{literal(cubin.member)}, {symbol}}},")
    filled = {
        "title": f"{spec.name}: {spec.summary or 'a tuned kernel'}".replace("\\", "/"),
        "version": __version__,
        "stem": stem,
        "name": spec.name,
        "namespace": namespace_of(spec, dtype),
        "dtype_bytes": str(DTYPES[dtype].size_bytes),
        "sizes": _lines(f"    std::int64_t {name} = {literal(default)};" for name, default in spec.sizes.items()),
        "parameters": _lines(f"    {_KINDS[type(p.values[0])]} {p.name};" for p in spec.parameters),
        "and_flags": " and the flags of a problem" if spec.flags else "",
        "cubin_flags": "".join(f"    std::int64_t compiled_{name};\n" for name in spec.compiled_names),
        "configs": _lines(
            f"    {_aggregate(c[p.name] for p in spec.parameters)},  // {n}" for n, c in enumerate(configs.values())
        ),
        "default_config": str(numbers[config_key(untuned)]),
        "tuned": _lines(tuned) or '    {{}, 0, 0.0, "", 0},  // nothing',
        "tuned_count": str(len(known)),
        "cubins": _lines(compiled),
        "grid": dimensions(launch.grid),
        "block": dimensions(launch.block),
        "cluster": dimensions(launch.cluster),
        "is_cooperative": literal(launch.is_cooperative),
        "dynamic_smem_bytes": cpp(launch.dynamic_smem_bytes) if launch.dynamic_smem_bytes else "0",
        "flags_differ": "".join(f" || cubin.compiled_{name} != sizes.{name}" for name in spec.compiled_names),
        "flag_distance": " + ".join(f"int(from.sizes.{name} != sizes.{name})" for name in spec.flags) or "0",
        "size_distance": " + ".join(f"detail::doublings(from.sizes.{name}, sizes.{name})" for name in proper),
        **_launch_code(spec, dtype, cpp),
        "value_pointers": ", ".join(f"&value_{name}" for name in spec.steps[0].arguments),
        **_family_code(spec, rules, numbers),
    }
    filled["device"] = _device(filled.values(), [cubin.target for cubin in cubins])
    template = files("autotile.exchange").joinpath("header_template.hpp").read_text(encoding="utf-8")
    has_attributes = bool(launch.cluster or launch.is_cooperative)
    parts = {
        "workspaces": spec.workspaces,
        "attributes": has_attributes,
        "plain": not has_attributes,
        "maps": spec.tensor_maps,
        "constants": any(buffer.constant for buffer in spec.buffers),
    }
    template = _PART.sub(lambda match: match[2] if parts[match[1]] else "", template)
    return _PLACEHOLDER.sub(lambda match: filled[match[1]], template)


def namespace_of(spec: KernelSpec, dtype: str) -> str:
    """Return the kernel's namespace within ``autotile``; a kernel with several element types has one for each."""
    name = spec.name.replace("-", "_")
    name += "_" * (is_keyword(name) or name in ("std", "autotile"))  # these would hide the header's own
    return name if len(spec.dtypes) == 1 else f"{name}_{dtype}"


def _aggregate(values: Iterable[Value]) -> str:
    return "{" + ", ".join(map(literal, values)) + "}"


def _device(texts: Iterable[str], targets: Sequence[str]) -> str:
    """Return the device fields that parts of a header use and that the driver cannot be queried for."""
    used = "".join(texts)
    fields = []
    for name in _OF_ARCHITECTURES:
        if f"device.{name}" in used:
            values = {int(limits_for(capability_of(target))[name]) for target in targets}
            if len(values) > 1:
                raise InputError(
                    f"the kernel uses device.{name}, which the driver cannot be queried for and which differs between "
                    f"{', '.join(dict.fromkeys(targets))}; write one header per architecture, with --arch"
                )
            fields.append(f"    std::int64_t {name} = {values.pop()};  // of every architecture here\n")
    return "".join(fields)
