"""Contents of buffers in tuning: the declarations ``init`` and ``file``, and reproducible random arrays.

An ``init`` is a name, or an expression of the language of `autotile.kernel.array_expressions` with generators of random
numbers.
"""

from __future__ import annotations

import ast
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import Array
from autotile.core.frozen import dataclass
from autotile.errors import InputError, nearest
from autotile.kernel.argument_kind import ArgumentScope
from autotile.kernel.array_expressions import ArrayExpression, ShapeOnly, parse_array_expression
from autotile.kernel.expressions import ExpressionError, ExpressionText, Kind, Location, canonical_text, one_line
from autotile.kernel.table import Table, describe
from autotile.settings import available_cores

if TYPE_CHECKING:
    from autotile.kernel.arguments import BufferArgument
    from autotile.kernel.input_files import InputFile


NAMED = ("normal", "uniform", "zeros", "ones", "arange")
"""Contents that are a name alone."""

GENERATORS: Mapping[str, str] = {
    "uniform": "uniform(low, high)",
    "normal": "normal(mean, deviation)",
    "integers": "integers(low, high)",
    "permutation": "permutation(n)",
    "arange": "arange(n)",
}
"""Functions of the language that make arrays, with their usage."""
_PAIRED = ("uniform", "normal", "integers")


class Generator(NamedTuple):
    """A call of one of `GENERATORS`: its function, its arguments, and the extents; those of the buffer if empty."""

    function: str
    arguments: tuple[ArrayExpression, ...]
    extents: tuple[ArrayExpression, ...]

    def shape(self, names: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of its array, in the buffer of a shape.

        Raises
        ------
        ValueError
            An extent is negative, or the function makes arrays of one axis only and the buffer has several.
        """
        if not self.extents:
            if self.function == "permutation" and len(shape) != 1:
                raise ValueError("permutation() without a length is for buffers of one axis")
            return shape
        extents = tuple(int(extent.evaluate(names)) for extent in self.extents)
        if min(extents) < 0:
            raise ValueError(f"{self.function} has a negative extent: {extents}")
        return extents

    def draw(self, names: Mapping[str, Any], shape: tuple[int, ...], key: str, seed: int) -> Array:
        """Return its array in float64; ``key`` and ``seed`` select the stream of random numbers."""
        shape = self.shape(names, shape)
        if self.function == "arange":
            return np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
        if self.function == "permutation":
            (sequence,) = seed_sequences(key, shape, seed, 1)
            return np.random.Generator(np.random.SFC64(sequence)).permutation(math.prod(shape)).astype(np.float64)
        first, second = (float(argument.evaluate(names)) for argument in self.arguments)
        match self.function:
            case "integers":
                if not first < second:
                    raise ValueError(f"integers({first:g}, {second:g}) is empty; the upper bound is not part of it")
                fill = partial(fill_integers, int(first), int(second) - 1, np.int64)
            case "uniform":
                fill = partial(fill_uniform, first, second)
            case _:
                fill = partial(fill_normal, first, second)
        return draw_chunks(key, shape, seed, fill, np.float64)


@dataclass(frozen=True, slots=True)
class InputExpression:
    """Content that an array expression gives, over sizes, scalars, other inputs and generators.

    Attributes
    ----------
    text
        Text with normalized spaces.
    expression
        The expression, with a name of its own for each generator.
    generators
        Generators by these names.
    """

    text: str
    expression: ArrayExpression
    generators: Mapping[str, Generator]

    @property
    def inputs(self) -> frozenset[str]:
        """All names in it, except those of generators."""
        return self.expression.names - self.generators.keys()

    @property
    def is_zero(self) -> bool:
        """Whether it is the number 0."""
        return self.text in ("0", "0.0")

    def shape(self, names: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of its value in a buffer of the given shape, from the shapes of the other inputs.

        Raises
        ------
        SpecError
            Shapes are not compatible.
        """
        try:
            arrays = {name: ShapeOnly(one.shape(names, shape)) for name, one in self.generators.items()}
            return np.shape(self.expression.evaluate({**names, **arrays}))
        except (ValueError, TypeError) as error:
            raise self.expression.location.error(str(error), expression=self.text) from None

    def values(self, names: Mapping[str, Any], shape: tuple[int, ...], key: str, seed: int) -> Array:
        """Return its value, of the buffer's shape.

        Raises
        ------
        InputError
            It has no value, or not the shape of the buffer.
        """
        try:
            drawn = {
                name: generator.draw(names, shape, f"{key}.{number}", seed)
                for number, (name, generator) in enumerate(self.generators.items())
            }
            value = np.asarray(self.expression.evaluate({**names, **drawn}))
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            raise InputError(f"the content of {key} ({self.text}): {error}") from None
        if value.shape not in ((), shape):
            raise InputError(f"the content of {key} has the shape {value.shape}, expected {shape}")
        return np.broadcast_to(value, shape)


Content: TypeAlias = "InputExpression | InputFile"


def declared_content(table: Table, name: str, scope: ArgumentScope) -> tuple[str, Content | None]:
    """Parse ``init``, or ``file`` with ``sha256`` and ``whole``; return the text, and the content unless it is a name.

    The text is empty if neither is given.
    """
    if "file" in table.data:
        if "init" in table.data:
            raise table.error("init", "the content is that of the file; remove init")
        sha256 = table.text("sha256", "")
        if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):
            raise table.error("sha256", "expected 64 hexadecimal digits, in lower case")
        path = table.text("file")
        if not path.endswith(".npy"):
            raise table.error("file", f"{describe(path)} is not accepted; expected a file that ends in .npy")
        from autotile.kernel.input_files import InputFile

        folder = Path(scope.folder) if scope.folder else Path(table.document.source).parent
        return "file", InputFile(str((folder / path).absolute()), sha256, table.boolean("whole", default=False))
    for key in ("sha256", "whole"):
        if key in table.data:
            raise table.error(key, f"{key} belongs to a file; remove it, or give file")
    if "init" not in table.data:
        return "", None
    given = table.data["init"]
    text = table.text("init", multiline=True) if isinstance(given, str) else repr(table.number("init"))
    if text in NAMED:
        return text, None
    if text.isidentifier() and text not in scope.operands and text not in scope.problem.sizes:
        hint = f"(known: {', '.join(NAMED)}, and expressions such as 'integers(0, 10)')"
        raise table.error("init", f"{describe(text)} is not accepted{nearest(text, NAMED)} {hint}")
    numbers = [*scope.problem.sizes, *(other for other, is_number in scope.operands.items() if is_number)]
    arrays = [other for other, is_number in scope.operands.items() if not is_number and other != name]
    content = parse_content(text, [*numbers, *arrays], numbers, scope.problem.kinds, table.location("init"))
    return content.text, content


