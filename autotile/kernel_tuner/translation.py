"""A kernel of autotile from the arguments of Kernel Tuner's `tune_kernel` and `run_kernel`."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from autotile.api.tunable import private_folder
from autotile.core.documents import toml_text
from autotile.core.dtypes import DTYPES, dtype_name
from autotile.core.text import plural
from autotile.errors import InputError, SpecError, type_text
from autotile.kernel.expressions import is_c_identifier, python_source
from autotile.kernel.library import Inspection, Kernel, make_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import MAX_SIZE
from autotile.kernel.python_kernel import as_array
from autotile.kernel.sources import OwnSources, global_functions, read_bytes, sources_with_options
from autotile.kernel.spec import ConfigFunction
from autotile.kernel_tuner.parameters import (
    ParameterCodec,
    Params,
    computed,
    evaluate,
    replace_param_occurrences,
    restriction_rules,
)
from autotile.kernel_tuner.util import default_block_size_names

_GPU_LANGUAGES = ("CUDA", "CUPY", "NVCUDA", "PYCUDA")
"""Kernel Tuner's names of CUDA; autotile compiles all with NVRTC and launches with the driver."""
_REFUSALS = {
    "C": "a function that runs on the host cannot be tuned: autotile launches kernels itself, and times them alone; "
    "pass the __global__ function that the host function launches, with lang='CUDA'",
    "OPENCL": "autotile runs CUDA C++ only",
    "HIP": "autotile runs CUDA C++ only; HIP code that NVRTC compiles can be passed with lang='CUDA'",
    "JULIA": "autotile runs CUDA C++ only",
    "FORTRAN": "autotile runs CUDA C++ only",
    "HYPERTUNER": "autotile has no strategies of Kernel Tuner to tune",
}
_FILE_NAME_CHARACTERS = 250
_CODE_MARKS = ("(", ")", "{", "}", ";", "\n", "__global__ ", "void ", "float ")
_FILE_MARKS = (".c", ".h")
_DEFAULT_BLOCK = (256, 1, 1)
"""Threads of a block along each axis where no parameter states them."""
_RELATIVE_TOLERANCE = 1e-5
"""Relative tolerance of `numpy.allclose`, by which Kernel Tuner compares."""
_SAMPLES = 64
"""Configurations by whose source and launch a kernel is told from another one of the same name."""

Check = Callable[[Params, Mapping[int, NDArray[Any]]], tuple[str, Mapping[str, float | str]]]
"""Function of a configuration and the stored contents of arguments by position; see `Inspection`."""


