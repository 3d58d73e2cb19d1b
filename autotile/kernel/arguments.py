"""The kinds of arguments of a kernel, each with its parser, its checks and its part in the key of a result.

A kind is a class derived from `ArgumentKind` and listed in `Argument` and `_KINDS`; those of structs and tensor maps
are in `autotile.kernel.argument_kind`. Code outside this package queries an argument (`is_given`, `is_passed`,
`workspace`, ...) instead of testing its type. Only two modules have code for each kind, and mypy reports a kind that
they lack: `autotile.cuda.packing` packs the parameters of a launch, `autotile.exchange.cpp_header` writes them in C++.

The contents of buffers in tuning are declared by ``init``, a name or an expression of the language of
`autotile.kernel.expressions` with generators of random numbers, or by ``file``.
"""

from __future__ import annotations

import ast
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import DTYPES, Array, Dtype
from autotile.core.model import Value
from autotile.errors import ArgumentError, InputError, listing, nearest
from autotile.kernel.argument_kind import (
    PROBLEM_DTYPE,
    ArgumentKind,
    ArgumentScope,
    ArrayArgument,
    StructArgument,
    TensorMapArgument,
    TextureArgument,
    Workspace,
    canonical_texts,
    known_type,
    parse_element_type,
)
from autotile.kernel.expressions import (
    ArrayExpression,
    Expression,
    ExpressionError,
    ExpressionText,
    Location,
    ShapeOnly,
    canonical_text,
    is_c_identifier,
    one_line,
    parse_array_expression,
)
from autotile.kernel.functions import Kind
from autotile.kernel.table import ProblemSection, Table, check_names, describe
from autotile.settings import available_cores

if TYPE_CHECKING:
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


Access = Literal["in", "out", "inout"]
Number = float | tuple[float, ...]
"""Value of a scalar; a tuple for a vector or a complex number."""

MAX_AXES = 8

_Text = TypeVar("_Text", bound=str)


@dataclass(frozen=True, slots=True)
class BufferArgument(ArrayArgument):
    """A device array that the caller passes."""

    access: Access
    init: str
    """Content in tuning: a name of `autotile.kernel.inputs.NAMED`, or the text of ``content``."""
    is_passed: bool = True
    """Whether the kernel takes its address; False for a buffer that is accessed through a tensor map or struct only."""
    content: Content | None = None
    """Content that is computed or read from a file; None for one that is a name alone."""
    is_initialized: bool = True
    """Whether it has its content before each launch: an input, or an output with ``init``."""
    constant: str = ""
    """``__constant__`` variable to which it is copied before a launch; "" if it is passed."""

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ buffer = "float32", shape = [...], access = "in", ... }``."""
        table.allow(("buffer", "shape", "access", "init", "file", "sha256", "whole", "restore", "pass", "constant"))
        shape = table.expressions("shape", scope.problem.kinds, max_length=MAX_AXES)
        scope.problem.check_positive(table, "shape", shape)
        access = _one_of(table, "access", get_args(Access))
        if "restore" in table.data and (access == "in" or not table.boolean("restore", default=True)):
            raise table.error("restore", "every buffer that is written and has a content is restored; remove restore")
        init, content = declared_content(table, name, scope)
        dtype = parse_element_type(table.text("buffer"), scope.problem.flag_kinds, table.location("buffer"))
        is_initialized = access != "out" or bool(init)
        constant = _constant_variable(table, access)
        is_passed = not constant and table.boolean("pass", default=True)
        return cls(name, dtype, shape, access, init or "normal", is_passed, content, is_initialized, constant)

    def meaning(self) -> dict[str, Any]:
        """Return the buffer's part of the space hash."""
        meaning: dict[str, Any] = {
            "buffer": self.name,
            "dtype": str(self.dtype),
            "shape": canonical_texts(self.shape),
            "access": self.access,
            "init": self.init if isinstance(self.content, InputExpression | None) else self.content.content_hash,
        }
        if self.constant:
            meaning["constant"] = self.constant
        elif not self.is_passed:
            meaning["pass"] = False
        if self.is_initialized and not self.is_read:
            meaning["initialized"] = True
        return meaning

    @property
    def is_given(self) -> bool:
        """Whether the caller passes an array for it."""
        return True

    @property
    def is_read(self) -> bool:
        """Whether the kernel may read what the caller passes."""
        return self.access != "out"

    @property
    def is_operand(self) -> bool:
        """Whether references may use it."""
        return self.is_read

    def operand(self, sizes: Mapping[str, int], *, check: bool) -> ShapeOnly:
        """Return the shape."""
        return ShapeOnly(self.array_shape(sizes))

    @property
    def is_zeroed(self) -> bool:
        """Whether its content is zero."""
        return self.init == "zeros" or (isinstance(self.content, InputExpression) and self.content.is_zero)

    @property
    def targets(self) -> tuple[str, ...]:
        """The buffer itself, if the kernel reads it from constant memory."""
        return (self.name,) if self.constant else ()

    @property
    def is_written(self) -> bool:
        """Whether the kernel writes it."""
        return self.access != "in"

    def array_shape(self, names: Mapping[str, Value]) -> tuple[int, ...]:
        """Return the shape of the array that holds the elements: the components of vectors are its last axis."""
        dtype = DTYPES.get(self.dtype.of("", names))  # the problem's type, which "" stands for, is no vector
        return dtype.array_shape(self.extents(names)) if dtype is not None else self.extents(names)

    def size_bytes(self, problem_dtype: str, names: Mapping[str, Value]) -> int:
        """Return the size of the array in bytes."""
        return math.prod(self.extents(names)) * DTYPES[self.element_type(problem_dtype, names)].size_bytes


