"""Expressions of a search-space file: a closed language over numbers, booleans and strings, and over whole arrays.

Python's own parser reads the text. The parsers here accept only the parts of the syntax tree that they list; the tree
is only inspected, never compiled or executed. `autotile.kernel.functions` states the operators and functions.

A scalar expression (`Expression`) knows the kind of each part when it is parsed. In its nodes, ``where`` selects the
rows to evaluate, as in NumPy's ufuncs. ``and``, ``or`` and ``x if c else y`` narrow it, so that no row fails on an
operand that Python would not have evaluated. Values in the other rows are undefined and never used.

An array expression (`ArrayExpression`) gives the expected outputs of a kernel and the contents of its inputs. The shape
of every intermediate array is computed, and bounded, before the array is.
"""

from __future__ import annotations

import ast
import keyword
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from autotile.core.dtypes import Shape
from autotile.core.forks import cached_property
from autotile.core.model import DTYPE_BYTES
from autotile.errors import SpecError, listing, nearest
from autotile.kernel import functions as language
from autotile.kernel.functions import (
    ARRAY_FUNCTIONS,
    COMPARISONS,
    FUNCTIONS,
    OPERATORS,
    ArrayFunction,
    ExpressionError,
    Kind,
    Kinds,
    Operand,
    Rows,
    any_row,
)

MAX_CHARACTERS = 1000
MAX_STATEMENT_CHARACTERS = 8000  # of assignments that end in an expression
MAX_DEPTH = 100  # a sum of n terms nests n deep
MAX_SHOWN = 160  # characters of an expression that a message repeats

_BACKSLASH = chr(92)
_WORD = r"\w+"

_PYTHON_ARGUMENTS = {
    "kernel.template": "source",
    "problem": "sizes",
    "work": "flops",
    **{f"problem.{name}": name for name in ("sizes", "flags", "ragged", "dtypes")},
    **{f"work.{name}": name for name in ("flops", "bytes")},
}
"""Arguments of `autotile.kernel` whose names are not those of the sections that they are written to."""

# Keywords of C++20, which a macro must not redefine, except those that are Python keywords too.
_CXX_WORDS = (
    "alignas alignof asm auto bool case catch char char8_t char16_t char32_t concept consteval constexpr constinit "
    "const const_cast co_await co_return co_yield decltype default delete do double dynamic_cast enum explicit export "
    "extern false float friend goto inline int long mutable namespace new noexcept nullptr operator private protected "
    "public register reinterpret_cast requires short signed sizeof static static_assert static_cast struct switch "
    "template this thread_local throw true typedef typeid typename union unsigned using virtual void volatile wchar_t"
)
_CXX_KEYWORDS = frozenset(_CXX_WORDS.split())

RESERVED = {
    "device": "the device's properties",
    "DTYPE": "the macro that holds the element type",
    DTYPE_BYTES: "the bytes of an element of the problem's type",
    **dict.fromkeys(("min", "max", "ceil_div"), "a function of expressions"),
}
"""Names that a search-space file must not define, with what they name."""


def is_c_identifier(name: str) -> bool:
    """Return True if a name is a C identifier."""
    return name.isascii() and name.isidentifier()


def is_keyword(name: str) -> bool:
    """Return True if a name is a keyword of Python or C++, or reserved in a search-space file."""
    return keyword.iskeyword(name) or name in _CXX_KEYWORDS or name in RESERVED


def python_source(name: str) -> str:
    """Return the source that messages name for a kernel that is written in Python rather than in a file."""
    return f"<kernel {name}>"


def is_python_source(source: str) -> bool:
    """Return True if a source is from `python_source`: it has no lines, and its keys are arguments of a call."""
    return source.startswith("<kernel ")


class Location(msgspec.Struct, frozen=True):
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
        if is_python_source(self.source):  # name the argument: arguments['x']['shape'] for arguments.x.shape
            prefix = max((one for one in _PYTHON_ARGUMENTS if f"{key}.".startswith(f"{one}.")), key=len, default="")
            first, *rest = key.removeprefix("kernel.").split(".")
            if prefix:
                first, rest = _PYTHON_ARGUMENTS[prefix], key[len(prefix) :].split(".")[1:]
            key, line = first + "".join(f"[{part!r}]" for part in rest), None
        return kind(problem, source=self.source, key=key, line=line, column=column, expression=shown)

    @contextmanager
    def reporting(self, expression: str) -> Iterator[None]:
        """Raise an `ExpressionError` of the block as a `SpecError` for this location."""
        try:
            yield
        except ExpressionError as error:
            raise self.error(error.problem, column=error.column, expression=expression) from None


UNKNOWN_LOCATION = Location()


