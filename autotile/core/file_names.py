"""File names made of names from databases and files, which are never used as paths themselves."""

from __future__ import annotations

import hashlib
import re

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_OTHERS = re.compile(r"[^A-Za-z0-9_]+")
_MAX_WORD = 100
_MAX_STEM = 180
"""With a suffix and the marks of an unfinished file, a name stays below the 255 bytes that file systems allow."""
_DIGEST = 12


def file_name(*words: str, separator: str = "-", suffix: str = "") -> str:
    """Return the name of a file: a single component of a path, which leads to no other folder.

    Plain words are kept, with hyphens for spaces. Any other, such as ``"../x"`` or one with a line break, is replaced
    by its letters and digits and a hash, so that different words give different names.

    Parameters
    ----------
    words
        Names of the content, such as a kernel's and a GPU's.
    separator, suffix
        Text between the words and at the end, such as ``".json"``.

    Examples
    --------
    >>> file_name("nvidia h200", "matmul", "float32", separator=".", suffix=".json")
    'nvidia-h200.matmul.float32.json'
    >>> file_name("../x", suffix=".json")
    'x-d6b96a97d147.json'
    """
    stem = separator.join(map(_word, words))
    if len(stem) > _MAX_STEM:
        stem = f"{stem[: _MAX_STEM - _DIGEST - 1]}-{_digest(stem)}"
    return stem + suffix


def _word(word: str) -> str:
    joined = "-".join(word.split(" "))
    if _PLAIN.fullmatch(joined) and len(joined) <= _MAX_WORD:
        return joined
    letters = _OTHERS.sub("-", joined).strip("-")[:_MAX_WORD]
    return "-".join(filter(None, (letters, _digest(word))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
