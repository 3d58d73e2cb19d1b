"""Generate a C++ header that chooses a configuration from the sizes and launches it through the driver API."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import assert_never

import numpy as np

from autotile.core.device import EXPRESSION_NAMES, limits_for
from autotile.core.dtypes import DTYPES
from autotile.core.model import Value, config_key
from autotile.core.text import shown_text
from autotile.cuda.driver import variable_symbols
from autotile.database.paths import write_output
from autotile.database.winners import StoredRule, Winner
from autotile.errors import InputError
from autotile.exchange.bundle import BundledCubin, Shipment
from autotile.families.family import FamilyRule, Leaf, Split
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
from autotile.kernel.expressions import Expression, Node, evaluate
from autotile.kernel.problem import capability_of, runs_on
from autotile.kernel.spec import KernelSpec, Launch
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


def argument_fields(spec: KernelSpec, dtype: str) -> Iterator[str]:
    """Yield a field for each array and for each scalar that the caller may set."""
    for buffer in spec.buffers:
        shape = ", ".join(extent.text for extent in buffer.shape)
        yield f"CUdeviceptr {buffer.name} = 0;  ///< {buffer.access}, {_named(buffer.dtype, dtype)}[{shape}]"
    for scalar in spec.scalars:
        if scalar.default is not None:
            name = scalar.element_type(dtype)
            bits = f"  ///< the bits of a {name}" if DTYPES[name].component.name in _BITS else ""
            yield f"{c_type(name)} {scalar.name} = {_constant(scalar.default, name)};{bits}"


def launch_values(spec: KernelSpec, dtype: str, symbols: Mapping[str, str]) -> dict[str, str]:
    """Return the local variables of a launch, and the pointers to all arguments in order."""
    lines: list[str] = []
    pointed_to = {target for a in spec.arguments if isinstance(a, StructArgument) for target in a.targets}
    for argument in spec.arguments:
        name = argument.name
        match argument:
            case BufferArgument():
                if argument.is_passed or name in pointed_to:
                    lines.append(f"CUdeviceptr value_{name} = arguments.{name};")
            case StructArgument() | TensorMapArgument():
                continue  # below, as it may need the address of any of the others
            case ScalarArgument():
                kind, bound = c_type(argument.element_type(dtype)), argument.binding
                value = f"arguments.{name}" if bound is None else f"static_cast<{kind}>({to_cpp(bound, symbols)})"
                lines.append(f"{kind} value_{name} = {value};")
            case WorkspaceArgument():
                lines += _workspace(argument, dtype, symbols)
            case TextureArgument():
                raise InputError(
                    f"a C++ header cannot pass the texture {name}; serve the kernel from Python, or a bundle"
                )
            case _:
                assert_never(argument)
    for argument in spec.arguments:
        if isinstance(argument, StructArgument):
            lines += _struct(argument, dtype, symbols)
        if isinstance(argument, TensorMapArgument):
            lines += _tensor_map(argument, dtype, symbols)
    lines += _preparation(spec, dtype, symbols)
    pointers = [f"&value_{argument.name}" for argument in spec.arguments if argument.is_passed]
    return {"values": "\n".join(f"        {line}" for line in lines), "value_pointers": ", ".join(pointers)}


def workspace_code(spec: KernelSpec) -> dict[str, str]:
    """Return the members that the class needs if the kernel has workspaces."""
    if not spec.workspaces:
        return {"workspace_methods": "", "workspace_members": "", "free_workspaces": ""}
    return {
        "workspace_methods": _WORKSPACE_METHOD,
        "workspace_members": "\n    std::map<std::pair<CUstream, std::string>, Workspace> workspaces_;",
        "free_workspaces": "        for (const auto& [key, workspace] : workspaces_) cuMemFree(workspace.address);\n",
    }


_WORKSPACE_METHOD = """
    struct Workspace {
        CUdeviceptr address;
        std::size_t bytes;
    };

    /// Workspace of a stream, kept until a larger one is needed; null if its size is 0.
    CUdeviceptr workspace(CUstream stream, const std::string& name, std::size_t bytes, bool zeroed) {
        if (bytes == 0) return 0;
        const std::lock_guard<std::mutex> lock(mutex_);
        Workspace& kept = workspaces_[{stream, name}];
        if (kept.bytes < bytes) {
            if (kept.address != 0) {
                detail::check(cuStreamSynchronize(stream), "waiting for a workspace");
                detail::check(cuMemFree(kept.address), "freeing a workspace");
            }
            kept = {};
            detail::check(cuMemAlloc(&kept.address, bytes), "allocating a workspace");
            kept.bytes = bytes;
            if (zeroed) detail::check(cuMemsetD8Async(kept.address, 0, bytes, stream), "clearing a workspace");
        }
        return kept.address;
    }
