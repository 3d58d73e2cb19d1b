"""Serve by the rule of a family: what it would choose for sizes that were not tuned themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from autotile.files.library import Kernel
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Measurement, Problem
from autotile.ground.rule import FamilyRule
from autotile.store.keys import TuningKey
from autotile.store.rules import StoredRule
from autotile.store.winners import Winner

_ANY = ("sizes", "nvrtc_version", "l2_mode")
"""Fields of the key in which a rule may differ from what is asked: its sizes are the family's, the others are told."""


def choose_by_rule(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    asked: TuningKey,
    *,
    rules: Iterable[StoredRule],
    may_serve: Callable[[Winner], bool],
) -> tuple[Winner, str] | None:
    """What the rule of a family that holds the problem serves; None where there is no such family.

    A rule of another version of the kernel, or learned on another GPU, is passed over.

    Parameters
    ----------
    kernel, problem, device, asked
        What is asked for, and its key.
    rules
        Rules of the kernel, the newest first.
    may_serve
        Whether a configuration keeps all rules and limits; where the best does not, the next best is taken.

    Returns
    -------
    tuple of Winner and str, or None
        The configuration, as a result at the nearest point where it was timed, and what is said of the rule.
    """
    for stored in rules:
        if _is_of_another(stored.key, asked) or problem.sizes not in stored.rule.family:
            continue
        for number in stored.rule.order(kernel.spec, device, problem.sizes):
            winner = _winner(stored, number, problem)
            if may_serve(winner):
                return winner, _said(stored.rule)
    return None


def _is_of_another(key: TuningKey, asked: TuningKey) -> bool:
    changes = {name: getattr(asked, name) for name in _ANY}
    return replace(key, **changes) != asked


def _winner(stored: StoredRule, number: int, problem: Problem) -> Winner:
    chosen, point = stored.rule.configs[number], stored.rule.nearest_point(number, problem.sizes)
    timed = point.times_us[number] if point is not None else None
    return Winner(
        key=replace(stored.key, sizes=point.sizes if point is not None else stored.rule.family.largest),
        device=stored.device,
        config=chosen.config,
        resources=chosen.resources,
        measurement=Measurement(*timed, l2=stored.key.l2_mode) if timed is not None else None,
        tuned_at=stored.learned_at,
        shipped=stored.shipped,
    )


def _said(rule: FamilyRule) -> str:
    learned = f"{rule.family}, learned from {len(rule.points)} of its problems"
    expected = rule.mean_held_out
    return learned if expected is None else f"{learned}, which lost {100 * expected:.1f} % on average when left out"