def parse_content(
    text: str, names: Sequence[str], scalars: Sequence[str], kinds: Mapping[str, Kind], location: Location
) -> InputExpression:
    """Parse the content of a buffer.

    Parameters
    ----------
    text
        The expression.
    names
        Names that it may use.
    scalars
        Those of ``names`` that are numbers, which the arguments of generators may use.
    kinds
        As for `parse_array_expression`.
    location
        Location of the text, for messages.

    Raises
    ------
    SpecError
        The text is not in the language or uses an unknown name.
    """
    line = one_line(text)
    source = ExpressionText(line)
    generators: dict[str, Generator] = {}
    written = line
    try:
        calls = _outermost_generators(source.parse())
        for number, call in enumerate(calls):
            name = f"__{number}"
            generators[name] = _generator(source, call, scalars, kinds, location)
            start, end = call.col_offset, call.end_col_offset or 0
            written = written[:start] + name.ljust(end - start) + written[end:]  # columns stay as they are
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=line) from None
    expression = parse_array_expression(written, (*names, *generators), kinds, location)
    return InputExpression(canonical_text(line), expression, generators)


def _outermost_generators(tree: ast.expr) -> list[ast.Call]:
    """Return the calls of generators, in the order of the text."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_generator(node)]
    return sorted(calls, key=lambda call: call.col_offset)


def _is_generator(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in GENERATORS


def _generator(
    source: ExpressionText, call: ast.Call, scalars: Sequence[str], kinds: Mapping[str, Kind], location: Location
) -> Generator:
    assert isinstance(call.func, ast.Name)
    function = call.func.id
    plain = not call.keywords and not any(isinstance(argument, ast.Starred) for argument in call.args)
    if not source.text.isascii() or not plain or any(_contains_generator(argument) for argument in call.args):
        raise source.error(call, f"{function} is called as {GENERATORS[function]}, with numbers")

    def parsed(argument: ast.expr) -> ArrayExpression:
        return parse_array_expression(ast.unparse(argument), scalars, kinds, location)

    arguments = tuple(map(parsed, call.args))
    if function not in _PAIRED:
        if len(arguments) > 1:
            raise source.error(call, f"{function} is called as {GENERATORS[function]}")
        return Generator(function, (), arguments)
    if len(arguments) == 1 or (not arguments and function == "integers"):
        usage = GENERATORS[function]
        raise source.error(
            call, f"{function} is called as {usage}, or {usage[:-1]}, n, ...) for an array of n elements"
        )
    bounds = arguments[:2] or (parsed(ast.Constant(0)), parsed(ast.Constant(1)))
    return Generator(function, bounds, arguments[2:])


def _contains_generator(tree: ast.expr) -> bool:
    return bool(_outermost_generators(tree))


def check_contents(buffers: Iterable[BufferArgument], operands: Mapping[str, Any], location: Location) -> None:
    """Check the shape of every computed content, and that none depends on itself.

    Parameters
    ----------
    buffers
        The buffers of a kernel.
    operands
        Sizes, and the shape or value of each argument that an expression may use.
    location
        Location of the arguments, for messages.

    Raises
    ------
    SpecError
        A content has not the shape of its buffer, or depends on itself.
    """
    contents = {b.name: b.content for b in buffers if isinstance(b.content, InputExpression)}
    for name, content in contents.items():
        _check_independent(name, contents, location)
        for used in sorted(content.inputs - operands.keys()):
            problem = f"the value of {used} depends on the configuration; use sizes and other inputs"
            raise content.expression.location.error(problem, expression=content.text)
        shape = next(b for b in buffers if b.name == name).array_shape(operands)
        found = content.shape(operands, shape)
        if found not in ((), shape):
            problem = f"the content has the shape {found}, but the buffer {name} has {shape}"
            raise content.expression.location.error(problem, expression=content.text)


def _check_independent(name: str, contents: Mapping[str, InputExpression], location: Location) -> None:
    reached, pending = set[str](), [name]
    while pending:
        content = contents.get(pending.pop())
        for other in content.inputs if content is not None else ():
            if other == name:
                raise contents[name].expression.location.error(f"the content of {name} depends on itself")
            if other not in reached:
                reached.add(other)
                pending.append(other)


_SEED = 20_240_601
_CHUNK = 1 << 20
"""Number of values from one generator, which take a few milliseconds."""

Fill = Callable[["np.random.Generator", Array], object]


def fill_integers(low: int, high: int, dtype: Any, generator: np.random.Generator, chunk: Array) -> None:
    """Fill an array with whole numbers from ``low`` to ``high``, drawn as ``dtype``."""
    chunk[:] = generator.integers(low, high, chunk.shape, dtype, endpoint=True)


def fill_uniform(low: float, high: float, generator: np.random.Generator, chunk: Array) -> None:
    """Fill an array with uniformly distributed numbers from ``low`` to below ``high``."""
    generator.random(out=chunk)
    chunk *= high - low
    chunk += low


def fill_normal(mean: float, deviation: float, generator: np.random.Generator, chunk: Array) -> None:
    """Fill an array with normally distributed numbers."""
    generator.standard_normal(out=chunk)
    chunk *= deviation
    chunk += mean


def draw_chunks(name: str, shape: tuple[int, ...], seed: int, fill: Fill, dtype: Any = np.float32) -> NDArray[Any]:
    """Return random values of a generator that depends on seed, name and shape.

    Each chunk of a fixed size has its own generator, so the values do not depend on the number of cores that draw them.
    """
    from concurrent.futures import ThreadPoolExecutor  # which serving does not need

    values = np.empty(math.prod(shape), dtype)
    chunks = [values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK)]
    generators = [np.random.Generator(np.random.SFC64(seed)) for seed in seed_sequences(name, shape, seed, len(chunks))]
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(fill, generators, chunks))
    return values.reshape(shape)


def seed_sequences(name: str, shape: tuple[int, ...], seed: int, count: int) -> list[np.random.SeedSequence]:
    """Return the seeds of ``count`` generators."""
    return np.random.SeedSequence([_SEED + seed, zlib.crc32(name.encode()), *shape]).spawn(count)
