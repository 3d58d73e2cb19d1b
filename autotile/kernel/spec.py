"""A kernel with its search space, metrics and objective, as declared in a search-space file; see docs/file-format.md.

The smaller parts are named tuples: the first look-up of a process defines them all, and defining a dataclass takes six
times as long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import structs

from autotile.core.documents import Name
from autotile.core.dtypes import DTYPES
from autotile.core.forks import cached_property
from autotile.core.model import DTYPE_BYTES, OBJECTIVE, Config, Problem, Sizes, Value, Values, config_text
from autotile.core.text import html_of, plural
from autotile.errors import ConfigError, SpecError, listing
from autotile.kernel.arguments import (
    Argument,
    BufferArgument,
    ElementType,
    ScalarArgument,
    StructArgument,
    TensorMapArgument,
    WorkspaceArgument,
    arguments_of_kind,
)
from autotile.kernel.contents import InputExpression, InputFile, declared_file
from autotile.kernel.expressions import (
    ArrayExpression,
    Expression,
    Location,
    is_c_identifier,
    parse_array_expression,
    parse_expression,
)
from autotile.kernel.functions import Kind, Kinds
from autotile.kernel.table import ProblemSection, Table, check_names, describe, stating

COMPILERS = ("nvrtc", "nvcc")

KNOWN_OPTIONS = (
    "--use_fast_math",
    "--extra-device-vectorization",
    "--restrict",
    *(f"--{name}={value}" for name in ("ftz", "prec-div", "prec-sqrt", "fmad") for value in ("true", "false")),
    *(f"--std=c++{year}" for year in (14, 17, 20)),
    "--maxrregcount=",
    "--generate-line-info",
    "--ptxas-options=",
)
"""Options that a message suggests for one that is misspelled."""

_FORBIDDEN_NAMES = (
    "I include-path D define-macro U undefine-macro pre-include include isystem system-include x L l library "
    "library-path pch create-pch use-pch pch-dir pch-messages instantiate-templates-in-pch time fdevice-time-trace "
    "options-file optf output-file output-directory odir o keep keep-dir save-temps gpu-architecture arch gpu-code "
    "code gencode generate-code dlink-time-opt dlto gen-opt-lto ltoir lto optix-ir relocatable-device-code rdc "
    "device-c dc device-link dlink compile c cubin ptx fatbin lib link run run-args dryrun compiler-bindir ccbin "
    "compiler-options Xcompiler linker-options Xlinker archive-options Xarchive nvlink-options Xnvlink "
    "forward-unknown-to-host-compiler forward-unknown-opts forward-unknown-to-host-linker forward-slash-prefix-opts "
    "cudart cudadevrt libdevice-directory ldir target-directory tdir input-drive-prefix idp dependency-drive-prefix "
    "ddp drive-prefix dp no-cache M MM MD MMD MF MT MP generate-dependencies dependency-output version V help h "
    "clean-targets use-local-env threads t input-as-string ias fdevice-syntax-only preprocess E machine m qpp-config "
    "config"
)
"""Options that read or write files, replace the input, or belong to autotile."""
_FLAG_NAMES = (
    "use_fast_math lineinfo generate-line-info restrict extra-device-vectorization device-debug G minimal w "
    "disable-warnings device-int128 device-float128 device-as-default-execution-space default-device extended-lambda "
    "expt-extended-lambda expt-relaxed-constexpr brief-diagnostics device-stack-protector"
)
"""Options without a value; ``=true`` and ``=false``, as a boolean parameter gives them, set and omit them."""
_NVCC_NAMES = (
    "O O0 O1 O2 O3 optimize expt-relaxed-constexpr expt-extended-lambda extended-lambda resource-usage res-usage "
    "Wno-deprecated-gpu-targets"
)
"""Options of nvcc that NVRTC has no equivalent of, because it always does so or has no host code."""
_FORBIDDEN, _FLAGS, _NVCC_ONLY = (frozenset(names.split()) for names in (_FORBIDDEN_NAMES, _FLAG_NAMES, _NVCC_NAMES))
_CONTROLS = "apply-controls"
"""Option of the assembler that names a file of compiler controls."""
_NOT_OWN = (
    "options that read or write files, define macros, or choose the output or the target are not; use the keys "
    "defines, include or architecture"
)
_ATTACHED = r"-[IDULl](?!ineinfo\b)"
"""An option of one letter with its value attached."""
_OPTION = r"(?as)-{1,2}([A-Za-z][\w-]*)(?:=(.*))?"
_SAFE_VALUE = r"(?a)(?!.*\.\.)[\w.,+:%-]*"
_FILE_NAME = r"(?a)\w[\w.-]*"
_CPP_LITERAL = r"(['\"])(\\.|(?!\1)[^\\])*\1"
_PLACEHOLDER = r"\{([^{}]*)\}"
_MAX_TEXT = 1000
_MISSPELLED = 0.9
"""Similarity above which an unknown option is taken for a known one that is misspelled."""


class Build(msgspec.Struct, frozen=True):
    """How a kernel is compiled."""

    options: Mapping[str, tuple[str | Expression, ...]] = {}
    """Parts of each option by its text: the expressions in braces, and the text between them."""
    defines: Mapping[str, Expression | str] = {}
    """Expression, or literal text, of each macro besides those of the parameters and flags."""
    compiler: str = "nvrtc"

    @property
    def names(self) -> frozenset[str]:
        """Names that options and macros depend on, besides the parameters and flags that are macros themselves."""
        parts = (*self.defines.values(), *(piece for pieces in self.options.values() for piece in pieces))
        return frozenset().union(*(part.names for part in parts if isinstance(part, Expression)))

    def arguments(self, names: Values) -> tuple[str, ...]:
        """Return the options of the compiler, given the value of every name.

        Raise `ConfigError` if an expression has no value, or its value makes an option that is not accepted.
        """
        found: list[str] = []
        for text, pieces in self.options.items():
            values = (piece if isinstance(piece, str) else piece.value(names) for piece in pieces)
            filled = "".join(str(value).lower() if isinstance(value, bool) else macro_text(value) for value in values)
            try:
                found += _normalized(filled)
            except ValueError as error:
                raise ConfigError(f"the compiler option {text!r} becomes {filled!r:.200}: {error}") from None
        if self.compiler == "nvcc":
            return tuple(found)
        named = ((one, re.fullmatch(_OPTION, one)) for one in found)
        return tuple(one for one, match in named if match is None or match[1] not in _NVCC_ONLY)

    def macros(self, names: Values) -> dict[str, str]:
        """Return the texts of the further macros."""
        return {name: v if isinstance(v, str) else macro_text(v.value(names)) for name, v in self.defines.items()}

    def meaning(self) -> dict[str, object]:
        """Return the part of `autotile.database.keys.space_hash` besides the options; empty at the defaults."""
        meaning: dict[str, object] = {}
        if self.defines:
            values = {name: v if isinstance(v, str) else ["=", v.canonical] for name, v in self.defines.items()}
            meaning["defines"] = dict(sorted(values.items()))
        if self.compiler != "nvrtc":
            meaning["compiler"] = self.compiler
        return meaning


def controls_file(option: str) -> str:
    """Return the name of the file of compiler controls that an option names; "" for other options."""
    name, _, value = option.partition(f"--{_CONTROLS}=")
    return value if name == "--ptxas-options=" else ""


def macro_text(value: Value) -> str:
    """Return the value of a macro as C++ text; booleans are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def parse_build(kernel: Table, kinds: Kinds, macros: Sequence[str]) -> Build:
    """Parse ``options``, ``defines`` and ``compiler`` of the section ``[kernel]``."""
    compiler = kernel.text("compiler", "nvrtc")
    if compiler not in COMPILERS:
        raise kernel.error("compiler", f"expected one of {', '.join(COMPILERS)}; got {describe(compiler)}")
    options = {text: _option(kernel, text, kinds) for text in kernel.texts("options", optional=True)}
    table = kernel.table("defines", optional=True)
    defines: dict[str, Expression | str] = {}
    for name, value in table.data.items():
        table.check_identifier(name)
        if name in macros or name == "DTYPE":
            raise table.error(name, f"{name!r} is a macro already, as every parameter and flag; use another name")
        if isinstance(value, bool | int | float) and (not isinstance(value, float) or math.isfinite(value)):
            defines[name] = macro_text(value)
            continue
        if not isinstance(value, str) or len(value) > _MAX_TEXT or (value and not value.isprintable()):
            expected = "expected one line of text, such as 'N', '1e-5f' or 'float4'"
            raise table.error(name, f"{expected}; got {describe(value)}")
        defines[name] = value
        if re.fullmatch(_CPP_LITERAL, value) is None:
            with suppress(SpecError):
                defines[name] = parse_expression(value, kinds, table.location(name))
    return Build(options, defines, compiler)


