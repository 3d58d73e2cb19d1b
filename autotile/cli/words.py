"""Words of the command line: ``NAME=VALUE`` pairs, ranges of sizes, databases, and their completion at the Tab key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotile.errors import AutotileError, InputError, ProblemError

if TYPE_CHECKING:
    from autotile.core.model import Value
    from autotile.kernel.spec import KernelSpec

_MAX_SIZE_DIGITS = 18
"""Maximum number of digits converted to a size: more than any size has, and the value fits in 64 bits."""
_MAX_VALUE_LENGTH = 7
"""Maximum number of characters converted to a parameter's integer value; longer words are none of its values."""
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_REPLAY = "--replay"
_DATABASE_SUFFIXES = (".db", ".sqlite", ".sqlite3")


def read_assignments(words: Iterable[str]) -> dict[str, str]:
    """Split ``NAME=VALUE`` words.

    Raises
    ------
    InputError
        A word has no name, no value or no ``=``, or a name is given twice.
    """
    assignments: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier() or not text:
            raise InputError(f"cannot read {word!r}: expected NAME=VALUE, such as M=4096")
        if name in assignments:
            raise InputError(f"{name} is given twice, as {assignments[name]} and as {text}; give it once")
        assignments[name] = text
    return assignments


def read_size(name: str, text: str) -> int:
    """Convert a word to a problem size or flag; only the kernel distinguishes them, so the range is not checked here.

    Raises
    ------
    ProblemError
        The word is not a decimal integer.
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


def read_problems(texts: Iterable[str]) -> tuple[dict[str, int], ...]:
    """Read problems that are each given as ``SIZE=N[,...]``."""
    return tuple(read_sizes(text.replace(",", " ").split()) for text in texts)


def read_selections(words: Iterable[str]) -> list[tuple[str, dict[str, int] | None]]:
    """Parse ``KERNEL [SIZE=N ...] ...``, where sizes belong to the kernel before them; None for a kernel without sizes.

    Raises
    ------
    InputError
        The first word is no kernel, or a size cannot be read.
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

        return list(DTYPES)
    if name == "outcome":
        from autotile.core.model import Outcome

        return list(map(str, Outcome))
    if name == "sampler":
        from autotile.search.samplers import sampler_names

        return sampler_names()
    if name in ("device", "keep_gpus"):
        from autotile.core.device import profile_names

        return profile_names()
    from autotile.kernel.library import kernel_names

    return kernel_names()