"""


def c_type(dtype: str) -> str:
    """Return the C++ type that holds a value of an element type."""
    count, part = _parts(dtype)
    return f"std::array<{c_type(part)}, {count}>" if count else _C_TYPES.get(dtype) or f"std::{dtype}_t"


def _parts(dtype: str) -> tuple[int, str]:
    """Return the number of parts of a vector or complex number and their type; 0 and "" for any other type."""
    if DTYPES[dtype].is_complex:
        return 2, _COMPLEX_PARTS[dtype]
    return DTYPES[dtype].components, DTYPES[dtype].component_name


def _named(kind: ElementType, dtype: str) -> str:
    return str(kind).replace(PROBLEM_DTYPE, dtype)


def _constant(value: Number, name: str) -> str:
    dtype = DTYPES[name]
    count, part = _parts(name)
    if count:
        values = value if isinstance(value, tuple) else (value, 0.0)  # a real number of a complex type
        return f"{{{', '.join(_constant(one, part) for one in values)}}}"
    assert not isinstance(value, tuple)
    if name in _BITS:
        stored = dtype.encode(np.array([float(value)]))
        return f"0x{int(stored.view(f'uint{8 * stored.itemsize}')[0]):0{2 * stored.itemsize}x}"
    if name == "bool":
        return literal(bool(value))
    if dtype.is_integer:
        return str(int(value))
    if not math.isfinite(value):
        return 'std::nan("")' if math.isnan(value) else f"{'-' if value < 0 else ''}HUGE_VAL"
    return repr(float(value)) + ("f" if name == "float32" else "")


def _by_type(kind: ElementType, dtype: str, symbols: Mapping[str, str], text: Callable[[str], str]) -> str:
    """Return text that depends on an element type, which flags may select."""
    named = [text(dtype if name == PROBLEM_DTYPE else name) for name in kind.names]
    if kind.condition is None:
        return named[0]
    return f"(({to_cpp(kind.condition, symbols)}) ? {named[0]} : {named[1]})"


def _element_bytes(kind: ElementType, dtype: str, symbols: Mapping[str, str]) -> str:
    return _by_type(kind, dtype, symbols, lambda name: str(DTYPES[name].size_bytes))


def _workspace(argument: WorkspaceArgument, dtype: str, symbols: Mapping[str, str]) -> Iterator[str]:
    name = argument.name
    factors = [f"({to_cpp(extent, symbols)})" for extent in argument.shape]
    yield f"const std::int64_t bytes_{name} ="
    yield f"    {' * '.join([*factors, _element_bytes(argument.dtype, dtype, symbols)])};"
    zeroed = "true" if argument.zeroed else "false"
    yield f'CUdeviceptr value_{name} = workspace(stream, "{name}", static_cast<std::size_t>(bytes_{name}), {zeroed});'


def _preparation(spec: KernelSpec, dtype: str, symbols: Mapping[str, str]) -> Iterator[str]:
    """Yield the code that fills outputs before a launch, and copies buffers to constant memory.

    Raises
    ------
    InputError
        An output has another content than zeros.
    """
    for buffer in spec.buffers:
        factors = [f"({to_cpp(extent, symbols)})" for extent in buffer.shape]
        size_bytes = f"static_cast<std::size_t>({' * '.join([*factors, _element_bytes(buffer.dtype, dtype, symbols)])})"
        if buffer.is_initialized and not buffer.is_read:
            if not buffer.is_zeroed:
                hint = 'use init = "zeros", or an inout buffer'
                raise InputError(f"a C++ header cannot make the content of the output {buffer.name}; {hint}")
            yield f'detail::check(cuMemsetD8Async(arguments.{buffer.name}, 0, {size_bytes}, stream), "{buffer.name}");'
        if buffer.constant:
            (symbol,) = variable_symbols(buffer.constant)
            yield "// launches that overlap must not need different contents of constant memory"
            yield f"CUmodule module_{buffer.name} = nullptr;"
            yield f"CUdeviceptr constant_{buffer.name} = 0;"
            yield f'detail::check(cuFuncGetModule(&module_{buffer.name}, prepared.function), "the module");'
            found = f'cuModuleGetGlobal(&constant_{buffer.name}, nullptr, module_{buffer.name}, "{symbol}")'
            yield f"if ({found} == CUDA_SUCCESS) {{"
            copied = f"cuMemcpyDtoDAsync(constant_{buffer.name}, arguments.{buffer.name}, {size_bytes}, stream)"
            yield f'    detail::check({copied}, "{buffer.constant}");'
            yield "}"


def _struct(argument: StructArgument, dtype: str, symbols: Mapping[str, str]) -> Iterator[str]:
    """Yield the code that fills the bytes of a struct."""
    name, layout = argument.name, argument.layout(dtype)
    yield f"alignas(16) unsigned char value_{name}[{layout.size_bytes}] = {{}};"
    for offset, member, values in layout.scalars:
        count, part = _parts(member)
        written = [_member(value, part or member, symbols) for value in values]
        value = f"{{{', '.join(written)}}}" if count else written[0]
        yield f"const {c_type(member)} {name}_{offset} = {value};"
        yield f"std::memcpy(value_{name} + {offset}, &{name}_{offset}, sizeof {name}_{offset});"
    for offset, target in layout.pointers:
        yield f"std::memcpy(value_{name} + {offset}, &value_{target}, sizeof value_{target});"


def _member(value: Expression | float, dtype: str, symbols: Mapping[str, str]) -> str:
    if isinstance(value, Expression):
        return f"static_cast<{c_type(dtype)}>({to_cpp(value, symbols)})"
    return _constant(value, dtype)


def _tensor_map(argument: TensorMapArgument, dtype: str, symbols: Mapping[str, str]) -> Iterator[str]:
    """Yield the code that encodes a tensor map; the driver orders axes from the innermost."""
    name, buffer = argument.name, argument.buffer
    rank = len(buffer.shape)
    address = f"arguments.{buffer.name}" if buffer.is_given else f"value_{buffer.name}"
    kind = _by_type(buffer.dtype, dtype, symbols, lambda n: f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES.get(n, n.upper())}")
    element = _element_bytes(buffer.dtype, dtype, symbols)

    def listed(c_kind: str, what: str, expressions: tuple[Expression, ...]) -> str:
        values = ", ".join(f"static_cast<{c_kind}>({to_cpp(e, symbols)})" for e in reversed(expressions))
        return f"const {c_kind} {what}_{name}[] = {{{values}}};"

    yield listed("cuuint64_t", "extents", buffer.shape)
    strides = [f"{element} * " + " * ".join(f"extents_{name}[{i}]" for i in range(axis)) for axis in range(1, rank)]
    yield f"const cuuint64_t strides_{name}[] = {{{', '.join(strides) or '0'}}};"
    yield listed("cuuint32_t", "box", argument.box)
    yield listed("cuuint32_t", "steps", argument.element_strides)
    yield f"CUtensorMap value_{name}{{}};  // zeros if the configuration does not use it"
    yield f"if ({_is_present(argument, symbols)}) {{"
    yield f"    detail::check(cuTensorMapEncodeTiled(&value_{name}, {kind}, {rank},"
    yield f"                                         reinterpret_cast<void*>({address}),"
    yield f"                                         extents_{name}, strides_{name}, box_{name}, steps_{name},"
    yield "                                         CU_TENSOR_MAP_INTERLEAVE_NONE,"
    yield f"                                         {_choice(_SWIZZLES, to_cpp(argument.swizzle_bytes, symbols))},"
    promotion = _choice(_PROMOTIONS, to_cpp(argument.l2_promotion_bytes, symbols))
    yield f"                                         {promotion},"
    yield "                                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),"
    yield f'                  "the tensor map of {buffer.name}");'
    yield "}"


def _is_present(argument: TensorMapArgument, symbols: Mapping[str, str]) -> str:
    sides = argument.box if argument.buffer.is_given else (*argument.box, *argument.buffer.shape)
    return " && ".join(f"({to_cpp(side, symbols)}) != 0" for side in sides)


def map_rules(spec: KernelSpec, dtype: str, symbols: Mapping[str, str]) -> Iterator[str]:
    """Yield the constraints of tensor maps on the sizes: rows are multiples of 16 bytes."""
    for argument in spec.tensor_maps:
        buffer = argument.buffer
        row = f"({to_cpp(buffer.shape[-1], symbols)}) * {_element_bytes(buffer.dtype, dtype, symbols)}"
        yield f"if ({_is_present(argument, symbols)} && {row} % 16 != 0) return false;  // {argument.name}"


_SWIZZLES = {b: f"CU_TENSOR_MAP_SWIZZLE_{b}B" for b in (128, 64, 32)} | {0: "CU_TENSOR_MAP_SWIZZLE_NONE"}
_PROMOTIONS = {b: f"CU_TENSOR_MAP_L2_PROMOTION_L2_{b}B" for b in (256, 128, 64)} | {
    0: "CU_TENSOR_MAP_L2_PROMOTION_NONE"
}


def _choice(names: Mapping[int, str], value: str) -> str:
    if value.isdecimal():
        return names[int(value)]
    return "".join(f"({value}) == {n} ? {text} : " for n, text in names.items() if n) + names[0]


_MAX_INT = 2**31 - 1

_INFIX = ("+", "-", "*", "&", "|", "^", "/")
"""Operators of both languages."""

_ROUNDING = ("floor", "ceil", "round", "int")
"""Functions that return a whole number as it is."""

_WHOLE_CALLS = {
    "//": "detail::floor_div",
    "%": "detail::floor_mod",
    "ceil_div": "detail::ceil_div",
    "**": "detail::power",
    "min": "std::min<std::int64_t>",
    "max": "std::max<std::int64_t>",
    "abs": "detail::absolute",
    "gcd": "std::gcd<std::int64_t, std::int64_t>",
    "lcm": "std::lcm<std::int64_t, std::int64_t>",
    "<<": "detail::shift_left",
    ">>": "detail::shift_right",
    "ceil_log2": "detail::ceil_log2",
    "is_power_of_two": "detail::is_power_of_two",
}
"""C++ functions of whole numbers."""

_REAL_CALLS = {
    "//": "detail::floor_div_real",
    "%": "detail::floor_mod_real",
    "**": "std::pow",
    "min": "std::min<double>",
    "max": "std::max<double>",
    "abs": "std::fabs",
    "sqrt": "std::sqrt",
    "log2": "std::log2",
    "log": "std::log",
    "exp": "std::exp",
    "floor": "detail::whole(std::floor, {})",
    "ceil": "detail::whole(std::ceil, {})",
    "round": "detail::whole(std::nearbyint, {})",
    "int": "detail::whole(std::trunc, {})",
}
"""C++ functions of real numbers, by name, or with a place for the arguments."""


def to_cpp(expression: Expression, symbols: Mapping[str, str]) -> str:
    """Return a C++ expression with the same value: 64-bit integers, doubles, booleans and ``std::string_view``.

    Parameters
    ----------
    expression
        A parsed expression.
    symbols
        C++ expression of each name: ``{"BM": "config.BM"}``; device properties are ``device.NAME`` in both languages.

    Notes
    -----
    Expressions that raise in Python (division by zero, results beyond 64 bits) have undefined behavior in C++.
    """
    return _Writer(symbols).write(expression.node)


def _character(character: str) -> str:
    """Return a character in a C++ string; one that is not printable would end the line, or could not be written."""
    if character.isprintable():
        return f"\\{character}" if character in '"\\' else character
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors="surrogatepass"))


def literal(value: Value | float) -> str:
    """Return a C++ literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(map(_character, value)) + '"'
    if isinstance(value, float):
        return repr(value)
    if value == -(2**63):
        return f"({value + 1}LL - 1)"
    return str(value) if abs(value) <= _MAX_INT else f"{value}LL"


