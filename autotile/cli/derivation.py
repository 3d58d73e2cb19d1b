"""Commands that are derived from public functions: parameters from the signature, help from the docstring; their words.

The source of a function is read, not imported: a page of help must not wait for what the function needs to run.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autotile.errors import AutotileError, InputError, ProblemError

if TYPE_CHECKING:
    from autotile.core.model import Value
    from autotile.kernel.spec import KernelSpec

REQUIRED = inspect.Parameter.empty
_INTERNAL = frozenset(("options", "progress", "observe", "announce", "search", "other", "kernels"))
"""Parameters that only a program gives."""
_SECTION = re.compile(r"^(\w[\w ]*)\n-+\n", re.MULTILINE)
_ENTRY = re.compile(r"^(\S[^\n]*)\n((?:    [^\n]*\n?|\n)+)", re.MULTILINE)
_SENTENCE = re.compile(r"\.\s+(?=[A-Z`])")
_UNSAID = re.compile(r"(?:; |\A)?None for ([^;]*?)\.?(?=\Z|;|\.\s)")
_COMPLETED = frozenset(("kernel", "like", "dtype", "outcome", "sampler", "keep_gpus"))
_MAX_SEED = 2**63 - 1
"""Largest integer that the database stores."""
SEARCH, MEASUREMENT = "Search", "Measurement"
PANELS = {
    **dict.fromkeys(("trials", "budget", "until", "spend", "sampler", "objective", "maximize"), SEARCH),
    **dict.fromkeys(("transfer", "fresh"), SEARCH),
    **dict.fromkeys(("l2", "finals", "precision", "verify_problem", "sanitize", "replay"), MEASUREMENT),
    **dict.fromkeys(("scheduler", "insecure"), MEASUREMENT),
}
"""Panels of the options of sessions, in the help of the command that has them all."""


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter as its function's signature and docstring state it."""

    name: str
    hint: str
    """Its type as text: the annotation, or what stands behind its name in ``Other Parameters``."""
    default: Any
    is_positional: bool
    help: str
    """First sentence of its description."""
    unsaid: str
    """The meaning of None."""


def describe(path: str) -> tuple[str, list[Described]]:
    """Return the summary of a public function with what follows it, and its parameters, those of options included.

    ``path`` is the module below `autotile` and the name of the function.
    """
    module, _, name = path.rpartition(".")
    source = _source(f"autotile.{module}")
    begin = source.index(f"\ndef {name}(")
    (node,) = ast.parse(source[begin : source.find("\n\n\n", begin)]).body
    assert isinstance(node, ast.FunctionDef)
    aliases = dict(re.findall(r"^(\w+) = (Literal\[.*\])$", source, re.MULTILINE))
    text, *sections = _SECTION.split(ast.get_docstring(node) or "")
    docs: dict[str, tuple[str, str]] = {}
    others = []
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        if heading in ("Parameters", "Other Parameters"):
            for entry in _ENTRY.finditer(body + "\n"):
                names, _, hint = entry[1].partition(" : ")
                for one in names.split(", "):
                    docs[one] = hint, " ".join(entry[2].split())
                    if heading == "Other Parameters":
                        others.append(one)
    arguments, found = node.args, []
    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    for parameter, value in zip([*places, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True):
        if parameter.arg not in _INTERNAL:
            hint = ast.unparse(parameter.annotation) if parameter.annotation else ""
            known: Any = value.value if isinstance(value, ast.Constant) else None
            known = REQUIRED if value is None else known
            found.append((parameter.arg, aliases.get(hint, hint), known, parameter in places))
    if arguments.vararg is not None and arguments.vararg.arg in docs:
        found.insert(0, (arguments.vararg.arg, "Sequence[str]", None, True))
    described = [
        Described(one, hint, value, positional, *_said(docs[one][1])) for one, hint, value, positional in found
    ]
    for one in others:
        hint, _, default = docs[one][0].partition(", default ")
        described.append(Described(one, hint, ast.literal_eval(default or "None"), False, *_said(docs[one][1])))
    return text.strip(), described


@cache
def _source(module: str) -> str:
    spec = find_spec(module)
    loader: Any = spec.loader if spec is not None else None
    return str(loader.get_source(module))


def _said(text: str) -> tuple[str, str]:
    """Return the help that a description states, and what None stands for."""
    unsaid = _UNSAID.search(text)
    kept = (text[: unsaid.start()] + text[unsaid.end() :]) if unsaid else text
    first = _SENTENCE.split(kept.strip())[0].strip().rstrip(".;")
    again = " May be given again." if "May be given again" in kept and "again" not in first else ""
    return f"{first}.{again}", unsaid[1] if unsaid else ""


def flags_of(name: str, form: str = "") -> list[str]:
    """Return the option of a parameter; a form may name it, as in ``-o --output FILE 1..9``."""
    return [word for word in form.split() if word.startswith("-")] or [f"--{name.replace('_', '-')}"]


def parameter_of(
    one: Described, form: str, flags: Mapping[str, str], *, hidden: bool = False, panel: str | None = None
) -> inspect.Parameter:
    """Return a parameter of a command, which the help shows in a panel unless it is hidden.

    The form has option, metavar and bounds, in words; each may be left out. The flags are options by the names of
    parameters, which they replace in the help.
    """
    words = form.split()
    bounds = next((word for word in words if re.fullmatch(r"[\d.]*\.\.[\d.]*", word)), "..")
    least, most = (float(end) if "." in end else int(end) if end else None for end in bounds.split("..", 1))
    metavar = " ".join(word for word in words if not word.startswith("-") and word != bounds)
    kind, completion = _kind(one.hint), None
    completable = "kernel" if "KERNEL" in metavar else one.name
    if completable in _COMPLETED or (one.name == "device" and "INDEX" in metavar):

        def completion(incomplete: str) -> list[str]:
            return completed(completable, incomplete)

    settings: dict[str, Any] = {
        "help": in_options(one.help, flags),
        "metavar": metavar or one.name.upper(),
        "min": least,
        "max": most,
        "autocompletion": completion,
        "callback": {"database": _refuse_empty, "seed": _check_seed}.get(one.name),
    }
    if kind == list[str] and one.hint.startswith("Mapping") and not one.is_positional:
        kind = str  # a configuration is one word
    default = None if one.default == "" else one.default  # an empty text is one that was given
    unsaid = in_options(one.unsaid, flags)
    settings["show_default"] = True if default not in (None, "", REQUIRED) and kind is not bool else unsaid or False
    if one.is_positional and not any(word.startswith("-") for word in words):
        option: Any = typer.Argument(**settings)
    else:
        declared = flags_of(one.name, form)
        if kind is bool and default is True and not declared[0].startswith("--no-"):
            declared, settings["show_default"] = [f"{declared[0]}/--no-{declared[0][2:]}"], True
        elif declared[0].startswith("--no-"):
            default = False  # the option is the opposite of the parameter
        option = typer.Option(*declared, hidden=hidden, rich_help_panel=panel, **settings)
    hint = kind if default is REQUIRED or default not in (None, ()) else kind | None
    if kind == list[str] and default is not REQUIRED:
        default, hint = None, list[str] | None
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
    )