class ExpressionText:
    """Text of an expression, on one line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def column(self, node: ast.expr | ast.stmt) -> int:
        """Return the 1-based column of a node in characters; `ast` itself counts UTF-8 bytes."""
        return len(self.text.encode()[: node.col_offset].decode()) + 1

    def excerpt(self, node: ast.expr) -> str:
        """Return the text of a node, shortened for a message."""
        text = ast.get_source_segment(self.text, node) or ""
        return text if len(text) <= 40 else text[:37] + "..."

    def error(self, node: ast.expr, problem: str) -> ExpressionError:
        """Return an error at a node."""
        return ExpressionError(problem, self.column(node))

    def called(self, tree: ast.Call, functions: Mapping[str, object]) -> str:
        """Return the name of the function that is called, one of those that are known."""
        if isinstance(tree.func, ast.Name) and tree.func.id in functions:
            return tree.func.id
        called = self.excerpt(tree.func)
        hint = f"{nearest(called, functions)} (functions: {', '.join(functions)})"
        raise self.error(tree, f"{called!r} cannot be called{hint}")

    def parse(self) -> ast.expr:
        """Parse the text as one Python expression."""
        (statement,) = self._parsed(MAX_CHARACTERS, "eval", "an expression", "split it into several named rules")
        return self._checked(statement)

    def parse_statements(self) -> tuple[list[tuple[str, ast.expr]], ast.expr]:
        """Parse assignments that end in one expression, ``t = x @ w; maximum(t, 0)``, which is the second result."""
        if ";" not in self.text:
            return [], self.parse()
        statements = self._parsed(
            MAX_STATEMENT_CHARACTERS, "exec", "assignments and an expression", "split it into several assignments"
        )
        assigned: list[tuple[str, ast.expr]] = []
        for statement in statements[:-1]:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    assigned.append((name, self._checked(value)))
                case _:
                    raise ExpressionError("expected an assignment, as in t = x @ w", self.column(statement))
        if not statements or not isinstance(statements[-1], ast.Expr):
            raise ExpressionError("expected an expression after the last assignment, as in t = x @ w; t + 1")
        return assigned, self._checked(statements[-1].value)

    def _parsed(self, limit: int, mode: str, what: str, cure: str) -> list[Any]:
        """Return the statements, or the expression alone."""
        text = self.text
        if not text:
            raise ExpressionError("the expression is empty")
        if len(text) > limit:
            raise ExpressionError(f"the expression has {len(text)} characters, at most {limit} are accepted; split it")
        if not text.isprintable() or "#" in text or _BACKSLASH in text:
            position, character = next(
                (i, c) for i, c in enumerate(text, 1) if not c.isprintable() or c in ("#", _BACKSLASH)
            )
            raise ExpressionError(f"the character {character!r} is not accepted in an expression; remove it", position)
        try:
            parsed: Any = ast.parse(text, mode=mode)
        except SyntaxError as error:
            column = None if error.offset is None else min(max(error.offset, 1), len(text) + 1)
            raise ExpressionError(f"not {what}: {error.msg}", column) from None
        except (RecursionError, MemoryError):
            raise ExpressionError(f"nested too deeply; {cure}") from None
        except ValueError as error:
            raise ExpressionError(f"not {what}: {error}") from None
        return [parsed.body] if mode == "eval" else list(parsed.body)

    def _checked(self, tree: ast.expr) -> ast.expr:
        """Return a tree that is not nested too deeply."""
        if len(re.sub(_WORD, "", self.text)) < MAX_DEPTH - 1:
            return tree  # every level except the innermost takes an operator, a bracket or a space: ----x, (not(x))
        level: list[ast.AST] = [tree]
        for _ in range(MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
            if not level:
                return tree
        deep = next((node for node in level if isinstance(node, ast.expr)), tree)
        raise self.error(deep, f"nested more than {MAX_DEPTH} deep; split it into several expressions")


def one_line(text: str) -> str:
    """Return a text with line breaks as spaces, so that a column alone gives a position in it."""
    return text.strip().replace("\r", " ").replace("\n", " ").replace("\t", " ")


@lru_cache(maxsize=4096)
def canonical_text(text: str) -> str:
    """Return a spelling that is equal for expressions that differ in spaces and redundant parentheses only."""
    if ";" in text:
        return "; ".join(ast.unparse(statement) for statement in ast.parse(text.strip()).body)
    return ast.unparse(ast.parse(text.strip(), mode="eval"))


NOUNS: Mapping[Kind, str] = {
    "number": "a whole number",
    "real": "a real number",
    "boolean": "a condition",
    "string": "a string",
}
"""Each kind with its article, for messages."""

Environment = Mapping[str, Operand]


class Node(NamedTuple):
    """A part of a scalar expression."""

    operation: str
    """``constant`` or ``name``; ``and``, ``or``, ``not``, ``compare``, ``in`` (the first operand among the others),
    ``if`` (condition, value, other value); ``number`` or ``real``, a conversion; ``function``, of Python; or an
    operator or a function of the language, as a text spells it."""
    kind: Kind
    operands: tuple[Node, ...] = ()
    """Operands, which are all whole or all real numbers for an operator or a function of the language."""
    value: Any = None
    """The constant, the name, the signs of the comparisons, or the function of operands and selected rows."""
    column: int = 0
    """1-based column in the text; 0 where no evaluation fails."""


_TYPES: Mapping[str, tuple[type[np.generic], type]] = {
    "number": (np.int64, int),
    "real": (np.float64, float),
    "boolean": (np.bool_, bool),
}
"""Types of a column and of a scalar."""

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {sign: function for sign, function, _ in COMPARISONS.values()}


def _negation(value: Operand) -> Operand:
    return ~value if isinstance(value, np.ndarray) else not value


def evaluate(node: Node, env: Environment, where: Rows) -> Operand:
    """Return the value of a node in the rows of ``where``, which selects at least one."""
    value, operands = node.value, node.operands
    if node.column:  # an operator or a function of the language
        values = [evaluate(operand, env, where) for operand in operands]
        try:
            return value(*values, where)
        except ExpressionError as error:
            error.column = node.column
            raise
    undecided: Any = True
    match node.operation:
        case "constant":
            return value
        case "name":  # columns of numbers of any width become int64 or float64, those of flags bool
            found, types = env[value], _TYPES.get(node.kind)
            if types is not None and isinstance(found, np.ndarray):
                return found.astype(types[0], copy=False)
            return found if types is None or node.kind == "number" else types[1](found)
        case "number" | "real":
            found, types = evaluate(operands[0], env, where), _TYPES[node.kind]
            return found.astype(types[0]) if isinstance(found, np.ndarray) else types[1](found)
        case "not":
            return _negation(evaluate(operands[0], env, where))
        case "and" | "or" as word:  # each condition only in rows that the previous ones leave undecided
            for operand in operands:
                selected = where & undecided
                if not any_row(selected):
                    break
                found = evaluate(operand, env, selected)
                undecided = undecided & (_negation(found) if word == "or" else found)
            return _negation(undecided) if word == "or" else undecided
        case "compare":  # each operand of a < b <= c once, in rows where the previous links hold
            left = evaluate(operands[0], env, where)
            for sign, operand in zip(value, operands[1:], strict=True):
                selected = where & undecided
                if not any_row(selected):
                    break
                right = evaluate(operand, env, selected)
                undecided, left = undecided & _COMPARE[sign](left, right), right
            return undecided
        case "in":
            found, *members = (evaluate(operand, env, where) for operand in operands)
            return reduce(operator.or_, [found == member for member in members])
        case "if":  # each branch only in the rows that select it
            test, chosen, otherwise = operands
            condition = evaluate(test, env, where)
            if not isinstance(condition, np.ndarray):
                return evaluate(chosen if condition else otherwise, env, where)
            first, second = where & condition, where & ~condition
            if not any_row(second):
                return evaluate(chosen, env, where)
            if not any_row(first):
                return evaluate(otherwise, env, where)
            return np.where(condition, evaluate(chosen, env, first), evaluate(otherwise, env, second))
    return value(env)  # a function of Python


def compiled(node: Node) -> Callable[[Environment], Any]:
    """Return a function of the values of names, all scalars: what `evaluate` does, four times faster.

    It raises `ExpressionError` or an `ArithmeticError` where `evaluate` raises, without a column.
    """
    value, parts = node.value, [compiled(operand) for operand in node.operands]
    match node.operation:
        case "constant":
            return lambda env: value
        case "name":
            look_up = operator.itemgetter(value)
            convert = _TYPES[node.kind][1] if node.kind in ("boolean", "real") else None
            return look_up if convert is None else lambda env: convert(look_up(env))
        case "number" | "real" | "not":
            apply = operator.not_ if node.operation == "not" else _TYPES[node.operation][1]
            (operand,) = parts
            return lambda env: apply(operand(env))
        case "and" | "or":
            is_or = node.operation == "or"

            def combined(env: Environment) -> bool:
                for part in parts:
                    if bool(part(env)) is is_or:
                        return is_or
                return not is_or

            return combined
        case "compare":
            compares = [_COMPARE[sign] for sign in value]
            first, second = parts[:2]
            if len(compares) == 1:
                compare_two = compares[0]
                return lambda env: compare_two(first(env), second(env))

            def compared(env: Environment) -> bool:
                left = first(env)
                for compare, part in zip(compares, parts[1:], strict=True):
                    right = part(env)
                    if not compare(left, right):
                        return False
                    left = right
                return True

            return compared
        case "in":
            left, *others = parts
            return lambda env: left(env) in [other(env) for other in others]
        case "if":
            holds, chosen, otherwise = parts
            return lambda env: chosen(env) if holds(env) else otherwise(env)
        case "function":
            called: Callable[[Environment], Any] = value
            return called
    if len(parts) != 2:
        return lambda env: value(*[part(env) for part in parts], True)
    left, right = parts
    plain = language.PLAIN.get(value)
    if plain is None:
        return lambda env: value(left(env), right(env), True)

    def computed(env: Environment) -> Any:
        result = plain(left(env), right(env))
        return result if language.INT64_MIN <= result <= language.INT64_MAX else value(left(env), right(env), True)

    return computed


_LANGUAGE = (
    "use names, numbers, strings, + - * / // % ** & | ^ ~ << >>, comparisons, and/or/not, in, x if c else y and the "
    f"functions {', '.join(FUNCTIONS)}"
)


class ExpressionParser(ExpressionText):
    """Converts a syntax tree to nodes; methods raise `ExpressionError` for parts that are not in the language."""

    def __init__(self, text: str, kinds: Kinds) -> None:
        super().__init__(text)
        self.kinds = kinds
        self.names: set[str] = set()
        """Names used so far."""

    def node(self, tree: ast.expr) -> Node:
        """Convert an expression of any kind."""
        match tree:
            case ast.Constant(value=bool(value)):
                return Node("constant", "boolean", value=value)
            case ast.Constant(value=int(value)) if value <= language.INT64_MAX:
                return Node("constant", "number", value=value)
            case ast.Constant(value=float(value)) if np.isfinite(value):
                return Node("constant", "real", value=value)
            case ast.Constant(value=int() | float() as value):
                size = "64 bits" if isinstance(value, int) else "float64"
                raise self.error(tree, f"the number does not fit in {size}")
            case ast.Constant(value=str(value)):
                return Node("constant", "string", value=value)
            case ast.Name(id=name):
                return self._name(tree, name)
            case ast.Attribute(value=ast.Name(id="device" | "computed" as group), attr=name):
                return self._name(tree, f"{group}.{name}")
            case ast.BinOp():
                return self._binary(tree)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Node("not", "boolean", (self.condition(operand),))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._number(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                zero = Node("constant", "number", value=0)
                pair = (operand, operand), (zero, self._number(operand))
                return self._operation("-", OPERATORS[ast.Sub], *pair, self.column(tree))
            case ast.UnaryOp(operand=operand):
                node = self.node(operand)
                if node.kind != "number":
                    problem = f"'~' takes a whole number, and {self.excerpt(operand)} is {NOUNS[node.kind]}"
                    raise self.error(tree, f"{problem}; use 'not'" if node.kind == "boolean" else problem)
                return Node("~", "number", (node,), language.invert, self.column(tree))
            case ast.BoolOp(op=word, values=operands):
                conditions = tuple(self.condition(operand) for operand in operands)
                return Node("and" if isinstance(word, ast.And) else "or", "boolean", conditions)
            case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                members = tree.comparators[0]
                if not isinstance(members, ast.List | ast.Tuple) or not members.elts:
                    raise self.error(members, "'in' takes a list of values, as in BM in (64, 128)")
                nodes = [self.node(tree.left), *map(self.node, members.elts)]
                for member, node in zip(members.elts, nodes[1:], strict=True):
                    self._check_comparable(nodes[0], member, node)
                found = Node("in", "boolean", _alike(nodes))
                return Node("not", "boolean", (found,)) if isinstance(tree.ops[0], ast.NotIn) else found
            case ast.Compare():
                return self._comparison(tree)
            case ast.IfExp():
                condition = self.condition(tree.test)
                chosen, otherwise = self.node(tree.body), self.node(tree.orelse)
                if chosen.kind != otherwise.kind:
                    chosen, otherwise = self._number(tree.body, chosen), self._number(tree.orelse, otherwise)
                chosen, otherwise = _alike([chosen, otherwise])
                return Node("if", chosen.kind, (condition, chosen, otherwise))
            case ast.Call():
                return self._call(tree)
            case ast.Attribute():
                raise self.error(tree, "only properties of 'device' are accepted, as in device.sm_count")
            case _:
                raise self.error(tree, f"{self.excerpt(tree)!r} is not accepted; {_LANGUAGE}")

    def _number(self, tree: ast.expr, node: Node | None = None) -> Node:
        """Convert a whole or a real number; a condition is 0 or 1."""
        node = self.node(tree) if node is None else node
        if node.kind == "string":
            excerpt = self.excerpt(tree)
            raise self.error(tree, f"{excerpt} is a string where a number is expected; strings take ==, != and in")
        return Node("number", "number", (node,)) if node.kind == "boolean" else node

    def condition(self, tree: ast.expr) -> Node:
        """Convert a condition."""
        node = self.node(tree)
        if node.kind != "boolean":
            excerpt = self.excerpt(tree)
            hint = f"compare it, as in {excerpt} != 0"
            raise self.error(tree, f"{excerpt} is {NOUNS[node.kind]} where a condition is expected; {hint}")
        return node

    def _name(self, tree: ast.expr, name: str) -> Node:
        if name in self.kinds:
            self.names.add(name)
            return Node("name", self.kinds[name], value=name)
        properties = [known for known in self.kinds if known.startswith("device.")]
        plain = [known for known in self.kinds if not known.startswith("device.")]
        if name in FUNCTIONS:
            raise self.error(tree, f"{name!r} is a function; call it, as in {FUNCTIONS[name].usage}")
        if name.startswith("device."):
            known = listing(properties or plain)
            what = "is not a property" if properties else "is not accepted here"
            raise self.error(tree, f"{name!r} {what}{nearest(name, properties)} (known: {known})")
        known = listing([*plain, "device.*"] if properties else plain)
        raise self.error(tree, f"unknown name {name!r}{nearest(name, plain)} (known: {known})")

    def _binary(self, tree: ast.BinOp) -> Node:
        known = OPERATORS.get(type(tree.op))
        if known is None:
            raise self.error(tree, f"this operator is not accepted; {_LANGUAGE}")
        trees, nodes = (tree.left, tree.right), (self.node(tree.left), self.node(tree.right))
        if isinstance(tree.op, language.LOGICAL) and all(node.kind == "boolean" for node in nodes):
            return Node(known.usage, "boolean", nodes, known.whole, self.column(tree))
        operands = tuple(self._number(part, node) for part, node in zip(trees, nodes, strict=True))
        return self._operation(known.usage, known, trees, operands, self.column(tree))

    def _operation(
        self,
        name: str,
        known: language.ScalarFunction,
        trees: tuple[ast.expr, ...],
        operands: tuple[Node, ...],
        column: int,
    ) -> Node:
        """Apply an operation to numbers: to whole ones if all are and it can, otherwise to real ones."""
        if known.divides:
            column = self.column(trees[-1])
            if operands[-1].operation == "constant" and operands[-1].value == 0:
                raise self.error(trees[-1], "division by zero")
        real_tree = next((tree for tree, node in zip(trees, operands, strict=True) if node.kind == "real"), None)
        if known.real is None and real_tree is not None:
            hint = "round it with floor(), ceil() or round(), or divide with // or ceil_div"
            excerpt = self.excerpt(real_tree)
            raise self.error(real_tree, f"{excerpt} is a real number where a whole number is expected; {hint}")
        if known.whole is not None and real_tree is None:
            return Node(name, known.result or "number", operands, known.whole, column)
        return Node(name, known.result or "real", tuple(map(_as_real, operands)), known.real, column)

    def _comparison(self, tree: ast.Compare) -> Node:
        nodes, signs = [self.node(tree.left)], []
        # Python reads a > 1 & b > 2 as the chain a > (1 & b) > 2.
        for operand in tree.comparators[:-1]:
            if isinstance(operand, ast.BinOp) and isinstance(operand.op, language.LOGICAL):
                end = len(self.text.encode()[: operand.end_col_offset].decode())
                before, after = self.text[: self.column(operand) - 1], self.text[end:]
                if not (before.rstrip().endswith("(") and after.lstrip().startswith(")")):
                    problem = "'&', '|' and '^' bind more tightly than a comparison"
                    raise self.error(operand, f"{problem}; use 'and' or 'or', or add parentheses")
        for comparison, operand in zip(tree.ops, tree.comparators, strict=True):
            if type(comparison) not in COMPARISONS:
                raise self.error(operand, "'is' is not accepted, nor 'in' in a chain; use == or split with 'and'")
            sign = COMPARISONS[type(comparison)][0]
            node = self.node(operand)
            self._check_comparable(nodes[0], operand, node)
            if node.kind == "string" and sign not in ("==", "!="):
                raise self.error(operand, f"strings have no order for {sign!r}; they take ==, != and in")
            nodes.append(node)
            signs.append(sign)
        return Node("compare", "boolean", _alike(nodes), tuple(signs))

    def _check_comparable(self, first: Node, tree: ast.expr, node: Node) -> None:
        if (node.kind == "string") != (first.kind == "string"):
            problem = f"{NOUNS[first.kind]} is compared with {NOUNS[node.kind]}; they are never equal"
            raise self.error(tree, problem)

    def _call(self, tree: ast.Call) -> Node:
        name = self.called(tree, FUNCTIONS)
        known = FUNCTIONS[name]
        if tree.keywords or any(isinstance(argument, ast.Starred) for argument in tree.args):
            raise self.error(tree, f"{name} takes plain arguments only, as in {known.usage}")
        counts = known.arguments
        if len(tree.args) not in counts:
            accepted = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
            plural = "argument" if accepted == "1" else "arguments"
            raise self.error(tree, f"{name} takes {accepted} {plural}, got {len(tree.args)}")
        operands = [self._number(argument) for argument in tree.args]
        column = self.column(tree)
        if len(operands) <= 2:
            return self._operation(name, known, tuple(tree.args), tuple(operands), column)
        result, *others = operands
        for other, part in zip(others, tree.args[1:], strict=True):
            result = self._operation(name, known, (tree.args[0], part), (result, other), column)
        return result


def _as_real(node: Node) -> Node:
    if node.operation == "constant":
        return Node("constant", "real", value=float(node.value))
    return node if node.kind == "real" else Node("real", "real", (node,))


def _alike(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return operands that are compared: all as real numbers if one is."""
    nodes = tuple(nodes)
    return tuple(map(_as_real, nodes)) if any(node.kind == "real" for node in nodes) else nodes