_SAMPLES: Mapping[str, str] = {"number": "1", "real": "1.0", "boolean": "true", "string": "name"}
"""A value of each kind, to check an option before its expressions have one."""


def _option(kernel: Table, text: str, kinds: Kinds) -> tuple[str | Expression, ...]:
    """Return the parts of an option: the expressions in braces, and the text between them."""
    if len(text) > _MAX_TEXT or not text.isprintable():
        expected = f"expected one line of at most {_MAX_TEXT} characters"
        raise kernel.error("options", f"{text[:60]!r} is not accepted: {expected}")
    pieces: list[str | Expression] = []
    position = 0
    for match in re.finditer(_PLACEHOLDER, text):
        pieces += [text[position : match.start()], parse_expression(match[1], kinds, kernel.location("options"))]
        position = match.end()
    pieces.append(text[position:])
    try:
        list(_normalized("".join(p if isinstance(p, str) else _SAMPLES[p.kind] for p in pieces)))
    except ValueError as error:
        raise kernel.error("options", f"{text[:60]!r} is not accepted: {error}") from None
    option = tuple(piece for piece in pieces if piece != "")
    if text in KNOWN_OPTIONS:
        return option
    import difflib  # rarely needed

    if near := difflib.get_close_matches(text, KNOWN_OPTIONS, n=1, cutoff=_MISSPELLED):
        name = near[0].partition("=")[0]
        if text.partition("=")[0].lstrip("-") != name.lstrip("-"):  # one dash or two: both compilers accept either
            raise kernel.error("options", f"{text[:60]!r} is not accepted; did you mean {near[0]!r}?")
    return option


