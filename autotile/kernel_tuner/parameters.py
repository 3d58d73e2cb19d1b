"""Parameters of Kernel Tuner: their values, string expressions over them, and restrictions.

Kernel Tuner pastes values into its string expressions and runs them. Here the text is parsed, and only the operations
listed in this module are carried out, by this module; a restriction in the language of search-space files is evaluated
for whole columns as one.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from numbers import Integral
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Config, Value, config_text
from autotile.errors import InputError, SpecError
from autotile.exchange.kernel_tuner import RESERVED
from autotile.kernel.expressions import is_c_identifier, parse_expression
from autotile.kernel.python_kernel import map_rows, names_read

Params = Mapping[str, Any]
"""Values of parameters by name, as the caller listed them."""
Rows = NDArray[Any]

_TEXT = re.compile(r"[A-Za-z_]\w{0,63}")


class ParameterCodec:
    """Converts configurations between the values that the caller listed, and values that autotile declares.

    Lists of whole numbers, of booleans and of C identifiers are declared as they are (`is_plain`); any other value is
    declared as its index in the list. A name or a list that cannot be used is an `InputError`.
    """

    def __init__(self, tune_params: Mapping[str, Sequence[Any]]) -> None:
        if not isinstance(tune_params, Mapping) or not tune_params:
            raise InputError(
                f"tune_params is {tune_params!r:.80}, expected a dictionary of at least one list of values"
            )
        self.values: dict[str, list[Any]] = {}
        self.declared: dict[str, list[Value]] = {}
        self._decoding: dict[str, dict[Value, Any]] = {}
        for name, given in tune_params.items():
            if name in RESERVED or not isinstance(name, str) or not is_c_identifier(name):
                raise InputError(
                    f"a parameter cannot be named {name!r}; expected a C identifier, and none of Kernel Tuner's own"
                )
            if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
                raise InputError(f"tune_params[{name!r}] is {given!r:.80}, expected a list of values")
            values: list[Any] = []
            for value in given:
                if _position(values, value) is None:
                    values.append(value.item() if isinstance(value, np.generic) else value)
            if not values:
                raise InputError(f"tune_params[{name!r}] is empty; give at least one value")
            is_whole = all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)
            is_declared = (
                (is_whole and all(abs(value) < 2**63 for value in values))
                or all(isinstance(value, bool) for value in values)
                or all(isinstance(value, str) and _TEXT.fullmatch(value) for value in values)
            )
            self.values[name] = values
            self.declared[name] = list(values if is_declared else range(len(values)))
            self._decoding[name] = dict(zip(self.declared[name], values, strict=True))
        self.is_plain = {name: self.declared[name] == values for name, values in self.values.items()}

    def decode(self, config: Mapping[str, Any]) -> Params:
        """Return a configuration of autotile with the caller's values; names that are no parameters are left out.

        A dictionary gives a dictionary; another mapping gives a view of it, decoded as it is read.
        """
        if isinstance(config, dict):
            return {name: self._decoding[name][value] for name, value in config.items() if name in self._decoding}
        return _Decoded(self._decoding, config)

    def encode(self, params: Params) -> Config:
        """Return the configuration of autotile; an `InputError` if a value is missing or not listed."""
        config: dict[str, Value] = {}
        for name, values in self.values.items():
            position = _position(values, params[name]) if name in params else None
            if position is None:
                raise InputError(f"{name} = {params.get(name)!r} is not among its values {values}")
            config[name] = self.declared[name][position]
        return config

    def draw(self, random: Random) -> Params:
        """Return a random configuration with the caller's values."""
        return {name: random.choice(values) for name, values in self.values.items()}

    def key(self, params: Params) -> str:
        """Return the key of a configuration in a cache file of Kernel Tuner."""
        return ",".join(str(params[name]) for name in self.values)

    def __len__(self) -> int:
        return math.prod(len(values) for values in self.values.values())


class _Decoded(Mapping[str, Any]):
    def __init__(self, decoding: Mapping[str, Mapping[Any, Any]], config: Mapping[str, Any]) -> None:
        self._decoding = decoding
        self._config = config

    def __getitem__(self, name: str) -> Any:
        return self._decoding[name][self._config[name]]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._config if name in self._decoding)

    def __len__(self) -> int:
        return len(self._decoding)


