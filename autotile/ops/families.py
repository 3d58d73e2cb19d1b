"""List the rules that were learned of families."""

from __future__ import annotations

from autotile.database.database import Database
from autotile.database.engine import parse_location
from autotile.database.families import Families
from autotile.database.keys import space_hash
from autotile.database.winners import StoredRule
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.report.family import ListedRule, RulesReport
from autotile.settings import read_settings


def list_families(kernel: str | None = None, *, database: str | None = None) -> RulesReport:
    """Every family with its rule, or those of one kernel.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    location = database or read_settings().database
    opened = Database.open_readonly(location)
    if opened is None:
        return RulesReport([], str(parse_location(location)))
    with opened:
        rules = Families(opened).rules(kernel)  # a kernel that was deleted since is still in the database
        if kernel is not None and not rules:
            rules = Families(opened).rules(load_kernel(kernel).name)
        return RulesReport([ListedRule(rule, _is_in_force(rule)) for rule in rules], opened.location)


def _is_in_force(stored: StoredRule) -> bool | None:
    """Whether the rule is for the kernel as it is now; None where the kernel is not found by its name."""
    try:
        loaded = load_kernel(stored.key.kernel)
    except InputError:
        return None
    return (stored.key.template_hash, stored.key.space_hash) == (loaded.source_hash, space_hash(loaded.spec))