@dataclass(frozen=True)
class Expression:
    """A parsed scalar expression."""

    text: str
    names: frozenset[str]
    """All names in it; device properties as ``"device.sm_count"``."""
    kind: Kind
    location: Location = field(repr=False, compare=False)
    node: Node = field(repr=False)

    def evaluate(self, env: Environment) -> Any:
        """Evaluate over the value of each of ``names``: Python scalars, or columns that broadcast against each other.

        The result is a Python scalar if all values are, otherwise a read-only array (int64, float64, bool or string) of
        the broadcast shape. Raise `SpecError` on a division by zero, an exponent outside 0 to 63, a result that exceeds
        64 bits, or a real one that is not finite, in a row that is evaluated, with the values of the names in that row.
        """
        try:
            value = evaluate(self.node, env, True)
        except ExpressionError as error:
            # The message has the values in the first of the rows: " where BM = 64, TM = 0".
            columns = {name: env[name] for name in sorted(self.names)}
            shape = np.broadcast_shapes(np.shape(error.rows), *(np.shape(column) for column in columns.values()))
            row = np.unravel_index(int(np.argmax(np.broadcast_to(error.rows, shape))), shape)
            values = [f"{name} = {np.broadcast_to(column, shape)[row].item()}" for name, column in columns.items()]
            problem = error.problem + (f" where {', '.join(values)}" if values else "")
            raise self.location.error(problem, column=error.column, expression=self.text) from None
        shapes = [column.shape for name in self.names if isinstance(column := env[name], np.ndarray)]
        return np.broadcast_to(value, np.broadcast_shapes(*shapes)) if shapes else value

    def value(self, env: Environment) -> Any:
        """Evaluate over Python scalars, as `evaluate` does but several times faster."""
        try:
            return self._compiled(env)
        except (ExpressionError, ArithmeticError):
            return self.evaluate(env)  # which raises with the place in the text

    _compiled = cached_property(lambda self: compiled(self.node))

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def as_whole(self) -> Expression:
        """Return a condition as 0 or 1, a real number rounded to the nearest whole one, and a whole one as it is."""
        node = Node("number", "number", (self.node,))
        if self.kind == "real":
            node = Node("round", "number", (self.node,), language.nearest_whole, 1)
        return self if self.kind == "number" else replace(self, kind="number", node=node)