def _position(values: Sequence[Any], value: Any) -> int | None:
    """Return the index of a value; True is not 1 here, and 1.0 is not 1, but a list is the tuple of its items."""
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, list):  # of JSON, which has no tuples
        plain, values = tuple(plain), [tuple(each) if isinstance(each, list) else each for each in values]
    return next((i for i, each in enumerate(values) if type(each) is type(plain) and each == plain), None)


_MAX_CHARACTERS = 10_000
_MAX_POWER_BITS = 4096
"""Size of a whole number that ``**`` or ``<<`` may give."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.RShift: operator.rshift},
    **{ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor},
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("ceil", "floor", "sqrt", "log", "log2", "log10", "exp", "pow", "gcd")},
    **{"int": int, "float": float, "bool": bool, "str": str, "abs": abs, "round": round, "len": len},
    **{"min": min, "max": max, "sum": sum, "any": any, "all": all, "sorted": sorted, "set": set, "list": list},
}
_NUMPY_NAMES = (
    "ceil floor sqrt log log2 log10 exp power abs sum prod mean median average min max amin amax minimum maximum std "
    "var array round pi any all float16 float32 float64 int8 int16 int32 int64 uint32 uint64"
)
_NUMPY = {name: getattr(np, name) for name in _NUMPY_NAMES.split()}
_MODULES: Mapping[str, Mapping[str, Any]] = {
    "math": {name: getattr(math, name) for name in dir(math) if not name.startswith("_")},
    "np": _NUMPY,
    "numpy": _NUMPY,
}
_METHODS = frozenset({"startswith", "endswith", "lower", "upper", "split", "strip", "count", "index", "get"})
"""Methods of strings, lists and dictionaries that may be called."""


def evaluate(text: str, values: Params) -> Any:
    """Return the value of an expression: arithmetic, comparisons, conditions, lists, functions of ``math`` and ``np``.

    Raise `InputError` if the text is not such an expression, or names something unknown; `ArithmeticError`, `TypeError`
    or `ValueError` if an operation has no result.
    """

    def refusal(tree: ast.expr, why: str) -> InputError:
        return InputError(f"{ast.unparse(tree)!r} in the expression {text!r} {why}")

    def value(tree: ast.expr, names: Params) -> Any:
        match tree:
            case ast.Constant():
                return tree.value
            case ast.Name(id=name):
                if name not in names and name not in _PLAIN:
                    known = ", ".join(map(str, names))
                    raise InputError(f"{name!r} in the expression {text!r} is unknown; known are {known}")
                return names[name] if name in names else _PLAIN[name]
            case ast.BinOp(left=left, op=ast.Pow() | ast.LShift() as operation, right=right):
                return _power(operation, value(left, names), value(right, names))
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
                return _BINARY[type(operation)](value(left, names), value(right, names))
            case ast.UnaryOp(op=operation, operand=operand):
                return _UNARY[type(operation)](value(operand, names))
            case ast.BoolOp(op=operation, values=operands):
                found: Any = None
                for operand in operands:
                    found = value(operand, names)
                    if bool(found) is isinstance(operation, ast.Or):
                        break
                return found
            case ast.Compare(left=first, ops=operations, comparators=others):
                left = value(first, names)
                for comparison, other in zip(operations, others, strict=True):
                    right = value(other, names)
                    if not _COMPARISONS[type(comparison)](left, right):
                        return False
                    left = right
                return True
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                return value(body if value(test, names) else otherwise, names)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return tuple(value(element, names) for element in elements)
            case ast.Subscript(value=array, slice=index) if not isinstance(index, ast.Slice):
                return value(array, names)[value(index, names)]
            case ast.Call(func=function, args=arguments, keywords=[]):
                called = None
                if isinstance(function, ast.Attribute) and function.attr in _METHODS:
                    called = getattr(value(function.value, names), function.attr)
                elif isinstance(function, ast.Name | ast.Attribute):
                    called = value(function, names)
                if not callable(called):
                    raise refusal(function, "is not a function that is known here")
                return called(*(value(argument, names) for argument in arguments))
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in _MODULES.get(module, {}):
                return _MODULES[module][name]
            case ast.ListComp(elt=element, generators=loops) | ast.GeneratorExp(elt=element, generators=loops):
                match loops:
                    case [ast.comprehension(target=ast.Name(id=name), iter=source, ifs=conditions, is_async=0)]:
                        scopes = [{**names, name: item} for item in value(source, names)]
                        kept = [scope for scope in scopes if all(value(each, scope) for each in conditions)]
                        return [value(element, scope) for scope in kept]
                raise refusal(tree, "is not carried out; pass a function")
        hint = "use arithmetic, comparisons, conditions and functions of math, or pass a function"
        raise refusal(tree, f"is not carried out; {hint}")

    return value(_parsed(text), values)


@contextmanager
def computed(what: str, params: Params) -> Iterator[None]:
    """Turn the failure of an expression, a function or a conversion to a number into an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InputError(
            f"the {what} of the configuration {config_text(params)} cannot be computed: {error}; expected numbers, and "
            "texts and functions that give a number for every configuration that the restrictions allow"
        ) from error


