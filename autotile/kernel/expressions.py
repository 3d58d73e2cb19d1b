"""Scalar expressions of a search-space file: a closed language over whole and real numbers, booleans and strings.

Python's own parser reads the text. The parser here accepts only the parts of the syntax tree that are listed and
determines the kind of each; the tree is only inspected, never compiled or executed. Array expressions share the text
and its locations (`autotile.kernel.array_expressions`).

In nodes, ``where`` selects the rows to evaluate, as in NumPy's ufuncs. ``and``, ``or`` and ``x if c else y`` narrow it,
so that no row fails on an operand that Python would not have evaluated. Values in the other rows are undefined and
never used. The nodes are named tuples: the first look-up of a process defines them all, and defining a dataclass takes
six times as long.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from autotile.core.forks import cached_property
from autotile.errors import SpecError, listing, nearest
from autotile.kernel import real_numbers as real
from autotile.kernel import whole_numbers as whole
from autotile.kernel.whole_numbers import EvaluationError, Operand, Rows, any_row

MAX_CHARACTERS = 1000
"""Maximum length of an expression."""

MAX_STATEMENT_CHARACTERS = 8000
"""Maximum length of assignments that end in an expression."""

MAX_DEPTH = 100
"""Maximum nesting depth; a sum of n terms nests n deep."""

MAX_SHOWN = 160
"""Maximum length of an expression that a message repeats."""

_BACKSLASH = chr(92)
_WORD = re.compile(r"\w+")


_PYTHON_ARGUMENTS = {
    "kernel.template": "source",
    "problem": "sizes",
    "work": "flops",
    **{f"problem.{name}": name for name in ("sizes", "flags", "ragged", "dtypes")},
    **{f"work.{name}": name for name in ("flops", "bytes")},
}
"""Arguments of `autotile.kernel` whose names are not those of the sections that they are written to."""


def python_source(name: str) -> str:
    """Return the source that messages name for a kernel that is written in Python rather than in a file."""
    return f"<kernel {name}>"


def is_python_source(source: str) -> bool:
    """Return whether a source is from `python_source`: it has no lines, and its keys are arguments of a call."""
    return source.startswith("<kernel ")


def python_argument(key: str) -> str:
    """Return the argument of `autotile.kernel` that a key of a search-space file stands for.

    Examples
    --------
    >>> python_argument("arguments.x.shape")
    "arguments['x']['shape']"
    >>> python_argument("problem.sizes.N")
    "sizes['N']"
    """
    for prefix, argument in sorted(_PYTHON_ARGUMENTS.items(), key=lambda item: -len(item[0])):
        if key == prefix or key.startswith(f"{prefix}."):
            first, rest = argument, key[len(prefix) :].split(".")[1:]
            break
    else:
        first, *rest = key.removeprefix("kernel.").split(".")
    return first + "".join(f"[{part!r}]" for part in rest)


@dataclass(frozen=True, slots=True)
class Location:
    """Location of an entry: the file, the dotted key, and the line if known."""

    source: str = ""
    key: str = ""
    line: int | None = None

    def error(
        self, problem: str, *, column: int | None = None, expression: str = "", kind: type[SpecError] = SpecError
    ) -> SpecError:
        """Return a `SpecError` for this location; an expression that does not fit on one line is omitted."""
        shown = expression if len(expression) <= MAX_SHOWN and expression.isprintable() else ""
        key, line = self.key, self.line
        if is_python_source(self.source):
            key, line = python_argument(key), None
        return kind(problem, source=self.source, key=key, line=line, column=column, expression=shown)


UNKNOWN_LOCATION = Location()


class ExpressionError(Exception):
    """A text that is not in the language, at a 1-based column; reported as a `SpecError` with its location."""

    def __init__(self, problem: str, column: int | None = None) -> None:
        self.problem = problem
        self.column = column
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class ExpressionText:
    """Text of an expression, on one line."""

    text: str

    def column(self, node: ast.expr) -> int:
        """Return the 1-based column of a node in characters; `ast` itself counts UTF-8 bytes."""
        return len(self.text.encode()[: node.col_offset].decode()) + 1

    def excerpt(self, node: ast.expr) -> str:
        """Return the text of a node, shortened for a message."""
        text = ast.get_source_segment(self.text, node) or ""
        return text if len(text) <= 40 else text[:37] + "..."

    def error(self, node: ast.expr, problem: str) -> ExpressionError:
        """Return an error at a node."""
        return ExpressionError(problem, self.column(node))

    def parse(self) -> ast.expr:
        """Parse the text as one Python expression.

        Raises
        ------
        ExpressionError
            The text is empty, too long, too deeply nested, or not an expression.
        """
        _check_characters(self.text)
        try:
            tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            raise ExpressionError(f"not an expression: {error.msg}", self._clamp(error.offset)) from None
        except (RecursionError, MemoryError):
            raise ExpressionError("nested too deeply; split it into several named rules") from None
        except ValueError as error:
            raise ExpressionError(f"not an expression: {error}") from None
        _check_depth(tree, self)
        return tree

    def parse_statements(self) -> tuple[list[tuple[str, ast.expr]], ast.expr]:
        """Parse assignments that end in one expression, ``t = x @ w; maximum(t, 0)``.

        Returns
        -------
        tuple
            Names with the expressions that are assigned to them, in order, and the last expression.

        Raises
        ------
        ExpressionError
            As for `parse`.
        """
        if ";" not in self.text:
            return [], self.parse()
        _check_characters(self.text, MAX_STATEMENT_CHARACTERS)
        try:
            statements = ast.parse(self.text).body
        except SyntaxError as error:
            raise ExpressionError(
                f"not assignments and an expression: {error.msg}", self._clamp(error.offset)
            ) from None
        except (RecursionError, MemoryError, ValueError):
            raise ExpressionError("nested too deeply; split it into several assignments") from None
        assigned: list[tuple[str, ast.expr]] = []
        for statement in statements[:-1]:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    _check_depth(value, self)
                    assigned.append((name, value))
                case _:
                    raise ExpressionError("expected an assignment, as in t = x @ w", self._statement_column(statement))
        if not statements or not isinstance(statements[-1], ast.Expr):
            raise ExpressionError("expected an expression after the last assignment, as in t = x @ w; t + 1")
        _check_depth(statements[-1].value, self)
        return assigned, statements[-1].value

    def _statement_column(self, statement: ast.stmt) -> int:
        return len(self.text.encode()[: statement.col_offset].decode()) + 1

    def _clamp(self, offset: int | None) -> int | None:
        return None if offset is None else min(max(offset, 1), len(self.text) + 1)


def one_line(text: str) -> str:
    """Return a text with line breaks as spaces, so that a column alone gives a position in it."""
    return text.strip().replace("\r", " ").replace("\n", " ").replace("\t", " ")


@lru_cache(maxsize=4096)
def canonical_text(text: str) -> str:
    """Return a spelling that is equal for expressions that differ in spaces and redundant parentheses only."""
    if ";" in text:
        return "; ".join(ast.unparse(statement) for statement in ast.parse(text.strip()).body)
    return ast.unparse(ast.parse(text.strip(), mode="eval"))


def _check_characters(text: str, limit: int = MAX_CHARACTERS) -> None:
    if not text:
        raise ExpressionError("the expression is empty")
    if len(text) > limit:
        raise ExpressionError(f"the expression has {len(text)} characters, at most {limit} are accepted; split it")
    if text.isprintable() and "#" not in text and _BACKSLASH not in text:
        return
    for position, character in enumerate(text):
        if not character.isprintable() or character in ("#", _BACKSLASH):
            raise ExpressionError(
                f"the character {character!r} is not accepted in an expression; remove it", position + 1
            )


def _check_depth(tree: ast.expr, text: ExpressionText) -> None:
    if len(_WORD.sub("", text.text)) < MAX_DEPTH - 1:
        return  # every level except the innermost takes an operator, a bracket or a space, as in ----x or (not(x))
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    deep = next((node for node in level if isinstance(node, ast.expr)), tree)
    raise text.error(deep, f"nested more than {MAX_DEPTH} deep; split it into several expressions")


Kind = Literal["number", "real", "boolean", "string"]
"""Kind of a value: a whole number of 64 bits, a real number (float64), a condition, or a text."""

NOUNS: Mapping[Kind, str] = {
    "number": "a whole number",
    "real": "a real number",
    "boolean": "a condition",
    "string": "a string",
}
"""Each kind with its article, for messages."""

Environment = Mapping[str, Operand]

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Node(Protocol):
    """A node of an expression; its kind is known when the text is parsed."""

    @property
    def kind(self) -> Kind:
        """Kind of the result."""

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value in the rows of ``where``, which selects at least one."""