def _normalized(text: str) -> Iterator[str]:
    """Yield an option as the compiler takes it; raise `ValueError` if it is not accepted."""
    words = text.split()
    if len(words) == 2 and "=" not in words[0]:
        words = ["=".join(words)]
    match = re.fullmatch(_OPTION, words[0]) if len(words) == 1 else None
    if match is None:
        raise ValueError("expected one option, such as '--maxrregcount=64' or '-Xptxas -dlcm=cg'")
    name, value = match[1], match[2]
    if name in ("Xptxas", "ptxas-options"):
        for inner in (value or "").split(","):
            if (match := re.fullmatch(_OPTION, inner)) is None:
                raise ValueError(f"{inner!r} is not an option of the assembler, such as -dlcm=cg")
            name, value = match[1], match[2]
            if name in _FORBIDDEN:
                raise ValueError(_NOT_OWN)
            if name == _CONTROLS:
                if re.fullmatch(_FILE_NAME, value or "") is None:
                    raise ValueError("expected the name of a file in the kernel's folder, without directories")
                inner = f"--{_CONTROLS}={value}"  # noqa: PLW2901 - with two dashes
            elif re.fullmatch(_SAFE_VALUE, value or "") is None:
                raise ValueError(f"the value of {name} may hold letters, digits and '_.,+:%-' only")
            yield f"--ptxas-options={inner}"
        return
    if re.match(_ATTACHED, words[0]) or name in _FORBIDDEN:
        raise ValueError(_NOT_OWN)
    if re.fullmatch(_SAFE_VALUE, value or "") is None:
        raise ValueError("its value may hold letters, digits and '_.,+:%-' only")
    if name in _FLAGS and value in ("true", "false"):
        if value == "true":
            yield words[0].partition("=")[0]
    elif name != "maxrregcount" or value != "0":  # which is no limit, as for nvcc
        yield words[0]


KERNEL_KEYS = ("template", "block", "grid", "dynamic_smem_bytes", "defines", "arguments", "element_type")
"""Keys of ``[reference]`` that only a reference kernel has."""

_MAX_DEFINES = 100
_TEMPLATE = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.cuh?"
_TEXT = r"(?a)[A-Za-z_]\w*(::[A-Za-z_]\w*)*|-?\.?\d[\w.+\-]*"
_NAME = r"(?a)[A-Za-z_]\w*(::[A-Za-z_]\w*)*(<[\w\s,:<>()+*/%.\-]*>)?"

Wide = Literal["float64"]
_WIDE = {"complex64": "complex128", "complex128": "complex128"}


class Launch(msgspec.Struct, frozen=True):
    """Launch geometry and declared resources, as expressions over parameters, sizes and ``device.*``."""

    block: tuple[Expression, ...]
    grid: tuple[Expression, ...]
    cluster: tuple[Expression, ...] = ()
    """Blocks of a cluster; empty if the kernel has no clusters. A launch sets them unless the template does."""
    dynamic_smem_bytes: Expression | None = None
    static_smem_bytes: Expression | None = None
    """Shared memory that the template declares statically; the limits apply to it before compilation."""
    min_registers: Expression | None = None
    """Lower bound on the registers of a thread (its accumulators, for example)."""
    is_cooperative: bool = False
    """Whether all blocks must be resident at once, as they wait for each other."""


class ReferenceKernel(NamedTuple):
    """A kernel that computes the expected outputs."""

    entry: str
    template: str | None
    """File name of its source, in the folder of the template; None for the template itself."""
    launch: Launch
    """Its block, grid and dynamic shared memory; parameters have the values of the default configuration."""
    defines: Mapping[str, Expression | str]
    """Macros besides those of the default configuration: an expression, or text."""
    arguments: tuple[str, ...] | None
    """Names of its arguments in order; None for those of the kernel."""
    element_type: Wide | None
    """``"float64"`` if every floating-point argument is passed in double precision, as for ``naive<double>``; None if
    the arguments have the types of the kernel's."""

    def meaning(self) -> dict[str, Any]:
        """Return its part of the space hash."""
        smem_bytes = self.launch.dynamic_smem_bytes
        return {
            "entry": self.entry,
            "template": self.template,
            "block": [extent.canonical for extent in self.launch.block],
            "grid": [extent.canonical for extent in self.launch.grid],
            "dynamic_smem_bytes": smem_bytes.canonical if smem_bytes else "0",
            "defines": {n: e if isinstance(e, str) else e.canonical for n, e in sorted(self.defines.items())},
            "arguments": self.arguments,
            "element_type": self.element_type,
        }

    def macros(self, names: Values) -> dict[str, Value]:
        """Return the values of the macros, given the value of every name."""
        return {name: v if isinstance(v, str) else v.evaluate(names) for name, v in self.defines.items()}


def _reference_kernel(table: Table, arguments: Sequence[Argument], kinds: Kinds) -> ReferenceKernel:
    entries = table.table("defines", optional=True)
    if len(entries.data) > _MAX_DEFINES:
        raise table.error("defines", f"at most {_MAX_DEFINES} macros are accepted")
    defines: dict[str, Expression | str] = {}
    for name, value in entries.data.items():
        if not is_c_identifier(name):
            raise entries.error(name, f"{name!r} is not the name of a macro")
        text = repr(value) if isinstance(value, bool | float) else value
        is_plain = isinstance(text, str) and text not in kinds and text not in ("True", "False")
        is_text = is_plain and re.fullmatch(_TEXT, text) is not None
        defines[name] = text if is_text else entries.any_expression(name, text, kinds)
    kernel = ReferenceKernel(
        table.matching("kernel", _NAME, 'the name of a __global__ function, such as "naive" or "naive<double>"'),
        table.matching("template", _TEMPLATE, "a bare file name that ends in .cu or .cuh")
        if "template" in table.data
        else None,
        Launch(
            table.expressions("block", kinds),
            table.expressions("grid", kinds),
            dynamic_smem_bytes=table.optional_expression("dynamic_smem_bytes", kinds),
        ),
        defines,
        table.texts("arguments") if "arguments" in table.data else None,
        "float64" if "element_type" in table.data else None,
    )
    names, known = kernel.arguments, [argument.name for argument in arguments]
    if names is not None:
        for name in names:
            table.check_known("arguments", name, known, "is not an argument of the kernel")
        for buffer in arguments_of_kind(arguments, BufferArgument):
            if buffer.is_written and buffer.name not in names:
                raise table.error("arguments", f"the buffer {buffer.name!r} is written by the kernel; add it")
    if kernel.element_type is not None:
        if (given := table.text("element_type")) != "float64":
            expected = 'expected "float64", to pass floating-point arguments in double precision, or no element_type'
            raise table.error("element_type", f"{describe(given)} is not accepted; {expected}")
        fixed = [argument.name for argument in arguments if argument.described_buffer]
        if fixed and names is None:
            fault = f"the tensor map {fixed[0]!r} has the type of its buffer; name the arguments"
            raise table.error("element_type", fault)
    return kernel


