"""The content of a buffer in tuning: an expression with generators of random numbers, or a ``.npy`` file.

A name alone, such as ``uniform``, is neither; `autotile.kernel.inputs` makes it. Files are mapped to memory and never
unpickled.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from autotile.core.dtypes import Array, Dtype, Shape, map_npy
from autotile.errors import DataError, InputError, SpecError, nearest
from autotile.kernel.expressions import (
    ArrayExpression,
    Environment,
    ExpressionText,
    Location,
    ShapeOnly,
    canonical_text,
    one_line,
    parse_array_expression,
)
from autotile.kernel.functions import Kinds
from autotile.kernel.table import ProblemSection, Table, describe
from autotile.settings import available_cores

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

MAX_FILE_BYTES = 256 << 30
"""Maximum size of a file, larger than the memory of any GPU."""
_SEED = 20_240_601
_CHUNK = 1 << 20
"""Number of values from one generator, which take a few milliseconds."""

Fill = Callable[["np.random.Generator", Array], object]


class Generator(NamedTuple):
    """A call of one of `GENERATORS`: its function, its arguments, and the extents; those of the buffer if empty."""

    function: str
    arguments: tuple[ArrayExpression, ...]
    extents: tuple[ArrayExpression, ...]

    def bounds(self, names: Environment) -> tuple[float, float]:
        """Return its two numbers, which are finite; of whole numbers, the second is above the first."""
        first, second = (float(argument.evaluate(names)) for argument in self.arguments)
        if not (math.isfinite(first) and math.isfinite(second)):
            raise ValueError(f"{self.function}({first:g}, {second:g}) is not of finite numbers")
        if self.function == "integers" and not first < second:
            raise ValueError(f"integers({first:g}, {second:g}) is empty; the upper bound is not part of it")
        return first, second

    def shape(self, names: Environment, shape: Shape) -> Shape:
        """Return the shape of its array, in the buffer of a shape."""
        if self.arguments:
            self.bounds(names)
        if not self.extents:
            if self.function == "permutation" and len(shape) != 1:
                raise ValueError("permutation() without a length is for buffers of one axis")
            return shape
        extents = tuple(int(extent.evaluate(names)) for extent in self.extents)
        if min(extents) < 0:
            raise ValueError(f"{self.function} has a negative extent: {extents}")
        return extents

    def draw(self, names: Environment, shape: Shape, key: str, seed: int) -> Array:
        """Return its array in float64; ``key`` and ``seed`` select the stream of random numbers."""
        shape = self.shape(names, shape)
        if self.function == "arange":
            return np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
        if self.function == "permutation":
            (sequence,) = _seed_sequences(key, shape, seed, 1)
            return np.random.Generator(np.random.SFC64(sequence)).permutation(math.prod(shape)).astype(np.float64)
        first, second = self.bounds(names)
        scale = second - first if self.function == "uniform" else second
        fill: Fill = partial(_fill_scaled, self.function, first, scale)
        if self.function == "integers":
            fill = partial(fill_integers, int(first), int(second) - 1, np.int64)
        return draw_chunks(key, shape, seed, fill, np.float64)


class InputExpression(msgspec.Struct, frozen=True):
    """Content that an array expression gives, over sizes, scalars, other inputs and generators."""

    text: str
    """Text with normalized spaces."""
    expression: ArrayExpression
    """The expression, with a name of its own for each generator."""
    generators: Mapping[str, Generator]

    @property
    def inputs(self) -> frozenset[str]:
        """All names in it, except those of generators."""
        return self.expression.names - self.generators.keys()

    @property
    def names(self) -> frozenset[str]:
        """All names in it, with those in the arguments of generators."""
        parts = (part for one in self.generators.values() for part in (*one.arguments, *one.extents))
        return self.inputs.union(*(part.names for part in parts))

    def shape(self, names: Environment, shape: Shape) -> Shape:
        """Return the shape of its value in a buffer of the given shape, from the shapes of the other inputs."""
        try:
            arrays = {name: ShapeOnly(one.shape(names, shape)) for name, one in self.generators.items()}
            return np.shape(self.expression.evaluate({**names, **arrays}))
        except (ValueError, TypeError) as error:
            problem = error.problem if isinstance(error, SpecError) else str(error)
            raise self.expression.location.error(problem, expression=self.text) from None

    def values(self, names: Environment, shape: Shape, key: str, seed: int) -> Array:
        """Return its value, of the buffer's shape."""
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


