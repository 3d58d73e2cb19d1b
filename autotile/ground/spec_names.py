"""Which names a search-space file may give to its parameters, sizes and arguments."""

from __future__ import annotations

import keyword

from autotile.ground.arrays import ARRAY_FUNCTIONS
from autotile.ground.expressions import FUNCTIONS
from autotile.ground.spec_table import Table

# Words of C++20 that a macro of the same name would break, less those that are Python keywords too.
_CXX_WORDS = (
    "alignas alignof asm auto bool case catch char char8_t char16_t char32_t concept consteval constexpr constinit "
    "const const_cast co_await co_return co_yield decltype default delete do double dynamic_cast enum explicit export "
    "extern false float friend goto inline int long mutable namespace new noexcept nullptr operator private protected "
    "public register reinterpret_cast requires short signed sizeof static static_assert static_cast struct switch "
    "template this thread_local throw true typedef typeid typename union unsigned using virtual void volatile wchar_t"
)
_CXX_KEYWORDS = frozenset(_CXX_WORDS.split())

_RESERVED = {
    "device": "the device's properties",
    "DTYPE": "the macro that holds the element type",
    **dict.fromkeys(FUNCTIONS, "a function of expressions"),
}


def is_c_identifier(name: str) -> bool:
    """Whether a name can stand in C source."""
    return name.isascii() and name.isidentifier()


def check_names(table: Table, *, what: str, taken: dict[str, str]) -> None:
    """Check the names that a table's keys give to things, and add them to ``taken``.

    Parameters
    ----------
    table
        The table whose keys are names.
    what
        What each of them names, such as ``"a parameter"``.
    taken
        Names given before, with what they name.

    Raises
    ------
    SpecError
        A name is no C identifier, a keyword, reserved, or taken.
    """
    for name in table.data:
        if not is_c_identifier(name):
            raise table.error(name, f"{name!r} is not a C identifier; use letters, digits and '_', no digit first")
        if name.startswith("__"):
            raise table.error(name, f"{name!r} is reserved for the compiler; use a name without leading '__'")
        if keyword.iskeyword(name) or name in _CXX_KEYWORDS:
            raise table.error(name, f"{name!r} is a keyword of Python or C++; use another name")
        other = _RESERVED.get(name) or taken.get(name)
        if other:
            raise table.error(name, f"{name!r} already names {other}; use another name")
        taken[name] = what


def check_array_names(table: Table) -> None:
    """Refuse arguments named like a function of array expressions."""
    for name in table.data:
        if name in ARRAY_FUNCTIONS:
            raise table.error(name, f"{name!r} already names a function of [reference]; use another name")