def reference_spec(spec: KernelSpec, problem: Problem) -> KernelSpec:
    """Return the reference kernel as a kernel of its own, without parameters that are tuned."""
    kernel, dtype = spec.reference.kernel, problem.dtype
    assert kernel is not None
    known = {argument.name: argument for argument in spec.arguments}
    names = kernel.arguments if kernel.arguments is not None else tuple(known)
    arguments = [known[name] for name in names]
    if kernel.arguments is not None:  # the address of a buffer is passed, also where the kernel reads constant memory
        arguments = [
            structs.replace(each, is_passed=True, constant="") if isinstance(each, BufferArgument) else each
            for each in arguments
        ]
    described = {target for argument in spec.arguments if argument.name in names for target in argument.targets}
    further = [b for b in spec.buffers if b.name not in names and (b.constant or b.name in described)]
    arguments += [structs.replace(buffer, is_passed=False) for buffer in further]  # which it reads in other ways
    for index, argument in enumerate(arguments) if kernel.element_type is not None else ():
        if not argument.is_passed:  # constant memory has the type that the source declares
            continue
        if isinstance(argument, BufferArgument | WorkspaceArgument):
            wide = ElementType(wide_type(argument.element_type(dtype, problem.sizes)))
            arguments[index] = structs.replace(argument, dtype=wide)
        elif isinstance(argument, ScalarArgument):
            arguments[index] = structs.replace(argument, dtype=wide_type(argument.element_type(dtype)))
    passed = tuple(argument.name for argument in arguments if argument.is_passed)
    return replace(spec, steps=(Step(kernel.entry, kernel.launch, passed),), arguments=tuple(arguments))


def wide_type(dtype: str) -> str:
    """Return the type of double precision for a floating-point type or vector; other types are returned unchanged."""
    kind = DTYPES[dtype]
    if kind.components:
        return f"double{kind.components}" if not kind.component.is_integer else dtype
    return dtype if kind.is_integer else _WIDE.get(dtype, "float64")


class Tolerance(NamedTuple):
    """Allowed error of an element: ``absolute + relative * max(|expected|, scale)``.

    The scale is the root mean square of the output's expected values; with ``is_elementwise`` it is 0, as in
    `numpy.isclose`.
    """

    relative: float
    absolute: float = 0.0
    is_elementwise: bool = False

    def text(self, scale: float) -> str:
        """Return the criterion for outputs of the given scale as text."""
        largest = "|expected|" if self.is_elementwise else f"max(|expected|, {scale:.3g})"
        parts = [f"{self.absolute:.2g}"] if self.absolute else []
        if self.relative or not parts:
            parts.append(f"{self.relative:.2g} of {largest}")
        return " and ".join(parts)

    def meaning(self) -> Any:
        """Return its part of the space hash."""
        return {"absolute": self.absolute, "relative": self.relative} if self.is_elementwise else self.relative


class Reference(NamedTuple):
    """How the expected outputs are computed, and how closely a kernel must match them."""

    outputs: Mapping[str, ArrayExpression]
    """Expression of the values of each output, in float64; empty for the other forms."""
    reduction: Expression
    """Number of terms summed into each output element; the tolerance grows with its square root."""
    tolerance: float | None
    tolerances: Mapping[str, Tolerance] = {}
    """Tolerances of single outputs, which take precedence."""
    kernel: ReferenceKernel | None = None
    files: Mapping[str, InputFile] = {}
    """File of the values of each output that is not an expression, at the default sizes."""
    function: str | None = None
    """Name of the Python function that computes the outputs; the function itself is attached to the kernel."""
    is_agreement: bool = False
    """Whether there is no reference, and configurations are compared with each other."""
    comparison: str | None = None
    """Name of the Python function that compares the outputs, instead of tolerances; it is attached to the kernel."""
    unchecked: tuple[str, ...] = ()
    """Written buffers that are not compared with anything."""

    @property
    def notice(self) -> str:
        """Notice to the user on results that were verified with it, as one line; "" for nothing."""
        if self.is_agreement:
            return (
                "NO REFERENCE: configurations were only compared with each other, so an error that they share is not "
                "found; add a reference"
            )
        if self.comparison is not None:
            name = self.comparison.partition("-")[0]
            return f"outputs were compared by {name}, once for each configuration, at the tuned sizes only"
        if self.files:
            return (
                f"the reference of {', '.join(self.files)} is a file: it was compared at the default sizes only, "
                "not at the ragged ones"
            )
        if self.unchecked:
            return f"NOT VERIFIED: nothing was compared with {', '.join(self.unchecked)}"
        return ""

    def meaning(self) -> dict[str, Any]:
        """Return its part of the space hash; what is at its default is left out."""
        further: dict[str, Any] = {
            "tolerances": {name: t.meaning() for name, t in sorted(self.tolerances.items())} or None,
            "reference_kernel": self.kernel and self.kernel.meaning(),
            "reference_files": {name: file.content_hash for name, file in self.files.items()} or None,
            "reference_function": self.function,
            "comparison": self.comparison,
            "verify": "agreement" if self.is_agreement else None,
            "unchecked": sorted(self.unchecked) or None,
        }
        return {
            "outputs": {name: e.canonical for name, e in self.outputs.items()},
            "reduction": self.reduction.canonical,
            "tolerance": self.tolerance,
            **{name: part for name, part in further.items() if part is not None},
        }


