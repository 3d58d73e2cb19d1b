"""Read the JSON documents that come with autotile."""

from __future__ import annotations

import json
from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from autotile.files.settings import data_folder
from autotile.ground.errors import InputError

Content = TypeVar("Content")


def rule_files(kernel: str) -> list[Path]:
    """Files with rules of a kernel's families, ``GPU.KERNEL.json``; none is read to tell which they are."""
    return sorted((data_folder("tuned") / "families").glob(f"*.{escape(kernel)}.json"))


def read_document(path: Path, what: str, written: int, content: Callable[[Any], Content]) -> Content:
    """Read a document.

    Parameters
    ----------
    path
        Of the file.
    what
        What it holds, for the error: ``winners``.
    written
        The ``format`` that this autotile writes.
    content
        Makes the document's content of its JSON values; raises KeyError, TypeError or ValueError where it is damaged.

    Raises
    ------
    InputError
        It cannot be read, is damaged, or was written by a newer autotile.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = document["format"]
    except OSError as error:
        raise InputError(f"cannot read the {what} in {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, what, error) from None
    if found != written:
        raise InputError(f"{path} has format {found!r}, this autotile reads {written}; upgrade it")
    return understood(path, what, document, content)


def understood(path: Path, what: str, document: Any, content: Callable[[Any], Content]) -> Content:
    """What a document that was read holds, or a part of that; parameters and errors as for `read_document`."""
    try:
        return content(document)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, what, error) from None


def _damaged(path: Path, what: str, error: Exception) -> InputError:
    fault = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return InputError(f"{path} is no file of {what}: {fault}; fetch it again or delete it")
