"""Captured calls: the arguments of a call of a served kernel, in a folder, as inputs of a tuning session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from autotile.core.documents import Count, Name, Text, decode_json
from autotile.core.reading import read_regular
from autotile.errors import DataError, InputError
from autotile.kernel.arguments import Argument, BufferArgument, ScalarArgument
from autotile.kernel.input_files import InputFile
from autotile.kernel.spec import KernelSpec

DOCUMENT = "call.json"
"""File beside the arrays of a call."""
_MAX_DOCUMENT_BYTES = 1 << 20
_File = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,200}\.npy\Z")]
"""Name of a file in the folder of the call."""


class CapturedCall(msgspec.Struct, forbid_unknown_fields=True):
    """Content of `DOCUMENT`."""

    kernel: Name
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
    """Read the document of a captured call.

    Raises
    ------
    InputError
        The folder holds no captured call, or several.
    """
    path = folder / DOCUMENT
    if not path.is_file() and folder.is_dir():
        found = sorted(one.parent.name for one in folder.glob(f"*/{DOCUMENT}"))
        if len(found) == 1:
            return read_captured_call(folder / found[0])
        listed = f"choose one of {', '.join(found[:10])}" if found else f"it has no {DOCUMENT}"
        raise InputError(f"{folder} is not the folder of one captured call: {listed}")
    try:
        return decode_json(read_regular(path, _MAX_DOCUMENT_BYTES), CapturedCall)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (DataError, ValueError) as error:
        raise InputError(f"{path} is not the document of a captured call: {error}") from None


def call_folder(folder: Path) -> Path:
    """Return the folder of the only call in a folder of calls, or the folder itself."""
    calls = [] if (folder / DOCUMENT).is_file() else list(folder.glob(f"*/{DOCUMENT}"))
    return calls[0].parent if len(calls) == 1 else folder


def with_captured_call(spec: KernelSpec, folder: Path) -> KernelSpec:
    """Return a kernel whose inputs are those of a captured call, as a whole, and its scalars too.

    Raises
    ------
    InputError
        The call is of another kernel, or names an argument that the kernel does not have.
    """
    folder = call_folder(folder)
    call = read_captured_call(folder)
    known = {argument.name for argument in spec.arguments}
    unknown = [name for name in (*call.arrays, *call.scalars) if name not in known]
    if call.kernel != spec.name or unknown:
        what = f"has no argument {unknown[0]!r}" if call.kernel == spec.name else f"is not {call.kernel!r}"
        raise InputError(f"{folder} holds a call of another kernel or version: {spec.name} {what}")
    return replace(spec, arguments=tuple(_with_content(a, call, folder) for a in spec.arguments))


def _with_content(argument: Argument, call: CapturedCall, folder: Path) -> Argument:
    if isinstance(argument, BufferArgument) and argument.name in call.arrays:
        content = InputFile(str((folder / call.arrays[argument.name]).absolute()), is_whole=True)
        return replace(argument, init="file", content=content)
    if isinstance(argument, ScalarArgument) and argument.name in call.scalars and argument.binding is None:
        return replace(argument, value=call.scalars[argument.name], check_value=None)
    return argument


def document_of(spec: KernelSpec, sizes: Mapping[str, int], dtype: str, scalars: Mapping[str, object]) -> CapturedCall:
    """Return the document of a call."""
    source = str(Path(spec.folder) / Path(spec.source).name) if spec.folder else spec.source
    values = {
        name: tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)  # type: ignore[arg-type]
        for name, value in scalars.items()
    }
    arrays = {buffer.name: f"{buffer.name}.npy" for buffer in spec.buffers if buffer.is_read}
    return CapturedCall(spec.name, source, dict(sizes), dtype, values, arrays)
