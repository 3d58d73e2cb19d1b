"""Translation of a kernel's arguments and expressions to C++."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, assert_never

import numpy as np

from autotile.core.dtypes import DTYPES
from autotile.core.model import Value
from autotile.cuda.driver import variable_symbols
from autotile.errors import InputError
from autotile.kernel import expressions as nodes
from autotile.kernel import real_numbers as real
from autotile.kernel import whole_numbers as whole
from autotile.kernel.argument_kind import PROBLEM_DTYPE, ElementType, StructArgument, TensorMapArgument, TextureArgument
from autotile.kernel.arguments import BufferArgument, Number, ScalarArgument, WorkspaceArgument
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import KernelSpec

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

_OPERATORS: Mapping[Callable[..., Any], str] = {
    whole.add: "+",
    whole.subtract: "-",
    whole.multiply: "*",
    whole.bit_and: "&",
    whole.bit_or: "|",
    whole.bit_xor: "^",
    real.add: "+",
    real.subtract: "-",
    real.multiply: "*",
    real.divide: "/",
}
"""Binary operators of both languages."""

_CALLS: Mapping[Callable[..., Any], str] = {
    whole.floor_divide: "detail::floor_div",
    whole.modulo: "detail::floor_mod",
    whole.ceil_divide: "detail::ceil_div",
    whole.power: "detail::power",
    whole.minimum: "std::min<std::int64_t>",
    whole.maximum: "std::max<std::int64_t>",
    whole.absolute: "detail::absolute",
    whole.greatest_divisor: "std::gcd<std::int64_t, std::int64_t>",
    whole.least_multiple: "std::lcm<std::int64_t, std::int64_t>",
    whole.shift_left: "detail::shift_left",
    whole.shift_right: "detail::shift_right",
    whole.ceil_log2: "detail::ceil_log2",
    whole.is_power_of_two: "detail::is_power_of_two",
    real.floor_divide: "detail::floor_div_real",
    real.modulo: "detail::floor_mod_real",
    real.power: "std::pow",
    real.minimum: "std::min<double>",
    real.maximum: "std::max<double>",
    real.absolute: "std::fabs",
    real.square_root: "std::sqrt",
    real.log2: "std::log2",
    real.log: "std::log",
    real.exponential: "std::exp",
    real.floor: "detail::whole(std::floor, {})",
    real.ceil: "detail::whole(std::ceil, {})",
    real.nearest_whole: "detail::whole(std::nearbyint, {})",
    real.truncate: "detail::whole(std::trunc, {})",
}
"""Functions by name, or with a place for the arguments."""


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
    if value == whole.INT64_MIN:
        return f"({value + 1}LL - 1)"
    return str(value) if abs(value) <= _MAX_INT else f"{value}LL"


class _Writer:
    def __init__(self, symbols: Mapping[str, str]) -> None:
        self._symbols = symbols

    def write(self, node: nodes.Node) -> str:
        """Translate a node; its operands are parenthesized where needed."""
        known: Any = node  # one of the classes below; mypy cannot derive that from the protocol
        match known:
            case nodes.Constant(value=str() as text):
                written = f"std::string_view({literal(text)})"
            case nodes.Constant(value=value):
                written = literal(value)
            case nodes.Name(name=name):
                written = name if name.startswith("device.") else self._symbols[name]
            case nodes.AsNumber(operand=operand):
                written = f"std::int64_t{{{self.write(operand)}}}"
            case nodes.AsReal(operand=operand):
                written = f"static_cast<double>({self.write(operand)})"
            case nodes.Operation():
                written = self._operation(known)
            case nodes.Not(operand=operand):
                written = f"!{self._part(operand)}"
            case nodes.BooleanOperation(word=word, operands=operands):
                written = (" && " if word == "and" else " || ").join(map(self._part, operands))
            case nodes.Comparison(first=first, links=links):
                parts = [self._part(first), *(self._part(operand) for _, operand in links)]
                steps = zip(parts, links, parts[1:], strict=False)
                written = " && ".join(f"{left} {symbol} {right}" for left, (symbol, _), right in steps)
            case nodes.Membership(operand=operand, members=members):
                left = self._part(operand)
                written = " || ".join(f"{left} == {self._part(member)}" for member in members)
            case nodes.Conditional(condition=condition, chosen=chosen, otherwise=otherwise):
                written = f"{self._part(condition)} ? {self._part(chosen)} : {self._part(otherwise)}"
            case _:
                assert_never(known)
        return written

    def _part(self, node: nodes.Node) -> str:
        """Translate a node that is an operand."""
        text = self.write(node)
        is_call = isinstance(node, nodes.Operation) and node.function not in _OPERATORS and text.endswith(")")
        simple = is_call or isinstance(node, nodes.Constant | nodes.Name | nodes.AsNumber | nodes.AsReal)
        return text if (simple and not text.startswith("-")) or text.isdecimal() else f"({text})"

    def _operation(self, node: nodes.Operation) -> str:
        if all(_is_constant(operand) for operand in node.operands):
            return literal(node.evaluate({}, True))  # C++ literals are ints, and products of them may need 64 bits
        function, operands = node.function, node.operands
        if function is whole.unchanged:
            return self.write(operands[0])
        if function is whole.invert:
            return f"~{self._part(operands[0])}"
        if function in (whole.subtract, real.subtract) and operands[0] == nodes.Constant(0, operands[0].kind):
            return f"-{self._part(operands[1])}"
        if function in _OPERATORS:
            left, right = map(self._part, operands)
            return f"{left} {_OPERATORS[function]} {right}"
        call, arguments = _CALLS[function], ", ".join(map(self.write, operands))
        return call.format(arguments) if "{}" in call else f"{call}({arguments})"


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Operation):
        return all(map(_is_constant, node.operands))
    return isinstance(node, nodes.Constant)