class Constant(NamedTuple):
    """A literal."""

    value: int | float | bool | str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value."""
        return self.value


class Name(NamedTuple):
    """A parameter, a size, a flag or a property of the device."""

    name: str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Look up the name; columns of numbers of any width become int64 or float64, those of flags bool."""
        value, kind = env[self.name], _TYPES.get(self.kind)
        if isinstance(value, np.ndarray) and kind is not None:
            return value.astype(kind[0], copy=False)
        return value if kind is None or self.kind == "number" else kind[1](value)


_TYPES: Mapping[Kind, tuple[type[np.generic], type]] = {
    "number": (np.int64, int),
    "real": (np.float64, float),
    "boolean": (np.bool_, bool),
}
"""Types of a column and of a scalar."""


class AsNumber(NamedTuple):
    """A boolean used as 0 or 1."""

    operand: Node
    kind: Kind = "number"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return 0 or 1."""
        value = self.operand.evaluate(env, where)
        return value.astype(np.int64) if isinstance(value, np.ndarray) else int(value)


class AsReal(NamedTuple):
    """A whole number, or a boolean as 0 or 1, used as a real number."""

    operand: Node
    kind: Kind = "real"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value as float64."""
        value = self.operand.evaluate(env, where)
        return value.astype(np.float64) if isinstance(value, np.ndarray) else float(value)


