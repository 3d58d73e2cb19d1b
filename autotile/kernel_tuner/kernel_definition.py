"""A kernel of autotile from the arguments of Kernel Tuner's `tune_kernel` and `run_kernel`, and one launch of it."""

from __future__ import annotations

import hashlib
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.documents import toml_text
from autotile.core.dtypes import load_npy
from autotile.core.model import Config, Outcome, config_text
from autotile.cuda.compiler import compile_job
from autotile.cuda.driver import device_count, live_device
from autotile.errors import InputError
from autotile.kernel.computed import ConfigFunction, computed_values
from autotile.kernel.library import Inspection, Kernel, Variant, make_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import resolve_problem
from autotile.kernel.sources import GlobalFunction, global_functions, included_files, read_bytes, sources_with_options
from autotile.kernel_tuner.files import (
    element_type,
    host_array,
    is_on_gpu,
    restored_form,
    save_array,
    session_folder,
    stored_form,
    write_to_gpu,
)
from autotile.kernel_tuner.kernel_source import KernelSource, KernelTunerLaunch, Macros
from autotile.kernel_tuner.parameter_codec import ParameterCodec
from autotile.kernel_tuner.restrictions import restriction_rules
from autotile.settings import read_settings
from autotile.space.limits import check_config
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Candidate, Entry, Time, Workload

_RELATIVE_TOLERANCE = 1e-5
"""Relative tolerance of `numpy.allclose`, by which Kernel Tuner compares."""
_MAX_SIZE = 2**31 - 1
_SAMPLES = 64
"""Configurations by whose source and launch a kernel is told from another one of the same name."""

Check = Callable[[Mapping[str, Any], Mapping[int, NDArray[Any]]], tuple[str, Mapping[str, float | str]]]
"""Function of a configuration and the stored contents of arguments by position; see `Inspection`."""


