"""Operators and functions of expressions, each stated once: its values, its shape, and the bounds of both.

Scalar expressions compute with whole numbers of 64 bits, exactly, and with finite real numbers (float64), for one
configuration or for columns of many. ``where`` selects the rows to evaluate, as in NumPy's ufuncs; values in the other
rows are undefined and never used.

Array expressions compute with whole arrays, of NumPy or CuPy. The rule of a function takes what the function takes,
with shapes in place of the arrays, and returns the shape of the result, or raises `ValueError` where NumPy would: so
an array is checked before it is computed, and the shapes of a file without any array.
"""

from __future__ import annotations

import ast
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import Shape
from autotile.core.text import plural

Operand = Any
"""A Python scalar or a NumPy column."""

Rows = bool | NDArray[np.bool_]
"""Selected rows: all of them, or those that are true."""

Kind = Literal["number", "real", "boolean", "string"]
"""Kind of a value: a whole number of 64 bits, a real number (float64), a condition, or a text."""

Kinds = Mapping[str, Kind]
"""Kind of each name that an expression may use."""

Compute = Callable[..., Any]

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_ARGUMENTS = 20  # of a call
MAX_EXPONENT = 63  # every base except -1, 0 and 1 exceeds 64 bits beyond it
MAX_SHIFT = 62  # 1 << 63 exceeds 64 bits
_TOO_LARGE = "the result does not fit in 64 bits"


class ExpressionError(Exception):
    """A text that is not in the language, or an operation without a result in some rows (True for a scalar).

    The column in the text is 1-based; that of an operation is set by the evaluation of its node.
    """

    def __init__(self, problem: str, column: int | None = None, rows: Rows = True) -> None:
        self.problem = problem
        self.column = column
        self.rows = rows
        super().__init__(problem)


def refuse(bad: Rows, where: Rows, problem: str) -> None:
    """Raise `ExpressionError` if a selected row is bad."""
    rows = bad & where
    if any_row(rows):
        raise ExpressionError(problem, rows=rows)


def any_row(rows: Rows) -> bool:
    """Return True if any row is selected; `numpy.any` takes microseconds for a scalar."""
    return bool(rows.any()) if isinstance(rows, np.ndarray) else bool(rows)


def _is_column(*operands: Operand) -> bool:
    return any(isinstance(operand, np.ndarray) for operand in operands)


def _extremes(value: Operand) -> Shape:
    if not isinstance(value, np.ndarray):
        return (int(value),)
    return (int(value.min()), int(value.max())) if value.size else ()


def _exact(operation: Compute) -> Compute:
    """Return +, - or * of whole numbers; if the extremes could exceed 64 bits, by Python's unbounded integers."""

    def compute(left: Operand, right: Operand, where: Rows) -> Operand:
        if not isinstance(left, np.ndarray) and not isinstance(right, np.ndarray):
            return _fitting(operation(left, right))
        corners = [operation(a, b) for a in _extremes(left) for b in _extremes(right)]
        if not corners or (min(corners) >= INT64_MIN and max(corners) <= INT64_MAX):
            return operation(left, right)
        wide = np.asarray(operation(np.asarray(left, object), np.asarray(right, object)))
        overflows = ((wide < INT64_MIN) | (wide > INT64_MAX)).astype(bool)
        refuse(overflows, where, _TOO_LARGE)
        return np.where(overflows, 0, wide).astype(np.int64)

    return compute


def _fitting(value: int) -> int:
    if not INT64_MIN <= value <= INT64_MAX:
        raise ExpressionError(_TOO_LARGE)
    return value


def _nonzero(divisor: Operand, where: Rows) -> Any:
    """Return the divisor, with ones instead of zeros in the rows that are not selected."""
    refuse(divisor == 0, where, "division by zero")
    return np.where(divisor == 0, 1, divisor) if isinstance(divisor, np.ndarray) else divisor


def _paired(scalar: Compute, column: Compute) -> Compute:
    return lambda left, right, where: (column if _is_column(left, right) else scalar)(left, right)


_add, _multiply, _gcd = _exact(operator.add), _exact(operator.mul), _paired(math.gcd, np.gcd)


def _floor_divide(left: Operand, right: Operand, where: Rows) -> Operand:
    divisor = _nonzero(right, where)
    refuse((left == INT64_MIN) & (divisor == -1), where, _TOO_LARGE)
    return left // divisor


def _modulo(left: Operand, right: Operand, where: Rows) -> Operand:
    return left % _nonzero(right, where)


def _power(base: Operand, exponent: Operand, where: Rows) -> Operand:
    refuse((exponent < 0) | (exponent > MAX_EXPONENT), where, f"the exponent is not within 0 to {MAX_EXPONENT}")
    if not _is_column(base, exponent):
        return _fitting(base**exponent)
    bounded = np.clip(exponent, 0, MAX_EXPONENT)
    result = np.ones(np.broadcast_shapes(np.shape(base), np.shape(bounded)), np.int64)
    for step in range(int(np.max(bounded, initial=0))):
        result = _multiply(result, np.where(step < bounded, base, 1), where)
    return result


def _absolute(value: Operand, where: Rows) -> Operand:
    refuse(value == INT64_MIN, where, _TOO_LARGE)
    return abs(value)


