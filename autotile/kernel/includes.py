"""Files that a template may include: a compiler's error shows lines of whatever file it was made to read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotile.errors import InputError
from autotile.settings import toolkit_folders

_CURE = "copy it into the kernel's folder, and include it from there"


def permitted_folders(template: Path, further: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the folders, without links in their paths, below which a template may include files.

    These are its own, the one around it (``../common/x.h``) unless that is the home folder or the root, the toolkit's,
    and further ones.
    """
    own = template.parent.resolve()
    around = [own.parent] if own.parent not in (Path(own.anchor), _home()) else []
    return (own, *around, *(folder.resolve() for folder in (*further, *toolkit_folders())))


def is_permitted(path: Path, folders: Sequence[Path]) -> bool:
    """Return whether a file, wherever links lead to, is below one of the folders; `permitted_folders`' order counts.

    Hidden files count only below the first folder, the template's own: others, such as ``.ssh``, hold secrets.
    """
    found = path.resolve()
    if found.is_relative_to(folders[0]):
        return True
    below = [found.relative_to(folder) for folder in folders[1:] if found.is_relative_to(folder)]
    return any(not any(part.startswith(".") for part in rest.parts) for rest in below)


def check_include(path: Path, folders: Sequence[Path], name: str, place: str) -> None:
    """Raise if a template must not include a file.

    Parameters
    ----------
    path, folders
        File, and folders as from `permitted_folders`.
    name, place
        The name in the directive, and the file and line of the directive, for the message.

    Raises
    ------
    InputError
        The file is a pipe, a device or another special file, or is outside of the folders.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a name may not be a path at all
    except (OSError, ValueError):
        return
    if stat.S_ISDIR(mode):
        return
    if not stat.S_ISREG(mode):
        raise InputError(f"{place}: {name!r} is a pipe, a device or another special file; include a regular file")
    if not is_permitted(path, folders):
        raise InputError(f"{place}: {name!r} is outside of the kernel's folder {folders[0]}; {_CURE}")


def _home() -> Path:
    return Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - Path.home raises if there is none
