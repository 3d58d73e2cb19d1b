"""Parsing shared by both expression languages: text to syntax tree, with source locations for messages.

Python's own parser reads the text. The tree is only inspected, never compiled or executed.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from autotile.core.frozen import dataclass
from autotile.errors import SpecError

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