def _least_multiple(left: Operand, right: Operand, where: Rows) -> Operand:
    a, b = _absolute(left, where), _absolute(right, where)
    divisor = _gcd(a, b, where)
    return _multiply(a // (np.maximum(divisor, 1) if _is_column(divisor) else max(divisor, 1)), b, where)


def _shift(bits: Operand, where: Rows) -> Any:
    refuse((bits < 0) | (bits > MAX_SHIFT), where, f"the shift is not within 0 to {MAX_SHIFT} bits")
    return np.clip(bits, 0, MAX_SHIFT) if isinstance(bits, np.ndarray) else int(bits)


def _shift_left(value: Operand, bits: Operand, where: Rows) -> Operand:
    bounded = _shift(bits, where)
    return _multiply(value, 1 << bounded if isinstance(bounded, int) else np.left_shift(np.int64(1), bounded), where)


def _ceil_log2(value: Operand, where: Rows) -> Operand:
    refuse(value < 1, where, "the logarithm of a number below 1")
    if not isinstance(value, np.ndarray):
        return (int(value) - 1).bit_length()
    return np.searchsorted(2 ** np.arange(63, dtype=np.int64), value).astype(np.int64)


def unchanged(value: Operand, where: Rows) -> Operand:
    """Return the value, as ``floor``, ``ceil`` and ``round`` do with a whole number."""
    return value


def _finite(operation: Compute, faults: Callable[..., Rows] | None = None, problem: str = "") -> Compute:
    """Return an operation on real numbers, which have no result in the rows of ``faults``, nor where it is infinite.

    The result is a Python number unless an operand is a column.
    """

    def compute(*given: Any) -> Operand:
        *operands, where = given
        if faults is not None:
            refuse(faults(*operands), where, problem)
        with np.errstate(all="ignore"):
            result = operation(*operands)
        refuse(~np.isfinite(result), where, "the result is not a finite number")
        return result if isinstance(result, np.ndarray) else float(result)

    return compute


def _divided(operation: Compute) -> Compute:
    divide = _finite(operation)
    return lambda left, right, where: divide(left, _nonzero(right, where), where)


def _rounded(operation: Compute) -> Compute:
    def compute(value: Operand, where: Rows) -> Operand:
        rounded = operation(value)
        fits = (rounded >= -(2.0**63)) & (rounded < 2.0**63)
        refuse(~fits, where, _TOO_LARGE)
        return np.where(fits, rounded, 0).astype(np.int64) if isinstance(rounded, np.ndarray) else int(rounded)

    return compute


_logarithm = partial(_finite, faults=lambda value: value <= 0, problem="the logarithm of a number that is not above 0")


class ScalarFunction(NamedTuple):
    """An operator, or a function, of scalar expressions."""

    usage: str
    """The symbol of an operator; a call of a function, for messages."""
    whole: Compute | None
    real: Compute | None
    """Function for whole, and for real numbers, and the selected rows; None if the operands are converted to real
    numbers, or if it takes whole ones only."""
    plain: Compute | None = None
    """Python's function of two whole numbers, which is exact as long as the result fits in 64 bits."""
    result: Kind | None = None
    """Kind of the result; None for that of the operands."""
    arguments: range = range(1, 2)
    """Accepted counts of arguments; the function is applied from left to right to more than two."""
    divides: bool = False
    """Whether the last argument must not be zero."""
    array: str = ""
    """NumPy's name of an operator."""


nearest_whole = _rounded(np.rint)
"""The nearest whole number, the even one of two equally near."""
invert: Compute = lambda value, where: ~value  # noqa: E731
"""``-value - 1``."""

OPERATORS: Mapping[type[ast.operator], ScalarFunction] = {
    ast.Add: ScalarFunction("+", _add, _finite(np.add), operator.add, array="add"),
    ast.Sub: ScalarFunction("-", _exact(operator.sub), _finite(np.subtract), operator.sub, array="subtract"),
    ast.Mult: ScalarFunction("*", _multiply, _finite(np.multiply), operator.mul, array="multiply"),
    ast.Div: ScalarFunction("/", None, _divided(np.divide), divides=True),
    ast.FloorDiv: ScalarFunction(
        "//", _floor_divide, _divided(np.floor_divide), operator.floordiv, divides=True, array="floor_divide"
    ),
    ast.Mod: ScalarFunction("%", _modulo, _divided(np.mod), operator.mod, divides=True, array="mod"),
    ast.Pow: ScalarFunction("**", _power, _finite(np.power, lambda a, b: (a == 0) & (b < 0), "division by zero")),
    ast.BitAnd: ScalarFunction("&", lambda a, b, where: a & b, None, operator.and_, array="bitwise_and"),
    ast.BitOr: ScalarFunction("|", lambda a, b, where: a | b, None, operator.or_, array="bitwise_or"),
    ast.BitXor: ScalarFunction("^", lambda a, b, where: a ^ b, None, operator.xor, array="bitwise_xor"),
    ast.LShift: ScalarFunction("<<", _shift_left, None, array="left_shift"),
    ast.RShift: ScalarFunction(">>", lambda a, b, where: a >> _shift(b, where), None, array="right_shift"),
}

LOGICAL = (ast.BitAnd, ast.BitOr, ast.BitXor)
"""Operators that combine two conditions to a condition, as in Python."""

COMPARISONS: Mapping[type[ast.cmpop], tuple[str, Compute, str]] = {
    ast.Eq: ("==", operator.eq, "equal"),
    ast.NotEq: ("!=", operator.ne, "not_equal"),
    ast.Lt: ("<", operator.lt, "less"),
    ast.LtE: ("<=", operator.le, "less_equal"),
    ast.Gt: (">", operator.gt, "greater"),
    ast.GtE: (">=", operator.ge, "greater_equal"),
}
"""Sign, function, and NumPy's name of each comparison."""

_SEVERAL = range(2, MAX_ARGUMENTS + 1)

FUNCTIONS: Mapping[str, ScalarFunction] = {
    "min": ScalarFunction("min(a, b)", _paired(min, np.minimum), _finite(np.minimum), min, arguments=_SEVERAL),
    "max": ScalarFunction("max(a, b)", _paired(max, np.maximum), _finite(np.maximum), max, arguments=_SEVERAL),
    "ceil_div": ScalarFunction(
        "ceil_div(a, b)",
        lambda a, b, where: _add(_floor_divide(a, b, where), _modulo(a, b, where) != 0, where),
        None,
        lambda a, b: -(-a // b),
        arguments=range(2, 3),
        divides=True,
    ),
    "gcd": ScalarFunction(
        "gcd(a, b)", lambda a, b, where: _gcd(_absolute(a, where), _absolute(b, where), where), None, arguments=_SEVERAL
    ),
    "lcm": ScalarFunction("lcm(a, b)", _least_multiple, None, arguments=_SEVERAL),
    "ceil_log2": ScalarFunction("ceil_log2(a)", _ceil_log2, None),
    "is_power_of_two": ScalarFunction(
        "is_power_of_two(a)", lambda a, where: (a > 0) & (a & (a - 1) == 0), None, result="boolean"
    ),
    "abs": ScalarFunction("abs(a)", _absolute, lambda value, where: abs(value)),
    "floor": ScalarFunction("floor(a)", unchanged, _rounded(np.floor), result="number"),
    "ceil": ScalarFunction("ceil(a)", unchanged, _rounded(np.ceil), result="number"),
    "round": ScalarFunction("round(a)", unchanged, nearest_whole, result="number"),
    "int": ScalarFunction("int(a)", unchanged, _rounded(np.trunc), result="number"),
    "float": ScalarFunction("float(a)", None, unchanged),
    "sqrt": ScalarFunction(
        "sqrt(a)", None, _finite(np.sqrt, lambda value: value < 0, "the square root of a negative number")
    ),
    "log2": ScalarFunction("log2(a)", None, _logarithm(np.log2)),
    "log": ScalarFunction("log(a)", None, _logarithm(np.log)),
    "exp": ScalarFunction("exp(a)", None, _finite(np.exp)),
}
"""Functions of scalar expressions."""

PLAIN = {each.whole: each.plain for each in (*OPERATORS.values(), *FUNCTIONS.values()) if each.whole and each.plain}
"""`ScalarFunction.plain` of each function of whole numbers that has one."""


MAX_ELEMENTS = 2**32  # of an array of an expression: 32 GiB of float64
MAX_OPERATIONS = 2**44  # multiplications of a product: minutes on a device
MAX_AXES = 16
MAX_TAPS = 2**14  # elements of a filter
MAX_HOST_ELEMENTS = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16
"""Maximum number of elements of an array on the host: half of the machine's memory, at 8 bytes each."""


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def check_size(shape: Shape) -> None:
    """Raise `ValueError` if an array is larger than expressions may compute."""
    _require(len(shape) <= MAX_AXES, f"the result would have {len(shape)} axes, at most {MAX_AXES} are accepted")
    would = f"the result would have the shape {shape}"
    _require(not shape or min(shape) >= 0, would)
    _require(math.prod(shape) <= MAX_ELEMENTS, f"{would}, more than {MAX_ELEMENTS:,} elements")


def numeric(x: Any) -> Any:
    """Return truth values as 0 and 1, so that sums and products of them are those of numbers."""
    if getattr(getattr(x, "dtype", None), "kind", "") == "b":
        return x.astype(np.int64)
    return int(x) if isinstance(x, bool) else x


def _truth(x: Any) -> Any:
    return x if getattr(getattr(x, "dtype", None), "kind", "") == "b" or isinstance(x, bool) else x != 0


def has_kind(x: Any, kinds: str) -> bool:
    """Return True if an operand's values are of one of NumPy's kinds: b, i, u, f, c."""
    return np.result_type(getattr(x, "dtype", type(x))).kind in kinds


def bounded(value: int) -> int | float:
    """Return a whole number that fits in 64 bits, or a real one."""
    return value if -(2**63) <= value < 2**64 else float(value)


def _whole(x: Any, what: str) -> Any:
    if has_kind(x, "iu"):
        return x
    if np.ndim(x) == 0 and isinstance(x, int | float) and float(x).is_integer():
        return int(x)
    raise ValueError(f"{what} takes whole numbers; convert with int(x)")


def _array_operator(name: str, of_whole: Compute, symbol: str = "") -> Compute:
    """Return an operation on arrays; of two whole numbers the result is exact, or a real number if it is large.

    With a symbol, it takes truth values or whole numbers only.
    """

    def compute(xp: ModuleType, a: Any, b: Any) -> Any:
        if symbol and has_kind(a, "b") and has_kind(b, "b"):
            return getattr(xp, name)(a, b)
        a, b = (_whole(numeric(x), symbol) if symbol else numeric(x) for x in (a, b))
        if isinstance(a, int) and isinstance(b, int):
            return bounded(of_whole(a, b))
        return getattr(xp, name)(a, b)

    return compute


def _array_power(xp: ModuleType, x: Any, exponent: Any) -> Any:
    """``x ** exponent``; whole numbers stay whole where the exponents are literals that are not negative."""
    x, exponent = numeric(x), numeric(exponent)
    if has_kind(x, "iu") and not (isinstance(exponent, int) and exponent >= 0):
        x = xp.asarray(x).astype(np.float64) if np.ndim(x) else float(x)
    if isinstance(x, int) and isinstance(exponent, int):
        return bounded(x**exponent) if exponent <= MAX_AXES * 64 else float(x) ** exponent
    with np.errstate(all="ignore"):
        return xp.power(x, exponent)


_SHIFTS: Mapping[type[ast.operator], Compute] = {
    ast.LShift: lambda a, b: a << min(max(b, 0), 64),
    ast.RShift: lambda a, b: a >> max(b, 0),
}


class ArrayFunction(NamedTuple):
    """A function of array expressions."""

    signature: str
    """Names of the operands, as in ``"x axis=None"``. `OPTION_TYPES` holds the types of those that are no arrays;
    ``*shape`` collects the remaining whole numbers."""
    shape: Callable[..., Shape]
    """Shape of the result, from the operands with shapes in place of arrays."""
    compute: Compute
    """The result, from the array library and the operands."""
    divides: bool = False
    """Whether the second operand must not be a literal zero."""
    takes_infinity: bool = False
    """Whether the result may be finite although an operand is infinite."""

    @property
    def operands(self) -> list[tuple[str, str, str]]:
        """Name of each operand, "=" if it may be left out, and its default."""
        return [part.partition("=") for part in self.signature.split()]

    @property
    def kinds(self) -> list[str]:
        """The kind of each operand: ``"array"``, which includes numbers, ``"arrays"`` or ``"option"``."""
        options = {name for name, _, _ in self.operands if name.startswith("*") or name in OPTION_TYPES}
        return [
            "arrays" if name in ("*arrays", "arrays") else "option" if name in options else "array"
            for name, _, _ in self.operands
        ]

    def usage(self, name: str) -> str:
        """Return a call, for messages."""
        return f"{name}({self.signature.replace(' ', ', ')})"


OPTION_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("axis", "axes", "shift", "offsets", "shape", "counts", "widths"), "whole numbers"),
    **dict.fromkeys(("length", "repeats", "n", "m", "k", "start", "stop", "step"), "whole number"),
    **dict.fromkeys(("mode", "side", "subscripts"), "text"),
    "keepdims": "boolean",
    "arrays": "arrays",
}
"""Types of the operands that are no arrays."""


