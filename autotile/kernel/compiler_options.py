"""Compiler options and macros of a kernel, whose values may depend on parameters, sizes and flags."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import ConfigError, SpecError
from autotile.kernel.expressions import Expression, Kind, parse_expression
from autotile.kernel.table import Table, describe

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

_FORBIDDEN = frozenset(
    [
        "I",
        "include-path",
        "D",
        "define-macro",
        "U",
        "undefine-macro",
        "pre-include",
        "include",
        "isystem",
        "system-include",
        "x",
        "L",
        "l",
        "library",
        "library-path",
        "pch",
        "create-pch",
        "use-pch",
        "pch-dir",
        "pch-messages",
        "instantiate-templates-in-pch",
        "time",
        "fdevice-time-trace",
        "options-file",
        "optf",
        "output-file",
        "output-directory",
        "odir",
        "o",
        "keep",
        "keep-dir",
        "save-temps",
        "gpu-architecture",
        "arch",
        "gpu-code",
        "code",
        "gencode",
        "generate-code",
        "dlink-time-opt",
        "dlto",
        "gen-opt-lto",
        "ltoir",
        "lto",
        "optix-ir",
        "relocatable-device-code",
        "rdc",
        "device-c",
        "dc",
        "device-link",
        "dlink",
        "compile",
        "c",
        "cubin",
        "ptx",
        "fatbin",
        "lib",
        "link",
        "run",
        "run-args",
        "dryrun",
        "compiler-bindir",
        "ccbin",
        "compiler-options",
        "Xcompiler",
        "linker-options",
        "Xlinker",
        "archive-options",
        "Xarchive",
        "nvlink-options",
        "Xnvlink",
        "forward-unknown-to-host-compiler",
        "forward-unknown-opts",
        "forward-unknown-to-host-linker",
        "forward-slash-prefix-opts",
        "cudart",
        "cudadevrt",
        "libdevice-directory",
        "ldir",
        "target-directory",
        "tdir",
        "input-drive-prefix",
        "idp",
        "dependency-drive-prefix",
        "ddp",
        "drive-prefix",
        "dp",
        "no-cache",
        "M",
        "MM",
        "MD",
        "MMD",
        "MF",
        "MT",
        "MP",
        "generate-dependencies",
        "dependency-output",
        "version",
        "V",
        "help",
        "h",
        "clean-targets",
        "use-local-env",
        "threads",
        "t",
        "input-as-string",
        "ias",
        "fdevice-syntax-only",
        "preprocess",
        "E",
        "machine",
        "m",
        "qpp-config",
        "config",
    ]
)
"""Options that read or write files, replace the input, or belong to autotile."""
_FLAGS = frozenset(
    [
        "use_fast_math",
        "lineinfo",
        "generate-line-info",
        "restrict",
        "extra-device-vectorization",
        "device-debug",
        "G",
        "minimal",
        "w",
        "disable-warnings",
        "device-int128",
        "device-float128",
        "device-as-default-execution-space",
        "default-device",
        "extended-lambda",
        "expt-extended-lambda",
        "expt-relaxed-constexpr",
        "brief-diagnostics",
        "device-stack-protector",
    ]
)
"""Options without a value; ``=true`` and ``=false``, as a boolean parameter gives them, set and omit them."""
_NVCC_ONLY = frozenset(
    ["O", "O0", "O1", "O2", "O3", "optimize", "expt-relaxed-constexpr", "expt-extended-lambda", "extended-lambda",
     "resource-usage", "res-usage", "Wno-deprecated-gpu-targets"]
)  # fmt: skip
"""Options of nvcc that NVRTC has no equivalent of, because it always does so or has no host code."""
_JOINED = {"Xptxas": "ptxas-options", "ptxas-options": "ptxas-options"}
_CONTROLS = "apply-controls"
"""Option of the assembler that names a file of compiler controls."""
_NOT_OWN = (
    "options that read or write files, define macros, or choose the output or the target are not; use the keys "
    "defines, include or architecture"
)
_ATTACHED = re.compile(r"-[IDULl](?!ineinfo\b)")
"""An option of one letter with its value attached."""
_OPTION = re.compile(r"-{1,2}([A-Za-z][\w-]*)(?:=(.*))?", re.ASCII | re.DOTALL)
_SAFE_VALUE = re.compile(r"[\w.,+:%-]*", re.ASCII)
_FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_MAX_TEXT = 1000
_MACRO_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MISSPELLED = 0.9
"""Similarity above which an unknown option is taken for a known one that is misspelled."""


@dataclass(frozen=True, slots=True)
class Build:
    """How a kernel is compiled."""

    options: tuple[OptionText, ...] = ()
    defines: Mapping[str, Expression | str] = field(default_factory=dict)
    """Expression, or literal text, of each macro besides those of the parameters and flags."""
    compiler: str = "nvrtc"

    @property
    def names(self) -> frozenset[str]:
        """Names that options and macros depend on, besides the parameters and flags that are macros themselves."""
        defined = [value.names for value in self.defines.values() if not isinstance(value, str)]
        return frozenset().union(*(option.names for option in self.options), *defined)

    def arguments(self, names: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the options of the compiler, given the value of every name.

        Raises
        ------
        ConfigError
            An expression has no value, or its value makes an option that is not accepted.
        """
        found = [one for option in self.options for one in option.arguments(names)]
        return tuple(one for one in found if self.compiler == "nvcc" or _option_name(one) not in _NVCC_ONLY)

    def macros(self, names: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the ``-D`` options of the further macros."""
        texts = ((n, v if isinstance(v, str) else macro_text(_value(v, names))) for n, v in self.defines.items())
        return tuple(f"-D{name}={text}" for name, text in texts)

    def meaning(self) -> dict[str, object]:
        """Return what `autotile.database.keys.space_hash` covers, besides the options; empty at the defaults."""
        meaning: dict[str, object] = {}
        if self.defines:
            values = {name: v if isinstance(v, str) else ["=", v.canonical] for name, v in self.defines.items()}
            meaning["defines"] = dict(sorted(values.items()))
        if self.compiler != "nvrtc":
            meaning["compiler"] = self.compiler
        return meaning


@dataclass(frozen=True, slots=True)
class OptionText:
    """An option, with expressions in braces."""

    text: str
    pieces: tuple[str | Expression, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names in its expressions."""
        return frozenset().union(*(piece.names for piece in self.pieces if not isinstance(piece, str)))

    def arguments(self, names: Mapping[str, Value]) -> tuple[str, ...]:
        """Return it as the compiler takes it, one option each; see `Build.arguments`."""
        pieces = (piece if isinstance(piece, str) else _option_value(_value(piece, names)) for piece in self.pieces)
        filled = "".join(pieces)
        try:
            return tuple(_normalized(filled))
        except ValueError as error:
            raise ConfigError(f"the compiler option {self.text!r} becomes {filled!r:.200}: {error}") from None


def controls_file(option: str) -> str:
    """Return the name of the file of compiler controls that an option names; "" for other options."""
    name, _, value = option.partition(f"--{_CONTROLS}=")
    return value if name == "--ptxas-options=" else ""


def macro_text(value: Value) -> str:
    """Return the value of a macro as C++ text; booleans are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def parse_build(kernel: Table, kinds: Mapping[str, Kind], macros: Sequence[str]) -> Build:
    """Parse ``options``, ``defines`` and ``compiler`` of the section ``[kernel]``.

    Parameters
    ----------
    kernel
        The section.
    kinds
        Kind of each parameter, size and flag, which expressions may use.
    macros
        Names that are macros already: those of the parameters and flags.

    Raises
    ------
    SpecError
        An option or macro is malformed or not accepted.
    """
    compiler = kernel.text("compiler", "nvrtc")
    if compiler not in COMPILERS:
        raise kernel.error("compiler", f"expected one of {', '.join(COMPILERS)}; got {describe(compiler)}")
    options = tuple(_option(kernel, text, kinds) for text in kernel.texts("options", optional=True))
    return Build(options, _defines(kernel.table("defines", optional=True), kinds, macros), compiler)


def _option(kernel: Table, text: str, kinds: Mapping[str, Kind]) -> OptionText:
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise kernel.error(
            "options", f"{text[:60]!r} is not accepted: expected one line of at most {_MAX_TEXT} characters"
        )
    pieces: list[str | Expression] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        pieces += [text[position : match.start()], parse_expression(match[1], kinds, kernel.location("options"))]
        position = match.end()
    pieces.append(text[position:])
    option = OptionText(text, tuple(piece for piece in pieces if piece != ""))
    sample = "".join(piece if isinstance(piece, str) else _sample(piece.kind) for piece in option.pieces)
    try:
        list(_normalized(sample))
    except ValueError as error:
        raise kernel.error("options", f"{text[:60]!r} is not accepted: {error}") from None
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
    match = _OPTION.fullmatch(words[0]) if len(words) == 1 else None
    if match is None:
        raise ValueError("expected one option, such as '--maxrregcount=64' or '-Xptxas -dlcm=cg'")
    name, value = match[1], match[2]
    if name in _JOINED:
        for inner in (value or "").split(","):
            yield f"--ptxas-options={_assembler_option(inner)}"
        return
    if _ATTACHED.match(words[0]):
        raise ValueError(_NOT_OWN)
    _check_name(name)
    if value is not None and (_SAFE_VALUE.fullmatch(value) is None or ".." in value):
        raise ValueError("its value may hold letters, digits and '_.,+:%-' only")
    if name in _FLAGS and value in ("true", "false"):
        if value == "true":
            yield words[0].partition("=")[0]
        return
    if name == "maxrregcount" and value == "0":  # no limit, as for nvcc
        return
    yield words[0]


def _assembler_option(text: str) -> str:
    match = _OPTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an option of the assembler, such as -dlcm=cg")
    name, value = match[1], match[2]
    _check_name(name)
    if name == _CONTROLS:
        if _FILE_NAME.fullmatch(value or "") is None:
            raise ValueError("expected the name of a file in the kernel's folder, without directories")
        return f"--{_CONTROLS}={value}"
    if value is not None and (_SAFE_VALUE.fullmatch(value) is None or ".." in value):
        raise ValueError(f"the value of {name} may hold letters, digits and '_.,+:%-' only")
    return text


def _check_name(name: str) -> None:
    if name in _FORBIDDEN:
        raise ValueError(_NOT_OWN)


def _option_name(option: str) -> str:
    match = _OPTION.fullmatch(option)
    return match[1] if match else ""


def _option_value(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else macro_text(value)


def _sample(kind: Kind) -> str:
    return {"number": "1", "real": "1.0", "boolean": "true", "string": "name"}[kind]


def _value(expression: Expression, names: Mapping[str, Value]) -> Value:
    value = expression.evaluate(names)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{expression.text!r} is not finite")
    item = getattr(value, "item", None)
    found: Value = item() if item is not None else value
    return found


def _defines(table: Table, kinds: Mapping[str, Kind], macros: Sequence[str]) -> dict[str, Expression | str]:
    defines: dict[str, Expression | str] = {}
    for name, value in table.data.items():
        if _MACRO_NAME.fullmatch(name) is None:
            raise table.error(name, f"{name!r} is not a C identifier; use letters, digits and '_', no digit first")
        if name in macros or name == "DTYPE":
            raise table.error(name, f"{name!r} is a macro already, as every parameter and flag; use another name")
        defines[name] = _define(table, name, value, kinds)
    return defines


def _define(table: Table, name: str, value: object, kinds: Mapping[str, Kind]) -> Expression | str:
    """Return an expression if a text is one, else the text."""
    if isinstance(value, bool | int | float) and (not isinstance(value, float) or math.isfinite(value)):
        return macro_text(value)
    if not isinstance(value, str) or len(value) > _MAX_TEXT or (value and not value.isprintable()):
        raise table.error(name, f"expected one line of text, such as 'N', '1e-5f' or 'float4'; got {describe(value)}")
    try:
        return parse_expression(value, kinds, table.location(name))
    except SpecError:
        return value