def parse_reference(table: Table, arguments: tuple[Argument, ...], problem: ProblemSection, kinds: Kinds) -> Reference:
    """Parse ``[reference]``, which has one of five forms: ``outputs``, a kernel, a function, files, or agreement."""
    forms = ("outputs", "kernel", "function", "verify")
    table.allow((*forms, "unchecked", "comparison", "reduction", "tolerance", *KERNEL_KEYS))
    given = [form for form in forms if form in table.data]
    if len(given) != 1:
        what = f"{' and '.join(given)} are both given" if given else "there is no reference"
        raise table.error(
            "",
            f"{what}; expected one of outputs (expressions or files), kernel (another kernel), function (of Python) "
            'and verify = "agreement" (none: configurations are compared with each other)',
        )
    (form,) = given
    for name in KERNEL_KEYS if form != "kernel" else ():
        if name in table.data:
            raise table.error(name, f"{name} belongs to a reference kernel; add kernel, or remove it")
    written = [buffer.name for buffer in arguments_of_kind(arguments, BufferArgument) if buffer.is_written]
    reduction = parse_expression("1", {})
    if "reduction" in table.data:
        reduction = table.expression("reduction", problem.kinds, "number")
        problem.check_positive(table, "reduction", [reduction])
    tolerance, tolerances = _tolerances(table, written)
    unchecked = table.texts("unchecked", optional=True)
    for name in unchecked:
        table.check_known("unchecked", name, written, "is no buffer that is written")
    comparison = table.text("comparison") if "comparison" in table.data else None
    if comparison is not None and form == "verify":
        raise table.error("comparison", "there are no expected values to compare with; remove comparison")
    common = Reference({}, reduction, tolerance, tolerances, unchecked=unchecked, comparison=comparison)
    match form:
        case "kernel":
            return common._replace(kernel=_reference_kernel(table, arguments, kinds))
        case "function":
            return common._replace(function=table.text("function"))
        case "verify":
            match table.text("verify"):
                case "agreement":
                    return common._replace(is_agreement=True)
                case "nothing":
                    return common._replace(unchecked=tuple(written))
                case other:
                    expected = 'expected "agreement" or "nothing"'
                    raise table.error("verify", f"{describe(other)} is not accepted; {expected}")
    checked = [name for name in written if name not in unchecked]
    outputs, files = _outputs(table.table("outputs"), checked, arguments, problem)
    return common._replace(outputs=outputs, files=files)


def _outputs(
    table: Table, written: list[str], arguments: tuple[Argument, ...], problem: ProblemSection
) -> tuple[dict[str, ArrayExpression], dict[str, InputFile]]:
    """Parse the expression or the file of each output.

    The shape of each expression is checked in the cases of the problem, and with each flag inverted.
    """
    table.allow(written)
    for name in written:
        if name not in table.data:
            raise table.error("", f'the buffer {name!r} is written but has no reference; add {name} = "..."')
    known = sorted({*problem.sizes, *(argument.name for argument in arguments if argument.is_operand)})
    outputs: dict[str, ArrayExpression] = {}
    files: dict[str, InputFile] = {}
    for name in written:
        if not isinstance(table.data[name], dict):
            is_list = isinstance(table.data[name], list)
            text = "; ".join(table.texts(name)) if is_list else table.text(name, multiline=True)
            outputs[name] = parse_array_expression(text, known, problem.kinds, table.location(name))
            continue
        entry = table.table(name)
        entry.allow(("file", "sha256"))
        files[name] = declared_file(entry)
        for buffer in arguments_of_kind(arguments, BufferArgument):
            drawn = buffer.content.generators if isinstance(buffer.content, InputExpression) else ()
            if buffer.is_initialized and (drawn or (buffer.content is None and buffer.init in ("normal", "uniform"))):
                cure = f'give {buffer.name} a file, too, or a constant content such as init = "ones"'
                fault = f"the file holds one answer, but the content of {buffer.name} is random; {cure}"
                raise entry.error("file", fault)
    buffers = {buffer.name: buffer for buffer in arguments_of_kind(arguments, BufferArgument)}
    extents = (extent.names for buffer in buffers.values() for extent in buffer.shape)
    used = frozenset().union(*extents, *(expression.names for expression in outputs.values()))
    cases = (
        ({**sizes, **inverted}, check)
        for sizes, check in problem.cases(used)
        for inverted in ({}, *({flag: 1 - sizes[flag]} for flag in problem.flags))
    )
    for sizes, check in cases:
        operands = {a.name: a.operand(sizes, check=check) for a in arguments if a.is_operand}
        for name, expression in outputs.items():
            with stating(sizes, used, is_ragged=check):
                shape, expected = expression.shape({**sizes, **operands}), buffers[name].array_shape(sizes)
                if shape != expected:
                    fault = f"the result has the shape {shape}, but the buffer {name} has {expected}"
                    hint = "; write reshape(..., 1)" if not shape and expected == (1,) else ""
                    raise expression.location.error(fault + hint, expression=expression.text)
    return outputs, files