elementwise: Callable[..., Shape] = np.broadcast_shapes
"""Rule of functions whose operands broadcast."""


def same(operand: Shape, *_: Any) -> Shape:
    """Return the shape of the first operand."""
    return operand


def _axes(shape: Shape, axis: Any) -> Shape:
    """Return an axis, or several, as nonnegative numbers; all axes for None."""
    if axis is None:
        return tuple(range(len(shape)))
    found = []
    for one in axis if isinstance(axis, tuple) else (axis,):
        _require(-len(shape) <= one < len(shape), f"axis {one} is out of bounds for a {len(shape)}-dimensional array")
        found.append(one % len(shape))
    _require(len(set(found)) == len(found), f"an axis is repeated in {axis}")
    return tuple(found)


def _flat(shape: Shape, axis: int | None) -> tuple[Shape, int]:
    """Return the shape that an operation along an axis applies to, that of the flattened array for None, and the axis.

    The axis is not negative.
    """
    flat = (math.prod(shape),) if axis is None else shape
    return flat, _axes(flat, 0 if axis is None else axis)[0]


def calls(name: str, convert: Compute = lambda x: x) -> Compute:
    """Return a function of the array library, which takes the operands in their order, each converted."""
    return lambda xp, *operands: getattr(xp, name)(*map(convert, operands))


