"""Shelves: the stored results that choices come from. All that serving reads of a database is read here.

A shelf is a database with the results that ship with autotile, a bundle, or what a program states. A database that is
missing or cannot be read counts as empty.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from autotile.core.forks import FORK_LOCK
from autotile.core.model import Config, config_key
from autotile.database.keys import TuningKey
from autotile.database.winners import (
    CHECKS,
    DIGESTED,
    MODEL,
    RULES,
    SERVER_TIMEOUT_S,
    WINNER,
    WINNERS,
    Check,
    Query,
    StoredRule,
    Winner,
    file_signature,
    read_file,
)
from autotile.errors import DatabaseError, DataError

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.families.operation_model import OperationModel

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Result = TypeVar("Result")

MAX_SERVED = 10_000
"""Maximum number of served kernels that are kept, of 3 KiB each."""


class RecentCache(dict[Key, Value]):
    """The entries that were used last, read with `dict.get`.

    An order of use would cost time at each hit. Instead there are two generations: this dictionary, and the one that it
    was when it last became full. An entry of the older generation that is asked for moves into this one; the others
    are dropped when this one is full again.

    Parameters
    ----------
    limit
        Maximum number of entries of both generations together.
    """

    __slots__ = ("_full", "_lock", "_older")  # without a dictionary of attributes, `get` is found as fast as in a dict

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._full = limit // 2
        self._older: dict[Key, Value] = {}
        self._lock = threading.Lock()

    def recall(self, key: Key) -> Value | None:
        """Return an entry of either generation, or None, after `get` has found nothing."""
        with self._lock:
            found = self.get(key)
            if found is None and (found := self._older.pop(key, None)) is not None:
                self._add(key, found)
            return found

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry unless the key has one, and return the entry: concurrent callers get the same object."""
        with self._lock:
            found = self.get(key, self._older.get(key))
            if found is None:
                self._add(key, found := value)
            return found

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            super().clear()
            self._older = {}

    def _add(self, key: Key, value: Value) -> None:
        if len(self) >= self._full:
            self._older = dict(self)
            super().clear()
        self[key] = value


_FINALISTS: RecentCache[tuple[object, ...], Mapping[str, Winner]] = RecentCache(256)
"""Finalists of studies, by the state of the database's file."""


class Shelf:
    """Results of one kernel, whatever their sizes.

    Parameters
    ----------
    winners
        Winners, the user's own newest first. Between equals, the user's own takes precedence over a shipped one; of the
        user's own the first, as dates depend on clocks, and of shipped ones the newest.
    rules
        Rules of the kernel's families, newest first.
    checks
        Verdicts on configurations that are not ranked, oldest first.
    estimates
        Whether a configuration may take the place of the default that is estimated to be far faster.
    compares
        Whether results of other problems are compared; otherwise the nearest is served.
    bundled
        Whether the results come from a bundle, which has no times of the default.

    Attributes
    ----------
    fault
        Reason why the database could not be read; empty if it was read or there is none.
    """

    def __init__(
        self,
        winners: Iterable[Winner] = (),
        *,
        rules: Iterable[StoredRule] = (),
        checks: Iterable[Check] = (),
        estimates: bool = True,
        compares: bool = True,
        bundled: bool = False,
    ) -> None:
        self.fault = ""
        self.estimates, self.compares, self.bundled = estimates, compares, bundled
        self._winners: list[Winner] | None = list(winners)
        self._rules = tuple(rules)
        self._checks: Sequence[Check] | None = tuple(checks)

    def own(self, key: TuningKey) -> list[Winner]:
        """Return the user's winner of exactly one problem, if it is known apart from all others."""
        return []

    def winners(self) -> list[Winner]:
        """Return all winners."""
        return self._winners or []

    def rules(self) -> Iterator[StoredRule]:
        """Yield the rules."""
        yield from self._rules

    def checks(self) -> Sequence[Check]:
        """Return the verdicts."""
        return self._checks or ()

    def finalists(self, winner: Winner, configs: Sequence[Config]) -> Mapping[str, Winner]:
        """Return the finalists of a winner's study, and the results of some other configurations in it.

        Parameters
        ----------
        winner
            The winner.
        configs
            Configurations whose results are read even if they are no finalists.

        Returns
        -------
        mapping
            The newest result of each, by `config_key`.
        """
        return {}


