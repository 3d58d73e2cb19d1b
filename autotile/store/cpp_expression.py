"""Write the expressions of a search-space file in C++."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from autotile.ground.expressions import Expression
from autotile.ground.model import Value

_ARITHMETIC: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_FUNCTIONS: Mapping[type[ast.operator], str] = {
    ast.FloorDiv: "detail::floor_div",
    ast.Mod: "detail::floor_mod",
    ast.Pow: "detail::power",
}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_CALLS = {
    "min": "std::min<std::int64_t>({{{}}})",
    "max": "std::max<std::int64_t>({{{}}})",
    "ceil_div": "detail::ceil_div({})",
}
_SIGNS: Mapping[type[ast.unaryop], str] = {ast.Not: "!", ast.USub: "-", ast.UAdd: "+"}
_FOLDS: Mapping[type[ast.operator], Callable[[int, int], int | None]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: a // b if b else None,
    ast.Mod: lambda a, b: a % b if b else None,
    ast.Pow: lambda a, b: int(a**b) if 0 <= b <= 63 else None,
}
_LARGEST_INT = 2**31 - 1


def to_cpp(expression: Expression, places: Mapping[str, str]) -> str:
    """An expression over 64-bit integers, booleans and ``std::string_view``, of the same value wherever it has one.

    Parameters
    ----------
    expression
        Parsed and checked, so that its text is known to be in the language.
    places
        What each name is in C++: ``{"BM": "config.BM"}``; properties of the device are ``device.NAME`` in both.

    Notes
    -----
    Where the language has no value (a division by zero, a result beyond 64 bits), C++ has none either, but does not say
    so.
    """
    return _Writer(places).write(ast.parse(expression.text, mode="eval").body)


def literal(value: Value) -> str:
    """A constant in C++."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value) if abs(value) <= _LARGEST_INT else f"{value}LL"


class _Writer:
    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def write(self, tree: ast.expr) -> str:
        """Any part of an expression; whatever combines others stands in parentheses where it needs them."""
        match tree:
            case ast.Constant(value=str() as text):
                written = f"std::string_view({literal(text)})"
            case ast.Constant(value=bool() | int() as value):
                written = literal(value)
            case ast.Name(id=name):
                written = self._places[name]
            case ast.Attribute(attr=name):
                written = f"device.{name}"
            case ast.BinOp():
                written = self._binary(tree)
            case ast.UnaryOp(op=sign, operand=operand):
                written = _SIGNS[type(sign)] + self._part(operand)
            case ast.BoolOp(op=word, values=operands):
                written = (" && " if isinstance(word, ast.And) else " || ").join(map(self._part, operands))
            case ast.Compare():
                written = self._comparison(tree)
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                written = f"{self._part(test)} ? {self._part(body)} : {self._part(otherwise)}"
            case ast.Call(func=ast.Name(id=name), args=arguments):
                written = _CALLS[name].format(", ".join(map(self.write, arguments)))
            case _:
                raise ValueError(f"{ast.unparse(tree)} is no part of the expression language")
        return written

    def _part(self, tree: ast.expr) -> str:
        """A part as an operand."""
        text = self.write(tree)
        functions = isinstance(tree, ast.BinOp) and type(tree.op) in _FUNCTIONS
        simple = isinstance(tree, ast.Constant | ast.Name | ast.Attribute | ast.Call) or functions
        return text if simple or text.isidentifier() or text.isdecimal() else f"({text})"

    def _binary(self, tree: ast.BinOp) -> str:
        folded = _folded(tree)  # literals are ints in C++, and products of them may need 64 bits
        if folded is not None:
            return literal(folded)
        if type(tree.op) in _FUNCTIONS:
            return f"{_FUNCTIONS[type(tree.op)]}({self.write(tree.left)}, {self.write(tree.right)})"
        return f"{self._part(tree.left)} {_ARITHMETIC[type(tree.op)]} {self._part(tree.right)}"

    def _comparison(self, tree: ast.Compare) -> str:
        match tree:
            case ast.Compare(ops=[ast.In() | ast.NotIn() as word], comparators=[ast.Tuple() | ast.List() as listed]):
                left = self._part(tree.left)
                found = " || ".join(f"{left} == {self._part(element)}" for element in listed.elts)
                return f"!({found})" if isinstance(word, ast.NotIn) else found
        operands = [self._part(operand) for operand in (tree.left, *tree.comparators)]
        steps = zip(operands, tree.ops, operands[1:], strict=False)
        return " && ".join(f"{left} {_COMPARISONS[type(word)]} {right}" for left, word, right in steps)


def _folded(tree: ast.expr) -> int | None:
    """Value of arithmetic on literals alone."""
    match tree:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _folded(operand)
            return None if inner is None else -inner
        case ast.BinOp(left=left, op=sign, right=right):
            a, b = _folded(left), _folded(right)
            return None if a is None or b is None else _FOLDS[type(sign)](a, b)
    return None