def parse_expression(text: str, kinds: Kinds, location: Location = UNKNOWN_LOCATION) -> Expression:
    """Parse and check a scalar expression over the names in ``kinds``, which include ``device.*``."""
    line_of_text = one_line(text)
    parser = ExpressionParser(line_of_text, kinds)
    with location.reporting(line_of_text):
        node = parser.node(parser.parse())
    return Expression(line_of_text, frozenset(parser.names), node.kind, location, node)


class ShapeOnly:
    """Stand-in for an array of which only the shape is known; expressions of it are evaluated to shapes."""

    __slots__ = ("largest", "shape")

    def __init__(self, shape: Shape, *operands: Any) -> None:
        self.shape = shape
        largest = [operand.largest for operand in operands if isinstance(operand, ShapeOnly)]
        self.largest: int = max(math.prod(shape), *largest, 0)
        """Number of elements of the largest array among it and all that it is computed from."""


Matmul = Callable[[Any, Any], Any]


class Context(NamedTuple):
    """Arrays, sizes and functions that a closure is evaluated with."""

    env: Environment
    library: ModuleType
    """NumPy or CuPy."""
    matmul: Matmul
    only_shapes: bool
    """Whether arrays are `ShapeOnly`."""


Closure = Callable[[Context], Any]


def _is_on_device(value: Any) -> bool:
    return hasattr(value, "__cuda_array_interface__")


