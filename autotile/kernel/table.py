"""Checked access to the tables of a search-space file, and checks of the names that it defines."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec

from autotile.core.documents import MAX_KEY_PARTS, parse_toml
from autotile.core.model import DTYPE_BYTES, Sizes, dtype_names
from autotile.errors import SpecError, listing, nearest, type_text
from autotile.kernel.expressions import (
    NOUNS,
    RESERVED,
    Expression,
    Location,
    is_c_identifier,
    is_keyword,
    is_python_source,
    one_line,
    parse_expression,
)
from autotile.kernel.functions import Kind, Kinds

MAX_BYTES = 2**20  # of a file
MAX_ENTRIES = 1000  # of a table or list
MAX_KEY_CHARACTERS = 100
_MAX_SHOWN_VALUE = 60  # characters of a value that a message repeats
MAX_WHOLE_NUMBER = 2**31 - 1  # by convention, sizes are passed to kernels as int32

_KEY = r"\s*([A-Za-z0-9_.\-\"']+)\s*="
_Path: TypeAlias = "tuple[_Path, str] | None"
"""Path of a table from its innermost name outwards, which shares the names of the tables around it."""
_POSITION = r" \(at line (\d+), column \d+\)$"


class Table(msgspec.Struct, frozen=True):
    """A table of the file. Methods that read a key raise `SpecError` if it is missing or has the wrong type."""

    source: str
    lines: Mapping[str, int]
    key: str
    data: Mapping[str, Any]
    folder: str = ""
    """Folder of the files that arguments and references name; that of ``source`` if empty."""

    def error(self, name: str, problem: str) -> SpecError:
        """Return an error for a key of this table, or for the table itself if ``name`` is empty."""
        return self.location(name).error(problem)

    def location(self, name: str) -> Location:
        """Return the location of an entry; its line is that of the innermost enclosing table with a known line."""
        key = self.path(name)
        path = key.split(".")
        known = (".".join(path[:length]) for length in range(len(path), 0, -1))
        line = next((self.lines[prefix] for prefix in known if prefix in self.lines), None)
        return Location(self.source, key, line)

    def path(self, name: str) -> str:
        """Return the dotted key of an entry."""
        return ".".join(part for part in (self.key, name) if part)

    def allow(self, names: Iterable[str], *, deprecated: tuple[str, ...] = ()) -> None:
        """Raise if there are entries other than these; messages do not suggest the deprecated ones."""
        known = tuple(names)
        for name in self.data:
            if name not in known and name not in deprecated:
                what = "key" if self.key else "section"
                raise self.error(name, f"unknown {what} {name!r}{nearest(name, known)} (known: {listing(known)})")

    def require(self, name: str, default: Any = None) -> Any:
        """Return the value of an entry, which is required where there is no default."""
        value = self.data.get(name, default)
        if value is None:  # which TOML has not
            what = f"the key {name!r}" if self.key else f"the section [{name}]"
            raise self.error("", f"{what} is missing; add it")
        return value

    def table(self, name: str, *, optional: bool = False) -> Table:
        """Return a nested table; an optional table that is missing is empty."""
        data = self.require(name, {} if optional else None)
        if not isinstance(data, dict):
            raise self.error(name, f"expected a table, got {describe(data)}")
        self.check_length(name, data)
        return Table(self.source, self.lines, self.path(name), data, self.folder)

    def text(self, name: str, default: str | None = None, *, multiline: bool = False) -> str:
        """Return a string of one line; several lines are joined to one if ``multiline``, as in an expression."""
        value = self.require(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, got {describe(value)}")
        value = one_line(value) if multiline else value
        if not value.isprintable():
            raise self.error(name, "expected one line of printable characters")
        return value

    def matching(self, name: str, pattern: str, expected: str) -> str:
        """Return a string that a pattern describes, as ``expected`` says in words."""
        text = self.text(name)
        if not re.fullmatch(pattern, text):
            raise self.error(name, f"expected {expected}; got {describe(text)}")
        return text

    def entries(self, name: str, *, optional: bool = False) -> list[Any]:
        """Return a non-empty list; an optional list that is missing is empty."""
        if optional and name not in self.data:
            return []
        value = self.require(name)
        if not isinstance(value, list):
            shown = f'"{value}"' if isinstance(value, str) else value
            is_scalar = isinstance(value, str | int | float) and len(str(value)) <= _MAX_SHOWN_VALUE
            hint = f"; write {name} = [{str(shown).lower() if isinstance(value, bool) else shown}]" if is_scalar else ""
            raise self.error(name, f"expected a list, got {describe(value)}{hint}")
        if not value:
            raise self.error(name, "the list is empty; give at least one value")
        self.check_length(name, value)
        return value

    def texts(self, name: str, *, optional: bool = False) -> tuple[str, ...]:
        """Return a list of distinct strings."""
        values = self.entries(name, optional=optional)
        for position, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(name, f"expected strings, got {describe(value)}")
            if value in values[:position]:
                raise self.error(name, f"{value!r} is listed twice; remove one")
        return tuple(values)

    def choice(self, name: str, known: Sequence[str], default: str | None = None) -> Any:
        """Return one of several strings."""
        text = self.text(name, default)
        self.check_known(name, text, known)
        return text

    def check_identifier(self, name: str) -> None:
        """Raise if an entry's name is not a C identifier."""
        if not is_c_identifier(name):
            raise self.error(name, f"{name!r} is not a C identifier; use letters, digits and '_', no digit first")

    def check_known(self, name: str, value: Any, known: Collection[str], what: str = "is not accepted") -> None:
        """Raise if a value of an entry is not among the known ones."""
        if value not in known:
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise self.error(name, f"{describe(value)} {what}{hint} (known: {listing(known)})")

    def whole_number(self, name: str, *, minimum: int, maximum: int = MAX_WHOLE_NUMBER) -> int:
        """Return a whole number from ``minimum`` to ``maximum``."""
        value = self.require(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"expected a whole number, got {describe(value)}")
        if not minimum <= value <= maximum:
            raise self.error(name, f"expected a whole number from {minimum} to {maximum}, got {describe(value)}")
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, got {describe(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.require(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"expected a number, got {describe(value)}")
        if not abs(value) <= 1.7e308:
            raise self.error(name, f"expected a finite number, got {describe(value)}")
        return float(value)

    def expression(self, name: str, kinds: Kinds, expected: Kind) -> Expression:
        """Return an expression of one kind; a whole number is a constant expression."""
        return self.parse(name, self.require(name), kinds, expected)

    def optional_expression(self, name: str, kinds: Kinds, expected: Kind = "number") -> Expression | None:
        """Return an expression of one kind, or None if there is no such entry."""
        return self.expression(name, kinds, expected) if name in self.data else None

    def expressions(self, name: str, kinds: Kinds, *, max_length: int = 3) -> tuple[Expression, ...]:
        """Return a list of 1 to ``max_length`` expressions for numbers, by default one for each axis of a launch."""
        values = self.entries(name)
        if len(values) > max_length:
            raise self.error(name, f"at most {max_length} expressions are accepted, got {len(values)}")
        return tuple(self.parse(name, value, kinds, "number") for value in values)

    def any_expression(self, name: str, value: Any, kinds: Kinds) -> Expression:
        """Parse a value of the entry ``name``, text or a number, as an expression of any kind."""
        value = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if not isinstance(value, str):
            raise self.error(name, f"expected an expression in a string, got {describe(value)}")
        return parse_expression(value, kinds, self.location(name))

    def parse(self, name: str, value: Any, kinds: Kinds, expected: Kind) -> Expression:
        """Parse a value of the entry ``name`` as an expression of one kind.

        A flag alone also serves as a number, and a whole number as a real one.
        """
        if isinstance(value, float) and expected != "real":
            raise self.error(name, f"expected an expression in a string, got {describe(value)}")
        expression = self.any_expression(name, value, kinds)
        if expected in ("number", "real") and expression.kind == "boolean" and expression.text in kinds:
            return expression.as_whole()
        if expected == "real" and expression.kind == "number":
            return expression
        if expression.kind != expected:
            to_whole = _OF_ARGUMENT if name == "value" else _TO_WHOLE
            hint = to_whole if (expected, expression.kind) == ("number", "real") else ""
            problem = f"expected {NOUNS[expected]}, but this is {NOUNS[expression.kind]}{hint}"
            raise expression.location.error(problem, expression=expression.text)
        return expression

    def check_length(self, name: str, entries: list[Any] | dict[str, Any]) -> None:
        """Raise if a list or table has too many entries."""
        if len(entries) > MAX_ENTRIES:
            raise self.error(name, f"{len(entries)} entries, at most {MAX_ENTRIES} are accepted; shorten it")


_OF_ARGUMENT = "; give a real constant without quotes, as in value = 0.5, or compute the value in the kernel"
_TO_WHOLE = "; divide with // (rounds down) or ceil_div (rounds up), or round with floor(), ceil() or round()"


def read_document(text: str, source: str, folder: str = "") -> Table:
    """Parse TOML; the folder is that of `Table`."""
    size_bytes = len(text.encode(errors="replace"))
    if size_bytes > MAX_BYTES:
        raise SpecError(f"the file has {size_bytes} bytes, at most {MAX_BYTES} are accepted; shorten it", source=source)
    try:
        data = parse_toml(text)
    except ValueError as error:
        position = re.search(_POSITION, str(error))
        line = int(position[1]) if position else None
        raise SpecError(f"not TOML: {re.sub(_POSITION, '', str(error))}", source=source, line=line) from None
    document = Table(source, {} if is_python_source(source) else _key_lines(text), "", data, folder)
    # every key has to fit in a message; everything else is checked where it is read
    tables: list[tuple[_Path, Any]] = [(None, data)]
    for path, table in tables:
        for name, value in table.items():
            if len(name) > MAX_KEY_CHARACTERS or not name.isprintable():
                problem = f"{name[:60]!r} is not a valid key: use at most {MAX_KEY_CHARACTERS} printable characters"
                names: list[str] = []
                while path is not None:
                    path, outer = path  # noqa: PLW2901 - the walk ends here
                    names.append(outer)
                raise document.error(".".join(reversed(names)), problem)
            if isinstance(value, dict):
                tables.append(((path, name), value))
            elif isinstance(value, list):
                tables += [((path, f"{name}[{i}]"), entry) for i, entry in enumerate(value) if isinstance(entry, dict)]
    return document


def describe(value: Any) -> str:
    """Return a value with its TOML type, shortened for a message."""
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}" if not 10**30 <= abs(value) < math.inf else "a number of more than 30 digits"
    if isinstance(value, str):
        return f"the string {value[:60]!r}"
    return "a table" if isinstance(value, dict) else type_text(type(value))


def _key_lines(text: str) -> dict[str, int]:
    """Return the first line of each dotted key, found by pattern; the text is known to be TOML."""
    unquoted = str.maketrans("", "", "\"' ")
    lines: dict[str, int] = {}
    section = ""
    tables: dict[str, int] = {}
    """Number of tables of each array of tables so far."""
    # What is longer stands in a text of several lines; each of its lines would be stored with the section before it.
    longest = MAX_KEY_PARTS * (MAX_KEY_CHARACTERS + 1)
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            section = line.strip().lstrip("[").partition("]")[0].translate(unquoted)[:longest]
            lines.setdefault(section, number)
            if line.lstrip().startswith("[["):
                tables[section] = tables.get(section, -1) + 1
                section = f"{section}[{tables[section]}]"
                lines.setdefault(section, number)
        elif entry := re.match(_KEY, line):
            key = entry[1].translate(unquoted)
            lines.setdefault(f"{section}.{key}" if section else key, number)
    return lines


def check_names(table: Table, *, what: str, taken: dict[str, str]) -> None:
    """Check the names that the keys of a table define, and add them to ``taken`` with a noun such as "a parameter"."""
    note = "; it need not be the name in the source" if what == "an argument" else ""
    for name in table.data:
        table.check_identifier(name)
        if name.startswith("__"):
            raise table.error(name, f"{name!r} is reserved for the compiler; use a name without leading '__'")
        if is_keyword(name) and name not in RESERVED:
            hint = f"use another name, such as {name}_"
            raise table.error(name, f"{name!r} is a keyword of Python or C++; {hint}{note}")
        other = RESERVED.get(name) or taken.get(name)
        if other:
            raise table.error(name, f"{name!r} already names {other}; use another name")
        taken[name] = what


class ProblemSection(msgspec.Struct, frozen=True):
    """The parsed section ``[problem]``: names for expressions, and two problems at which each expression is tested."""

    sizes: Sizes
    ragged: Sizes
    """Default and ragged sizes, with the flags at their defaults, and `DTYPE_BYTES` of the first element type."""
    flags: tuple[str, ...]
    dtypes: tuple[str, ...]
    parameters: Kinds = {}
    """Kinds of the parameters that shapes and references may use; ``sizes`` and ``ragged`` hold a value of each."""

    @property
    def own_names(self) -> frozenset[str]:
        """Sizes, flags and `DTYPE_BYTES`."""
        return frozenset(self.sizes.keys() - self.parameters.keys())

    @property
    def kinds(self) -> dict[str, Kind]:
        """Kind of each name; a flag is a boolean."""
        return {name: "boolean" if name in self.flags else self.parameters.get(name, "number") for name in self.sizes}

    @property
    def flag_kinds(self) -> dict[str, Kind]:
        """Kind of each flag."""
        return dict.fromkeys(self.flags, "boolean")

    def cases(self, used: Collection[str]) -> Iterator[tuple[dict[str, int], bool]]:
        """Yield the values of all names in the two problems, with whether it is the ragged one.

        Both are yielded in each element type if its size is among the names that are used.
        """
        for sizes, is_ragged in ((self.sizes, False), (self.ragged, True)):
            for dtype in self.dtypes if DTYPE_BYTES in used else self.dtypes[:1]:
                yield {**sizes, **dtype_names(dtype)}, is_ragged

    def check_positive(self, table: Table, name: str, expressions: Iterable[Expression]) -> None:
        """Raise if an expression of an entry is below 1 for one of the two problems, in any element type."""
        for expression in expressions:
            for names, _ in self.cases(expression.names):
                value = expression.evaluate(names)
                if value < 1:
                    at = ", ".join(f"{name} = {names[name]}" for name in sorted(expression.names))
                    where = f" where {at}" if at else ""
                    raise table.error(name, f"{expression.text} is {value}, expected at least 1{where}")


@contextmanager
def stating(values: Sizes, used: Collection[str], *, is_ragged: bool) -> Iterator[None]:
    """Add the sizes at which something is tested to a `SpecError` of the block."""
    try:
        yield
    except SpecError as error:
        at = " ".join(f"{name}={value}" for name, value in values.items() if name != DTYPE_BYTES or name in used)
        fault, separator, remedy = error.problem.partition(";")
        at = f"the ragged sizes {at}" if is_ragged else at
        if is_ragged and not remedy:
            separator, remedy = ";", " give ragged sizes for which it holds"
        raise SpecError(**{**vars(error), "problem": f"{fault}, at {at}{separator}{remedy}"}) from None