def replace_param_occurrences(string: str, params: Params) -> str:
    """Return a text with each word that names a parameter replaced by its value."""
    return re.sub(r"\w+", lambda match: str(params[match[0]]) if match[0] in params else match[0], string)


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr:
    if len(text) > _MAX_CHARACTERS:
        raise InputError(f"the expression {text[:60]!r}... has {len(text):,} characters, at most {_MAX_CHARACTERS:,}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"the expression {text!r} is not Python: {error}") from None


def _power(operation: ast.operator, base: Any, exponent: Any) -> Any:
    """Return ``base ** exponent`` or ``base << exponent``, unless the number would be absurdly long."""
    is_shift = isinstance(operation, ast.LShift)
    if isinstance(base, int) and isinstance(exponent, int):
        bits = base.bit_length() + exponent if is_shift else base.bit_length() * exponent
        if bits > _MAX_POWER_BITS:
            raise OverflowError(f"{base} {'<<' if is_shift else '**'} {exponent} has {bits:,} bits")
    return base << exponent if is_shift else base**exponent


_MAX_EXACT = 2**53
"""Bound of whole numbers below which float64 holds them all."""


def holds_in_rows(text: str, columns: Mapping[str, Rows]) -> Rows | None:
    """Evaluate a condition for a table of whole numbers; return one boolean a row, shape (rows,).

    None where `evaluate` must be called for each row: the condition is not in the language of search-space files, calls
    functions, fails in some row, or converts whole numbers to real ones that may not hold them.
    """
    nodes = list(ast.walk(_parsed(text)))
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, int | float)]
    if any(isinstance(node, ast.Call) for node in nodes):
        return None
    if any(isinstance(node, ast.Div) for node in nodes) or any(isinstance(number, float) for number in numbers):
        names = [node.id for node in nodes if isinstance(node, ast.Name) and node.id in columns]
        largest = [float(np.abs(columns[name].astype(np.float64)).max(initial=0)) for name in names]
        bound = math.prod(max(2.0, abs(number)) for number in (*numbers, *largest))  # of every part of the condition
        if bound >= _MAX_EXACT or any(isinstance(node, ast.Pow | ast.LShift) for node in nodes):
            return None
    try:
        condition = parse_expression(text, dict.fromkeys(columns, "number"))
        found = condition.evaluate(columns)
    except SpecError:
        return None
    if condition.kind == "string":
        return None
    return np.broadcast_to(np.not_equal(found, 0), np.shape(next(iter(columns.values()))))


class Restriction(NamedTuple):
    """A condition on a configuration, a function of a mapping of parameters.

    The names are those of the parameters that it may read, None if that is not known; the text is the condition itself,
    where it is one.
    """

    holds: Callable[[Params], Any]
    names: tuple[str, ...] | None = None
    text: str = ""

    def allows(self, params: Params) -> bool:
        """Evaluate the condition; a configuration that gives it no meaning does not meet it."""
        try:
            return bool(self.holds(params))
        except ZeroDivisionError:
            return False


