"""Translation of scalar expressions to C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

from autotile.core.model import Value
from autotile.kernel import nodes
from autotile.kernel import real_numbers as real
from autotile.kernel import whole_numbers as whole
from autotile.kernel.expressions import Expression

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


def literal(value: Value | float) -> str:
    """Return a C++ literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
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
