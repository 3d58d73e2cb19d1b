"""Inputs of a problem in tuning, from their declarations or from captured calls.

Contents depend only on the declaration, the sizes, the element type and the seed, not on the process or the machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import structs

from autotile.core.documents import Count, Name, Text, canonical_json, decode_json, read_regular
from autotile.core.dtypes import DTYPES, Array, Dtype, Shape
from autotile.core.model import Problem, Sizes
from autotile.errors import DataError, InputError
from autotile.kernel.arguments import Argument, BufferArgument, ScalarArgument
from autotile.kernel.contents import InputExpression, InputFile, draw_chunks, encode_chunks, fill_integers
from autotile.kernel.parser import KERNEL_NAME
from autotile.kernel.sources import is_file
from autotile.kernel.spec import KernelSpec


def input_maker(spec: KernelSpec, problem: Problem, *, seed: int = 0, check: bool = False) -> Callable[[str], Array]:
    """Return a function that makes the content of a buffer of a problem, given its name.

    With ``check``, scalars have their check values. The content is in its storage dtype, C-contiguous. The function
    raises `InputError` if it has no value, or does not fit in the element type; or its file cannot be used.
    """
    kept: dict[str, Array] = {}
    contents = [b.content for b in spec.buffers if isinstance(b.content, InputExpression)]
    used = frozenset[str]().union(*(content.inputs for content in contents))  # contents are computed from them
    names, dtype = problem.names, problem.dtype

    def stored(name: str) -> Array:
        if name in kept:
            return kept[name]
        buffer = spec.buffer(name)
        shape, element_type = buffer.array_shape(names), buffer.element_type(dtype, names)
        if buffer.content is None:
            made = make_input(buffer, shape, element_type, seed)
        elif isinstance(buffer.content, InputFile):
            made = buffer.content.read(name, shape, DTYPES[element_type])
        else:
            known: dict[str, Any] = {**names}
            for scalar in spec.scalars:
                if scalar.is_operand:
                    value = scalar.given(names, check=check)
                    known[scalar.name] = np.asarray(value) if isinstance(value, tuple) else value
            for other in buffer.content.inputs - known.keys():
                known[other] = DTYPES[spec.buffer(other).element_type(dtype, names)].decode(stored(other))
            made = _encoded(name, buffer.content.values(known, shape, name, seed), DTYPES[element_type])
        if name in used:
            kept[name] = made
        return made

    return stored


def _encoded(name: str, values: Array, dtype: Dtype) -> Array:
    """Round values to an element type; those of an integer type must be in it."""
    if values.dtype.kind == "c" and not dtype.is_complex:
        raise InputError(f"the content of {name} is complex, but its type is {dtype.name}")
    stored = encode_chunks(values, dtype)
    if dtype.is_integer and not np.array_equal(dtype.decode(stored), values):
        wrong = values[dtype.decode(stored) != values].ravel()[0]
        raise InputError(
            f"the content of {name} has the value {wrong:g}, which is not in {dtype.name}; use floor or bounds"
        )
    return stored


_INTEGER_SPAN = 8
"""Random integers lie in [-8, 8] (unsigned: [0, 8]), so that sums of products stay exact in float64."""
_INTEGER_RANGES = {"bool": (0, 1), **{f"uint{bits}": (0, _INTEGER_SPAN) for bits in (8, 16, 32, 64)}}


def make_input(buffer: BufferArgument, shape: Shape, dtype_name: str, seed: int = 0) -> Array:
    """Return a content that is a name alone, rounded to its dtype, in the storage dtype.

    It depends only on the buffer's name, shape (that of `BufferArgument.array_shape`), dtype and distribution, and on
    the seed if it is random, not on the process or the machine.
    """
    dtype = DTYPES[dtype_name].component
    if dtype.is_complex and buffer.init in ("normal", "uniform"):
        parts = make_input(buffer, (*shape, 2), "float32", seed)  # real and imaginary parts as a last axis
        return np.ascontiguousarray(dtype.encode(parts.view(np.complex64)[..., 0]))
    random = partial(draw_chunks, buffer.name, shape, seed)
    match buffer.init:
        case "zeros":
            values: Array = np.zeros(shape)
        case "ones":
            values = np.ones(shape)
        case "arange":
            values = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
        case "uniform":
            values = random(lambda generator, chunk: generator.random(out=chunk, dtype=np.float32))
        case "normal" if dtype.is_integer:
            low, high = _INTEGER_RANGES.get(dtype.name, (-_INTEGER_SPAN, _INTEGER_SPAN))
            values = random(partial(fill_integers, low, high, np.int8))
        case "normal":
            values = random(lambda generator, chunk: generator.standard_normal(out=chunk, dtype=np.float32))
        case unknown:
            raise InputError(f"unknown content {unknown!r} of {buffer.name}")
    return np.ascontiguousarray(values) if values.dtype.name == dtype.name else encode_chunks(values, dtype)


def missing_input(spec: KernelSpec, problem: Problem) -> str:
    """Return why a problem has no inputs: a file does not hold enough; "" if it has all."""
    for buffer in spec.buffers:
        if isinstance(buffer.content, InputFile):
            names = problem.names
            element = DTYPES[buffer.element_type(problem.dtype, names)]
            try:
                buffer.content.mapped(buffer.name, buffer.array_shape(names), element)
            except InputError as error:
                return str(error)
    return ""


def ragged_problem(spec: KernelSpec, problem: Problem) -> Problem | None:
    """Return the problem of ragged sizes at which configurations are verified before another, with its flags.

    None where that says nothing new, or a file of inputs does not hold enough.
    """
    ragged = problem.at(spec.ragged_sizes(problem.sizes))
    is_same = ragged == problem and all(scalar.check_value is None for scalar in spec.scalars)
    return None if is_same or missing_input(spec, ragged) else ragged


def expected_file(folder: Path, name: str, sizes: Sizes, seed: int, *, check: bool) -> Path:
    """Return the path of the expected values of an output in a session's folder; parameters as of `input_maker`."""
    inputs = canonical_json([dict(sorted(sizes.items())), seed, check])
    return folder / f"{name}-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.npy"