@dataclass(frozen=True)
class ScriptKernel:
    """A kernel as Kernel Tuner's arguments describe it."""

    name: str
    given: Any
    """``kernel_source``: code, a file, a function that returns the code of a configuration, or a list of files of which
    the first has the kernel and includes the others."""
    problem_size: Any
    """A number, text, function of the parameters, or up to three numbers and texts."""
    arguments: Sequence[Any]
    """Arrays of NumPy, CuPy or PyTorch, NumPy numbers, and None for a null pointer."""
    codec: ParameterCodec
    block_names: Sequence[str] = tuple(default_block_size_names)
    grid_div: tuple[Any, Any, Any] = (None, None, None)
    smem_args: Mapping[str, Any] | None = None
    """Its ``size`` is the dynamic shared memory in bytes."""
    options: Sequence[str] | Callable[[Params], Sequence[str]] | None = None
    defines: Mapping[str, Any] | None = None
    """Values, texts or functions by the name of a macro; None for all parameters and the extents of the launch."""
    restrictions: Any = None
    constants: Mapping[str, Any] | None = None
    """Arrays for ``__constant__`` variables, by name."""
    answer: Sequence[Any] | None = None
    """Expected content of each argument after a launch, None where it is not compared."""
    atol: float = 1e-6
    is_agreement: bool = False
    """Whether configurations are compared with each other where there is no answer."""
    check: Check | None = None
    """Takes the place of the comparison."""
    check_name: str = ""
    """Changes with the functions that the check calls."""

    @property
    def _first(self) -> Any:
        return self.given[0] if isinstance(self.given, list | tuple) and self.given else self.given

    @property
    def path(self) -> Path | None:
        """Path of the file of the kernel; None if it is code."""
        first = self._first
        if isinstance(first, str):
            is_short = len(first) <= _FILE_NAME_CHARACTERS and not any(mark in first for mark in _CODE_MARKS)
            return Path(first).absolute() if is_short and any(mark in first for mark in _FILE_MARKS) else None
        return first.absolute() if isinstance(first, Path) else None

    def text(self, params: Params) -> str:
        """Return the code for a configuration, without its macros."""
        text = self._first(dict(params)) if callable(self._first) else self._first
        if (path := self.path) is not None:
            return read_bytes(path, "source").decode("utf-8-sig", "replace")
        if not isinstance(text, str):
            raise InputError(f"kernel_source is {type(text).__name__}, expected code, a file, a function, or a list")
        return text

    def check_language(self, lang: str | None) -> None:
        """Raise an `InputError` if ``lang``, or the code where it is None, is not CUDA C++."""
        language = lang.upper() if lang else "CUDA"
        if not lang and not callable(self._first):
            code = self.text({}).lower()
            language = "CUDA" if "__global__" in code else "OPENCL" if "__kernel" in code else "C"
        if language in _GPU_LANGUAGES:
            return
        if language not in _REFUSALS:
            raise InputError(f"there is no language {lang!r}; expected one of CUDA, CuPy, NVCUDA, or None")
        found = f"lang={lang!r}" if lang else f"the code looks like {language}, as it has no __global__ function"
        raise InputError(f"{found}: {_REFUSALS[language]}")

    def block(self, params: Params) -> tuple[int, ...]:
        """Return the threads of a block along each axis."""
        extents = zip(self.block_names, _DEFAULT_BLOCK, strict=True)
        with computed("block", params):
            return tuple(int(params.get(name, default)) for name, default in extents)

    def grid(self, params: Params) -> tuple[int, ...]:
        """Return the blocks of the grid along each axis: the problem size over the divisors, rounded up."""
        with computed("grid", params):
            size = self.problem_size(params) if callable(self.problem_size) else self.problem_size
            if isinstance(size, str | Integral):
                size = (size,)
            if not isinstance(size, Iterable):
                raise InputError(f"problem_size is {size!r}, expected a number, text, or up to three of them")
            extents = []
            for each in size:
                if not isinstance(each, str | Integral):
                    raise InputError(f"problem_size contains {each!r}, expected whole numbers and texts")
                extents.append(int(evaluate(each, params) if isinstance(each, str) else each))
            if not 1 <= len(extents) <= 3:
                raise InputError(f"problem_size has {plural(len(extents), 'extent')}, expected 1 to 3")
            axes = zip((*extents, 1, 1)[:3], self.grid_div, self.block_names, strict=True)
            return tuple(math.ceil(float(extent) / _divisor(given, name, params)) for extent, given, name in axes)

    def dynamic_smem_bytes(self, params: Params) -> int:
        """Return the dynamic shared memory of a block."""
        size = (self.smem_args or {}).get("size", 0)
        with computed("shared memory", params):
            if callable(size):
                size = size(params)
            return int(evaluate(size, params) if isinstance(size, str) else size)

    def macros(self, params: Params) -> dict[str, str]:
        """Return the text of each macro of a configuration."""
        if self.defines is None:
            grid = zip(("grid_size_x", "grid_size_y", "grid_size_z"), self.grid(params), strict=True)
            block = zip(self.block_names, self.block(params), strict=True)
            return {name: _macro_text(value) for name, value in (*grid, *block, *params.items(), ("kernel_tuner", 1))}
        found = {}
        for name, value in self.defines.items():
            if not isinstance(name, str) or not is_c_identifier(name):
                raise InputError(f"defines contains {name!r}, expected C identifiers")
            text = replace_param_occurrences(value, params) if isinstance(value, str) else value
            found[name] = _macro_text(value(params) if callable(value) else text)
        return found

    def variant(self, params: Params) -> tuple[str, tuple[str, ...]]:
        """Return the code for a configuration with its macros, and its options for NVRTC.

        Lines are counted from the first one of the source. Parameters that are no macros are defined at the end, as the
        kernel's name may name them.
        """
        text, macros = self.text(params), self.macros(params)
        if macros:
            text = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + "#line 1\n" + text
        if self.defines is not None:
            text += "".join(f"\n#define {name} {_macro_text(params[name])}" for name in params if name not in macros)
            text += "\n"
        options = self.options(params) if callable(self.options) else self.options
        return text, nvrtc_options(options or ())

    @property
    def arrays(self) -> dict[int, NDArray[Any]]:
        """The arguments that are arrays, by position."""
        found = enumerate(map(host_array, self.arguments))
        return {index: array for index, array in found if array is not None}

    def build(self) -> Kernel:
        """Return the kernel for autotile; an `InputError` for an argument that cannot be used."""
        arrays, codec, random = self.arrays, self.codec, Random(0)
        for left in reversed(range(_SAMPLES)):
            try:
                source, _ = self.variant(codec.draw(random))
                break
            except Exception:  # a configuration that the restrictions may exclude
                if not left:
                    raise
        words = re.findall(r"[A-Za-z]\w*", self.name.partition("<")[0])
        plain_name = str(words[-1]) if words else "kernel"
        answered = [index for index in arrays if self.answer is not None and self.answer[index] is not None]
        names, constant = self._signature(source)
        written = [index for index in arrays if index not in constant or index in answered]

        def extent(of: Callable[[Params], Sequence[int]], axis: int) -> ConfigFunction:
            return lambda config: of(codec.decode(config))[axis]

        parts = (("grid", self.grid), ("block", self.block))
        functions = {f"{part}_{name}": extent(of, axis) for part, of in parts for axis, name in enumerate("xyz")}
        if self.smem_args:
            functions["smem"] = lambda config: self.dynamic_smem_bytes(codec.decode(config))
        extents = self.problem_size if isinstance(self.problem_size, tuple | list) else (self.problem_size,)
        sizes = {  # extents that are plain numbers, which are part of the key of results
            f"problem_{axis}" if axis in codec.values else axis: int(extent)
            for axis, extent in zip("xyz", extents, strict=False)
            if isinstance(extent, int | np.integer) and 1 <= extent <= MAX_SIZE
        } or {"problem_x": 1}
        block = []
        for axis, (parameter, default) in enumerate(zip(self.block_names, _DEFAULT_BLOCK, strict=True)):
            values = codec.declared.get(parameter)
            is_number = values and codec.is_plain[parameter] and all(type(value) is int for value in values)
            block.append(parameter if is_number else f"computed.block_{'xyz'[axis]}" if values else str(default))
        arguments = {
            name: _buffer_table(arrays[index], access="inout" if index in written else "in")
            if index in arrays
            else _scalar_table(index, argument)
            for index, (name, argument) in enumerate(zip(names, self.arguments, strict=True))
        }
        for symbol, value in (self.constants or {}).items():
            array = host_array(value)
            table = _buffer_table(np.asarray(value) if array is None else array, access="in")
            arguments[f"constant_{symbol}"] = {**table, "constant": symbol}
        document = {
            "kernel": {"name": plain_name, "template": f"{plain_name}.cu", "entry": self.name},
            "problem": {"sizes": sizes, "ragged": sizes},
            "parameters": codec.declared,
            "computed": dict.fromkeys(functions, "number"),
            "launch": {
                "block": block,
                "grid": [f"computed.grid_{axis}" for axis in "xyz"],
                **({"dynamic_smem_bytes": "computed.smem"} if self.smem_args else {}),
            },
            "arguments": arguments,
            "reference": self._reference(names, written, answered),
        }
        try:
            spec = parse_spec(
                toml_text(document),
                python_source(plain_name),
                folder=str(session_folder()),
                predicates=restriction_rules(self.restrictions, codec),
                functions=functions,
            )
        except SpecError as error:
            if error.key != "default":
                raise
            lacking = f"no configuration of {self.name} meets the restrictions and has at most 1024 threads a block"
            raise InputError(f"{lacking}; relax them, or list other values") from None
        inspection, check, shown = None, self.check, answered if self.answer is not None else list(arrays)
        if check is not None:
            inspection = Inspection(
                tuple(names[index] for index in shown),
                lambda config, contents: check(
                    codec.decode(dict(config)), {index: contents[names[index]] for index in shown}
                ),
                str(session_folder()),
            )
        kernel = make_kernel(spec, self.path or Path.cwd() / f"{plain_name}.cu", source)
        return structs.replace(
            kernel,
            source_hash=self._fingerprint(kernel),
            variant=lambda config: self.variant(codec.decode(dict(config))),
            inspection=inspection,
        )

    def _signature(self, source: str) -> tuple[list[str], set[int]]:
        """Return the name of each argument, and the arrays that the code declares not to be written, by position."""
        plain = self.name.partition("<")[0].rpartition("::")[2].strip()
        function = next((each for each in global_functions(source) if each.name == plain), None)
        if function is None or len(function.parameters) != len(self.arguments):
            return [f"arg{index}" for index in range(len(self.arguments))], set()
        constant = set()
        for index, (_, kind) in enumerate(function.parameters):
            pointed, _, _ = kind.rpartition("*")
            if re.search(r"\bconst\b", pointed) and "*" not in pointed and "const_cast" not in source:
                constant.add(index)
        names = [f"arg{index}_{name}" if name else f"arg{index}" for index, (name, _) in enumerate(function.parameters)]
        return names, constant

    def _reference(self, names: Sequence[str], written: Sequence[int], answered: Sequence[int]) -> dict[str, Any]:
        if not written:
            raise InputError(f"{self.name} has no array that it could write; all are const in its signature")
        answer = self.answer
        if self.check is not None or answer is None or not answered:
            is_compared = self.is_agreement and self.check is None
            return {"verify": "agreement" if is_compared else "nothing"}
        outputs = {}
        for index in answered:
            expected, array = host_array(answer[index]), self.arrays[index]
            if expected is None or expected.size != array.size:
                size = expected.size if expected is not None else type(answer[index]).__name__
                raise InputError(f"answer[{index}] has {size} elements, expected {array.size} as argument {index} has")
            outputs[names[index]] = {"file": save_array(np.ascontiguousarray(expected).reshape(-1))}
        tolerance = {"absolute": float(self.atol), "relative": _RELATIVE_TOLERANCE}
        unchecked = [names[index] for index in written if index not in answered]
        return {
            "outputs": outputs,
            "tolerance": dict.fromkeys(outputs, tolerance),
            **({"unchecked": unchecked} if unchecked else {}),
        }

    def _fingerprint(self, kernel: Kernel) -> str:
        """Return a hash of the source and the launch of sampled configurations.

        Both may be functions, which cannot be compared. It covers also the author's headers that the hash of a kernel's
        source does not: in folders that ``compiler_options`` names, or included by some configurations only.
        """
        random, digest = Random(1), hashlib.sha256(kernel.source_hash.encode())
        encoded = {name: values for name, values in self.codec.values.items() if not self.codec.is_plain[name]}
        digest.update(repr(encoded).encode())
        if self.check is not None:  # which results are right depends on it
            answer = [(each, host_array(each)) for each in self.answer or ()]
            held = [each if array is None else (array.dtype.str, array.tobytes()) for each, array in answer]
            digest.update(repr((self.check_name, self.atol, held)).encode())
        for _ in range(_SAMPLES):
            params = self.codec.draw(random)
            try:
                launch = self.grid(params), self.block(params), self.dynamic_smem_bytes(params)
                made = self.variant(params)
            except Exception as error:  # a configuration that the restrictions may exclude
                launch, made = ((0, 0, 0), (0, 0, 0), 0), (type(error).__name__, ())
            digest.update(repr((launch, made)).encode(errors="surrogatepass"))
        is_varied = callable(self._first) or callable(self.options)
        counts = [len(values) for values in self.codec.values.values()] if is_varied else [1]
        further: frozenset[Path] = frozenset()
        for number in range(max(counts)):  # each value of each parameter
            params = {name: values[number % len(values)] for name, values in self.codec.values.items()}
            try:
                source, options = self.variant(params)
            except Exception:  # a configuration that the restrictions may exclude
                continue
            further |= sources_with_options(kernel.template_path, source, kernel.include_folders, options).included
        further -= OwnSources(kernel.template_path, kernel.source, kernel.include_folders).included
        for header in sorted(further):
            digest.update(header.name.encode(errors="surrogateescape") + read_bytes(header, "included file"))
        return digest.hexdigest()


