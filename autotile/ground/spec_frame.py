"""What a problem is made of, as far as the rest of a search-space file is read against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autotile.ground.expressions import Expression, Kind
from autotile.ground.frozen import dataclass
from autotile.ground.spec_table import Table


@dataclass(frozen=True, slots=True)
class ProblemFrame:
    """Names that expressions over the problem may use, and the two shapes at which each is tried when it is read.

    Attributes
    ----------
    sizes, ragged
        Default and ragged sizes, with the flags at their defaults.
    flags
        The names that are 0 or 1.
    dtypes
        Element types that the kernel is written for.
    """

    sizes: Mapping[str, int]
    ragged: Mapping[str, int]
    flags: tuple[str, ...]
    dtypes: tuple[str, ...]

    @property
    def kinds(self) -> dict[str, Kind]:
        """Kind of each name; a flag is a condition."""
        return {name: "boolean" if name in self.flags else "number" for name in self.sizes}

    @property
    def flag_kinds(self) -> dict[str, Kind]:
        """Kind of each flag."""
        return dict.fromkeys(self.flags, "boolean")

    def check_positive(self, table: Table, name: str, expressions: Iterable[Expression]) -> None:
        """Refuse an entry whose expressions are not at least 1 at both shapes."""
        for expression in expressions:
            for sizes in (self.sizes, self.ragged):
                value = expression.evaluate(sizes)
                if value < 1:
                    at = ", ".join(f"{size} = {sizes[size]}" for size in sorted(expression.names))
                    where = f" where {at}" if at else ""
                    raise table.error(name, f"{expression.text} is {value}, expected at least 1{where}")