class _Writer:
    def __init__(self, symbols: Mapping[str, str]) -> None:
        self._symbols = symbols

    def write(self, node: Node) -> str:
        """Translate a node; its operands are parenthesized where needed."""
        operands, value = node.operands, node.value
        match node.operation:
            case "constant":
                return f"std::string_view({literal(value)})" if isinstance(value, str) else literal(value)
            case "name":
                return str(value) if value.startswith("device.") else self._symbols[value]
            case "number":
                return f"std::int64_t{{{self.write(operands[0])}}}"
            case "real":
                return f"static_cast<double>({self.write(operands[0])})"
            case "not":
                return f"!{self._part(operands[0])}"
            case "and" | "or" as word:
                return (" && " if word == "and" else " || ").join(map(self._part, operands))
            case "compare":
                parts = list(map(self._part, operands))
                links = zip(parts, value, parts[1:], strict=False)
                return " && ".join(f"{left} {sign} {right}" for left, sign, right in links)
            case "in":
                left, *members = map(self._part, operands)
                return " || ".join(f"{left} == {member}" for member in members)
            case "if":
                condition, chosen, otherwise = map(self._part, operands)
                return f"{condition} ? {chosen} : {otherwise}"
        return self._operation(node)

    def _part(self, node: Node) -> str:
        """Translate a node that is an operand."""
        text = self.write(node)
        is_call = callable(node.value) and node.operation not in _INFIX and text.endswith(")")
        simple = is_call or node.operation in ("constant", "name", "number", "real")
        return text if (simple and not text.startswith("-")) or text.isdecimal() else f"({text})"

    def _operation(self, node: Node) -> str:
        if all(map(_is_constant, node.operands)):
            return literal(evaluate(node, {}, True))  # C++ literals are ints, and products of them may need 64 bits
        operands = node.operands
        if node.operation == "float" or (node.operation in _ROUNDING and operands[0].kind == "number"):
            return self.write(operands[0])
        if node.operation == "~":
            return f"~{self._part(operands[0])}"
        if node.operation == "-" and operands[0] == Node("constant", operands[0].kind, value=0):
            return f"-{self._part(operands[1])}"
        if node.operation in _INFIX:
            left, right = map(self._part, operands)
            return f"{left} {node.operation} {right}"
        call = (_REAL_CALLS if operands[0].kind == "real" else _WHOLE_CALLS)[node.operation]
        arguments = ", ".join(map(self.write, operands))
        return call.format(arguments) if "{}" in call else f"{call}({arguments})"