def in_options(text: str, flags: Mapping[str, str]) -> str:
    """Return a text of a docstring with options in place of the parameters that it sets as code."""
    return re.sub(r"``([^`]+)``", lambda found: flags.get(found[1], found[1]), text)


def _kind(hint: str) -> Any:
    if choices := re.findall(r"""['"]([\w-]+)['"]""", hint):
        return Literal[tuple(choices)]
    parts = set(re.split(r" \| | or ", hint))
    if hint.startswith("list of") or (not {"str"} & parts and re.match("(Sequence|Iterable|Mapping)", hint)):
        return list[str]
    return next((kind for kind in (bool, int, float) if parts <= {kind.__name__, "None"}), str)


def _refuse_empty(database: str | None) -> str | None:
    """Raise if ``--db`` is empty: a shell variable that is not set must not select the user's own database."""
    if database == "":
        raise InputError("--db is empty; expected the path of an SQLite file or a postgresql:// URL")
    return database


def _check_seed(seed: int) -> int:
    """Raise if a seed does not fit; in the help, a maximum of 19 digits would leave no space for the texts."""
    if seed > _MAX_SEED:
        raise typer.BadParameter(f"{seed} is not in the range 0<=x<={_MAX_SEED}.")
    return seed


_MAX_SIZE_DIGITS = 18
"""Maximum number of digits converted to a size: more than any size has, and the value fits in 64 bits."""
_MAX_VALUE_LENGTH = 32
"""Maximum number of characters converted to a number: those of 64 bits have 24 at most, as Python writes them."""
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_REPLAY = "--replay"
_DATABASE_SUFFIXES = (".db", ".sqlite", ".sqlite3")


def read_assignments(words: Iterable[str]) -> dict[str, str]:
    """Split ``NAME=VALUE`` words; an `InputError` if one lacks name, value or ``=``, or a name is given twice."""
    assignments: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier() or not text:
            raise InputError(f"cannot read {word!r}: expected NAME=VALUE, such as M=4096")
        if name in assignments:
            raise InputError(f"{name} is given twice, as {assignments[name]} and as {text}; give it once")
        assignments[name] = text
    return assignments


def split_assignments(text: str) -> list[str]:
    """Split ``NAME=VALUE,...``; a comma that no name follows belongs to a value, such as a C++ type."""
    return re.split(r",\s*(?=\w+=)", text)