@dataclass(frozen=True, slots=True)
class ScalarArgument(ArgumentKind):
    """A value passed by the launch: bound (``M``, ``2 ** step``), or a default that a caller may override (``alpha``).

    Attributes
    ----------
    dtype
        Name of an element type, or `PROBLEM_DTYPE`.
    value
        Expression that binds it, over sizes, flags, parameters, ``device.*`` and ``step``; or its default: a number, or
        a tuple of the components of a vector or of the real and the imaginary part of a complex number.
    check_value
        Value at the ragged sizes in verification (``beta`` other than 0); None for the default.
    """

    name: str
    dtype: str
    value: Expression | Number
    check_value: Number | None
    is_per_launch: bool = False
    """Whether its value depends on more than the problem: on parameters, ``device.*`` or ``step``."""

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ scalar = "int32", value = "M" }`` or ``{ scalar = "float32", value = 0.0, check = 0.5 }``."""
        table.allow(("scalar", "value", "check"))
        dtype = known_type(table.text("scalar"), table.location("scalar"))
        if isinstance(table.require("value"), str):
            if "check" in table.data:
                raise table.error("check", "a value that is bound by the sizes takes no second one; remove check")
            if dtype != PROBLEM_DTYPE and DTYPES[dtype].parts > 1:
                raise table.error(
                    "value", f"expected a list of {DTYPES[dtype].parts} numbers for {dtype}, not an expression"
                )
            expression = table.expression("value", scope.launch_kinds, "number")
            if expression.names - scope.problem.own_names:
                return cls(name, dtype, expression, None, is_per_launch=True)
            for sizes in (scope.problem.sizes, scope.problem.ragged):
                expression.evaluate(sizes)
            return cls(name, dtype, expression, None)
        value = _constant(table, "value", dtype)
        return cls(name, dtype, value, _constant(table, "check", dtype) if "check" in table.data else None)

    def meaning(self) -> dict[str, Any]:
        """Return the scalar's part of the space hash."""
        value = self.default if self.binding is None else self.binding.canonical
        return {"scalar": self.name, "dtype": self.dtype, "value": value, "check": self.check_value}

    @property
    def binding(self) -> Expression | None:
        """Expression that gives its value; None if a caller may set it."""
        return self.value if isinstance(self.value, Expression) else None

    @property
    def default(self) -> Number | None:
        """Value unless a caller sets another; None if the problem binds it."""
        return None if isinstance(self.value, Expression) else self.value

    @property
    def is_operand(self) -> bool:
        """Whether references may use it."""
        return not self.is_per_launch

    def operand(self, sizes: Mapping[str, int], *, check: bool) -> ShapeOnly | float | complex:
        """Return the value in a reference; the shape of a vector. With ``check``, the check value if there is one."""
        value = self.given(sizes, check=check)
        if isinstance(value, tuple):
            return complex(*value) if DTYPES[self.dtype].is_complex else ShapeOnly((len(value),))
        return value

    def given(self, sizes: Mapping[str, int], *, check: bool) -> Number:
        """Return the value at the given sizes and flags; with ``check``, the check value if there is one."""
        if isinstance(self.value, Expression):
            return int(self.value.value(sizes))
        return self.check_value if check and self.check_value is not None else self.value

    @property
    def repeats_size(self) -> bool:
        """Whether its value is the size of the same name."""
        return self.binding is not None and self.binding.text == self.name

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The expression that binds it."""
        return () if self.binding is None else (self.binding,)

    def parameter_bytes(self, problem_dtype: str) -> int:
        """See `ArgumentKind.parameter_bytes`."""
        return DTYPES[self.element_type(problem_dtype)].size_bytes

    def element_type(self, problem_dtype: str) -> str:
        """Return the name of the type for a problem of the given dtype."""
        return problem_dtype if self.dtype == PROBLEM_DTYPE else self.dtype


@dataclass(frozen=True, slots=True)
class WorkspaceArgument(ArrayArgument):
    """Device memory that a launch needs for itself and that the caller never sees.

    Attributes
    ----------
    shape
        Extents over sizes, flags, parameters and ``device.*``; if one is 0, a null pointer is passed.
    zeroed
        Whether the memory is zero before the first launch and left zero by every launch; otherwise its content is
        undefined.
    """

    zeroed: bool
    is_passed: bool = True
    """Whether the kernel takes its address; False for one that is accessed through a tensor map or struct only."""

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ workspace = "float32", shape = [...], init = "zeros" }``."""
        table.allow(("workspace", "shape", "init", "pass"))
        if "init" in table.data and table.text("init") != "zeros":
            raise table.error("init", f'{describe(table.text("init"))} is not accepted; expected "zeros", or no init')
        dtype = parse_element_type(table.text("workspace"), scope.problem.flag_kinds, table.location("workspace"))
        shape = table.expressions("shape", scope.kinds, max_length=MAX_AXES)
        return cls(name, dtype, shape, "init" in table.data, table.boolean("pass", default=True))

    def meaning(self) -> dict[str, Any]:
        """Return the workspace's part of the space hash."""
        shape = canonical_texts(self.shape)
        meaning = {"workspace": self.name, "dtype": str(self.dtype), "shape": shape, "zeroed": self.zeroed}
        return meaning if self.is_passed else {**meaning, "pass": False}

    def workspace(self, problem_dtype: str, names: Mapping[str, Value]) -> Workspace:
        """Return the workspace of a configuration, given the value of every name."""
        return Workspace(self.name, self.element_type(problem_dtype, names), self.extents(names), self.zeroed)