def is_array(value: Any) -> bool:
    """Return True if a value is an array, or stands for one."""
    return isinstance(value, np.ndarray | ShapeOnly) or _is_on_device(value)


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python; anything else as it is."""
    return value.item() if isinstance(value, np.generic) or (is_array(value) and not value.shape) else value


def _operand(value: Any) -> Any:
    """Return an array with 64 bits an element: real numbers as float64, whole numbers exactly; a number as it is."""
    if isinstance(value, ShapeOnly):
        return value
    if not is_array(value):
        return _plain(value)
    kind = value.dtype.kind
    wide = {"f": np.float64, "c": np.complex128, "i": np.int64, "b": np.bool_}.get(kind)
    if kind == "u":
        wide = np.uint64 if value.dtype.itemsize == 8 else np.int64
    return value.astype(wide, copy=False)


def _shape_of(value: Any) -> Shape:
    return tuple(value.shape) if is_array(value) else ()


def _result_of(context: Context, function: ArrayFunction, kinds: Sequence[str], values: Sequence[Any]) -> Any:
    """Check the shape of a result, then compute it unless only shapes are known."""
    known: list[Any] = []
    operands: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind == "arrays":
            known.append(tuple(map(_shape_of, value)))
            operands += value
        elif kind == "option" or value is None:
            known.append(value)
        else:
            known.append(_shape_of(value))
            operands.append(value)
    shape = function.shape(*known)
    language.check_size(shape)
    if context.only_shapes and (shape or any(isinstance(operand, ShapeOnly) for operand in operands)):
        for operand in operands:
            if not is_array(operand) and not function.takes_infinity and not np.isfinite(operand):
                raise ValueError(f"an operand is {operand}, so the result is not finite")
        if function.divides and not is_array(operands[1]) and operands[1] == 0:
            raise ValueError("the divisor is zero")
        return ShapeOnly(shape, *operands)
    library = context.library if shape or any(map(is_array, operands)) else np
    if library is np and math.prod(shape) > language.MAX_HOST_ELEMENTS:
        raise ValueError(f"the result would have the shape {shape}, more than half of this machine's memory")
    result = function.compute(library, *values)
    if _shape_of(result) != shape:
        raise ValueError(f"the result has the shape {_shape_of(result)}, and not {shape} as expected")
    return result


_CONSTANTS = {"pi": math.pi, "inf": math.inf}

_MAX_ITEMS = 64
"""Maximum number of arrays in a list, and of indices."""

_ARRAY_LANGUAGE = (
    "use names, numbers, + - * / // % ** @, & | ^ ~ << >>, comparisons, x[i, a:b], x.T, x if c else y and functions"
)
_LISTS = (ast.Tuple, ast.List)
_EXAMPLES = {"text": "'edge'", "boolean": "True"}


class ArrayParser(ExpressionText):
    """Converts syntax trees to closures; raises `ExpressionError` for what is not in the language."""

    def __init__(self, text: str, known: tuple[str, ...], kinds: Kinds, *, are_numbers: bool = False) -> None:
        super().__init__(text)
        self.known = known
        """Names of arrays and scalars."""
        self.are_numbers = are_numbers
        """Whether all of them are scalars, of which ``max`` and ``min`` take several, and no axis."""
        self.kinds = kinds
        """Kind of each name that scalar expressions may use."""
        self.used: set[str] = set()
        """Names used so far, without those that the text assigns."""
        self._locals: set[str] = set()

    def program(self) -> Closure:
        """Convert the text: assignments, and the expression of the result."""
        assigned, last = self.parse_statements()
        steps: list[tuple[str, Closure]] = []
        for name, tree in assigned:
            if name in self.known or name in self._locals or name in ARRAY_FUNCTIONS:
                raise self.error(tree, f"{name!r} already has a meaning; assign to another name")
            steps.append((name, self.closure(tree)))
            self._locals.add(name)
        result = self.closure(last)
        if not steps:
            return result

        def run(context: Context) -> Any:
            env = dict(context.env)
            context = context._replace(env=env)
            for name, step in steps:
                env[name] = step(context)
            return result(context)

        return run

    def closure(self, tree: ast.expr) -> Closure:
        """Convert an expression."""
        match tree:
            case ast.Constant(value=int() | float() | complex() as value) if not isinstance(value, bool):
                try:
                    number = language.bounded(value) if isinstance(value, int) else value
                except OverflowError:
                    raise self.error(tree, "the number does not fit in float64") from None
                return lambda context: number
            case ast.Constant():
                raise self.error(tree, f"{self.excerpt(tree)!r} is not a number; {_ARRAY_LANGUAGE}")
            case ast.Name(id=name) if name in self._locals:
                return lambda context: context.env[name]
            case ast.Name(id=name) if name in self.known:
                self.used.add(name)
                return lambda context: _operand(context.env[name])
            case ast.Name(id=name) if name in _CONSTANTS:
                return lambda context: _CONSTANTS[name]
            case ast.Name(id=name):
                hint = "; it is a function" if name in ARRAY_FUNCTIONS else nearest(name, self.known)
                raise self.error(tree, f"unknown name {name!r}{hint} (known: {listing(self.known)})")
            case ast.UnaryOp(op=ast.USub()):
                return self._applied(tree, language.NEGATIVE, [self.closure(tree.operand)])
            case ast.UnaryOp(op=ast.Invert()):
                return self._applied(tree, language.INVERT, [self.closure(tree.operand)])
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.closure(operand)
            case ast.UnaryOp():
                self.closure(tree.operand)  # whose errors come first
                raise self.error(tree, "'not' takes a single condition; use ~ for arrays")
            case ast.BinOp():
                return self._binary(tree)
            case ast.Compare():
                return self._comparison(tree)
            case ast.IfExp():  # whose condition is a scalar expression
                parser = ExpressionParser(self.text, self.kinds)
                condition = self._scalar(tree.test, parser, parser.condition(tree.test))
                chosen, otherwise = self.closure(tree.body), self.closure(tree.orelse)
                return lambda context: (chosen if condition(context) else otherwise)(context)
            case ast.Call():
                return self._call(tree)
            case ast.Subscript():
                return self._subscript(tree)
            case ast.Attribute(attr="T"):
                return self._applied(tree, language.REVERSED_AXES, [self.closure(tree.value)])
            case ast.BoolOp():
                raise self.error(tree, "'and' and 'or' take single conditions; combine arrays with & and |")
            case _:
                raise self.error(tree, f"{self.excerpt(tree)!r} is not accepted; {_ARRAY_LANGUAGE}")

    def _binary(self, tree: ast.BinOp) -> Closure:
        operands = [self.closure(tree.left), self.closure(tree.right)]
        if isinstance(tree.op, ast.MatMult):
            numeric, dot = language.numeric, ARRAY_FUNCTIONS["dot"]
            return lambda context: self._applied(
                tree, dot._replace(compute=lambda xp, a, b: context.matmul(numeric(a), numeric(b))), operands
            )(context)
        function = language.ARRAY_OPERATORS.get(type(tree.op))
        if function is None:
            raise self.error(tree, f"this operator is not accepted; {_ARRAY_LANGUAGE}")
        return self._applied(tree, function, operands)

    def _comparison(self, tree: ast.Compare) -> Closure:
        operands = [self.closure(operand) for operand in (tree.left, *tree.comparators)]
        links: list[Closure] = []
        for comparison, *pair in zip(tree.ops, operands, operands[1:], strict=False):
            if type(comparison) not in COMPARISONS:
                raise self.error(tree, f"'in' and 'is' are not accepted; {_ARRAY_LANGUAGE}")
            links.append(self._applied(tree, language.ARRAY_COMPARISONS[type(comparison)], pair))
        return reduce(lambda result, link: self._applied(tree, language.BOTH, [result, link]), links)

    def _scalar(self, tree: ast.expr, parser: ExpressionParser, node: Node) -> Closure:
        self.used |= parser.names
        whole = {name for name in parser.names if self.kinds[name] == "number"}  # a size may be given as a real number

        def value(context: Context) -> Any:
            names = {name: _plain(context.env[name]) for name in parser.names}
            try:
                return evaluate(node, {name: int(x) if name in whole else x for name, x in names.items()}, True)
            except ExpressionError as error:
                raise self.error(tree, error.problem) from None

        return value

    def _whole(self, tree: ast.expr) -> Closure:
        """Convert a whole number: a scalar expression."""
        parser = ExpressionParser(self.text, self.kinds)
        try:
            node = parser.node(tree)
        except ExpressionError as error:
            excerpt = self.excerpt(tree)
            problem = f"{excerpt!r} is not a whole number, or an expression of sizes: {error.problem}"
            raise ExpressionError(problem, error.column) from None
        if node.kind != "number":
            raise self.error(tree, f"{self.excerpt(tree)!r} is not a whole number")
        return self._scalar(tree, parser, node)

    def _wholes(self, tree: ast.expr) -> Closure:
        """Convert a whole number, None, or a tuple of whole numbers or of such tuples."""
        if isinstance(tree, ast.Constant) and tree.value is None:
            return lambda context: None
        return self._tuple(tree.elts, self._wholes) if isinstance(tree, _LISTS) else self._whole(tree)

    def _applied(self, tree: ast.expr, function: ArrayFunction, operands: Sequence[Closure]) -> Closure:
        """Return the result of a function of operands, with errors at a node."""
        kinds = function.kinds

        def result(context: Context) -> Any:
            values = [operand(context) for operand in operands]
            try:
                return _result_of(context, function, kinds, values)
            except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError, AttributeError) as error:
                if isinstance(error, MemoryError) and context.library is not np:
                    raise  # of the device's memory; the host's may suffice
                numbers = int | float | complex | np.generic
                shown = [x for x in values if is_array(x) or (isinstance(x, numbers) and not isinstance(x, bool))]
                found = " and ".join(str(_shape_of(value)) for value in shown)
                if function.shape in (language.elementwise, language.product):
                    raise self.error(tree, f"operands of shape {found} are not compatible: {error}") from None
                raise self.error(tree, f"{error}{f' (of shape {found})' if found else ''}") from None

        return result

    def _subscript(self, tree: ast.Subscript) -> Closure:
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        if len(parts) > _MAX_ITEMS:
            raise self.error(tree, f"at most {_MAX_ITEMS} indices are accepted")
        indices = [self._index(part) for part in parts]
        array = self.closure(tree.value)

        def result(context: Context) -> Any:
            index = [part(context) for part in indices]
            shapes = [_shape_of(part) if is_array(part) else part for part in index]
            element = ArrayFunction(
                "x", lambda shape: language.indexed(shape, shapes), lambda xp, x: language.elements_at(xp, x, index)
            )
            return self._applied(tree, element, [array])(context)

        return result

    def _index(self, tree: ast.expr) -> Closure:
        match tree:
            case ast.Constant(value=value) if value is None or value is ...:
                return lambda context: value
            case ast.Slice(lower=lower, upper=upper, step=step):
                bounds = [self._whole(bound) if bound is not None else None for bound in (lower, upper, step)]

                def sliced(context: Context) -> slice:
                    found = [bound(context) if bound else None for bound in bounds]
                    if found[2] == 0:
                        raise self.error(tree, "the step of a slice is 0")
                    return slice(*found)

                return sliced
            case _:
                is_scalar = all(not isinstance(n, ast.Name) or n.id in self.kinds for n in ast.walk(tree))
                return self._whole(tree) if is_scalar else self.closure(tree)

    def _call(self, tree: ast.Call) -> Closure:
        name = self.called(tree, ARRAY_FUNCTIONS)
        if self.are_numbers and name in ("max", "min") and len(tree.args) != 1:
            if not tree.args or tree.keywords:
                raise self.error(tree, f"{name} is called as {name}(a, b, ...)")
            of_two = ARRAY_FUNCTIONS[f"{name}imum"]
            return reduce(lambda a, b: self._applied(tree, of_two, [a, b]), map(self.closure, tree.args))
        arguments = self._arguments(tree, name, ARRAY_FUNCTIONS[name])
        return self._applied(tree, ARRAY_FUNCTIONS[name], [self._argument(name, *argument) for argument in arguments])

    def _arguments(self, tree: ast.Call, name: str, function: ArrayFunction) -> list[tuple[str, Any]]:
        """Return each operand of the signature with its syntax tree, or with the literal of its default."""
        refusal = self.error(tree, f"{name} is called as {function.usage(name)}")
        if any(isinstance(argument, ast.Starred) for argument in tree.args) or len(tree.args) > _MAX_ITEMS:
            raise refusal
        given: dict[str, Any] = {}
        positional = list(tree.args)
        signature = function.operands
        for option, _, _ in signature:
            if option.startswith("*"):
                rest = positional[0].elts if len(positional) == 1 and isinstance(positional[0], _LISTS) else positional
                if not rest:
                    raise refusal
                given[option] = list(rest)
                positional = []
            elif positional:
                given[option] = positional.pop(0)
        for word in tree.keywords:
            if word.arg not in [option for option, _, _ in signature] or word.arg in given:
                raise refusal
            given[word.arg] = word.value
        if positional or any(option not in given and not has_default for option, has_default, _ in signature):
            raise refusal
        return [
            (option, given[option] if option in given else ast.parse(default, mode="eval").body)
            for option, _, default in signature
        ]

    def _argument(self, name: str, option: str, tree: Any) -> Closure:
        if option.startswith("*"):
            return self._tuple(tree, self.closure if option == "*arrays" else self._whole)
        kind = language.OPTION_TYPES.get(option, "")
        if kind in _EXAMPLES:
            literal = tree.value if isinstance(tree, ast.Constant) else None
            if not isinstance(literal, str if kind == "text" else bool):
                raise self.error(tree, f"{option} of {name} is a {kind}, as in {option}={_EXAMPLES[kind]}")
            return lambda context: literal
        if isinstance(tree, ast.Constant) and tree.value is None:
            return lambda context: None
        if kind == "arrays":
            if not isinstance(tree, _LISTS) or not 1 <= len(tree.elts) <= _MAX_ITEMS:
                raise self.error(tree, f"{name} takes 1 to {_MAX_ITEMS} arrays in a list, as in {name}((a, b))")
            return self._tuple(tree.elts, self.closure)
        return {"whole numbers": self._wholes, "whole number": self._whole}.get(kind, self.closure)(tree)

    def _tuple(self, trees: Sequence[ast.expr], convert: Callable[[ast.expr], Closure]) -> Closure:
        items = [convert(tree) for tree in trees]
        return lambda context: tuple(item(context) for item in items)


@dataclass(frozen=True, slots=True)
class ArrayExpression:
    """A parsed array expression."""

    text: str
    names: frozenset[str]
    location: Location = field(repr=False, compare=False)
    closure: Closure = field(repr=False, compare=False)

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def shape(self, env: Environment) -> Shape:
        """Return the shape of the value, where ``env`` has `ShapeOnly` in place of arrays."""
        found: Shape = self.evaluate(env).shape
        return found

    def evaluate(self, env: Environment, matmul: Matmul | None = None) -> Any:
        """Evaluate the expression over an array or number, of any dtype, for each of ``names``.

        Arrays of CuPy are evaluated by CuPy, on their device, with ``matmul`` for ``@`` of matrices or stacks of them.
        The result is an array of the same library: float64, complex128, int64, uint64 or bool, whole numbers exact;
        or a `ShapeOnly` if one is in ``env``. Divisions by zero, overflows and logarithms of negative numbers give
        infinities and NaNs, as on the device. Raise `SpecError` if shapes are not compatible, an index is out of
        bounds, or an array would be too large.
        """
        values = list(env.values())
        library: ModuleType = sys.modules["cupy"] if any(map(_is_on_device, values)) else np
        only_shapes = any(isinstance(value, ShapeOnly) for value in values)
        context = Context(env, library, matmul or library.matmul, only_shapes)
        with self.location.reporting(self.text), np.errstate(all="ignore"):
            result = self.closure(context)
        return result if is_array(result) else np.asarray(result)


def parse_array_expression(
    text: str,
    names: Iterable[str],
    kinds: Kinds | None = None,
    location: Location = UNKNOWN_LOCATION,
    *,
    are_numbers: bool = False,
) -> ArrayExpression:
    """Parse and check an array expression, which may begin with assignments: ``t = x @ w; maximum(t, 0)``.

    ``names`` are the arrays and scalars that it may use, ``kinds`` the names that its scalar expressions may use: the
    condition of ``x if c else y``, bounds and shapes. If they ``are_numbers``, ``max(a, b)`` is the greater one.
    """
    line_of_text = one_line(text)
    parser = ArrayParser(line_of_text, tuple(names), kinds or {}, are_numbers=are_numbers)
    with location.reporting(line_of_text):
        closure = parser.program()
    return ArrayExpression(line_of_text, frozenset(parser.used), location, closure)