@dataclass(frozen=True)
class KernelTunerKernel:
    """A kernel as Kernel Tuner's arguments describe it.

    Attributes
    ----------
    name
        Name of the ``__global__`` function, with template arguments if it is a template.
    source
        Its source.
    launch
        Its launch.
    macros
        The macros of a configuration.
    arguments
        Arrays of NumPy, CuPy or PyTorch, NumPy numbers, and None for a null pointer.
    codec
        The parameters.
    restrictions
        In any form that `restriction_rules` takes.
    constants
        Arrays for ``__constant__`` variables, by name.
    answer
        Expected content of each argument after a launch, None where it is not compared; None for no answer.
    atol
        Absolute tolerance of the comparison.
    is_agreement
        Whether configurations are compared with each other where there is no answer.
    check
        Check of the outputs by a function, which takes the place of the comparison; None for none.
    """

    name: str
    source: KernelSource
    launch: KernelTunerLaunch
    macros: Macros
    arguments: Sequence[Any]
    codec: ParameterCodec
    restrictions: Any = None
    constants: Mapping[str, Any] | None = None
    answer: Sequence[Any] | None = None
    atol: float = 1e-6
    is_agreement: bool = False
    check: Check | None = None

    def build(self) -> Kernel:
        """Return the kernel for autotile.

        Raises
        ------
        InputError
            An argument cannot be used.
        """
        source = self.source.variant(self.macros, self._sample(random.Random(0)))
        names = self._argument_names(source)
        document = self._document(names, source)
        file = session_folder() / f"{self._plain_name}.toml"
        spec = parse_spec(
            toml_text(document),
            str(file),
            predicates=restriction_rules(self.restrictions, self.codec),
            functions=self._functions(),
        )
        template = self.source.path or Path.cwd() / f"{self._plain_name}.cu"
        kernel = make_kernel(spec, template, source)
        return replace(
            kernel,
            source_hash=self._fingerprint(kernel),
            variant=self._variant,
            inspection=self._inspection(names),
        )

    @property
    def arrays(self) -> dict[int, NDArray[Any]]:
        """The arguments that are arrays, by position."""
        found = {index: host_array(argument) for index, argument in enumerate(self.arguments)}
        return {index: array for index, array in found.items() if array is not None}

    @property
    def checked(self) -> tuple[int, ...]:
        """Positions of the arrays that `check` receives: those of the answer, or all without an answer."""
        if self.answer is None:
            return tuple(self.arrays)
        return tuple(index for index in self.arrays if self.answer[index] is not None)

    @property
    def _plain_name(self) -> str:
        words = re.findall(r"[A-Za-z]\w*", self.name.partition("<")[0])
        return str(words[-1]) if words else "kernel"

    def _document(self, names: Sequence[str], source: str) -> dict[str, Any]:
        problem = self._problem_sizes()
        block = [self._block_expression(axis) for axis in range(3)]
        return {
            "kernel": {"name": self._plain_name, "template": f"{self._plain_name}.cu", "entry": self.name},
            "problem": {"sizes": problem, "ragged": problem},
            "parameters": self.codec.declared,
            "computed": dict.fromkeys(self._functions(), "number"),
            "launch": {
                "block": block,
                "grid": [f"computed.grid_{axis}" for axis in "xyz"],
                **({"dynamic_smem_bytes": "computed.smem"} if self.launch.smem_args else {}),
            },
            "arguments": {**self._argument_tables(names, source), **self._constant_tables(names)},
            "reference": self._reference(names, source),
        }

    def _block_expression(self, axis: int) -> str:
        name, default = self.launch.names[axis], self.launch.block({})[axis]
        values = self.codec.declared.get(name)
        if values is None:
            return str(default)
        is_number = self.codec.is_plain[name] and all(type(value) is int for value in values)
        return name if is_number else f"computed.block_{'xyz'[axis]}"

    def _problem_sizes(self) -> dict[str, int]:
        """Return the extents of the problem that are plain numbers, which are part of the key of results."""
        given = self.launch.problem_size
        extents = given if isinstance(given, tuple | list) else (given,)
        numbers = {
            axis: int(extent)
            for axis, extent in zip("xyz", extents, strict=False)
            if isinstance(extent, int | np.integer) and 1 <= extent <= _MAX_SIZE
        }
        taken = {*self.codec.values, *self._argument_names("")}
        return {f"problem_{axis}" if axis in taken else axis: n for axis, n in numbers.items()} or {"problem_x": 1}

    def _functions(self) -> dict[str, ConfigFunction]:
        """Return the functions of ``[computed]``: the launch of a configuration."""

        def extent(of: Callable[[Mapping[str, Any]], Sequence[int]], axis: int) -> ConfigFunction:
            return lambda config: of(self.codec.decode(config))[axis]

        functions = {f"grid_{name}": extent(self.launch.grid, axis) for axis, name in enumerate("xyz")}
        functions |= {f"block_{name}": extent(self.launch.block, axis) for axis, name in enumerate("xyz")}
        if self.launch.smem_args:
            functions["smem"] = lambda config: self.launch.dynamic_smem_bytes(self.codec.decode(config))
        return functions

    def _variant(self, config: Config) -> Variant:
        return self._variant_of(dict(self.codec.decode(dict(config))))

    def _variant_of(self, params: Mapping[str, Any]) -> Variant:
        return Variant(self.source.variant(self.macros, params), self.source.compiler_options(params))

    def _argument_names(self, source: str) -> list[str]:
        """Return the name of each argument: that of the code where it is known and not taken."""
        function = self._function(source)
        declared = [p.name for p in function.parameters] if function is not None else []
        if len(declared) != len(self.arguments):
            declared = [""] * len(self.arguments)
        return [f"arg{index}_{name}" if name else f"arg{index}" for index, name in enumerate(declared)]

    def _function(self, source: str) -> GlobalFunction | None:
        plain = self.name.partition("<")[0].rpartition("::")[2].strip()
        return next((each for each in global_functions(source) if each.name == plain), None)

    def _is_const(self, index: int, source: str) -> bool:
        """Return whether the code declares that the kernel does not write an array."""
        function = self._function(source)
        if function is None or len(function.parameters) != len(self.arguments):
            return False
        pointed, _, _ = function.parameters[index].type.rpartition("*")
        return re.search(r"\bconst\b", pointed) is not None and "*" not in pointed and "const_cast" not in source

    def _argument_tables(self, names: Sequence[str], source: str) -> dict[str, Any]:
        arrays = self.arrays
        return {
            name: self._array_table(arrays[index], index, source) if index in arrays else _scalar_table(index, argument)
            for index, (name, argument) in enumerate(zip(names, self.arguments, strict=True))
        }

    def _array_table(self, array: NDArray[Any], index: int, source: str) -> dict[str, Any]:
        stored = stored_form(array)
        is_written = not self._is_const(index, source) or (self.answer is not None and self.answer[index] is not None)
        return {
            "buffer": element_type(array),
            "shape": [stored.size],
            "access": "inout" if is_written else "in",
            "file": save_array(stored),
            "whole": True,
        }

    def _constant_tables(self, names: Sequence[str]) -> dict[str, Any]:
        tables: dict[str, Any] = {}
        for symbol, value in (self.constants or {}).items():
            array = host_array(value)
            stored = stored_form(np.asarray(value) if array is None else array)
            tables[f"constant_{symbol}"] = {
                "buffer": element_type(np.asarray(value) if array is None else array),
                "shape": [stored.size],
                "access": "in",
                "file": save_array(stored),
                "whole": True,
                "constant": symbol,
            }
        return tables

    def _reference(self, names: Sequence[str], source: str) -> dict[str, Any]:
        written = [index for index in self.arrays if not self._is_const(index, source) or index in self._answered()]
        if not written:
            raise InputError(f"{self.name} has no array that it could write; all are const in its signature")
        if self.check is not None or self.answer is None or not self._answered():
            is_compared = self.is_agreement and self.check is None
            return {"verify": "agreement" if is_compared else "nothing"}
        tolerance = {"absolute": float(self.atol), "relative": _RELATIVE_TOLERANCE}
        unchecked = [names[index] for index in written if index not in self._answered()]
        return {
            "outputs": {names[index]: {"file": self._answer_file(index)} for index in self._answered()},
            "tolerance": {names[index]: tolerance for index in self._answered()},
            **({"unchecked": unchecked} if unchecked else {}),
        }

    def _answered(self) -> tuple[int, ...]:
        return self.checked if self.answer is not None else ()

    def _answer_file(self, index: int) -> str:
        assert self.answer is not None
        expected, array = host_array(self.answer[index]), self.arrays[index]
        if expected is None or expected.size != array.size:
            size = expected.size if expected is not None else type(self.answer[index]).__name__
            raise InputError(f"answer[{index}] has {size} elements, expected {array.size} as argument {index} has")
        return save_array(np.ascontiguousarray(expected).reshape(-1))

    def _inspection(self, names: Sequence[str]) -> Inspection | None:
        check = self.check
        if check is None:
            return None
        positions = self.checked

        def inspect(config: Config, contents: Mapping[str, NDArray[Any]]) -> tuple[str, Mapping[str, float | str]]:
            return check(self.codec.decode(dict(config)), {index: contents[names[index]] for index in positions})

        return Inspection(tuple(names[index] for index in positions), inspect, str(session_folder()))

    def _sample(self, draw: random.Random) -> dict[str, Any]:
        return {name: draw.choice(values) for name, values in self.codec.values.items()}

    def _fingerprint(self, kernel: Kernel) -> str:
        """Return a hash of what the source and the launch of sampled configurations are.

        Both may be functions, which cannot be compared.
        """
        draw, digest = random.Random(1), hashlib.sha256(kernel.source_hash.encode())
        encoded = {name: values for name, values in self.codec.values.items() if not self.codec.is_plain[name]}
        digest.update(repr(encoded).encode())
        for _ in range(_SAMPLES):
            params = self._sample(draw)
            try:
                launch = self.launch.grid(params), self.launch.block(params), self.launch.dynamic_smem_bytes(params)
                made = self.source.variant(self.macros, params), self.source.compiler_options(params)
            except Exception as error:  # a configuration that the restrictions may exclude
                launch, made = ((0, 0, 0), (0, 0, 0), 0), (type(error).__name__, ())
            digest.update(repr((launch, made)).encode(errors="surrogatepass"))
        for header in sorted(self._further_headers(kernel)):
            digest.update(header.name.encode(errors="surrogateescape") + read_bytes(header, "included file"))
        return digest.hexdigest()

    def _further_headers(self, kernel: Kernel) -> frozenset[Path]:
        """Return the author's headers besides those that the hash of a kernel's source covers.

        They are in folders that ``compiler_options`` names, or included by the source of some configurations only.
        """
        counts = (
            map(len, self.codec.values.values()) if self.source.is_generated or callable(self.source.options) else ()
        )
        further: frozenset[Path] = frozenset()
        for number in range(max(counts, default=1)):  # each value of each parameter
            params = {name: values[number % len(values)] for name, values in self.codec.values.items()}
            try:
                source, options = self._variant_of(params)
            except Exception:  # a configuration that the restrictions may exclude
                continue
            further |= sources_with_options(kernel.template_path, source, kernel.include_folders, options).included
        return further - included_files(kernel.template_path, kernel.source, kernel.include_folders)