class Operation(NamedTuple):
    """An operation on numbers, which are all whole or all real."""

    function: Callable[..., Operand]
    """Function of `autotile.kernel.whole_numbers` or `real_numbers`, of the operands and the selected rows."""
    operands: tuple[Node, ...]
    column: int
    """1-based column of the operation in the text."""
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the result; an error has the column and the rows."""
        values = [operand.evaluate(env, where) for operand in self.operands]
        try:
            return self.function(*values, where)
        except EvaluationError as error:
            error.column = self.column
            raise


class Not(NamedTuple):
    """Negation."""

    operand: Node
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the negation of the operand."""
        return _negation(self.operand.evaluate(env, where))


class BooleanOperation(NamedTuple):
    """``and`` or ``or`` over several conditions, each evaluated only in rows that the previous ones leave undecided."""

    word: Literal["and", "or"]
    operands: tuple[Node, ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the combined condition, evaluated from left to right."""
        is_or = self.word == "or"
        undecided: Any = True
        for operand in self.operands:
            selected = where & undecided
            if not any_row(selected):
                break
            value = operand.evaluate(env, selected)
            undecided = undecided & (_negation(value) if is_or else value)
        return _negation(undecided) if is_or else undecided


class Comparison(NamedTuple):
    """A comparison such as ``a < b <= c``; each operand is evaluated once, in rows where the previous links hold."""

    first: Node
    links: tuple[tuple[str, Node], ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return whether every link holds."""
        holds: Any = True
        left = self.first.evaluate(env, where)
        for comparison, operand in self.links:
            selected = where & holds
            if not any_row(selected):
                break
            right = operand.evaluate(env, selected)
            holds = holds & COMPARISONS[comparison](left, right)
            left = right
        return holds


class Membership(NamedTuple):
    """``x in (a, b, c)``."""

    operand: Node
    members: tuple[Node, ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return whether the operand equals a member."""
        value = self.operand.evaluate(env, where)
        found: Any = False
        for member in self.members:
            found = found | (value == member.evaluate(env, where))
        return found


class Conditional(NamedTuple):
    """``x if c else y``; each branch is evaluated only in the rows that select it."""

    condition: Node
    chosen: Node
    otherwise: Node
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value of the selected branch in each row."""
        condition = self.condition.evaluate(env, where)
        if not isinstance(condition, np.ndarray):
            return (self.chosen if condition else self.otherwise).evaluate(env, where)
        first, second = where & condition, where & ~condition
        if not any_row(second):
            return self.chosen.evaluate(env, where)
        if not any_row(first):
            return self.otherwise.evaluate(env, where)
        return np.where(condition, self.chosen.evaluate(env, first), self.otherwise.evaluate(env, second))


def compiled(node: Node) -> Callable[[Environment], Any]:
    """Return a function of the values of names, all scalars: what `Node.evaluate` does, four times faster.

    It raises `EvaluationError` or an `ArithmeticError` where `Node.evaluate` raises, without a column.
    """
    made: Callable[[Environment], Any]
    match node:
        case Constant(value):
            made = lambda env: value  # noqa: E731 - as are the others
        case Name(name, kind):
            made = operator.itemgetter(name)
            if kind in ("boolean", "real"):
                made = _applied(_TYPES[kind][1], made)
        case AsNumber(operand):
            made = _applied(int, compiled(operand))
        case AsReal(operand):
            made = _applied(float, compiled(operand))
        case Not(operand):
            made = _applied(operator.not_, compiled(operand))
        case Operation(function, operands):
            made = _compiled_operation(function, [compiled(operand) for operand in operands])
        case BooleanOperation(word, operands):
            made = _compiled_boolean(word == "or", [compiled(operand) for operand in operands])
        case Comparison(first, links):
            made = _compiled_comparison(compiled(first), [(COMPARISONS[sign], compiled(part)) for sign, part in links])
        case Membership(operand, members):
            left, others = compiled(operand), [compiled(member) for member in members]
            made = lambda env: left(env) in [other(env) for other in others]  # noqa: E731
        case Conditional(condition, chosen, otherwise):
            holds, first_of, second_of = compiled(condition), compiled(chosen), compiled(otherwise)
            made = lambda env: first_of(env) if holds(env) else second_of(env)  # noqa: E731
        case _:  # such as a rule that is a function in Python
            made = lambda env: node.evaluate(env, True)  # noqa: E731
    return made


def _applied(function: Callable[[Any], Any], operand: Callable[[Environment], Any]) -> Callable[[Environment], Any]:
    return lambda env: function(operand(env))


_EXACT: Mapping[Callable[..., Operand], Callable[[Any, Any], Any]] = {
    whole.add: operator.add,
    whole.subtract: operator.sub,
    whole.multiply: operator.mul,
    whole.floor_divide: operator.floordiv,
    whole.modulo: operator.mod,
    whole.ceil_divide: lambda left, right: -(-left // right),
}
"""Python's function for those of two whole numbers, which is exact as long as the result fits in 64 bits."""
_BUILT_IN: Mapping[Callable[..., Operand], Callable[[Any, Any], Any]] = {whole.minimum: min, whole.maximum: max}


def _compiled_operation(
    function: Callable[..., Operand], operands: Sequence[Callable[[Environment], Any]]
) -> Callable[[Environment], Any]:
    if len(operands) != 2:
        return lambda env: function(*[operand(env) for operand in operands], True)
    left, right = operands
    exact = _EXACT.get(function)
    if exact is not None:

        def evaluate(env: Environment) -> Any:
            value = exact(left(env), right(env))
            return value if whole.INT64_MIN <= value <= whole.INT64_MAX else function(left(env), right(env), True)

        return evaluate
    built_in = _BUILT_IN.get(function)
    if built_in is not None:
        return lambda env: built_in(left(env), right(env))
    return lambda env: function(left(env), right(env), True)


def _compiled_boolean(is_or: bool, operands: Sequence[Callable[[Environment], Any]]) -> Callable[[Environment], Any]:
    def evaluate(env: Environment) -> bool:
        for operand in operands:
            if bool(operand(env)) is is_or:
                return is_or
        return not is_or

    return evaluate


def _compiled_comparison(
    first: Callable[[Environment], Any],
    links: Sequence[tuple[Callable[[Any, Any], Any], Callable[[Environment], Any]]],
) -> Callable[[Environment], Any]:
    if len(links) == 1:
        compare, second = links[0]
        return lambda env: compare(first(env), second(env))

    def evaluate(env: Environment) -> bool:
        left = first(env)
        for compare, operand in links:
            right = operand(env)
            if not compare(left, right):
                return False
            left = right
        return True

    return evaluate


def _negation(value: Operand) -> Operand:
    return ~value if isinstance(value, np.ndarray) else not value


MAX_ARGUMENTS = 20
"""Maximum number of arguments of a call."""


class Operator(NamedTuple):
    """A binary operator.

    Attributes
    ----------
    whole
        Function for two whole numbers; None if the operands are converted to real numbers.
    real
        Function for two real numbers; None if it takes whole numbers only.
    divides
        Whether the right operand must not be zero.
    """

    whole: Callable[..., Operand] | None
    real: Callable[..., Operand] | None
    divides: bool = False


OPERATORS: Mapping[type[ast.operator], Operator] = {
    ast.Add: Operator(whole.add, real.add),
    ast.Sub: Operator(whole.subtract, real.subtract),
    ast.Mult: Operator(whole.multiply, real.multiply),
    ast.Div: Operator(None, real.divide, divides=True),
    ast.FloorDiv: Operator(whole.floor_divide, real.floor_divide, divides=True),
    ast.Mod: Operator(whole.modulo, real.modulo, divides=True),
    ast.Pow: Operator(whole.power, real.power),
    ast.BitAnd: Operator(whole.bit_and, None),
    ast.BitOr: Operator(whole.bit_or, None),
    ast.BitXor: Operator(whole.bit_xor, None),
    ast.LShift: Operator(whole.shift_left, None),
    ast.RShift: Operator(whole.shift_right, None),
}

LOGICAL = (ast.BitAnd, ast.BitOr, ast.BitXor)
"""Operators that combine two conditions to a condition, as in Python."""


class Function(NamedTuple):
    """A function of the language.

    Attributes
    ----------
    usage
        A call, for messages.
    whole, real
        Functions as of `Operator`.
    result
        Kind of the result; None for that of the operands.
    arguments
        Accepted counts of arguments; the function is applied from left to right to more than two.
    divides
        Whether the last argument must not be zero.
    """

    usage: str
    whole: Callable[..., Operand] | None
    real: Callable[..., Operand] | None
    result: Kind | None = None
    arguments: range = range(1, 2)
    divides: bool = False


_SEVERAL = range(2, MAX_ARGUMENTS + 1)

FUNCTIONS: Mapping[str, Function] = {
    "min": Function("min(a, b)", whole.minimum, real.minimum, arguments=_SEVERAL),
    "max": Function("max(a, b)", whole.maximum, real.maximum, arguments=_SEVERAL),
    "ceil_div": Function("ceil_div(a, b)", whole.ceil_divide, None, arguments=range(2, 3), divides=True),
    "gcd": Function("gcd(a, b)", whole.greatest_divisor, None, arguments=_SEVERAL),
    "lcm": Function("lcm(a, b)", whole.least_multiple, None, arguments=_SEVERAL),
    "ceil_log2": Function("ceil_log2(a)", whole.ceil_log2, None),
    "is_power_of_two": Function("is_power_of_two(a)", whole.is_power_of_two, None, "boolean"),
    "abs": Function("abs(a)", whole.absolute, real.absolute),
    "floor": Function("floor(a)", whole.unchanged, real.floor, "number"),
    "ceil": Function("ceil(a)", whole.unchanged, real.ceil, "number"),
    "round": Function("round(a)", whole.unchanged, real.nearest_whole, "number"),
    "int": Function("int(a)", whole.unchanged, real.truncate, "number"),
    "float": Function("float(a)", None, whole.unchanged),
    "sqrt": Function("sqrt(a)", None, real.square_root),
    "log2": Function("log2(a)", None, real.log2),
    "log": Function("log(a)", None, real.log),
    "exp": Function("exp(a)", None, real.exponential),
}
"""Functions of the language."""


_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}

_LANGUAGE = (
    "use names, numbers, strings, + - * / // % ** & | ^ ~ << >>, comparisons, and/or/not, in, x if c else y and the "
    f"functions {', '.join(FUNCTIONS)}"
)


class ExpressionParser:
    """Converts a syntax tree to nodes; methods raise `ExpressionError` for parts that are not in the language.

    Parameters
    ----------
    text
        Text of the tree, for messages.
    kinds
        Kind of each name that the expression may use.

    Attributes
    ----------
    names
        Names used so far.
    """

    def __init__(self, text: ExpressionText, kinds: Mapping[str, Kind]) -> None:
        self.text = text
        self.kinds = kinds
        self.names: set[str] = set()

    def node(self, tree: ast.expr) -> Node:
        """Convert an expression of any kind."""
        node: Node
        match tree:
            case ast.Constant():
                node = self._constant(tree)
            case ast.Name(id=name):
                node = self._name(tree, name)
            case ast.Attribute(value=ast.Name(id="device" | "computed" as group), attr=name):
                node = self._name(tree, f"{group}.{name}")
            case ast.BinOp():
                node = self._binary(tree)
            case ast.UnaryOp():
                node = self._unary(tree)
            case ast.BoolOp(op=word, values=operands):
                conditions = tuple(self.condition(operand) for operand in operands)
                node = BooleanOperation("and" if isinstance(word, ast.And) else "or", conditions)
            case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                node = self._membership(tree)
            case ast.Compare():
                node = self._comparison(tree)
            case ast.IfExp():
                node = self._conditional(tree)
            case ast.Call():
                node = self._call(tree)
            case ast.Attribute():
                raise self.text.error(tree, "only properties of 'device' are accepted, as in device.sm_count")
            case _:
                raise self._unsupported(tree)
        return node

    def _number(self, tree: ast.expr) -> Node:
        """Convert a whole or a real number."""
        return self._as_number(tree, self.node(tree))

    def _as_number(self, tree: ast.expr, node: Node) -> Node:
        if node.kind == "string":
            excerpt = self.text.excerpt(tree)
            raise self.text.error(tree, f"{excerpt} is a string where a number is expected; strings take ==, != and in")
        return AsNumber(node) if node.kind == "boolean" else node

    def condition(self, tree: ast.expr) -> Node:
        """Convert a condition."""
        node = self.node(tree)
        if node.kind != "boolean":
            excerpt = self.text.excerpt(tree)
            hint = f"compare it, as in {excerpt} != 0"
            raise self.text.error(tree, f"{excerpt} is {NOUNS[node.kind]} where a condition is expected; {hint}")
        return node

    def _constant(self, tree: ast.Constant) -> Node:
        match tree.value:
            case bool(value):
                return Constant(value, "boolean")
            case int(value) if value <= whole.INT64_MAX:
                return Constant(value, "number")
            case int():
                raise self.text.error(tree, "the number does not fit in 64 bits")
            case float(value) if np.isfinite(value):
                return Constant(value, "real")
            case float():
                raise self.text.error(tree, "the number does not fit in float64")
            case str(value):
                return Constant(value, "string")
            case _:
                raise self._unsupported(tree)

    def _name(self, tree: ast.expr, name: str) -> Node:
        if name in self.kinds:
            self.names.add(name)
            return Name(name, self.kinds[name])
        properties = [known for known in self.kinds if known.startswith("device.")]
        plain = [known for known in self.kinds if not known.startswith("device.")]
        if name in FUNCTIONS:
            raise self.text.error(tree, f"{name!r} is a function; call it, as in {FUNCTIONS[name].usage}")
        if name.startswith("device."):
            known = listing(properties or plain)
            what = "is not a property" if properties else "is not accepted here"
            raise self.text.error(tree, f"{name!r} {what}{nearest(name, properties)} (known: {known})")
        known = listing([*plain, "device.*"] if properties else plain)
        raise self.text.error(tree, f"unknown name {name!r}{nearest(name, plain)} (known: {known})")

    def _binary(self, tree: ast.BinOp) -> Node:
        known = OPERATORS.get(type(tree.op))
        if known is None:
            raise self.text.error(tree, f"this operator is not accepted; {_LANGUAGE}")
        nodes = [self.node(tree.left), self.node(tree.right)]
        if isinstance(tree.op, LOGICAL) and all(node.kind == "boolean" for node in nodes):
            assert known.whole is not None
            return Operation(known.whole, tuple(nodes), self.text.column(tree), "boolean")
        trees = (tree.left, tree.right)
        operands = tuple(self._as_number(part, node) for part, node in zip(trees, nodes, strict=True))
        return self._operation(known, trees, operands, self.text.column(tree))

    def _operation(
        self, known: Operator | Function, trees: tuple[ast.expr, ...], operands: tuple[Node, ...], column: int
    ) -> Operation:
        """Apply an operation to numbers: to whole ones if all are and it can, otherwise to real ones."""
        if known.divides:
            column = self.text.column(trees[-1])
            if isinstance(operands[-1], Constant) and operands[-1].value == 0:
                raise self.text.error(trees[-1], "division by zero")
        real_tree = next((tree for tree, node in zip(trees, operands, strict=True) if node.kind == "real"), None)
        if known.real is None and real_tree is not None:
            hint = "round it with floor(), ceil() or round(), or divide with // or ceil_div"
            excerpt = self.text.excerpt(real_tree)
            raise self.text.error(real_tree, f"{excerpt} is a real number where a whole number is expected; {hint}")
        result = known.result if isinstance(known, Function) else None
        if known.whole is not None and real_tree is None:
            return Operation(known.whole, operands, column, result or "number")
        assert known.real is not None
        return Operation(known.real, tuple(map(_as_real, operands)), column, result or "real")

    def _unary(self, tree: ast.UnaryOp) -> Node:
        column = self.text.column(tree)
        match tree.op:
            case ast.Not():
                return Not(self.condition(tree.operand))
            case ast.USub():
                operand = self._number(tree.operand)
                if operand.kind == "real":
                    return Operation(real.subtract, (Constant(0.0, "real"), operand), column, "real")
                return Operation(whole.subtract, (Constant(0, "number"), operand), column, "number")
            case ast.UAdd():
                return self._number(tree.operand)
            case _:
                operand = self.node(tree.operand)
                if operand.kind != "number":
                    excerpt = self.text.excerpt(tree.operand)
                    problem = f"'~' takes a whole number, and {excerpt} is {NOUNS[operand.kind]}"
                    raise self.text.error(tree, f"{problem}; use 'not'" if operand.kind == "boolean" else problem)
                return Operation(whole.invert, (operand,), column, "number")

    def _comparison(self, tree: ast.Compare) -> Node:
        first = self.node(tree.left)
        links = []
        self._check_precedence(tree)
        for comparison, operand in zip(tree.ops, tree.comparators, strict=True):
            symbol = _COMPARISONS.get(type(comparison))
            if symbol is None:
                raise self.text.error(operand, "'is' is not accepted, nor 'in' in a chain; use == or split with 'and'")
            node = self.node(operand)
            self._check_comparable(first, operand, node)
            if node.kind == "string" and symbol not in ("==", "!="):
                raise self.text.error(operand, f"strings have no order for {symbol!r}; they take ==, != and in")
            links.append((symbol, node))
        first, *operands = _alike([first, *(node for _, node in links)])
        return Comparison(first, tuple((symbol, node) for (symbol, _), node in zip(links, operands, strict=True)))

    def _membership(self, tree: ast.Compare) -> Node:
        members = tree.comparators[0]
        if not isinstance(members, ast.List | ast.Tuple) or not members.elts:
            raise self.text.error(members, "'in' takes a list of values, as in BM in (64, 128)")
        operand = self.node(tree.left)
        nodes = tuple(self.node(member) for member in members.elts)
        for member, node in zip(members.elts, nodes, strict=True):
            self._check_comparable(operand, member, node)
        operand, *members_alike = _alike([operand, *nodes])
        found = Membership(operand, tuple(members_alike))
        return Not(found) if isinstance(tree.ops[0], ast.NotIn) else found

    def _check_comparable(self, first: Node, tree: ast.expr, node: Node) -> None:
        if (node.kind == "string") != (first.kind == "string"):
            raise self.text.error(
                tree, f"{NOUNS[first.kind]} is compared with {NOUNS[node.kind]}; they are never equal"
            )

    def _check_precedence(self, tree: ast.Compare) -> None:
        """Refuse ``a > 1 & b > 2``, which Python reads as the chain ``a > (1 & b) > 2``."""
        for operand in tree.comparators[:-1]:
            if isinstance(operand, ast.BinOp) and isinstance(operand.op, LOGICAL) and not self._is_enclosed(operand):
                problem = "'&', '|' and '^' bind more tightly than a comparison; use 'and' or 'or', or add parentheses"
                raise self.text.error(operand, problem)

    def _is_enclosed(self, tree: ast.expr) -> bool:
        """Return whether a subexpression stands in parentheses of its own."""
        end = len(self.text.text.encode()[: tree.end_col_offset].decode())
        return self.text.text[: self.text.column(tree) - 1].rstrip().endswith("(") and self.text.text[
            end:
        ].lstrip().startswith(")")

    def _conditional(self, tree: ast.IfExp) -> Node:
        condition = self.condition(tree.test)
        chosen, otherwise = self.node(tree.body), self.node(tree.orelse)
        if chosen.kind != otherwise.kind:
            chosen, otherwise = self._as_number(tree.body, chosen), self._as_number(tree.orelse, otherwise)
        if chosen.kind != otherwise.kind:
            chosen, otherwise = _as_real(chosen), _as_real(otherwise)
        return Conditional(condition, chosen, otherwise, chosen.kind)

    def _call(self, tree: ast.Call) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in FUNCTIONS:
            called = self.text.excerpt(tree.func)
            hint = f"{nearest(called, FUNCTIONS)} (functions: {listing(FUNCTIONS)})"
            raise self.text.error(tree, f"{called!r} cannot be called{hint}")
        known = FUNCTIONS[name]
        if tree.keywords or any(isinstance(argument, ast.Starred) for argument in tree.args):
            raise self.text.error(tree, f"{name} takes plain arguments only, as in {known.usage}")
        if len(tree.args) not in known.arguments:
            raise self.text.error(tree, f"{name} takes {_count_text(known.arguments)}, got {len(tree.args)}")
        operands = [self._number(argument) for argument in tree.args]
        column = self.text.column(tree)
        if len(operands) <= 2:
            return self._operation(known, tuple(tree.args), tuple(operands), column)
        result, *others = operands
        for other, part in zip(others, tree.args[1:], strict=True):
            result = self._operation(known, (tree.args[0], part), (result, other), column)
        return result

    def _unsupported(self, tree: ast.expr) -> ExpressionError:
        return self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Attributes
    ----------
    text
        Text, on one line.
    names
        All names in it; device properties as ``"device.sm_count"``.
    kind
        Kind of the result: ``"number"``, ``"real"``, ``"boolean"`` or ``"string"``.
    """

    text: str
    names: frozenset[str]
    kind: Kind
    location: Location = field(repr=False, compare=False)
    node: Node = field(repr=False)

    def evaluate(self, env: Mapping[str, Any]) -> Any:
        """Evaluate over scalars or columns.

        Parameters
        ----------
        env
            Value of each of ``names``: Python scalars, or arrays of numbers, booleans or strings that broadcast
            against each other.

        Returns
        -------
        int, float, bool, str or numpy.ndarray
            A Python scalar if all values are scalars, otherwise a read-only array (int64, float64, bool or string) of
            the broadcast shape.

        Raises
        ------
        SpecError
            A division by zero, an exponent outside 0 to 63, a result that exceeds 64 bits, or a real one that is not
            finite, in a row that is evaluated. The message gives the values of the names in that row.
        """
        try:
            value = self.node.evaluate(env, True)
        except EvaluationError as error:
            problem = f"{error.problem}{_first_values(error.rows, self._columns(env))}"
            raise self.location.error(problem, column=error.column, expression=self.text) from None
        shapes = [column.shape for name in self.names if isinstance(column := env[name], np.ndarray)]
        return np.broadcast_to(value, np.broadcast_shapes(*shapes)) if shapes else value

    def value(self, env: Mapping[str, Any]) -> Any:
        """Evaluate over Python scalars, as `evaluate` does but several times faster.

        Raises
        ------
        SpecError
            As for `evaluate`.
        """
        try:
            return self._compiled(env)
        except (EvaluationError, ArithmeticError):
            return self.evaluate(env)  # which raises with the place in the text

    @cached_property
    def _compiled(self) -> Callable[[Mapping[str, Any]], Any]:
        return compiled(self.node)

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def as_number(self) -> Expression:
        """Return the condition as a number, 0 or 1."""
        return replace(self, kind="number", node=AsNumber(self.node))

    def rounded(self) -> Expression:
        """Return a real expression rounded to the nearest whole number; any other as it is."""
        if self.kind != "real":
            return self
        return replace(self, kind="number", node=Operation(real.nearest_whole, (self.node,), 1, "number"))

    def _columns(self, env: Environment) -> dict[str, Operand]:
        return {name: env[name] for name in sorted(self.names)}


def parse_expression(text: str, kinds: Mapping[str, Kind], location: Location = UNKNOWN_LOCATION) -> Expression:
    """Parse and check an expression.

    Parameters
    ----------
    text
        The expression.
    kinds
        Kind of each name that it may use, including ``device.*``.
    location
        Location of the text, for messages.

    Raises
    ------
    SpecError
        The text is not in the language, uses an unknown name, or mixes kinds.
    """
    line_of_text = one_line(text)
    parser = ExpressionParser(ExpressionText(line_of_text), kinds)
    try:
        node = parser.node(parser.text.parse())
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=line_of_text) from None
    return Expression(line_of_text, frozenset(parser.names), node.kind, location, node)


def _as_real(node: Node) -> Node:
    """Return a number as a real number."""
    if isinstance(node, Constant):
        return Constant(float(node.value), "real")
    return node if node.kind == "real" else AsReal(node)


def _alike(nodes: list[Node]) -> list[Node]:
    """Return operands that are compared: all as real numbers if one is."""
    return [_as_real(node) for node in nodes] if any(node.kind == "real" for node in nodes) else nodes


def _count_text(counts: range) -> str:
    """Return accepted counts of arguments as text: ``"1 argument"``, ``"2 to 20 arguments"``."""
    if len(counts) > 1:
        return f"{counts[0]} to {counts[-1]} arguments"
    return "1 argument" if counts[0] == 1 else f"{counts[0]} arguments"


def _first_values(rows: Rows, columns: Mapping[str, Operand]) -> str:
    """Return the values in the first of the given rows as text: ``" where BM = 64, TM = 0"``."""
    if not columns:
        return ""
    shape = np.broadcast_shapes(np.shape(rows), *(np.shape(column) for column in columns.values()))
    index = np.unravel_index(int(np.argmax(np.broadcast_to(rows, shape))), shape)
    values = {name: np.broadcast_to(column, shape)[index].item() for name, column in columns.items()}
    return " where " + ", ".join(f"{name} = {value}" for name, value in values.items())
