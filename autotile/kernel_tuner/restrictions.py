"""Kernel Tuner's string expressions: Python arithmetic over parameters and results, evaluated without running Python.

Kernel Tuner pastes values into such strings and runs them. Here the text is parsed, and only the operations listed in
this module are carried out, by this module.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.errors import InputError
from autotile.kernel.computed import map_rows, names_read
from autotile.kernel_tuner.parameter_codec import ParameterCodec

_MAX_CHARACTERS = 10_000
_MAX_POWER_BITS = 4096
"""Size of a whole number that ``**`` or ``<<`` may give."""
_TOKEN = re.compile(r"\w+")

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.RShift: operator.rshift,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("ceil", "floor", "sqrt", "log", "log2", "log10", "exp", "pow", "gcd")},
    **{"int": int, "float": float, "bool": bool, "str": str, "abs": abs, "round": round, "len": len},
    **{"min": min, "max": max, "sum": sum, "any": any, "all": all, "sorted": sorted, "set": set, "list": list},
}
_NUMPY_NAMES = (
    *(
        "ceil",
        "floor",
        "sqrt",
        "log",
        "log2",
        "log10",
        "exp",
        "power",
        "abs",
        "sum",
        "prod",
        "mean",
        "median",
        "average",
    ),
    *("min", "max", "amin", "amax", "minimum", "maximum", "std", "var", "array", "round", "pi", "any", "all"),
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint32", "uint64"),
)
_NUMPY = {name: getattr(np, name) for name in _NUMPY_NAMES}
_MODULES: Mapping[str, Mapping[str, Any]] = {
    "math": {name: getattr(math, name) for name in dir(math) if not name.startswith("_")},
    "np": _NUMPY,
    "numpy": _NUMPY,
}
_METHODS = frozenset({"startswith", "endswith", "lower", "upper", "split", "strip", "count", "index", "get"})
"""Methods of strings, lists and dictionaries that may be called."""


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression.

    Parameters
    ----------
    text
        The expression: arithmetic, comparisons, conditions, lists, and functions of Python, ``math`` and ``np``.
    values
        Values of the names in it.

    Raises
    ------
    InputError
        The text is not such an expression, or names something unknown.
    ArithmeticError, TypeError, ValueError
        An operation has no result.
    """
    return _value(_parsed(text), values, text)


def names_in(text: str) -> set[str]:
    """Return the names in an expression; errors as for `evaluate`."""
    return {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)}