def _tolerances(table: Table, written: list[str]) -> tuple[float | None, dict[str, Tolerance]]:
    is_single = not isinstance(table.data.get("tolerance", {}), dict)
    entries = table if is_single else table.table("tolerance", optional=True)
    if not is_single:
        entries.allow(written)
    found: dict[str, Tolerance] = {}
    for name in ("tolerance",) if is_single else entries.data:
        if not isinstance(entries.data[name], dict):
            value = entries.number(name)
            if value <= 0:
                raise entries.error(name, f"expected a number above 0, got {value}")
            found[name] = Tolerance(value)
            continue
        entry = entries.table(name)
        entry.allow(("absolute", "relative"))
        values = {key: entry.number(key) for key in entry.data}
        if not values or min(values.values()) < 0 or max(values.values()) == 0:
            raise entries.error(name, "expected absolute, relative, or both, from 0, and one of them above 0")
        found[name] = Tolerance(values.get("relative", 0.0), values.get("absolute", 0.0), is_elementwise=True)
    return (found["tolerance"].relative, {}) if is_single else (None, found)


_MEASURED_NAMES = (
    "time_us registers spill_bytes static_smem_bytes dynamic_smem_bytes threads blocks occupancy energy_mj max_error"
)
MEASURED = tuple(_MEASURED_NAMES.split())
"""Values of a trial that expressions may use, beside parameters, sizes, flags and metrics."""

RUN_VALUES = ("time_us", "energy_mj", "max_error")
"""Values that only a run gives; the others are known after compilation."""


class Parameter(NamedTuple):
    """A tunable parameter; its value is passed to the template as ``-DNAME=VALUE``."""

    name: Name
    values: tuple[Value, ...]


class Rule(NamedTuple):
    """A named condition over parameters, sizes and ``device.*``."""

    name: str
    expression: Expression
    is_heuristic: bool = False
    """Whether a configuration that violates it is valid, but not worth a trial."""

    def __str__(self) -> str:
        return f"{'heuristic' if self.is_heuristic else 'rule'} {self.name!r}"


STEP = "step"
"""Number of a launch among those of its step, from 0, in the step's expressions and in the values of scalars."""


class Step(msgspec.Struct, frozen=True):
    """A function that a call of the kernel launches, once or several times, after those of the steps before it."""

    entry: str
    launch: Launch
    arguments: tuple[str, ...]
    when: Expression | None = None
    """Condition on which it is launched; None for always."""
    times: Expression | None = None
    """Number of launches; None for one."""
    swap: tuple[str, ...] = ()
    """Two arrays whose memory is exchanged after each launch, for all launches that follow in the call."""
    is_main: bool = False
    """Whether it is declared to be the one that stands for all where one launch is shown or estimated."""

    @property
    def is_always_once(self) -> bool:
        """Whether every configuration launches it exactly once."""
        return self.when is None and self.times is None


class Work(NamedTuple):
    """Minimum operations and bytes of the problem, for TFLOP/s and GB/s, and the arithmetic unit that does them."""

    flops: Expression | None
    bytes: Expression | None
    unit: str | None = None
    """One of `autotile.core.ceilings.UNITS` or `ARITHMETIC`; None if it is not stated."""
    passes: int = 1
    """Operations of the unit for each one of `flops`."""


PREFIX = "computed."
"""Prefix of the names of computed values in expressions and in the configurations of a worker."""

ConfigFunction = Callable[[Mapping[str, Any]], Any]
"""Function of one configuration: a mapping from each parameter's name to its value."""


class Computed(NamedTuple):
    """A value that depends on the configuration in a way that no expression of the file states."""

    name: str
    """Name with `PREFIX`."""
    kind: Kind
    function: ConfigFunction | None
    """None where only the text of the file is known."""
    location: Location

    def of(self, config: Values) -> Value:
        """Return the value for a configuration."""
        if self.function is None:
            raise self.location.error(f"{self.name} is computed by a function, which is not known here")
        try:
            value = self.function(config)
            if self.kind == "string":
                return str(value)
            number = int(value)
            if number != value or abs(number) >= 2**63:
                raise ValueError(f"it returned {value!r}, expected a whole number of 64 bits")
            return number
        except Exception as error:
            where = ", ".join(f"{name} = {config[name]!r}" for name in config)
            raise self.location.error(
                f"the function of {self.name} raises {type(error).__name__}: {error}, where {where}; it must have a "
                "value for every configuration that the rules allow"
            ) from error


def computed_values(computed: Iterable[Computed], config: Values) -> dict[str, Value]:
    """Return the computed values of a configuration by their names with prefix; it may hold them already."""
    plain = {name: value for name, value in config.items() if not name.startswith(PREFIX)}
    return {
        each.name: config[each.name] if each.function is None and each.name in config else each.of(dict(plain))
        for each in computed
    }