@cache
def _sha256(path: str, _inode: int, _size: int, _mtime_ns: int) -> str:
    """Return the hash of a file, which is read again when its status changes."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


class InputFile(msgspec.Struct, frozen=True):
    """Content of a buffer in a ``.npy`` file."""

    path: str
    """Absolute path."""
    sha256: str = ""
    """Hash that the content must have; "" if any is accepted."""
    is_whole: bool = False
    """Whether the content is used as a whole only, as with indices into it; otherwise a problem of smaller sizes takes
    its leading part."""
    written: str = ""
    """The path as the search-space file states it."""

    @property
    def content_hash(self) -> str:
        """SHA-256 of the file: the declared one, or that of its content."""
        return self.sha256 or self._hash()

    def read(self, name: str, shape: Shape, dtype: Dtype) -> Array:
        """Return the content of a buffer of a name, the shape of its array and its element type.

        Raise `InputError` if the file cannot be read, is no ``.npy`` file, has not the declared hash, or holds another
        type or too few elements.
        """
        self.check_hash(name)
        array = self.mapped(name, shape, dtype)
        return np.ascontiguousarray(array[tuple(slice(extent) for extent in shape)])

    def mapped(self, name: str, shape: Shape, dtype: Dtype) -> Array:
        """Return the array of the file, mapped to memory; parameters and errors as for `read`, without the hash."""
        self._status()
        try:
            array = map_npy(Path(self.path))
        except DataError as error:
            raise InputError(f"{self.path}: cannot be read as a .npy file: {error}") from None
        if array.dtype.kind == "V" and array.dtype.itemsize == np.dtype(dtype.storage).itemsize:
            array = array.view(dtype.storage)  # a type of ml_dtypes, which numpy.save writes without its name
        if array.dtype != np.dtype(dtype.storage):
            hint = f"expected {dtype.storage} for {name} ({dtype.name}); convert it with astype"
            raise InputError(f"{self.path}: the array has the dtype {array.dtype}, {hint}")
        found = array.shape
        fits = len(found) == len(shape) and all(f >= s for f, s in zip(found, shape, strict=True))
        if found != shape and (not fits or self.is_whole):
            expected = f"{shape}" if self.is_whole else f"{shape} or more along each axis"
            raise InputError(f"{self.path}: the array has the shape {found}, expected {expected} for {name}")
        return array

    def check_hash(self, name: str) -> None:
        """Raise `InputError` if the file has not the declared hash; ``name`` is that of its array in the message."""
        if self.sha256 and self._hash() != self.sha256:
            raise InputError(f"{self.path}: the SHA-256 is {self._hash()}, but sha256 of {name} is {self.sha256}")

    def _hash(self) -> str:
        status = self._status()
        return _sha256(self.path, status.st_ino, status.st_size, status.st_mtime_ns)

    def _status(self) -> os.stat_result:
        try:
            status = Path(self.path).stat()
        except OSError as error:
            hint = "the path of an array is relative to the search-space file"
            raise InputError(f"{self.path}: {error.strerror}; {hint}") from None
        except ValueError as error:
            raise InputError(f"{self.path!r:.200} is not a path: {error}") from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{self.path}: not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise InputError(f"{self.path}: {status.st_size} bytes, expected at most {MAX_FILE_BYTES}")
        return status


Content: TypeAlias = InputExpression | InputFile


def declared_file(table: Table) -> InputFile:
    """Parse ``file``, with ``sha256`` and ``whole``."""
    sha256 = table.text("sha256", "")
    if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise table.error("sha256", "expected 64 hexadecimal digits, in lower case")
    path = table.text("file")
    if not path.endswith(".npy"):
        raise table.error("file", f"{describe(path)} is not accepted; expected a file that ends in .npy")
    base = Path(table.folder) if table.folder else Path(table.source).parent
    return InputFile(str((base / path).absolute()), sha256, table.boolean("whole", default=False), path)


def declared_content(
    table: Table, name: str, problem: ProblemSection, operands: Mapping[str, bool]
) -> tuple[str, Content | None]:
    """Parse ``init``, or ``file`` with ``sha256`` and ``whole``; return the text, and the content unless it is a name.

    The text is empty if neither is given. The other parameters are those of `autotile.kernel.arguments.ArgumentScope`.
    """
    if "file" in table.data:
        if "init" in table.data:
            raise table.error("init", "the content is that of the file; remove init")
        return "file", declared_file(table)
    for key in ("sha256", "whole"):
        if key in table.data:
            raise table.error(key, f"{key} belongs to a file; remove it, or give file")
    if "init" not in table.data:
        return "", None
    given = table.data["init"]
    text = table.text("init", multiline=True) if isinstance(given, str) else repr(table.number("init"))
    if text in NAMED:
        return text, None
    if text.isidentifier() and text not in operands and text not in problem.sizes:
        hint = f"(known: {', '.join(NAMED)}, and expressions such as 'integers(0, 10)')"
        raise table.error("init", f"{describe(text)} is not accepted{nearest(text, NAMED)} {hint}")
    numbers = [*problem.sizes, *(other for other, is_number in operands.items() if is_number)]
    arrays = [other for other, is_number in operands.items() if not is_number and other != name]
    location, line = table.location("init"), one_line(text)
    source, written = ExpressionText(line), line
    generators: dict[str, Generator] = {}
    with location.reporting(line):
        for number, call in enumerate(_generator_calls(source.parse())):
            drawn = f"__{number}"
            generators[drawn] = _generator(source, call, numbers, problem.kinds, location)
            start, end = call.col_offset, call.end_col_offset or 0
            written = written[:start] + drawn.ljust(end - start) + written[end:]  # columns stay as they are
    expression = parse_array_expression(written, (*numbers, *arrays, *generators), problem.kinds, location)
    content = InputExpression(canonical_text(line), expression, generators)
    return content.text, content


def _generator_calls(tree: ast.expr) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in GENERATORS]
    return sorted(named, key=lambda call: call.col_offset)


def _generator(
    source: ExpressionText, call: ast.Call, scalars: Sequence[str], kinds: Kinds, location: Location
) -> Generator:
    assert isinstance(call.func, ast.Name)
    function, usage = call.func.id, GENERATORS[call.func.id]
    plain = not call.keywords and not any(isinstance(argument, ast.Starred) for argument in call.args)
    if not source.text.isascii() or not plain or any(map(_generator_calls, call.args)):
        raise source.error(call, f"{function} is called as {usage}, with numbers")

    def parsed(argument: ast.expr) -> ArrayExpression:
        return parse_array_expression(ast.unparse(argument), scalars, kinds, location)

    arguments = tuple(map(parsed, call.args))
    if function not in _PAIRED:
        if len(arguments) > 1:
            raise source.error(call, f"{function} is called as {usage}")
        return Generator(function, (), arguments)
    if len(arguments) == 1 or (not arguments and function == "integers"):
        further = f"or {usage[:-1]}, n, ...) for an array of n elements"
        raise source.error(call, f"{function} is called as {usage}, {further}")
    bounds = arguments[:2] or (parsed(ast.Constant(0)), parsed(ast.Constant(1)))
    return Generator(function, bounds, arguments[2:])


def fill_integers(low: int, high: int, dtype: Any, generator: np.random.Generator, chunk: Array) -> None:
    """Fill an array with whole numbers from ``low`` to ``high``, drawn as ``dtype``."""
    chunk[:] = generator.integers(low, high, chunk.shape, dtype, endpoint=True)


def _fill_scaled(function: str, offset: float, scale: float, generator: np.random.Generator, chunk: Array) -> None:
    (generator.random if function == "uniform" else generator.standard_normal)(out=chunk)
    chunk *= scale
    chunk += offset


def draw_chunks(name: str, shape: Shape, seed: int, fill: Fill, dtype: Any = np.float32) -> Array:
    """Return random values of a generator that depends on seed, name and shape.

    Each chunk of a fixed size has its own generator, so the values do not depend on the number of cores that draw them.
    """
    values = np.empty(math.prod(shape), dtype)
    chunks = _chunks(values)
    generators = [
        np.random.Generator(np.random.SFC64(each)) for each in _seed_sequences(name, shape, seed, len(chunks))
    ]
    _on_all_cores(fill, generators, chunks)
    return values.reshape(shape)


def encode_chunks(values: Array, dtype: Dtype) -> Array:
    """Return the stored bits of values, as `Dtype.encode` does, C-contiguous; all cores round a large array."""
    stored = np.empty(values.shape, dtype.storage)

    def encode(chunk: Array, bits: Array) -> None:
        with np.errstate(all="ignore"):
            bits[:] = dtype.encode(chunk)

    _on_all_cores(encode, _chunks(np.ascontiguousarray(values).reshape(-1)), _chunks(stored.reshape(-1)))
    return stored


def _chunks(values: Array) -> list[Array]:
    return [values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK)]


def _on_all_cores(function: Callable[..., object], *arguments: Sequence[Any]) -> None:
    """Call a function that releases the interpreter's lock for each chunk."""
    from concurrent.futures import ThreadPoolExecutor  # which serving does not need

    if len(arguments[0]) == 1:
        function(*(each[0] for each in arguments))
        return
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(function, *arguments))


def _seed_sequences(name: str, shape: Shape, seed: int, count: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence([_SEED + seed, zlib.crc32(name.encode()), *shape]).spawn(count)
