"""What came of tuning a family, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Problem
from autotile.ground.rule import FamilyRule
from autotile.tuning.options import check_whole
from autotile.tuning.result import Progress

FamilyPhase = Literal["tuning", "measuring"]


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """How a family is tuned, beside how each of its points is.

    Attributes
    ----------
    points
        Problems of the family to tune.
    max_configs
        Configurations that the rule chooses between, at most.
    """

    points: int = 24
    max_configs: int = 8

    def __post_init__(self) -> None:
        """Refuse what is no whole number of at least 1.

        Raises
        ------
        InputError
            One of the two is not.
        """
        check_whole("points", self.points, 1)
        check_whole("max_configs", self.max_configs, 1)


@dataclass(frozen=True, slots=True)
class FamilyStep:
    """Where a family's tuning stands.

    Attributes
    ----------
    phase
        ``tuning`` each point, or ``measuring`` there the best that all points have found.
    number, count
        Of the point, from 1.
    progress
        Of its session.
    """

    phase: FamilyPhase
    number: int
    count: int
    problem: Problem
    progress: Progress


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """A family that was tuned.

    Attributes
    ----------
    rule
        What is served from now on; None where the user interrupted: the same command goes on.
    candidates
        Configurations that were measured at every point.
    default_loss
        Mean loss of the default configuration over the points where it runs; None where it runs at none.
    resumed
        Points that an earlier, killed run had tuned.
    """

    kernel: str
    dtype: str
    family: str
    device: DeviceProperties
    rule: FamilyRule | None
    candidates: int
    default_loss: float | None
    seconds: float
    resumed: int
    database: str
    notices: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it before there was a rule."""
        return self.rule is None

    def to_json(self) -> dict[str, Any]:
        """The document that ``autotile tune --family --json`` prints."""
        rule = self.rule
        held_out = rule.held_out_losses if rule is not None else []
        return {
            "kernel": self.kernel,
            "family": self.family,
            "dtype": self.dtype,
            "device": {"name": self.device.name, "source": self.device.source},
            "loss": {"mean": rule.mean_loss, "worst": rule.worst.loss, "worst_at": dict(rule.worst.sizes)}
            if rule is not None
            else None,
            "held_out_loss": {"mean": sum(held_out) / len(held_out), "worst": max(held_out)} if held_out else None,
            "default_loss": self.default_loss,
            "candidates": self.candidates,
            "rule": rule.to_json() if rule is not None else None,
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "database": self.database,
            "notices": list(self.notices),
        }