@dataclass(frozen=True)
class KernelSpec:
    """Content of a search-space file, parsed and checked."""

    name: str
    summary: str
    template: str
    options: tuple[str, ...]
    build: Build
    """Options as they are given to the compiler, further macros, and the compiler itself."""
    include: tuple[str, ...]
    architecture: str | None
    """The only compilation target, such as ``sm_90a``; None for that of the device."""
    minimum_compute_capability: str | None
    """Lowest supported compute capability, such as ``"8.0"``."""
    sizes: Sizes
    """Sizes, followed by flags, of a problem with their defaults."""
    flags: tuple[str, ...]
    """Names in ``sizes`` that are 0 or 1."""
    ragged: Sizes
    """A second problem for verification, whose sizes are not multiples of a tile; flags have their defaults."""
    dtypes: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    default: Values
    rules: tuple[Rule, ...]
    heuristics: tuple[Rule, ...]
    steps: tuple[Step, ...]
    """Launches of a call, in order; one step unless the file has ``[[steps]]``."""
    min_occupancy: float
    max_spill_bytes: int | None
    arguments: tuple[Argument, ...]
    reference: Reference
    work: Work
    objective: Objective | None
    """Quantity that a search minimises or maximises; None for the time."""
    metrics: Mapping[str, ArrayExpression]
    """Values that are computed for each trial; one may use those before it."""
    score_kinds: Kinds
    """Kind of each size, flag, and parameter that objectives and metrics may use."""
    source: str
    """Path of the file, as the user gave it."""
    text: str
    computed: tuple[Computed, ...] = ()
    folder: str = ""
    """Folder of the files that the arguments name."""

    @property
    def headline(self) -> str:
        """Name, numbers of parameters and combinations, and the default configuration."""
        combinations = math.prod(len(parameter.values) for parameter in self.parameters)
        counts = f"{plural(len(self.parameters), 'parameter')}, {plural(combinations, 'combination')}"
        return f"{self.name}, {counts}, default {config_text(self.default)}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Sizes, values of the parameters, and rules, each with its name."""
        sizes = [(name, str(value)) for name, value in self.sizes.items()]
        values = [(each.name, " ".join(map(str, each.values))) for each in self.parameters]
        return [*sizes, *values, *((rule.name, rule.expression.text) for rule in (*self.rules, *self.heuristics))]

    def _repr_html_(self) -> str:
        return html_of(self.headline, [[*self.facts]])

    @property
    def files(self) -> dict[str, InputFile]:
        """The files of inputs by their names, and those of expected outputs as ``outputs.NAME``."""
        inputs = {each.name: each.content for each in self.buffers if isinstance(each.content, InputFile)}
        return inputs | {f"outputs.{name}": file for name, file in self.reference.files.items()}

    def with_file_hashes(self, hashes: Mapping[str, str]) -> KernelSpec:
        """Return the kernel with hashes of `files`, which then need not be there to tell what they hold.

        Bundles of earlier versions state none of expected outputs, whose paths stood for them in keys.
        """
        files = {n: structs.replace(f, sha256=hashes.get(n, f.written)) for n, f in self.files.items()}
        arguments = tuple(
            structs.replace(each, content=files[each.name]) if each.name in files else each for each in self.arguments
        )
        expected = {name: files[f"outputs.{name}"] for name in self.reference.files}
        return replace(self, arguments=arguments, reference=self.reference._replace(files=expected))

    @cached_property
    def shaping(self) -> tuple[str, ...]:
        """The parameters that the buffers, their contents or the reference depend on."""
        used = {name for buffer in self.buffers for extent in buffer.shape for name in extent.names}
        used |= {name for expression in self.reference.outputs.values() for name in expression.names}
        used |= {name for buffer in self.buffers for name in getattr(buffer.content, "inputs", ())}
        used |= self.reference.reduction.names
        return tuple(parameter.name for parameter in self.parameters if parameter.name in used)

    def at(self, sizes: Sizes | None = None, dtype: str | None = None) -> Problem:
        """Return the problem of complete sizes and flags, which are not checked; None for the defaults."""
        return Problem(self.name, self.sizes if sizes is None else sizes, dtype or self.dtypes[0])

    def shaped(self, problem: Problem, config: Values) -> Problem:
        """Return a problem with, among its sizes, the parameters that the buffers or the reference depend on."""
        return problem.at({**problem.sizes, **{name: int(config[name]) for name in self.shaping}})

    @cached_property
    def bound_scalars(self) -> tuple[ScalarArgument, ...]:
        """The scalars whose values are expressions, and such members of structs, each as ``struct.member``."""
        found = [scalar for scalar in self.scalars if scalar.binding is not None]
        for struct in arguments_of_kind(self.arguments, StructArgument):
            for _, member in struct.leaves():
                part = DTYPES[member.dtype].component.name if member.dtype in DTYPES else member.dtype
                for value in member.values:
                    if isinstance(value, Expression):
                        varies = not value.names <= {*self.sizes, DTYPE_BYTES}
                        found.append(ScalarArgument(f"{struct.name}.{member.name}", part, value, None, None, varies))
        return tuple(found)

    @property
    def has_one_launch(self) -> bool:
        """Whether a call is one launch, in every configuration."""
        return len(self.steps) == 1 and self.steps[0].is_always_once

    @property
    def entry(self) -> str:
        """The function of the first step."""
        return self.steps[0].entry

    @property
    def main_steps(self) -> tuple[Step, ...]:
        """The step that is declared to be the main one; all if none is."""
        return tuple(step for step in self.steps if step.is_main) or self.steps

    @property
    def entries(self) -> tuple[str, ...]:
        """The functions of all steps, each once."""
        return tuple(dict.fromkeys(step.entry for step in self.steps))

    @cached_property
    def compiled_names(self) -> tuple[str, ...]:
        """Sizes and flags that are compiled in: another value of one needs another cubin."""
        used = self.build.names.union(*map(names_in, self.entries))
        return tuple(name for name in self.sizes if name in self.flags or name in used)

    def is_optional(self, name: str) -> bool:
        """Whether a size or flag may be omitted from a problem: flags, and sizes with a default of 1."""
        return name in self.flags or self.sizes[name] == 1

    def ragged_sizes(self, sizes: Sizes) -> dict[str, int]:
        """Return the ragged sizes with the flags of a problem."""
        return {name: sizes[name] if name in self.flags else ragged for name, ragged in self.ragged.items()}

    def declares(self, config: Config) -> bool:
        """Whether the values of a configuration are among those of the parameters, which may have lost some since."""
        values = {parameter.name: parameter.values for parameter in self.parameters}
        return config.keys() == values.keys() and all(value in values[name] for name, value in config.items())

    def argument(self, name: str) -> Argument:
        """Return the argument of the given name; raise `KeyError` if there is none."""
        return self._arguments[name]

    def buffer(self, name: str) -> BufferArgument:
        """Return the buffer of the given name; raise `KeyError` if there is none."""
        return {buffer.name: buffer for buffer in self.buffers}[name]

    proper_sizes = cached_property(lambda self: tuple(name for name in self.sizes if name not in self.flags))
    """Sizes that are not flags."""
    _arguments = cached_property[dict[str, Argument]](
        lambda self: {argument.name: argument for argument in self.arguments}
    )
    buffers = cached_property(lambda self: arguments_of_kind(self.arguments, BufferArgument))
    scalars = cached_property(lambda self: arguments_of_kind(self.arguments, ScalarArgument))
    workspaces = cached_property(lambda self: arguments_of_kind(self.arguments, WorkspaceArgument))
    tensor_maps = cached_property(lambda self: arguments_of_kind(self.arguments, TensorMapArgument))