_PROBES = 500
"""Random configurations by which the parameters are found that a function reads."""
_ALL_NAMES_BELOW = 20_000
"""Number of combinations below which a function is simply given all parameters."""


def restriction_rules(restrictions: Any, codec: ParameterCodec) -> dict[str, Callable[..., Any]]:
    """Return restrictions as functions of columns of the parameters that autotile declares, by the name of a rule."""
    parsed = parse_restrictions(restrictions, codec.values)
    return {f"restriction_{number}": _rule(each, codec) for number, each in enumerate(parsed, start=1)}


def parse_restrictions(given: Any, values: Mapping[str, Sequence[Any]]) -> list[Restriction]:
    """Return restrictions: None, a text, a function, a constraint of python-constraint, or a list.

    A list is of these and of tuples of one of them with the names of its parameters; all else is an `InputError`.
    """
    listed = given if isinstance(given, list) else [] if given is None else [given]
    return [_restriction(each, values) for each in listed]


def _restriction(given: Any, values: Mapping[str, Sequence[Any]]) -> Restriction:
    if isinstance(given, str):
        used = {node.id for node in ast.walk(_parsed(given)) if isinstance(node, ast.Name)}
        return Restriction(
            lambda params: evaluate(given, params), tuple(name for name in values if name in used), given
        )
    if isinstance(given, tuple) and len(given) in (2, 3) and isinstance(given[1], list | tuple):
        names = tuple(given[1])
        if unknown := [name for name in names if name not in values]:
            raise InputError(
                f"a restriction names {unknown[0]!r}, which is no parameter; known are {', '.join(values)}"
            )
        inner = _restriction(given[0], {name: values[name] for name in names})
        return Restriction(lambda params: inner.holds({name: params[name] for name in names}), names)
    bases = ((each.__name__, each.__module__.partition(".")[0]) for each in type(given).__mro__)
    if ("Constraint", "constraint") in bases:  # over all parameters, in their order
        names, kind = tuple(values), type(given).__name__
        function = getattr(given, "_func", None)
        if function is not None:
            return Restriction(lambda params: function(*(params[name] for name in names)), names)
        if kind in ("InSetConstraint", "NotInSetConstraint"):  # python-constraint applies them to the lists of values
            is_wanted, chosen = kind == "InSetConstraint", given._set
            return Restriction(lambda params: all((params[name] in chosen) == is_wanted for name in names), names)
        domains = {name: list(each) for name, each in values.items()}
        return Restriction(lambda params: given(list(names), domains, {name: params[name] for name in names}), names)
    if callable(given):
        return _of_function(given, tuple(values))
    raise InputError(
        f"a restriction is {given!r:.80}, expected text, a function, a constraint of python-constraint, or a list"
    )


def _of_function(function: Callable[..., Any], parameters: tuple[str, ...]) -> Restriction:
    """Return a function of a dictionary of parameters, of parameters by name, or of all their values in order."""
    try:
        arguments = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return Restriction(function)
    kinds = inspect.Parameter
    plain = [a for a in arguments if a.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
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


def _rule(restriction: Restriction, codec: ParameterCodec) -> Callable[..., Any]:
    """Return a function whose arguments are named as the parameters that the restriction reads."""

    def holds(config: Params) -> bool:
        return restriction.allows(codec.decode(config))

    def rule(**columns: Any) -> Any:
        if not any(isinstance(column, np.ndarray) for column in columns.values()):
            return holds(columns)
        arrays = dict(zip(columns, np.broadcast_arrays(*columns.values()), strict=True))
        if restriction.text and all(codec.is_plain[name] and arrays[name].dtype == np.int64 for name in arrays):
            found = holds_in_rows(restriction.text, arrays)
            if found is not None:
                return found
        return map_rows(holds, arrays).astype(np.bool_)

    names = restriction.names
    if names is None and len(codec) >= _ALL_NAMES_BELOW:
        random = Random(0)
        read = names_read(restriction.allows, [codec.draw(random) for _ in range(_PROBES)])
        names = tuple(name for name in codec.values if name in read)
    elif names is None:
        names = tuple(codec.values)
    rule.__name__ = "<lambda>"  # messages call it a function
    arguments = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names or tuple(codec.values)[:1]]
    rule.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    return rule
