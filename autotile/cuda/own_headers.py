"""The author's headers without their host functions, for a source that is written for nvcc."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autotile.errors import InputError
from autotile.kernel.host_code import without_host_functions
from autotile.kernel.includes import is_permitted, permitted_folders
from autotile.kernel.source_text import included_names, strip_comments
from autotile.kernel.sources import is_file, read_text

_MAX_HEADERS = 1000


class OwnHeaders(NamedTuple):
    """Headers that are given to NVRTC as texts.

    Attributes
    ----------
    texts
        Text of each header by its name in the ``#include``.
    folders
        Folders of the headers: NVRTC does not search that of a header that is a text.
    """

    texts: dict[str, str]
    folders: tuple[str, ...]


def own_headers(source: str, template: Path, include_folders: Sequence[str]) -> OwnHeaders:
    """Return the author's headers that a source includes, directly or indirectly, without their host functions."""
    own = [template.parent, *map(Path, include_folders)]
    permitted = permitted_folders(template, own[1:])
    texts: dict[str, str] = {}
    folders: dict[str, None] = {}
    waiting = [(template.parent, source)]
    while waiting and len(texts) < _MAX_HEADERS:
        folder, text = waiting.pop()
        for name in included_names(strip_comments(text)):
            places = [place / name for place in (folder, *own)] if name else []
            path = next((place for place in places if is_file(place) and is_permitted(place, permitted)), None)
            if name is None or path is None or name in texts:
                continue
            try:
                texts[name] = without_host_functions(read_text(path, "included file"))
            except InputError:  # the compiler reports it
                continue
            folders[str(path.parent)] = None
            waiting.append((path.parent, texts[name]))
    return OwnHeaders(texts, tuple(folders))