class Objective(NamedTuple):
    """Quantity that a search minimises or maximises instead of the time."""

    expression: ArrayExpression
    maximize: bool = False

    def used(self, metrics: Mapping[str, ArrayExpression]) -> set[str]:
        """Return the names that it depends on, itself or by metrics, each of which uses only those before it."""
        used = set(self.expression.names)
        for name, metric in reversed([*metrics.items()]):
            if name in used:
                used |= metric.names
        return used


def parse_metrics(table: Table, kinds: Kinds, taken: Mapping[str, str]) -> dict[str, ArrayExpression]:
    """Parse ``[metrics]``; a metric may use those before it."""
    measured = dict.fromkeys(MEASURED, "a measured value")
    check_names(table, what="a metric", taken={**taken, **measured, OBJECTIVE: "the objective"})
    found: dict[str, ArrayExpression] = {}
    for name in table.data:
        found[name] = parse_score(table.text(name, multiline=True), found, kinds, table.location(name))
    return found


def parse_objective(
    text: str, metrics: Mapping[str, ArrayExpression], kinds: Kinds, location: Location, *, maximize: bool
) -> Objective:
    """Parse an objective. A `SpecError` is raised if it uses no measured value, neither itself nor by a metric."""
    objective = Objective(parse_score(text, metrics, kinds, location), maximize)
    if objective.used(metrics).isdisjoint(MEASURED):
        raise location.error(
            f"an objective that uses no measured value needs no search; expected one or more of {listing(MEASURED)}, "
            "or a metric that uses one",
            expression=text,
        )
    return objective


def parse_score(text: str, metrics: Iterable[str], kinds: Kinds, location: Location) -> ArrayExpression:
    """Parse an expression over measured values, metrics, and the names in ``kinds``."""
    return parse_array_expression(text, (*MEASURED, *metrics, *kinds), kinds, location, are_numbers=True)


_MAX_ENTRY_CHARACTERS = 1000
_QUALIFIED = r"(?a:(?:::\s*)?[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*)"
_CAST = r"\(\s*void\s*\(\s*\*\s*\)\s*\((?P<types>[^;{}]*?)\)\s*\)\s*&?"
"""An overloaded function with its type."""
_OTHER = r"(?a)[^\w\s:,<>()\[\]*&+\-/%!=|^~.?']|//|/\*|\n"
"""Characters that no template argument contains."""
_IDENTIFIER = r"(?a)(?<![\w:])[A-Za-z_]\w*(?!\w|\s*::)"


def is_entry(text: str) -> bool:
    """Return True if a text can be the C++ name of a function.

    That is a name with its namespaces, ``space::name``, maybe followed by template arguments, ``name<BLOCK, float>``,
    or an overloaded name with its type, ``(void (*)(float*, int))name``. The compiler reads it as an expression, so it
    must not be able to end it.
    """
    if len(text) > _MAX_ENTRY_CHARACTERS or re.search(_OTHER, text):
        return False
    if match := re.match(_CAST, text.lstrip()):
        return _is_balanced(match["types"]) and is_entry(text.lstrip()[match.end() :])
    name, opening, arguments = text.partition("<")
    if re.fullmatch(_QUALIFIED, name.strip()) is None:
        return False
    return not opening or (arguments.rstrip().endswith(">") and _is_balanced(arguments.rstrip()[:-1]))


def names_in(entry: str) -> frozenset[str]:
    """Return the identifiers in the template arguments of an entry, without those that a namespace or class holds."""
    return frozenset(re.findall(_IDENTIFIER, entry.partition("<")[2].rpartition(">")[0]))


def with_values(entry: str, values: Mapping[str, str]) -> str:
    """Return an entry with values in place of names in its template arguments."""
    name, opening, rest = entry.partition("<")
    if not opening:
        return entry
    arguments = re.sub(_IDENTIFIER, lambda match: values.get(match[0], match[0]), rest.rpartition(">")[0])
    return f"{name}<{arguments}>"


def _is_balanced(text: str) -> bool:
    """Return True if each parenthesis and bracket is closed; ``<`` and ``>`` may be comparisons."""
    opened: list[str] = []
    for character in text:
        if character in "([":
            opened.append(character)
        elif character in ")]" and (not opened or opened.pop() + character not in ("()", "[]")):
            return False
    return not opened
