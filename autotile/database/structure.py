"""Structure of an SQLite file: its revision, and that it has our tables and our view and nothing that acts by itself.

A view or trigger of someone else in the file would decide what is served, or change what is stored. This module needs
the standard library alone, since serving checks each file before it reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

SCHEMA_REVISION = "0008"
"""The newest migration. Revisions are four-digit numbers in order, so that a newer database can be recognized."""

VERSION_TABLE = "autotile_schema"
"""Table of Alembic's revision; with Alembic's default name, another program's database could pass for ours."""

VIEW = "best"

VIEW_DIGESTS: Mapping[str, str] = {
    "0001": "ec16a4c3503805458126ce71ab2d1bed56aaf05263e81b35ee087dcacd5699c0",
    "0002": "28518ae42dedd64b506ea0dc6365ffc82573b666f781d43ffb3f49b14ee536be",
    "0003": "28518ae42dedd64b506ea0dc6365ffc82573b666f781d43ffb3f49b14ee536be",
    "0004": "e33487e747ae325c4f9fdbf7146d3ac2b7c7f269b3bc025eaa03f3ab449ecc92",
    "0005": "e33487e747ae325c4f9fdbf7146d3ac2b7c7f269b3bc025eaa03f3ab449ecc92",
    "0006": "e33487e747ae325c4f9fdbf7146d3ac2b7c7f269b3bc025eaa03f3ab449ecc92",
    "0007": "e33487e747ae325c4f9fdbf7146d3ac2b7c7f269b3bc025eaa03f3ab449ecc92",
    "0008": "e33487e747ae325c4f9fdbf7146d3ac2b7c7f269b3bc025eaa03f3ab449ecc92",
}
"""SHA-256 of the text of the view, with single spaces, after each migration; a test compares them."""

Execute = Callable[[str], Iterable[Sequence[Any]]]
"""Function that runs a statement and returns its rows."""


def unknown_revision(revisions: Sequence[Any]) -> str:
    """Return the fault of the rows of `VERSION_TABLE`; empty if they hold one revision, known or newer."""
    if len(revisions) != 1:
        return f"its table {VERSION_TABLE} has {len(revisions)} rows, expected one"
    (revision,) = revisions
    if not isinstance(revision, str) or not (len(revision) == 4 and revision.isascii() and revision.isdecimal()):
        return f"its schema has the revision {revision!r:.40}, expected one such as {SCHEMA_REVISION!r}"
    if revision <= SCHEMA_REVISION and revision not in VIEW_DIGESTS:
        return f"its schema has the revision {revision!r}, which no version of autotile has written"
    return ""


def foreign_object(execute: Execute, revision: str | None) -> str:
    """Return the first view or trigger of a file that autotile did not create; empty if there is none.

    Parameters
    ----------
    revision
        Revision whose view the file must have; None for any, before the revision is read.
    """
    views = []
    for kind, name, text in execute("SELECT type, name, sql FROM sqlite_master WHERE type IN ('view', 'trigger')"):
        if kind == "trigger" or name != VIEW:
            return f"it has a {kind} {name!r:.80} that autotile did not create"
        views.append(text)
    if not views and revision is not None:
        return f"it lacks the view {VIEW!r}"
    known = VIEW_DIGESTS.values() if revision is None else (VIEW_DIGESTS[revision],)
    return "" if all(view_digest(text) in known for text in views) else f"its view {VIEW!r} was changed"


def differing_table(execute: Execute, tables: Mapping[str, Iterable[str]]) -> str:
    """Return the first table of a file that has other columns than ours; empty if there is none.

    Parameters
    ----------
    tables
        Names of the columns of each table.
    """
    for table, columns in tables.items():
        found = [name for _, name, *_ in execute(f"PRAGMA table_xinfo({table})")]
        if not found:
            return f"it lacks the table {table!r}"
        if differing := sorted({str(name) for name in found} ^ set(columns)):
            return f"its table {table!r} has other columns than autotile's: {differing[0]!r:.80}"
    return ""


def view_digest(text: str) -> str:
    """Return the SHA-256 of a view's text with single spaces."""
    return hashlib.sha256(" ".join(str(text).split()).encode("utf-8", "replace")).hexdigest()