def _scalar_table(index: int, argument: Any) -> dict[str, Any]:
    if argument is None:
        return {"scalar": "uint64", "value": 0}  # a null pointer
    if not isinstance(argument, np.generic | int | float | np.ndarray):
        raise InputError(
            f"argument {index} is a {type(argument).__name__}, expected an array of NumPy, CuPy or PyTorch, a NumPy "
            "number such as numpy.int32(5), or None for a null pointer"
        )
    value = np.asarray(argument)
    plain = value.item()
    if isinstance(plain, complex):
        return {"scalar": str(value.dtype), "value": [plain.real, plain.imag]}
    return {"scalar": element_type(value), "value": plain}


_COMPILE_DEADLINE_S = 120.0
_RUN_DEADLINE_S = 300.0


def run_once(described: KernelTunerKernel, device_index: int) -> list[Any]:
    """Launch the only configuration of a kernel once, in a process of its own.

    Arguments that are arrays on a GPU get what the kernel wrote, as if it had been launched on them.

    Returns
    -------
    list
        The arguments after the launch: arrays of NumPy, and the others as they are.

    Raises
    ------
    InputError
        There is no GPU, the configuration exceeds its limits, does not compile, or its launch fails.
    """
    kernel = described.build()
    if device_index >= device_count():
        raise InputError(
            f"there is no CUDA device {device_index} here, and run_kernel needs one; see `autotile doctor`"
        )
    device = live_device(device_index)
    problem = resolve_problem(kernel.spec, {}, None, defaults=True)
    config = dict(kernel.spec.default)
    if reason := check_config(kernel.spec, config, problem.sizes, device, problem.dtype):
        raise InputError(f"{described.name} cannot run with {config_text(config)}: {reason}")
    settings = read_settings()
    job = compile_job(kernel, config, problem.dtype, device.architecture, problem.sizes)
    compiled = compile_in_worker(job, settings, _COMPILE_DEADLINE_S)
    if compiled.cubin is None:
        raise InputError(f"{described.name} does not compile: {compiled.reason}")
    names = [buffer.name for buffer in kernel.spec.buffers if buffer.is_written]
    with tempfile.TemporaryDirectory(dir=session_folder()) as folder:
        workload = Workload(
            spec_text=kernel.spec.text,
            spec_source=kernel.spec.source,
            sizes=problem.sizes,
            dtype=problem.dtype,
            l2="hot",
            cache=str(settings.cache),
            cache_limit_bytes=settings.cache_limit_bytes,
            sample_limit_s=0.0,
            device_index=device_index,
            captured=tuple(names),
            capture_folder=folder,
        )
        computed = computed_values(kernel.spec.computed, config)
        candidate = Candidate(config, str(compiled.cubin.path), compiled.cubin.symbols, computed)
        gpu = Gpu(workload, _RUN_DEADLINE_S)
        try:
            (evaluation,) = gpu.time(Time((Entry(candidate),)))
        finally:
            gpu.close()
        if evaluation.outcome is not Outcome.OK or not evaluation.captured:
            raise InputError(f"{described.name} failed with {config_text(config)}: {evaluation.reason}")
        contents = {name: load_npy(Path(evaluation.captured) / f"{name}.npy") for name in names}
    return _returned(described, [argument.name for argument in kernel.spec.arguments], contents)


def _returned(described: KernelTunerKernel, names: list[str], contents: Mapping[str, NDArray[Any]]) -> list[Any]:
    """Return the arguments in their own types and shapes, those that a kernel cannot write as copies."""
    returned: list[Any] = list(described.arguments)
    for index, array in described.arrays.items():
        stored = contents.get(names[index])
        returned[index] = array.copy() if stored is None else restored_form(stored, array)
        if is_on_gpu(described.arguments[index]) and returned[index].tobytes() != array.tobytes():
            write_to_gpu(described.arguments[index], returned[index])  # unchanged, it may be another argument, too
    return returned