_choice = partial(ArrayFunction, shape=elementwise, takes_infinity=True)

ARRAY_OPERATORS: Mapping[type[ast.operator], ArrayFunction] = {
    **{
        kind: ArrayFunction(
            "a b",
            elementwise,
            _array_operator(each.array, each.plain or _SHIFTS[kind], "" if each.real else each.usage),
            each.divides,
        )
        for kind, each in OPERATORS.items()
        if each.array
    },
    ast.Div: ArrayFunction("a b", elementwise, lambda xp, a, b: xp.divide(numeric(a), numeric(b)), divides=True),
    ast.Pow: ArrayFunction("a b", elementwise, _array_power),
}
ARRAY_COMPARISONS: Mapping[type[ast.cmpop], ArrayFunction] = {
    kind: _choice("a b", compute=calls(name, numeric)) for kind, (_, _, name) in COMPARISONS.items()
}
BOTH = ArrayFunction("a b", elementwise, calls("logical_and"))
NEGATIVE = ArrayFunction("x", same, lambda xp, x: -numeric(x))
INVERT = ArrayFunction("x", same, lambda xp, x: xp.logical_not(x) if has_kind(x, "b") else ~_whole(x, "~"))
"""The negation of truth values, or the complement of whole numbers."""
REVERSED_AXES = ArrayFunction("x", lambda shape: shape[::-1], calls("transpose"))


def _real(xp: ModuleType, x: Any) -> Any:
    return xp.asarray(numeric(x)).astype(np.float64, copy=False)


def _special(name: str, xp: ModuleType, x: Any) -> Any:
    library = import_module("scipy.special" if xp is np else "cupyx.scipy.special")  # rare, and slow to import
    return getattr(library, name)(_real(xp, x))


def _reduced(shape: Shape, axis: Any = None, keepdims: bool = False) -> Shape:
    gone = _axes(shape, axis)
    _require(all(shape[axis] for axis in gone), "a reduction over an axis of extent 0")
    return tuple(1 if i in gone else extent for i, extent in enumerate(shape) if keepdims or i not in gone)


def _of_axes(name: str, rule: Callable[..., Shape], options: str, convert: Compute = numeric) -> ArrayFunction:
    """Return a function of the array library whose options, which it takes by name, select the axes."""
    names = [option.partition("=")[0] for option in options.split()]
    return ArrayFunction(
        f"x {options}",
        rule,
        lambda xp, x, *values: getattr(xp, name)(convert(xp.asarray(x)), **dict(zip(names, values, strict=True))),
    )


def _along(shape: Shape, axis: Any = None) -> Shape:
    """Return the shape of a scan or a sort along an axis; without an axis, that of the flattened array."""
    return (math.prod(shape),) if axis is None else _flipped(shape, axis)


def _flipped(shape: Shape, axis: Any = None) -> Shape:
    _axes(shape, axis)
    return shape


def _rolled(shape: Shape, shift: Any, axis: Any = None) -> Shape:
    _axes(shape, axis)
    if isinstance(shift, tuple) and (not isinstance(axis, tuple) or len(axis) != len(shift)):
        raise ValueError(f"{len(shift)} shifts take as many axes")
    return shape


def _shifted(shape: Shape, offsets: Shape) -> Shape:
    expected = f"shift of a {len(shape)}-dimensional array takes {len(shape)} offsets, got {len(offsets)}"
    _require(len(offsets) == len(shape), expected)
    return shape


def _shift_elements(xp: ModuleType, x: Any, offsets: Shape) -> Any:
    """``result[i, j] = x[i + d0, j + d1]``, zero outside the array."""
    result = xp.zeros_like(x)
    kept = [max(0, size - abs(offset)) for size, offset in zip(x.shape, offsets, strict=True)]
    to = tuple(slice(max(0, -offset), max(0, -offset) + n) for offset, n in zip(offsets, kept, strict=True))
    at = tuple(slice(max(0, offset), max(0, offset) + n) for offset, n in zip(offsets, kept, strict=True))
    result[to] = x[at]
    return result