def replace_names(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with each word that is a name replaced by its value."""
    return _TOKEN.sub(lambda match: str(values[match[0]]) if match[0] in values else match[0], text)


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr:
    if len(text) > _MAX_CHARACTERS:
        raise InputError(f"the expression {text[:60]!r}... has {len(text):,} characters, at most {_MAX_CHARACTERS:,}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"the expression {text!r} is not Python: {error}") from None


def _value(tree: ast.expr, values: Mapping[str, Any], text: str) -> Any:
    def value(part: ast.expr) -> Any:
        return _value(part, values, text)

    match tree:
        case ast.Constant():
            return tree.value
        case ast.Name(id=name):
            return _named(name, values, text)
        case ast.BinOp(left=left, op=ast.Pow() | ast.LShift() as operation, right=right):
            return _power(operation, value(left), value(right))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            return _BINARY[type(operation)](value(left), value(right))
        case ast.UnaryOp(op=operation, operand=operand):
            return _UNARY[type(operation)](value(operand))
        case ast.BoolOp(op=ast.And(), values=operands):
            return _until(operands, value, is_end=operator.not_)
        case ast.BoolOp(values=operands):
            return _until(operands, value, is_end=bool)
        case ast.Compare(left=left, ops=operations, comparators=others):
            return _compared(value(left), operations, others, value)
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return value(body) if value(test) else value(otherwise)
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return tuple(value(element) for element in elements)
        case ast.Subscript(value=array, slice=index) if not isinstance(index, ast.Slice):
            return value(array)[value(index)]
        case ast.Call(func=function, args=arguments, keywords=[]):
            return _function(function, value, text)(*(value(argument) for argument in arguments))
        case ast.Attribute(value=ast.Name(id=module), attr=name) if name in _MODULES.get(module, {}):
            return _MODULES[module][name]
        case ast.ListComp() | ast.GeneratorExp():
            return _comprehended(tree, values, text)
    raise InputError(
        f"{ast.unparse(tree)!r} in the expression {text!r} is not carried out; use arithmetic, comparisons, conditions "
        "and functions of math, or pass a function"
    )


def _named(name: str, values: Mapping[str, Any], text: str) -> Any:
    if name in values:
        return values[name]
    if name in _PLAIN:
        return _PLAIN[name]
    raise InputError(f"{name!r} in the expression {text!r} is unknown; known are {', '.join(map(str, values))}")


def _until(operands: list[ast.expr], value: Callable[[ast.expr], Any], is_end: Callable[[Any], bool]) -> Any:
    """Return the first operand that ends the evaluation, or the last one."""
    found: Any = None
    for operand in operands:
        found = value(operand)
        if is_end(found):
            break
    return found


def _compared(left: Any, operations: list[ast.cmpop], others: list[ast.expr], value: Callable[[ast.expr], Any]) -> bool:
    for operation, other in zip(operations, others, strict=True):
        right = value(other)
        if not _COMPARISONS[type(operation)](left, right):
            return False
        left = right
    return True


def _power(operation: ast.operator, base: Any, exponent: Any) -> Any:
    """Return ``base ** exponent`` or ``base << exponent``, unless the number would be absurdly long."""
    is_shift = isinstance(operation, ast.LShift)
    if isinstance(base, int) and isinstance(exponent, int):
        bits = base.bit_length() + exponent if is_shift else base.bit_length() * exponent
        if bits > _MAX_POWER_BITS:
            raise OverflowError(f"{base} {'<<' if is_shift else '**'} {exponent} has {bits:,} bits")
    return base << exponent if is_shift else base**exponent


def _function(tree: ast.expr, value: Callable[[ast.expr], Any], text: str) -> Callable[..., Any]:
    match tree:
        case ast.Attribute(value=owner, attr=name) if name in _METHODS:
            method: Callable[..., Any] = getattr(value(owner), name)
            return method
        case ast.Name() | ast.Attribute():
            function = value(tree)
            if callable(function):
                return function  # type: ignore[no-any-return]
    raise InputError(f"{ast.unparse(tree)!r} in the expression {text!r} is not a function that is known here")


def _comprehended(tree: ast.ListComp | ast.GeneratorExp, values: Mapping[str, Any], text: str) -> list[Any]:
    match tree.generators:
        case [ast.comprehension(target=ast.Name(id=name), iter=source, ifs=conditions, is_async=0)]:
            scopes = ({**values, name: item} for item in _value(source, values, text))
            kept = (scope for scope in scopes if all(_value(each, scope, text) for each in conditions))
            return [_value(tree.elt, scope, text) for scope in kept]
    raise InputError(f"{ast.unparse(tree)!r} in the expression {text!r} is not carried out; pass a function")


_PROBES = 500
"""Random configurations by which the parameters are found that a function reads."""
_ALL_NAMES_BELOW = 20_000
"""Number of combinations below which a function is simply given all parameters."""

Params = Mapping[str, Any]


Rows = NDArray[Any]

_MAX_NUMBER = 2**53
"""Bound of whole numbers in columns, below which float64 holds them all."""
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Rows]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
}
_DIVISIONS: Mapping[type[ast.operator], Callable[[Any, Any], Rows]] = {
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.remainder,
}


class _RowsNeededError(Exception):
    """The expression must be evaluated for one row at a time."""


def holds_in_rows(text: str, columns: Mapping[str, Rows]) -> Rows | None:
    """Return whether a condition holds in each row of a table of whole numbers, shape (rows,).

    None where `evaluate` must be called for each row: the condition has more than arithmetic and comparisons, divides
    by 0 somewhere, or its numbers may exceed 2**53.
    """
    try:
        return np.asarray(_condition(_parsed(text), columns))
    except _RowsNeededError:
        return None


def _condition(tree: ast.expr, columns: Mapping[str, Rows]) -> Rows:
    match tree:
        case ast.BoolOp(op=ast.And(), values=operands):
            return np.asarray(np.all([_condition(each, columns) for each in operands], axis=0))
        case ast.BoolOp(values=operands):
            return np.asarray(np.any([_condition(each, columns) for each in operands], axis=0))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_condition(operand, columns)
        case ast.Compare(left=first, ops=operations, comparators=others):
            sides = [_column(each, columns) for each in (first, *others)]
            if any(isinstance(operation, ast.In | ast.NotIn | ast.Is | ast.IsNot) for operation in operations):
                raise _RowsNeededError
            compared = [
                _COMPARISONS[type(operation)](*pair)
                for operation, *pair in zip(operations, sides, sides[1:], strict=False)
            ]
            return np.asarray(np.all(compared, axis=0))
    return np.asarray(np.not_equal(_column(tree, columns), 0))


def _column(tree: ast.expr, columns: Mapping[str, Rows]) -> Rows:
    rows = len(next(iter(columns.values()), ()))
    match tree:
        case ast.Constant(value=int(number)) if abs(number) < _MAX_NUMBER:
            return np.full(rows, int(number), np.int64)
        case ast.Name(id=name) if name in columns:
            return _bounded(columns[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_column(operand, columns)
        case ast.BinOp(left=left, op=operation, right=right):
            return _combined(operation, _column(left, columns), _column(right, columns))
    raise _RowsNeededError


def _combined(operation: ast.operator, left: Rows, right: Rows) -> Rows:
    kind, are_whole = type(operation), left.dtype.kind == right.dtype.kind == "i"
    if kind is ast.Mult and are_whole:
        _bounded(left.astype(np.float64) * right)  # int64 may wrap here
    if kind in _ARITHMETIC:
        return _bounded(_ARITHMETIC[kind](left, right))
    if not are_whole or kind not in _DIVISIONS or not right.all():
        raise _RowsNeededError
    return _DIVISIONS[kind](left, right)


def _bounded(column: Rows) -> Rows:
    if column.size and np.abs(column).max() >= _MAX_NUMBER:
        raise _RowsNeededError
    return column


class Restriction(NamedTuple):
    """A condition on a configuration.

    Attributes
    ----------
    holds
        Function of a mapping of parameters.
    names
        Parameters that it may read; None if that is not known.
    text
        The condition itself, where it is a text.
    """

    holds: Callable[[Params], Any]
    names: tuple[str, ...] | None = None
    text: str = ""


def restriction_rules(restrictions: Any, codec: ParameterCodec) -> dict[str, Callable[..., Any]]:
    """Return restrictions as functions of columns of the parameters that autotile declares, by the name of a rule.

    Parameters
    ----------
    restrictions
        None, a text, a function, a constraint of python-constraint, or a list of these and of tuples of one of them
        with the names of its parameters.
    codec
        The parameters.

    Raises
    ------
    InputError
        A restriction has none of these forms.
    """
    if restrictions is None:
        return {}
    listed = restrictions if isinstance(restrictions, list) else [restrictions]
    parsed = [_restriction(each, codec.values) for each in listed]
    return {f"restriction_{number}": _rule(each, codec) for number, each in enumerate(parsed, start=1)}


def check_restrictions(restrictions: Any, params: Params, values: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether a configuration meets all restrictions; forms and errors as for `restriction_rules`."""
    listed = restrictions if isinstance(restrictions, list) else [] if restrictions is None else [restrictions]
    return all(_holds(_restriction(each, values), params) for each in listed)


def _restriction(given: Any, values: Mapping[str, Sequence[Any]]) -> Restriction:
    if isinstance(given, str):
        names = tuple(name for name in values if name in names_in(given))
        return Restriction(lambda params: evaluate(given, params), names, given)
    if isinstance(given, tuple) and len(given) in (2, 3) and isinstance(given[1], list | tuple):
        names = tuple(given[1])
        inner = _restriction(given[0], {name: values[name] for name in names})
        return Restriction(lambda params: inner.holds({name: params[name] for name in names}), names)
    if _is_constraint(given):
        return _of_constraint(given, values)
    if callable(given):
        return _of_function(given, tuple(values))
    raise InputError(
        f"a restriction is {given!r:.80}, expected text, a function, a constraint of python-constraint, or a list"
    )


def _is_constraint(given: Any) -> bool:
    return any(
        each.__name__ == "Constraint" and each.__module__.partition(".")[0] == "constraint"
        for each in type(given).__mro__
    )


def _of_constraint(constraint: Any, values: Mapping[str, Sequence[Any]]) -> Restriction:
    """Return a constraint of python-constraint over parameters, in their order."""
    names, kind = tuple(values), type(constraint).__name__
    function = getattr(constraint, "_func", None)
    if function is not None:
        return Restriction(lambda params: function(*(params[name] for name in names)), names)
    if kind in ("InSetConstraint", "NotInSetConstraint"):  # python-constraint applies them to the lists of values
        is_wanted, chosen = kind == "InSetConstraint", constraint._set
        return Restriction(lambda params: all((params[name] in chosen) == is_wanted for name in names), names)
    domains = {name: list(each) for name, each in values.items()}
    return Restriction(lambda params: constraint(list(names), domains, {name: params[name] for name in names}), names)


def _of_function(function: Callable[..., Any], parameters: tuple[str, ...]) -> Restriction:
    """Return a function of a dictionary of parameters, of parameters by name, or of all their values in order."""
    try:
        arguments = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return Restriction(function)
    kinds = inspect.Parameter
    plain = [a for a in arguments if a.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = [a.name for a in plain if a.default is kinds.empty]
    if required and all(name in parameters for name in required):
        read = tuple(a.name for a in plain if a.name in parameters)
        return Restriction(lambda params: function(**{name: params[name] for name in read}), read)
    if any(a.kind is kinds.VAR_KEYWORD for a in arguments) and not required:
        return Restriction(lambda params: function(**params))
    if any(a.kind is kinds.VAR_POSITIONAL for a in arguments) or len(required) == len(parameters) > 1:
        return Restriction(lambda params: function(*(params[name] for name in parameters)))
    if len(required) == 1:
        return Restriction(function)
    raise InputError(
        f"the restriction {getattr(function, '__name__', function)!s} takes {', '.join(required) or 'nothing'}; "
        "expected one dictionary of parameters, or parameters by name"
    )


def _holds(restriction: Restriction, params: Params) -> bool:
    try:
        return bool(restriction.holds(params))
    except ZeroDivisionError:  # the configuration gives the condition no meaning
        return False


def _rule(restriction: Restriction, codec: ParameterCodec) -> Callable[..., Any]:
    """Return a function whose arguments are named as the parameters that the restriction reads."""

    def holds(config: Params) -> bool:
        return _holds(restriction, codec.decode(config))

    def rule(**columns: Any) -> Any:
        if not any(isinstance(column, np.ndarray) for column in columns.values()):
            return holds(columns)
        arrays = dict(zip(columns, np.broadcast_arrays(*columns.values()), strict=True))
        if restriction.text and all(codec.is_plain[name] and arrays[name].dtype == np.int64 for name in arrays):
            found = holds_in_rows(restriction.text, arrays)
            if found is not None:
                return found
        return map_rows(holds, arrays).astype(np.bool_)

    names = _names_of(restriction, codec) or tuple(codec.values)[:1]
    arguments = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    rule.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    return rule


def _names_of(restriction: Restriction, codec: ParameterCodec) -> tuple[str, ...]:
    if restriction.names is not None:
        return restriction.names
    if len(codec) < _ALL_NAMES_BELOW:
        return tuple(codec.values)
    draw = random.Random(0)
    probes = [{name: draw.choice(values) for name, values in codec.values.items()} for _ in range(_PROBES)]
    read = names_read(lambda params: _holds(restriction, params), probes)
    return tuple(name for name in codec.values if name in read)