Argument = BufferArgument | ScalarArgument | WorkspaceArgument | TensorMapArgument | StructArgument | TextureArgument

_KINDS: Mapping[str, type[Argument]] = {
    "buffer": BufferArgument,
    "scalar": ScalarArgument,
    "workspace": WorkspaceArgument,
    "tensor_map": TensorMapArgument,
    "struct": StructArgument,
    "texture": TextureArgument,
}
"""Kinds of arguments by the key that identifies their tables."""

_Kind = TypeVar("_Kind", bound=Argument)


def parse_arguments(table: Table, scope: ArgumentScope, taken: Mapping[str, str]) -> tuple[Argument, ...]:
    """Parse ``[arguments]``, in the order of the kernel's parameters.

    Parameters
    ----------
    table
        The section.
    scope
        Names that the arguments may refer to, without the buffers.
    taken
        Names of sizes, flags and parameters. A scalar may have the name of the size that it passes.

    Raises
    ------
    SpecError
        An argument is malformed, or no buffer is written.
    """
    problem = scope.problem
    sizes = problem.own_names - {*problem.flags}  # a flag is a macro, which would replace the name of a parameter
    check_names(table, what="an argument", taken={name: what for name, what in taken.items() if name not in sizes})
    entries = {name: table.table(name) for name in table.data}
    kind_of = {name: _kind(entry) for name, entry in entries.items()}
    scope = scope._replace(operands=_operands(entries, kind_of))
    buffers = {
        name: BufferArgument.parse(entries[name], name, scope)
        for name, kind in kind_of.items()
        if issubclass(kind, BufferArgument)
    }
    if not any(buffer.is_written for buffer in buffers.values()):
        raise table.error("", 'no buffer is written; give one access = "out" or "inout"')
    workspaces = {
        name: WorkspaceArgument.parse(entries[name], name, scope)
        for name, kind in kind_of.items()
        if issubclass(kind, WorkspaceArgument)
    }
    scope = scope._replace(buffers=buffers, workspaces=workspaces)
    known: dict[str, Argument] = {**buffers, **workspaces}
    arguments = tuple(known.get(name) or kind_of[name].parse(entry, name, scope) for name, entry in entries.items())
    for argument in arguments:  # before shapes and contents are computed, where the name would mean both
        if argument.name in sizes and not argument.repeats_size:
            hint = f'use another name, or make it a scalar with value = "{argument.name}"'
            raise table.error(argument.name, f"{argument.name!r} already names a size; {hint}")
    _check_reachable(table, arguments)
    _check_contents(table, arguments, scope.problem)
    return arguments


