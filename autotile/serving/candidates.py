"""Read the stored results that a problem may be served from: the user's own, and those that ship with autotile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from autotile.core.model import Problem
from autotile.database.fast_access import (
    FORK_LOCK,
    SERVER_TIMEOUT_S,
    read_checks_fast,
    read_rules_fast,
    read_winners_fast,
)
from autotile.database.winners import Check, StoredRule, Winner
from autotile.errors import DatabaseError
from autotile.exchange.shipped import shipped_rules, shipped_winners

if TYPE_CHECKING:
    from autotile.database.database import Database

Result = TypeVar("Result")


class Candidates:
    """Stored results of a kernel.

    A database that is missing or cannot be read counts as empty.

    Parameters
    ----------
    location
        Path or URL of the user's database.
    problem
        The problem; results of its kernel and dtype are read, whatever their sizes.

    Attributes
    ----------
    fault
        Reason why the database could not be read; empty if it was read or there is none.
    """

    def __init__(self, location: str, problem: Problem) -> None:
        self.fault = ""
        self._location = location
        self._kernel = problem.kernel
        self._dtype = problem.dtype

    def winners(self) -> list[Winner]:
        """Return the user's winners, then the shipped ones."""
        own = read_winners_fast(self._location, self._kernel, self._dtype)
        if own is None:
            own = self._read(lambda found: [best.winner for best in found.best(self._kernel, dtype=self._dtype)])
        return [*own, *shipped_winners(self._kernel, self._dtype)]

    def checks(self) -> list[Check]:
        """Return the user's verdicts on configurations that are not ranked, oldest first."""
        own = read_checks_fast(self._location, self._kernel, self._dtype)
        return own if own is not None else self._read(lambda found: found.checks(self._kernel, self._dtype))

    def rules(self) -> Iterator[StoredRule]:
        """Yield the rules of the kernel's families: the user's, newest first, then the shipped ones."""
        own = read_rules_fast(self._location, self._kernel, self._dtype)
        yield from own if own is not None else self._read(self._rules_of)
        yield from shipped_rules(self._kernel, self._dtype)

    def _rules_of(self, database: Database) -> list[StoredRule]:
        from autotile.database.family_store import FamilyStore

        return FamilyStore(database).rules(self._kernel, self._dtype)

    def _read(self, read: Callable[[Database], list[Result]]) -> list[Result]:
        """Read a database that fast reads do not apply to; return nothing if it does not exist or cannot be read."""
        if self.fault:  # rather than wait for a server once more
            return []
        from autotile.database.database import Database

        try:
            with FORK_LOCK:
                database = Database.open_readonly(self._location, server_timeout_s=SERVER_TIMEOUT_S)
                if database is None:
                    return []
                with database:
                    return read(database)
        except DatabaseError as error:
            self.fault = str(error)
            return []