def block_names(given: Sequence[str] | None, parameters: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the block's extents: those of ``block_size_names``, else the default ones, in any case."""
    if given is not None:
        if not isinstance(given, list | tuple) or len(given) > 3 or not all(isinstance(name, str) for name in given):
            raise InputError(f"block_size_names is {given!r}, expected a list of at most three names")
        return (*given, *default_block_size_names[len(given) :])
    names = list(parameters)
    spelled = {name.lower(): name for name in names if name.lower() not in names}
    return tuple(spelled.get(name, name) for name in default_block_size_names)


def _divisor(given: Any, name: str, params: Params) -> float:
    """Return the divisor of a dimension of the problem: the block's extent if nothing is given."""
    if given is None:
        return float(params.get(name, 1))
    if callable(given):
        return float(given(params))
    if isinstance(given, str):
        return float(int(evaluate(given, params)))
    if isinstance(given, Integral):
        return float(given)
    if isinstance(given, Iterable):
        return math.prod(_divisor(each, "", params) if each is not None else 1.0 for each in given)
    raise InputError(f"a grid divisor is {given!r}, expected a number, text, a function, or a list of these")


def _macro_text(value: Any) -> str:
    plain = int(value) if isinstance(value, bool) else value
    return str(plain).replace("\n", "\\\n")


_DROPPED = ("-O0", "-O1", "-O2", "-O3", "-O4", "-c", "-shared", "--shared", "-cubin", "-ptx")
_DROPPED_PREFIXES = (
    *("-W", "-arch", "--gpu-architecture", "-gencode", "--generate-code", "-code", "--gpu-code"),
    *("-Xcompiler", "--compiler-options", "-ccbin", "--compiler-bindir", "-Xlinker", "-L", "-l", "--library"),
)
_WITH_VALUE = ("-Xcompiler", "--compiler-options", "-ccbin", "-gencode", "-arch", "-code", "-Xlinker")


def nvrtc_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options of a compiler that NVRTC has, too; the target and those for the host compiler are left out."""
    if not isinstance(options, Sequence) or isinstance(options, str) or any(not isinstance(o, str) for o in options):
        raise InputError(f"compiler_options is {options!r:.80}, expected a list of texts")
    kept: list[str] = []
    words = iter(options)
    for option in words:
        if option in _WITH_VALUE:
            next(words, None)
        elif option in ("-I", "--include-path"):
            kept.append(f"-I{Path(next(words, '.')).absolute()}")
        elif option.startswith("-I"):
            kept.append(f"-I{Path(option[2:]).absolute()}")
        elif option in ("-Xptxas", "--ptxas-options"):
            kept.append(f"--ptxas-options={next(words, '')}")
        elif option.startswith("-lineinfo") or not (option in _DROPPED or option.startswith(_DROPPED_PREFIXES)):
            kept.append(option)
    return tuple(kept)


def host_array(value: Any) -> NDArray[Any] | None:
    """Return an array of NumPy, CuPy or PyTorch as one of NumPy; None if the value is no array."""
    return np.asarray(value.detach().cpu()) if library_name(value) == "torch" else as_array(value)


def library_name(value: Any) -> str:
    """Return the name of the package that a value's class is of."""
    return type(value).__module__.partition(".")[0]


def is_on_gpu(value: Any) -> bool:
    """Test for an array of CuPy, or a CUDA tensor of PyTorch, on which a kernel works in place."""
    library = library_name(value)
    return bool(value.is_cuda) if library == "torch" else library == "cupy" and hasattr(value, "get")


def restored_form(stored: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Return the content of a buffer in the type and the shape of the argument that it was made from."""
    return stored.reshape(-1).view(like.dtype)[: like.size].reshape(like.shape)


def _element_type(array: NDArray[Any]) -> str:
    """Return the name of the element type that a buffer of an array has; bytes for types that autotile lacks."""
    if array.dtype.kind in "OU":
        raise InputError(f"{array!r:.80} has the element type {array.dtype}; expected numbers")
    name = dtype_name(array.dtype)
    return name if name in DTYPES else "uint8"


def _buffer_table(array: NDArray[Any], *, access: str) -> dict[str, Any]:
    """Return the entry of an array, whose elements are stored in a file; one zero for an empty one."""
    flat = np.ascontiguousarray(array).reshape(-1) if array.size else np.zeros(1, array.dtype)
    storage = np.dtype(DTYPES[_element_type(flat)].storage)
    stored = flat.view(storage) if flat.dtype != storage else flat
    return {
        "buffer": _element_type(array),
        "shape": [stored.size],
        "access": access,
        "file": save_array(stored),
        "whole": True,
    }


def _scalar_table(index: int, argument: Any) -> dict[str, Any]:
    if argument is None:
        return {"scalar": "uint64", "value": 0}  # a null pointer
    if not isinstance(argument, np.generic | int | float | np.ndarray):
        raise InputError(
            f"argument {index} is {type_text(type(argument))}, expected an array of NumPy, CuPy or PyTorch, a NumPy "
            "number such as numpy.int32(5), or None for a null pointer"
        )
    value = np.asarray(argument)
    plain = value.item()
    if isinstance(plain, complex):
        return {"scalar": str(value.dtype), "value": [plain.real, plain.imag]}
    return {"scalar": _element_type(value), "value": plain}


session_folder = cache(private_folder)
"""Returns a folder of this process, which is removed when it ends."""


def save_array(array: NDArray[Any]) -> str:
    """Write an array of one axis to the folder of this process, and return the file's name.

    The name is that of the content, so that equal arrays share a file.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    digest = hashlib.sha256(header.getvalue())
    digest.update(array.view(np.uint8).data if array.size else b"")
    path = session_folder() / f"{digest.hexdigest()[:40]}.npy"
    if not path.exists():
        try:
            np.save(path, array, allow_pickle=False)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise InputError(f"cannot write an argument to {path.parent}: {error.strerror}; set TMPDIR") from None
    return path.name