def arguments_of_kind(arguments: Sequence[Argument], kind: type[_Kind]) -> tuple[_Kind, ...]:
    """Return the arguments of one kind, in order."""
    return tuple(argument for argument in arguments if isinstance(argument, kind))


def _kind(entry: Table) -> type[Argument]:
    kinds = [kind for key, kind in _KINDS.items() if key in entry.data]
    if len(kinds) != 1:
        raise entry.error("", f"expected exactly one of the keys {', '.join(_KINDS)}")
    return kinds[0]


def _check_reachable(table: Table, arguments: Sequence[Argument]) -> None:
    """Raise if the kernel is not given access to a buffer."""
    described = {target for argument in arguments for target in argument.targets}
    for argument in arguments:
        if not argument.is_passed and argument.name not in described:
            hint = f'add {argument.name}_map = {{ tensor_map = "{argument.name}", ... }}, or remove pass'
            what = f"{argument.name!r} is not passed, has no tensor map, and no struct points to it"
            raise table.error(argument.name, f"{what}; {hint}")


def _operands(entries: Mapping[str, Table], kind_of: Mapping[str, type[Argument]]) -> dict[str, bool]:
    """Return the names of arguments that a content may be computed from, with whether they are numbers."""
    return {
        name: issubclass(kind, ScalarArgument)
        for name, kind in kind_of.items()
        if issubclass(kind, ScalarArgument)
        or (issubclass(kind, BufferArgument) and entries[name].data.get("access") != "out")
    }


def _check_contents(table: Table, arguments: Sequence[Argument], problem: ProblemSection) -> None:
    buffers = arguments_of_kind(arguments, BufferArgument)
    for sizes, check in ((problem.sizes, False), (problem.ragged, True)):
        operands = {a.name: a.operand(sizes, check=check) for a in arguments if a.is_operand}
        check_contents(buffers, {**sizes, **operands}, table.location(""))


def _constant_variable(table: Table, access: Access) -> str:
    """Return the ``__constant__`` variable that a buffer is copied to, a C++ name; "" if none."""
    name = table.text("constant", "")
    if "constant" not in table.data:
        return ""
    if not all(is_c_identifier(part) for part in name.split("::")):
        raise table.error("constant", f"{describe(name)} is not the name of a variable, such as d_filter or ns::filter")
    if access != "in":
        raise table.error("constant", 'constant memory is read only; the access of the buffer must be "in"')
    if "pass" in table.data:
        raise table.error("pass", "what is copied to constant memory is not passed; remove pass")
    return name