DOCUMENT = "call.json"
"""File beside the arrays of a call."""
_MAX_DOCUMENT_BYTES = 1 << 20
_File = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,200}\.npy\Z")]
"""Name of a file in the folder of the call."""


class CapturedCall(msgspec.Struct, forbid_unknown_fields=True):
    """Content of `DOCUMENT`."""

    kernel: Annotated[str, msgspec.Meta(pattern=rf"\A{KERNEL_NAME}\Z", max_length=1000)]
    source: Text
    """Absolute path of the search-space file, or its name if it has none."""
    sizes: dict[Name, Count]
    dtype: Name
    scalars: dict[Name, float | tuple[float, ...]]
    """Scalars that the caller set."""
    arrays: dict[Name, _File]
    """File of each buffer that is read."""
    format: int = 1


def read_captured_call(folder: Path) -> CapturedCall:
    """Read the document of a captured call."""
    path = call_folder(folder) / DOCUMENT
    if not path.is_file() and folder.is_dir():
        found = sorted(one.parent.name for one in folder.glob(f"*/{DOCUMENT}"))
        listed = f"choose one of {', '.join(found[:10])}" if found else f"it has no {DOCUMENT}"
        raise InputError(f"{folder} is not the folder of one captured call: {listed}")
    try:
        return decode_json(read_regular(path, _MAX_DOCUMENT_BYTES), CapturedCall)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a folder that AUTOTILE_CAPTURE filled") from None
    except (DataError, ValueError) as error:
        raise InputError(f"{path} is not the document of a captured call: {error}") from None


def kernel_of_call(call: CapturedCall) -> str:
    """Return the kernel of a call as `load_kernel` takes it: the path of its file, else its name."""
    return call.source if is_file(Path(call.source)) else call.kernel


def call_folder(folder: Path) -> Path:
    """Return the folder of the only call in a folder of calls, or the folder itself."""
    calls = [] if (folder / DOCUMENT).is_file() else list(folder.glob(f"*/{DOCUMENT}"))
    return calls[0].parent if len(calls) == 1 else folder


def with_captured_call(spec: KernelSpec, folder: Path) -> KernelSpec:
    """Return a kernel whose inputs are those of a captured call, as a whole, and its scalars too."""
    folder = call_folder(folder)
    call = read_captured_call(folder)
    known = {argument.name for argument in spec.arguments}
    unknown = [name for name in (*call.arrays, *call.scalars) if name not in known]
    if call.kernel != spec.name or unknown:
        what = f"has no argument {unknown[0]!r}" if call.kernel == spec.name else f"is not {call.kernel!r}"
        raise InputError(f"{folder} holds a call of another kernel or version: {spec.name} {what}")

    def filled(argument: Argument) -> Argument:
        if isinstance(argument, BufferArgument) and argument.name in call.arrays:
            content = InputFile(str((folder / call.arrays[argument.name]).absolute()), is_whole=True)
            return structs.replace(argument, init="file", content=content)
        if isinstance(argument, ScalarArgument) and argument.name in call.scalars and argument.binding is None:
            return structs.replace(argument, default=call.scalars[argument.name], check_value=None)
        return argument

    return replace(spec, arguments=tuple(map(filled, spec.arguments)))


def document_of(spec: KernelSpec, problem: Problem, scalars: Mapping[str, object]) -> CapturedCall:
    """Return the document of a call."""
    source = str(Path(spec.folder) / Path(spec.source).name) if spec.folder else spec.source
    values = {
        name: tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)  # type: ignore[arg-type]
        for name, value in scalars.items()
    }
    arrays = {buffer.name: f"{buffer.name}.npy" for buffer in spec.buffers if buffer.is_read}
    return CapturedCall(spec.name, source, dict(problem.sizes), problem.dtype, values, arrays)
