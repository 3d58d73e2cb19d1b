"""Checks of a template against its search space, before anything is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autotile.errors import InputError
from autotile.kernel.source_text import strip_comments
from autotile.kernel.spec import KernelSpec

_CONDITIONAL = re.compile(r"^[^\S\n]*#[^\S\n]*(if|endif|define)(?:\w*[^\S\n]+(\w+))?", re.MULTILINE)


def check_source(spec: KernelSpec, source: str) -> None:
    """Raise if a template defines a parameter itself, or lacks a ``__constant__`` variable.

    Raises
    ------
    InputError
        The template defines a macro of the search space, so that its values would have no effect, or it includes no
        files of the author and lacks a variable.
    """
    names = [*(parameter.name for parameter in spec.parameters), *spec.flags, *spec.build.defines]
    for name in _overridden(names, source):
        cure = f"remove it, or put it between #ifndef {name} and #endif"
        raise InputError(f"{spec.source}: #define {name} in the template overrides the values of {name}; {cure}")
    for buffer in spec.buffers:
        name = buffer.constant.rpartition("::")[2]
        if name and not re.search(rf"\b{name}\b", source) and not re.search(r'#\s*include\s*"', source):
            hint = f"declare it as in __constant__ {buffer.dtype} {name}[...];"
            raise InputError(f"{spec.source}: {buffer.name}: the template has no variable {buffer.constant}; {hint}")


def _overridden(names: Iterable[str], source: str) -> list[str]:
    """Return the names that the source defines as macros outside of any ``#if``."""
    defined = {name for name in names if re.search(rf"#\s*define\s+{name}\b", source)}
    if not defined:
        return []
    found, depth = [], 0
    for match in _CONDITIONAL.finditer(strip_comments(source)):
        if match[1] == "define":
            found += [match[2]] if depth == 0 and match[2] in defined else []
        else:
            depth += 1 if match[1] == "if" else -1
    return found