def _constant(table: Table, name: str, dtype: str) -> Number:
    """Return a number; for a vector or a complex type, a tuple; for bool, true and false are accepted too."""
    given = table.require(name)
    if dtype == "bool" and isinstance(given, bool):
        return float(given)
    parts = 1 if dtype == PROBLEM_DTYPE else DTYPES[dtype].parts
    if parts == 1:
        return _number(table, name, dtype)
    if not isinstance(given, list) or len(given) != parts:
        raise table.error(name, f"expected a list of {parts} numbers for {dtype}, got {describe(given)}")
    return tuple(_number(Table(table.document, table.key, {name: part}), name, dtype) for part in given)


def _number(table: Table, name: str, dtype: str) -> float:
    value = table.number(name)
    if dtype in DTYPES and DTYPES[dtype].is_integer and not value.is_integer():
        raise table.error(name, f"expected a whole number for {dtype}, got {value}")
    return value


def _one_of(table: Table, name: str, known: tuple[_Text, ...]) -> _Text:
    text = table.text(name)
    for choice in known:
        if choice == text:
            return choice
    raise table.error(name, f"{describe(text)} is not accepted{nearest(text, known)} (known: {listing(known)})")


def scalar_value(scalar: ScalarArgument, sizes: Mapping[str, int], problem_dtype: str, *, check: bool) -> Any:
    """Return the value of a scalar argument for a problem.

    Parameters
    ----------
    scalar
        The argument.
    sizes, problem_dtype
        The problem.
    check
        Whether to use the check value, if there is one.

    Returns
    -------
    numpy scalar or numpy.ndarray
        The value, encoded by `encode_value`.

    Raises
    ------
    ArgumentError
        The value does not fit in the argument's type.
    """
    return encode_scalar(scalar, scalar.given(sizes, check=check), problem_dtype)


def encode_scalar(scalar: ScalarArgument, value: Any, problem_dtype: str) -> Any:
    """Convert a value to the type of a scalar argument; see `encode_value`."""
    return encode_value(f"scalar {scalar.name}", value, DTYPES[scalar.element_type(problem_dtype)])


def encode_value(what: str, value: Any, dtype: Dtype) -> Any:
    """Convert a value to an element type.

    Parameters
    ----------
    what
        Name of the value, for messages.
    value
        A number; for a vector, its components; a complex number may be given as its two parts.
    dtype
        The type.

    Returns
    -------
    numpy scalar or numpy.ndarray
        A scalar of the type's storage, or an array of shape (components,).

    Raises
    ------
    ArgumentError
        The value is not a number, or does not fit in the type: it is too large, or not an integer for an integer type.
    """
    given = np.asarray(value)
    if dtype.is_complex and given.shape == (2,) and given.dtype.kind in "biuf":
        given = np.asarray(complex(*given))
    if given.shape != dtype.array_shape(()) or given.dtype.kind not in ("biufc" if dtype.is_complex else "biuf"):
        expected = f"{dtype.components} numbers" if dtype.components else "a number"
        raise ArgumentError(
            f"{what} is {value!r}, expected {expected} that fit{'' if dtype.components else 's'} in {dtype.name}"
        )
    given = given.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        stored = dtype.encode(given)
    kept = dtype.decode(stored)
    fits = (kept == given) if dtype.is_integer else (np.isinf(kept) == np.isinf(given))
    if not fits.all() or (np.abs(given) > dtype.largest).any():
        raise ArgumentError(f"{what} is {value!r}, which does not fit in {dtype.name}")
    return stored if dtype.components else stored[0]


def decode_scalar(scalar: ScalarArgument, stored: Any, problem_dtype: str) -> Any:
    """Return the value of an encoded scalar: a float or complex, or an array of a vector's components."""
    dtype = DTYPES[scalar.element_type(problem_dtype)]
    decoded = dtype.decode(np.atleast_1d(stored))
    return decoded if dtype.components else decoded[0].item()