class DatabaseShelf(Shelf):
    """Results of a kernel in a user's database, then those that ship with autotile.

    Parameters
    ----------
    location
        Path or URL of the database.
    kernel, dtype
        Name of the kernel, and dtype of the results.
    """

    def __init__(self, location: str, kernel: str, dtype: str) -> None:
        super().__init__()
        self._location, self._of = location, {"kernel": kernel, "dtype": dtype}
        self._winners = self._checks = None

    def own(self, key: TuningKey) -> list[Winner]:
        """Return the user's winner of a problem; it takes as long in a large database as in a small one."""
        if self._winners is not None:
            return [winner for winner in self._winners if winner.key == key and not winner.shipped]
        found = read_file(self._location, WINNER, digest=key.digest)
        return found if found is not None else self._read(lambda database: [*filter(None, [database.winner(key)])])

    def winners(self) -> list[Winner]:
        """Return the user's winners, then the shipped ones."""
        if self._winners is None:
            from autotile.exchange.shipped import shipped_winners  # not for an exact result

            own = read_file(self._location, WINNERS, **self._of)
            own = own if own is not None else self._read(lambda database: database.winners(**self._of))
            self._winners = [*own, *shipped_winners(**self._of)]
        return self._winners

    def rules(self) -> Iterator[StoredRule]:
        """Yield the user's rules, newest first, then the shipped ones."""
        from autotile.exchange.shipped import shipped_rules

        yield from self._rows(RULES, **self._of)
        yield from shipped_rules(**self._of)

    def checks(self) -> Sequence[Check]:
        """Return the user's verdicts."""
        if self._checks is None:
            self._checks = self._rows(CHECKS, **self._of)
        return self._checks

    def finalists(self, winner: Winner, configs: Sequence[Config]) -> Mapping[str, Winner]:
        """Return finalists as `Shelf.finalists`; they are kept until the file changes, for look-ups of new sizes."""
        digest = winner.key.digest
        keys = [config_key(config) for config in configs]
        signature = file_signature(self._location)  # none of a server's database
        known = self._location, digest, *keys, signature
        if signature is not None and (found := _FINALISTS.get(known)) is not None:
            return found
        newest: dict[str, Winner] = {}
        for key in keys:
            if key not in newest:
                with suppress(DataError):
                    for row in self.digested_rows(digest, key):
                        each = Winner.from_row(row, winner.device)
                        newest.setdefault(config_key(each.config), each)
        return newest if signature is None else _FINALISTS.keep(known, newest)

    def digested_rows(self, study: str, config: str) -> list[dict[str, Any]]:
        """Return the finalists of a study with the digests of their outputs, and the rows of one configuration."""
        return self._rows(DIGESTED, study=study, config=config)

    def _rows(self, query: Query[Result], **parameters: str) -> list[Result]:
        found = read_file(self._location, query, **parameters)
        return found if found is not None else self._read(lambda database: database.read(query, **parameters))

    def _read(self, read: Callable[[Database], list[Result]]) -> list[Result]:
        """Read a server's database; nothing if it cannot be read, nor again: rather than wait for it once more."""
        if self.fault:
            return []
        try:
            return read_server(self._location, read) or []
        except DatabaseError as error:
            self.fault = str(error)
            return []


def read_server(location: str, read: Callable[[Database], Result]) -> Result | None:
    """Read a database that fast reads do not apply to; None if it does not exist.

    Raises
    ------
    DatabaseError
        It cannot be read.
    """
    from autotile.database.database import Database

    with FORK_LOCK:
        database = Database.open_readonly(location, server_timeout_s=SERVER_TIMEOUT_S)
        if database is None:
            return None
        with database:
            return read(database)


def model_of(location: str, operation: str, dtype: str, gpu_name: str) -> OperationModel | None:
    """Return the model of times of an operation on a GPU: the user's own, else the one that ships; None without one.

    A model that cannot be read counts as none, and so does one of the user's that an earlier version learned, whose
    configurations were not verified at ragged sizes.
    """
    from autotile.exchange.shipped import shipped_model

    of = {"operation": operation, "dtype": dtype, "gpu_name": gpu_name}
    found = read_file(location, MODEL, **of)
    if found is None:
        with suppress(DatabaseError):
            found = read_server(location, lambda database: database.read(MODEL, **of))
    for own in found or ():
        from autotile.families.operation_model import OperationModel

        with suppress(DataError):
            if (model := OperationModel.from_json(own)).verified:
                return model
    return shipped_model(operation, dtype, gpu_name)