def read_size(name: str, text: str) -> int:
    """Convert a word to a problem size or flag; only the kernel distinguishes them, so the range is not checked here.

    It is a `ProblemError` if the word is not a decimal integer.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_SIZE_DIGITS):
        from autotile.kernel.problem import MAX_SIZE

        shown = text if len(text) <= 2 * _MAX_SIZE_DIGITS else f"{text[:_MAX_SIZE_DIGITS]}..."
        raise ProblemError(
            f"{name} is {shown!r}, expected a whole number from 1 to {MAX_SIZE}, such as {name}=4096; a flag is 0 or 1"
        )
    return int(text)


def read_sizes(words: Iterable[str]) -> dict[str, int]:
    """Split ``NAME=VALUE`` words and convert the values to problem sizes."""
    return {name: read_size(name, text) for name, text in read_assignments(words).items()}


def read_extents(words: Iterable[str]) -> dict[str, int | str]:
    """Split ``NAME=VALUE`` words; a range (``1..8192``) or a list (``64,128``) stays text, for the family to read."""
    return {
        name: text if ".." in text or "," in text else read_size(name, text)
        for name, text in read_assignments(words).items()
    }


def read_values(spec: KernelSpec, words: Iterable[str]) -> dict[str, Value]:
    """Split ``NAME=VALUE`` words and convert the values of parameters and sizes to their types.

    A value that does not have the type of its parameter, and the value of an unknown name, remain text.
    """
    own = {parameter.name: parameter.values[0] for parameter in spec.parameters}
    values: dict[str, Value] = {}
    for name, text in read_assignments(words).items():
        kind, is_short = type(own.get(name)), len(text) <= _MAX_VALUE_LENGTH
        if name not in own:
            values[name] = read_size(name, text) if name in spec.sizes else text
        elif kind is bool:
            values[name] = _BOOLEANS.get(text.lower(), text)
        elif kind is int and is_short and text.removeprefix("-").isdecimal():
            values[name] = int(text)
        else:
            values[name] = float(text) if kind is float and is_short and _REAL.fullmatch(text) else text
    return values


def read_selections(words: Iterable[str]) -> list[tuple[str, dict[str, int] | None]]:
    """Parse ``KERNEL [SIZE=N ...] ...``, where sizes belong to the kernel before them; None for a kernel without sizes.

    It is an `InputError` if the first word is no kernel, or a size cannot be read.
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"{word!r} stands before any kernel; expected KERNEL [SIZE=N ...] ...")
    return [(kernel, read_sizes(sizes) if sizes else None) for kernel, sizes in groups]


def read_subject(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a report: a kernel with sizes, or two databases."""
    if len(words) == 2 and all(map(is_database, words)):
        return {"kernel": words[0], "other": words[1]}
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise InputError(f"one kernel, expected KERNEL SIZE=N ...; {names[1]!r} is another, or a size without a value")
    if not names and words:
        raise InputError(f"{words[0]!r} stands before any kernel; expected KERNEL SIZE=N ...")
    return {"kernel": names[0] if names else None, "sizes": read_sizes(word for word in words if "=" in word)}


def read_followed(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the live page: databases, and kernels."""
    return {
        "databases": [word for word in words if is_database(word)],
        "kernels": [word for word in words if not is_database(word)],
    }


def is_database(word: str) -> bool:
    """Return True if an argument is the path or URL of a database, which need not exist, rather than a kernel."""
    from autotile.database.paths import looks_like_url
    from autotile.settings import user_path

    if looks_like_url(word):
        return True
    path = user_path(word, "a database")
    return path.suffix in _DATABASE_SUFFIXES or (path.suffix != ".toml" and path.is_file())


def fill_in_replay(words: list[str]) -> list[str]:
    """Return the words of a command with ``--replay=auto`` in place of a bare ``--replay``.

    The word after ``--replay`` is its value only if it looks like a recording: a kernel or a size may follow, too. So
    does a folder, for which there is a message.
    """

    def is_recording(word: str) -> bool:
        if not word or word.startswith("-"):
            return False
        is_path = "=" not in word and not word.endswith(".toml") and ("/" in word or Path(word).is_dir())
        return word.endswith(".npz") or (is_path and ("/" in word or word not in _values_of("kernel")))

    return [
        f"{_REPLAY}=auto" if word == _REPLAY and not is_recording(following) else word
        for word, following in pairwise([*words, ""])
    ]


def completed(name: str, incomplete: str) -> list[str]:
    """Return the values of a parameter that begin as typed; none if they cannot be listed."""
    try:
        return [word for word in _values_of(name) if word.startswith(incomplete)]
    except (AutotileError, OSError):
        return []


def _values_of(name: str) -> Iterable[str]:
    if name == "dtype":
        from autotile.core.dtypes import DTYPES

        return DTYPES
    if name == "outcome":
        from autotile.core.model import Outcome

        return map(str, Outcome)
    if name == "sampler":
        from autotile.search.samplers import sampler_names

        return sampler_names()
    if name in ("device", "keep_gpus"):
        from autotile.core.device import profile_names

        return profile_names()
    from autotile.kernel.library import kernel_names

    return kernel_names()