def product(a: Shape, b: Shape) -> Shape:
    """Return the shape of ``a @ b``; a vector is a row on the left and a column on the right."""
    _require(bool(a and b), "a matrix product does not take scalars; use *")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    inner = b[-2 if len(b) > 1 else -1]
    _require(a[-1] == inner, f"{a[-1]} columns against {inner} rows")
    shape = (*np.broadcast_shapes(a[:-2], b[:-2]), *rows, *columns)
    _check_operations("product", math.prod(shape) * a[-1])
    return shape


def _check_operations(what: str, count: int) -> None:
    _require(count <= MAX_OPERATIONS, f"the {what} takes more than {MAX_OPERATIONS:,} multiplications")


def _permuted(shape: Shape, axes: Shape) -> Shape:
    order = _axes(shape, axes)
    _require(len(order) == len(shape), f"{len(order)} axes for an array of {len(shape)}")
    return tuple(shape[axis] for axis in order)


def _reshaped(shape: Shape, extents: Shape) -> Shape:
    total, known = math.prod(shape), math.prod(extent for extent in extents if extent != -1)
    is_shape = extents.count(-1) <= 1 and all(extent >= -1 for extent in extents)
    _require(is_shape, f"{extents} is not a shape; one extent may be -1")
    if -1 in extents and known and total % known == 0:
        return tuple(total // known if extent == -1 else extent for extent in extents)
    _require(-1 not in extents and known == total, f"an array of {total} elements has no shape {extents}")
    return extents


def _broadcast(shape: Shape, extents: Shape) -> Shape:
    fits = np.broadcast_shapes(shape, extents) == extents
    _require(fits, f"an array of shape {shape} cannot be broadcast to {extents}")
    return extents


def _repeated(shape: Shape, repeats: int, axis: int | None = None) -> Shape:
    flat, along = _flat(shape, axis)
    return tuple(extent * repeats if i == along else extent for i, extent in enumerate(flat))


def _tiled(shape: Shape, counts: Shape) -> Shape:
    rank = max(len(shape), len(counts))
    padded = (1,) * (rank - len(shape)) + shape
    return tuple(e * n for e, n in zip(padded, (1,) * (rank - len(counts)) + counts, strict=True))


def _concatenated(shapes: Sequence[Shape], axis: int = 0) -> Shape:
    first = shapes[0]
    _require(bool(first), "scalars cannot be concatenated; use stack")
    (along,) = _axes(first, axis)
    for shape in shapes[1:]:
        fits = len(shape) == len(first) and shape[:along] + shape[along + 1 :] == first[:along] + first[along + 1 :]
        _require(fits, f"arrays of shape {first} and {shape} do not fit along axis {axis}")
    return (*first[:along], sum(shape[along] for shape in shapes), *first[along + 1 :])


def _stacked(shapes: Sequence[Shape], axis: int = 0) -> Shape:
    different = f"arrays of different shapes: {', '.join(map(str, shapes))}"
    _require(all(shape == shapes[0] for shape in shapes), different)
    rank = len(shapes[0]) + 1
    _require(-rank <= axis < rank, f"axis {axis} is out of bounds for a {rank}-dimensional array")
    return (*shapes[0][: axis % rank], len(shapes), *shapes[0][axis % rank :])


def _pad_widths(shape: Shape, widths: Any) -> tuple[tuple[int, int], ...]:
    """Return the numbers of elements added before and after each axis: of one number, a pair, or a pair for each."""
    if isinstance(widths, int):
        widths = ((widths, widths),) * len(shape)
    elif len(widths) == 2 and all(isinstance(width, int) for width in widths):
        widths = (widths,) * len(shape)
    widths = tuple((width, width) if isinstance(width, int) else width for width in widths)
    if len(widths) != len(shape) or any(len(pair) != 2 or min(pair) < 0 for pair in widths):
        raise ValueError(f"padding of a {len(shape)}-dimensional array takes a pair of widths from 0 for each axis")
    return tuple((before, after) for before, after in widths)


def _padded(shape: Shape, widths: Any, *_: Any) -> Shape:
    pairs = zip(shape, _pad_widths(shape, widths), strict=True)
    return tuple(before + extent + after for extent, (before, after) in pairs)


def _pad(xp: ModuleType, x: Any, widths: Any, mode: str, value: Any) -> Any:
    x = xp.asarray(x)
    pairs = _pad_widths(x.shape, widths)
    if mode == "constant":
        number = value.item() if hasattr(value, "item") else value  # CuPy takes no array of its own here
        return xp.pad(x, pairs, mode="constant", constant_values=number)
    if mode not in ("edge", "wrap", "reflect", "symmetric"):
        raise ValueError(f"the mode {mode!r} is not known; use 'constant', 'edge', 'wrap', 'reflect' or 'symmetric'")
    return xp.pad(x, pairs, mode=mode)


def _positions(x: Shape, extents: Shape) -> Shape:
    found = tuple(extent - window + 1 for extent, window in zip(x, extents, strict=True))
    _require(min(found) >= 1, f"windows of the shape {extents} in an array of shape {x}; pad the array")
    return found


def _check_filter(shape: Shape, taps: Shape, terms: int) -> None:
    _require(math.prod(taps) <= MAX_TAPS, f"the filter has more than {MAX_TAPS:,} elements")
    _check_operations("filter", math.prod(shape) * terms)


def _correlated(x: Shape, weights: Shape) -> Shape:
    """Return the shape of a correlation without padding, over all axes of the filter, the last ones of the array."""
    _require(0 < len(weights) <= len(x), f"a filter of {len(weights)} axes on an array of {len(x)}")
    kept = len(x) - len(weights)
    shape = (*x[:kept], *_positions(x[kept:], weights))
    _check_filter(shape, weights, math.prod(weights))
    return shape


def _correlate(xp: ModuleType, x: Any, weights: Any) -> Any:
    """Sum one shifted array for each element of the filter, so that no array is larger than the operands."""
    x, weights = numeric(x), numeric(weights)
    extents = _correlated(x.shape, weights.shape)[-weights.ndim :]
    result: Any = 0
    for offset in np.ndindex(*weights.shape):
        window = tuple(slice(d, d + extent) for d, extent in zip(offset, extents, strict=True))
        result = result + weights[offset] * x[(..., *window)]
    return result


def _convolved(x: Shape, weights: Shape) -> Shape:
    """Return the shape of ``conv2d``: (B, C, H, W) and (O, C, KH, KW) give (B, O, H - KH + 1, W - KW + 1)."""
    if len(x) != 4 or len(weights) != 4 or x[1] != weights[1]:
        raise ValueError("conv2d takes arrays of the shapes (B, C, H, W) and (O, C, KH, KW)")
    shape = (x[0], weights[0], *_positions(x[2:], weights[2:]))
    _check_filter(shape, weights[2:], math.prod(weights[1:]))
    return shape


def _conv2d(xp: ModuleType, x: Any, weights: Any) -> Any:
    _, _, height, width = _convolved(x.shape, weights.shape)
    result: Any = 0
    for i, j in np.ndindex(*weights.shape[2:]):
        window = x[:, :, i : i + height, j : j + width].reshape(x.shape[0], x.shape[1], -1)
        result = result + xp.matmul(weights[:, :, i, j], window)
    return result.reshape(x.shape[0], weights.shape[0], height, width)


def _windows(x: Shape, extents: Shape) -> Shape:
    """Return the shape of all windows of the last axes: their positions, then their elements."""
    if len(extents) > len(x) or not extents or min(extents) < 1:
        raise ValueError(f"windows of the shape {extents} of a {len(x)}-dimensional array")
    kept = len(x) - len(extents)
    return (*x[:kept], *_positions(x[kept:], extents), *extents)


def _subscript_parts(subscripts: str, operands: int) -> tuple[list[str], str]:
    """Return the axes of each operand of an ``einsum``, and those of the result."""
    left, arrow, output = subscripts.replace(" ", "").partition("->")
    inputs = left.split(",")
    letters = left.replace(",", "") + output
    if not arrow or len(inputs) != operands or not (letters.isascii() and (letters.isalpha() or not letters)):
        raise ValueError(f"einsum takes subscripts such as 'ij,jk->ik', one group an array, here {operands}")
    return inputs, output


def _contracted(subscripts: str, shapes: Sequence[Shape]) -> Shape:
    inputs, output = _subscript_parts(subscripts, len(shapes))
    extents: dict[str, int] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        _require(len(labels) == len(shape), f"{labels!r} for a {len(shape)}-dimensional array")
        for label, extent in zip(labels, shape, strict=True):
            known = extents.setdefault(label, extent)
            _require(known == extent, f"the axis {label!r} has the extents {known} and {extent}")
    is_known = set(output) <= extents.keys() and len(set(output)) == len(output)
    _require(is_known, f"the result {output!r} does not name axes of the operands, each once")
    _check_operations("contraction", math.prod(extents.values()))
    return tuple(extents[label] for label in output)


def _einsum(xp: ModuleType, subscripts: str, arrays: tuple[Any, ...]) -> Any:
    """Contract operands pairwise, from left to right, so that the size of each intermediate result is known."""
    inputs, output = _subscript_parts(subscripts, len(arrays))
    operands = [xp.asarray(numeric(x)) for x in arrays]
    while len(operands) > 2:
        later = set("".join(inputs[2:]) + output)
        kept = "".join(dict.fromkeys(label for label in inputs[0] + inputs[1] if label in later))
        step = f"{inputs[0]},{inputs[1]}->{kept}"
        check_size(_contracted(step, [x.shape for x in operands[:2]]))
        operands[:2] = [xp.einsum(step, *operands[:2], optimize=True)]
        inputs[:2] = [kept]
    return xp.einsum(f"{','.join(inputs)}->{output}", *operands, optimize=True)


def _plane(what: str, shape: Shape, *_: Any) -> Shape:
    """Return the shape of an array of two axes or more, unchanged."""
    _require(len(shape) >= 2, f"a {what} takes two axes")
    return shape


def check_indices(indices: Any, extent: int) -> None:
    """Raise `ValueError` unless indices are whole numbers from 0 to below an extent."""
    _require(has_kind(indices, "iu"), "indices must be whole numbers; convert with int(x)")
    if np.size(indices):
        least, most = int(indices.min()), int(indices.max())
        _require(least >= 0 and most < extent, f"indices from {least} to {most} for an axis of {extent}")


def _taken(shape: Shape, indices: Shape, axis: int | None = None) -> Shape:
    flat, along = _flat(shape, axis)
    return (*flat[:along], *indices, *flat[along + 1 :])


def _take(xp: ModuleType, x: Any, indices: Any, axis: int | None) -> Any:
    array = xp.asarray(x)
    check_indices(xp.asarray(indices), array.size if axis is None else array.shape[axis])
    return xp.take(array, xp.asarray(indices), axis=axis)


def _counted(x: Shape, length: int, *_: Any) -> Shape:
    _require(len(x) == 1, f"expected a vector, got the shape {x}; use ravel")
    return (length,)


def _bincount(xp: ModuleType, x: Any, length: int, weights: Any) -> Any:
    check_indices(x, length)
    if weights is not None and np.shape(weights) != np.shape(x):
        raise ValueError(f"weights of shape {np.shape(weights)} for values of shape {np.shape(x)}")
    if not x.size:
        return xp.zeros(length, np.int64 if weights is None else np.float64)
    return xp.bincount(x.astype(np.int64), weights=weights, minlength=length)


def _histogram(xp: ModuleType, x: Any, length: int, low: Any, high: Any) -> Any:
    """Count values in equal parts of ``[low, high]``; the last part includes ``high``, others are not counted."""
    values = _real(xp, x).ravel()
    _require(bool(low < high) and length >= 1, f"a histogram of {length} parts of [{low}, {high}]")
    part = xp.floor((values - low) / (high - low) * length)
    part = xp.where(values == high, length - 1, part)
    inside = (values >= low) & (values <= high)
    return xp.bincount(xp.where(inside, part, length).astype(np.int64), minlength=length + 1)[:length]


def _add_at(xp: ModuleType, result: Any, indices: Any, values: Any) -> Any:
    """Add values to a new array in place; CuPy adds 64-bit integers as unsigned ones, which gives the same bits."""
    unsigned = result.dtype == np.int64 and xp is not np
    view, added = (result.view(np.uint64), values.astype(np.uint64)) if unsigned else (result, values)
    xp.add.at(view, indices, added)
    return result


def _segments(values: Shape, offsets: Shape) -> Shape:
    if not values or len(offsets) != 1 or offsets[0] < 1:
        raise ValueError("segment_sum takes values, and a vector of one offset more than there are segments")
    return (offsets[0] - 1, *values[1:])


def _segment_sum(xp: ModuleType, values: Any, offsets: Any) -> Any:
    count = offsets.shape[0] - 1
    host = offsets if xp is np else offsets.get()
    if not has_kind(offsets, "iu") or host[0] < 0 or host[-1] > values.shape[0] or (np.diff(host) < 0).any():
        raise ValueError(f"offsets must be whole numbers that ascend from 0 to {values.shape[0]} at most")
    positions = xp.arange(int(host[0]), int(host[-1]))
    segment = xp.searchsorted(offsets[1:], positions, side="right")
    base = xp.zeros((count, *values.shape[1:]), numeric(values[:0]).dtype)
    return _add_at(xp, base, segment, numeric(values[int(host[0]) : int(host[-1])]))


def _scattered(base: Shape, indices: Shape, values: Shape) -> Shape:
    _require(bool(base), "scatter_add takes an array, indices of its first axis, and values for them")
    _broadcast(values, (*indices, *base[1:]))
    return base


def _scatter_add(xp: ModuleType, base: Any, indices: Any, values: Any) -> Any:
    indices = xp.asarray(indices)
    check_indices(indices, base.shape[0])
    result = numeric(base)
    kind = np.result_type(result.dtype, getattr(numeric(values), "dtype", type(values)))
    shape = (*indices.shape, *base.shape[1:])
    return _add_at(xp, result.astype(kind), indices, xp.broadcast_to(xp.asarray(values, kind), shape))


def _searched(ascending: Shape, values: Shape, *_: Any) -> Shape:
    _require(len(ascending) == 1, f"searchsorted takes a sorted vector, got the shape {ascending}")
    return values


def _searchsorted(xp: ModuleType, ascending: Any, values: Any, side: str) -> Any:
    _require(side in ("left", "right"), f"the side is {side!r}; use 'left' or 'right'")
    return xp.searchsorted(ascending, xp.asarray(values), side=side)


def _arange_shape(start: int, stop: int | None, step: int) -> Shape:
    _require(step != 0, "the step is 0")
    return (len(range(*((0, start) if stop is None else (start, stop)), step)),)


def _filled(shape: Any, value: Shape) -> Shape:
    _require(not value, f"full takes a number, got an array of shape {value}; use broadcast_to")
    return shape if isinstance(shape, tuple) else (shape,)


def _spaced(low: Shape, high: Shape, n: int) -> Shape:
    _require(not low and not high, "linspace takes two numbers")
    return (n,)


_FLOAT_NAMES = (
    "exp exp2 expm1 log log2 log10 log1p sqrt cbrt sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh "
    "arctanh floor ceil trunc sign conj real imag square isfinite isnan isinf"
)
_REDUCTION_NAMES = "sum prod mean max min std var argmax argmin"
_BINARY_NAMES = "mod fmod floor_divide arctan2 hypot copysign"

ARRAY_FUNCTIONS: Mapping[str, ArrayFunction] = {
    **{name: ArrayFunction("x", same, calls(name, numeric)) for name in _FLOAT_NAMES.split()},
    **{name: _choice("a b", compute=calls(name, numeric)) for name in ("maximum", "minimum")},
    **{name: ArrayFunction("a b", elementwise, calls(name, numeric)) for name in _BINARY_NAMES.split()},
    **{name: ArrayFunction("x", same, partial(_special, name)) for name in ("erf", "erfc")},
    **{name: _of_axes(name, _reduced, "axis=None keepdims=False") for name in _REDUCTION_NAMES.split()},
    **{name: _of_axes(name, _reduced, "axis=None keepdims=False", _truth) for name in ("any", "all")},
    **{name: _of_axes(name, _along, "axis=None") for name in ("cumsum", "cumprod")},
    "abs": ArrayFunction("x", same, lambda xp, x: abs(numeric(x))),
    "round": ArrayFunction("x", same, calls("rint", numeric)),
    "rsqrt": ArrayFunction("x", same, lambda xp, x: 1.0 / xp.sqrt(numeric(x))),
    "angle": ArrayFunction("x", same, calls("angle")),
    "int": ArrayFunction("x", same, lambda xp, x: xp.asarray(x).astype(np.int64)),
    "float": ArrayFunction("x", same, lambda xp, x: xp.asarray(x).astype(np.float64)),
    "float32": ArrayFunction("x", same, lambda xp, x: xp.asarray(x).astype(np.float32).astype(np.float64)),
    "pow": ArrayFunction("x exponent", elementwise, _array_power),
    "where": _choice(
        "condition a b", compute=lambda xp, condition, a, b: xp.where(xp.asarray(_truth(condition)), a, b)
    ),
    "clip": _choice(
        "x low high", compute=lambda xp, x, low, high: xp.minimum(xp.maximum(numeric(x), numeric(low)), numeric(high))
    ),
    "sort": _of_axes("sort", _along, "axis=-1", lambda x: x),
    "argsort": ArrayFunction(
        "x axis=-1", _along, lambda xp, x, axis: xp.argsort(xp.asarray(x), axis=axis, kind="stable")
    ),
    "flip": ArrayFunction("x axis=None", _flipped, calls("flip")),
    "roll": ArrayFunction("x shift axis=None", _rolled, calls("roll")),
    "shift": ArrayFunction("x *offsets", _shifted, _shift_elements),
    "transpose": ArrayFunction(  # of the last two axes; a vector or scalar is returned unchanged
        "x",
        lambda shape: (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape,
        lambda xp, x: xp.swapaxes(x, -1, -2) if np.ndim(x) > 1 else x,
    ),
    "permute": ArrayFunction("x *axes", _permuted, calls("transpose")),
    "reshape": ArrayFunction("x *shape", _reshaped, calls("reshape")),
    "ravel": ArrayFunction("x", lambda shape: (math.prod(shape),), calls("ravel")),
    "broadcast_to": ArrayFunction("x *shape", _broadcast, calls("broadcast_to")),
    "repeat": ArrayFunction("x repeats axis=None", _repeated, calls("repeat")),
    "tile": ArrayFunction("x *counts", _tiled, calls("tile")),
    "concatenate": ArrayFunction(
        "arrays axis=0", _concatenated, lambda xp, xs, axis: xp.concatenate([xp.asarray(x) for x in xs], axis)
    ),
    "stack": ArrayFunction("arrays axis=0", _stacked, lambda xp, xs, axis: xp.stack([xp.asarray(x) for x in xs], axis)),
    "pad": ArrayFunction("x widths mode='constant' value=0", _padded, _pad),
    "correlate": ArrayFunction("x weights", _correlated, _correlate),
    "conv2d": ArrayFunction("x weights", _convolved, _conv2d),
    "sliding_window": ArrayFunction(
        "x *shape",
        _windows,
        lambda xp, x, extents: xp.lib.stride_tricks.sliding_window_view(x, extents, tuple(range(-len(extents), 0))),
    ),
    "einsum": ArrayFunction("subscripts *arrays", _contracted, _einsum),
    "dot": ArrayFunction("a b", product, calls("matmul", numeric)),
    "outer": ArrayFunction("a b", lambda a, b: (math.prod(a), math.prod(b)), calls("outer", numeric)),
    "diagonal": ArrayFunction(
        "x", lambda shape: (*_plane("diagonal", shape)[:-2], min(shape[-2:])), lambda xp, x: xp.diagonal(x, 0, -2, -1)
    ),
    "tril": ArrayFunction("x k=0", partial(_plane, "triangle"), calls("tril")),
    "triu": ArrayFunction("x k=0", partial(_plane, "triangle"), calls("triu")),
    "take": ArrayFunction("x indices axis=None", _taken, _take),
    "bincount": ArrayFunction("x length weights=None", _counted, _bincount),
    "histogram": ArrayFunction("x length low high", lambda x, length, *_: (length,), _histogram),
    "segment_sum": ArrayFunction("values bounds", _segments, _segment_sum),
    "scatter_add": ArrayFunction("base indices values", _scattered, _scatter_add),
    "searchsorted": ArrayFunction("ascending values side='left'", _searched, _searchsorted),
    "arange": ArrayFunction(
        "start stop=None step=1",
        _arange_shape,
        lambda xp, start, stop, step: xp.arange(*((0, start) if stop is None else (start, stop)), step, dtype=np.int64),
    ),
    "zeros": ArrayFunction("*shape", same, calls("zeros")),
    "ones": ArrayFunction("*shape", same, calls("ones")),
    "full": ArrayFunction("shape value", _filled, calls("full")),
    "eye": ArrayFunction("n", lambda n: (n, n), calls("eye")),
    "linspace": ArrayFunction("low high n", _spaced, calls("linspace")),
}
"""Functions of array expressions."""


def indexed(shape: Shape, index: Sequence[Any]) -> Shape:
    """Return the shape of ``x[index]``, whose arrays of indices are given by their shapes, as tuples."""
    parts = list(index) if any(part is ... for part in index) else [*index, ...]
    taken = sum(part is not None and part is not ... for part in parts)
    fits = taken <= len(shape) and sum(part is ... for part in parts) == 1
    _require(fits, f"{plural(taken, 'index', 'indices')} for a {len(shape)}-dimensional array")
    places = [number for number, part in enumerate(parts) if isinstance(part, tuple)]
    are_together = not places or places == list(range(places[0], places[0] + len(places)))
    _require(are_together, "arrays of indices must stand side by side; index in two steps")
    is_mixed = bool(places) and any(isinstance(part, int) for part in parts)
    _require(not is_mixed, "a whole number beside arrays of indices; index in two steps")
    result: list[int] = []
    axis = 0
    for number, part in enumerate(parts):
        extents = shape[axis : axis + len(shape) - taken] if part is ... else shape[axis : axis + 1]
        axis += len(extents) if part is not None else 0
        if isinstance(part, tuple):
            result += np.broadcast_shapes(*(parts[place] for place in places)) if number == places[0] else ()
        elif part is ...:
            result += extents
        elif part is None:
            result.append(1)
        elif isinstance(part, slice):
            result.append(len(range(*part.indices(extents[0]))))
        elif not -extents[0] <= part < extents[0]:
            raise ValueError(f"the index {part} is out of bounds for an axis of {extents[0]}")
    return tuple(result)


def elements_at(xp: ModuleType, x: Any, index: Sequence[Any]) -> Any:
    """Return ``x[index]``; indices in arrays may be negative, as in NumPy, and are checked, as CuPy does not."""
    x = xp.asarray(x)
    axis = 0
    taken = sum(part is not None and part is not ... for part in index)
    checked: list[Any] = []
    for part in index:
        if part is ...:
            axis += x.ndim - taken
        elif isinstance(part, np.ndarray) or hasattr(part, "__cuda_array_interface__"):
            _require(part.dtype.kind != "b", "the shape of x[mask] depends on values; use where(mask, x, 0)")
            shifted = xp.where(part < 0, part + x.shape[axis], part)
            check_indices(shifted, x.shape[axis])
            checked.append(shifted)
            axis += 1
            continue
        elif part is not None:
            axis += 1
        checked.append(part)
    return x[tuple(checked)]
