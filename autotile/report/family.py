"""A family that was tuned, and the rules that are in a database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.tables import below, facts, title
from autotile.core.model import config_text
from autotile.core.text import (
    moment_text,
    percent_text,
    plural,
    sizes_text,
    source_text,
)
from autotile.database.winners import StoredRule
from autotile.families.rule import FamilyRule, RulePoint

_IN_FORCE = {True: "yes", False: "no: the kernel has changed since", None: "not known: no kernel of that name is found"}


@dataclass(frozen=True, slots=True)
class ListedRule:
    """A stored rule, and whether it is for the kernel as it is now; None where that is not known."""

    stored: StoredRule
    in_force: bool | None


@dataclass(frozen=True, slots=True)
class RulesReport:
    """Rules of families; ``location`` names the database where there are none."""

    rules: Sequence[ListedRule]
    location: str

    def to_json(self) -> list[dict[str, Any]]:
        """One document a rule."""
        return [_document(listed) for listed in self.rules]

    def __rich__(self) -> RenderableType:
        """One rule under the other."""
        if not self.rules:
            return Text(f"no family is tuned yet in {self.location}; `autotile tune --family` does it")
        first, *others = (_rule_in_full(listed) for listed in self.rules)
        return Group(first, *map(below, others))


def _rule_facts(rule: FamilyRule) -> RenderableType:
    configs = [(f"#{number}", config_text(one.config)) for number, one in enumerate(rule.configs)]
    return facts([*configs, ("rule", "\n".join(rule.lines()))])


def _loss_text(rule: FamilyRule) -> str:
    at = f"{percent_text(rule.mean_loss)} on average at the points, {_worst_text(rule.worst)} at worst"
    held_out = rule.held_out_losses
    if not held_out:
        return at
    left_out = f"{percent_text(sum(held_out) / len(held_out))} on average and {percent_text(max(held_out))} at worst"
    return f"{at}; {left_out} where the point was left out of learning"


def _worst_text(point: RulePoint) -> str:
    return f"{percent_text(point.loss)} ({sizes_text(point.sizes)})"


def _rule_in_full(listed: ListedRule) -> RenderableType:
    stored, key = listed.stored, listed.stored.key
    hot = " hot L2" if key.l2_mode == "hot" else ""
    head = title(f"{key.kernel} {stored.rule.family} {key.dtype}{hot} on {source_text(key.gpu_name, key.source)}")
    known = [
        ("loss", _loss_text(stored.rule)),
        ("learned", f"{moment_text(stored.learned_at)}, from {plural(len(stored.rule.points), 'point')}"),
        ("in force", _IN_FORCE[listed.in_force]),
    ]
    return Group(head, facts(known), below(_rule_facts(stored.rule)))


def _document(listed: ListedRule) -> dict[str, Any]:
    stored, key = listed.stored, listed.stored.key
    return {
        "kernel": key.kernel,
        "family": str(stored.rule.family),
        "dtype": key.dtype,
        "device": {"name": key.gpu_name, "source": key.source},
        "nvrtc_version": key.nvrtc_version,
        "l2": key.l2_mode,
        "learned_at": stored.learned_at.isoformat(),
        "in_force": listed.in_force,
        "loss": {"mean": stored.rule.mean_loss, "worst": stored.rule.worst.loss},
        "held_out_loss": stored.rule.mean_held_out,
        "rule": stored.rule.to_json(),
    }