def _is_constant(node: Node) -> bool:
    return node.operation == "constant" or (callable(node.value) and all(map(_is_constant, node.operands)))


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


def write_shipped_header(shipment: Shipment, dtype: str, output: Path) -> tuple[str, ...]:
    """Write a C++ header for one element type, and its cubins beside it; return the names of the cubins' files.

    Raises
    ------
    InputError
        A file cannot be written, or the kernel depends on a property of the device that a header cannot know.
    """

    def precedence(winner: Winner) -> tuple[bool, bool, bool, float]:
        """Put measured ones, cold L2, the user's own and the newest first; the user's own are in order already."""
        age = -winner.tuned_at.timestamp() if winner.shipped else 0.0
        return (winner.key.source != "cuda", winner.key.l2_mode != "cold", winner.shipped, age)

    bundled, images, cubins = shipment.bundled, {}, []
    winners = sorted((winner for winner in bundled.winners if winner.key.dtype == dtype), key=precedence)
    rules = [stored for stored in bundled.rules if stored.key.dtype == dtype]
    for cubin in bundled.cubins:
        if cubin.dtype == dtype:
            file = f"{output.stem}.{cubin.target}.{Path(cubin.member).stem[:12]}.cubin"
            images[file] = shipment.images[cubin.member]
            cubins.append(replace(cubin, member=file))
    spec = bundled.kernel.spec
    text = write_header(spec, dtype, winners, cubins, rules=rules, stem=output.stem, version=__version__)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}; name another file") from None
    write_output(output, text)
    for file, image in images.items():
        write_output(output.with_name(file), image, follow_link=False)
    return tuple(sorted(images))


def write_header(
    spec: KernelSpec,
    dtype: str,
    winners: Sequence[Winner],
    cubins: Sequence[BundledCubin],
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


def _cubin(spec: KernelSpec, cubin: BundledCubin, numbers: Mapping[str, int]) -> str:
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
    return f"    {{{', '.join(map(str, fields))}, {flags}{literal(cubin.member)}, {literal(symbol)}}},"


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
