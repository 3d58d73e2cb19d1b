"""Two sets of results beside each other, several in one, and one that was pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.tables import RIGHT, Listing, below, facts
from autotile.core.model import Measurement, Trial, config_text
from autotile.core.statistics import Interval, is_tie
from autotile.core.text import NOTHING, interval_text, plural, source_text, time_text
from autotile.database.keys import TuningKey, key_text
from autotile.database.merging import Copied
from autotile.database.pruning import Pruned
from autotile.database.winners import Winner


@dataclass(frozen=True, slots=True)
class Compared:
    """One problem in both: ``ratio`` is the second's time over the first's, None where one is not known."""

    ours: Winner
    theirs: Winner
    same_config: bool
    ratio: Interval | None

    @property
    def verdict(self) -> str:
        """Which is faster, if their intervals say."""
        if self.ratio is None:
            return "unknown"
        if is_tie(self.ratio):
            return "unresolved"
        return "A is faster" if self.ratio.value > 1.0 else "B is faster"


@dataclass(frozen=True, slots=True)
class Lone:
    """A problem that only one of them has.

    Attributes
    ----------
    differs
        Fields of the key in which the other has the same problem on the same GPU; empty where it has not.
    """

    winner: Winner
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What two databases or files of winners differ in."""

    a: str
    b: str
    only_a: Sequence[Lone]
    only_b: Sequence[Lone]
    both: Sequence[Compared]

    def to_json(self) -> dict[str, Any]:
        """Everything, problems that agree too."""
        return {
            "a": self.a,
            "b": self.b,
            "only_a": list(map(_lone_document, self.only_a)),
            "only_b": list(map(_lone_document, self.only_b)),
            "both": [
                {
                    **_key_document(pair.ours.key),
                    "same_config": pair.same_config,
                    "a": _side_document(pair.ours),
                    "b": _side_document(pair.theirs),
                    "ratio": _ratio_document(pair.ratio),
                    "verdict": pair.verdict,
                }
                for pair in self.both
            ],
        }

    def __rich__(self) -> RenderableType:
        """What is the same in a line, then what differs."""
        same = [pair for pair in self.both if pair.same_config]
        other = [pair for pair in self.both if not pair.same_config]
        parts: list[RenderableType] = [
            facts(
                [
                    ("A", self.a),
                    ("B", self.b),
                    ("same configuration", plural(len(same), "problem")),
                    ("another configuration", plural(len(other), "problem")),
                    ("only in A", plural(len(self.only_a), "problem")),
                    ("only in B", plural(len(self.only_b), "problem")),
                ]
            )
        ]
        slower = [pair for pair in same if pair.verdict.endswith("faster")]
        if other or slower:
            headings = ("kernel", "problem", "device", "A", "B", f"{RIGHT}B / A", "difference")
            rows = [_pair_row(pair) for pair in (*other, *slower)]
            parts.append(below(Listing(headings, rows, ("device", "A", "B"))))
        for name, lone in (("A", self.only_a), ("B", self.only_b)):
            if lone:
                columns = (f"only in {name}", "problem", "device", "configuration", f"{RIGHT}time", "differs in")
                parts.append(below(Listing(columns, list(map(_lone_row, lone)), ("configuration", "device"))))
        return Group(*parts)


@dataclass(frozen=True, slots=True)
class MergedStudy:
    """A study whose best was another one in two of the databases.

    Attributes
    ----------
    served, other
        What is served from now on, and the one that it was compared with.
    ratio
        Time of the slower over the faster of them.
    decision
        ``kept``: what was served is faster; ``taken``: the faster is served now; ``unresolved``: their intervals do not
        tell, and the newest session's stays; ``refused``: the faster was found wrong once.
    """

    key: TuningKey
    served: Trial
    other: Trial
    ratio: Interval
    decision: Literal["kept", "taken", "unresolved", "refused"]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Databases that were put into one."""

    output: str
    copied: Sequence[tuple[str, Copied]]
    studies: Sequence[MergedStudy]

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "output": self.output,
            "copied": [{"database": name, **asdict(rows)} for name, rows in self.copied],
            "studies": [
                {
                    **_key_document(study.key),
                    "decision": study.decision,
                    "served": _trial_document(study.served),
                    "other": _trial_document(study.other),
                    "ratio": _ratio_document(study.ratio),
                }
                for study in self.studies
            ],
        }

    def __rich__(self) -> RenderableType:
        """What came from where, then what was decided."""
        rows: list[tuple[str, RenderableType]] = [("merged into", self.output)]
        for name, new in self.copied:
            found = f"{plural(new.trials, 'new trial')} of {plural(new.runs, 'run')}"
            rows.append(("from", f"{name}: {found}, {plural(new.studies, 'new study', 'new studies')}"))
        if not self.studies:
            return facts(rows)
        headings = ("kernel", "problem", "device", "served", f"{RIGHT}time", "other", f"{RIGHT}its time", "decision")
        listing = Listing(headings, list(map(_merged_row, self.studies)), ("device", "served", "other"))
        return Group(facts(rows), below(listing))


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was deleted, or would be."""

    location: str
    pruned: Sequence[Pruned]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "database": self.location,
            "dry_run": self.dry_run,
            "trials": sum(study.trials for study in self.pruned),
            "studies": [
                {
                    **_key_document(study.key),
                    "reasons": list(study.reasons),
                    "trials": study.trials,
                    "of": study.of,
                    "whole": study.whole,
                }
                for study in self.pruned
            ],
        }

    def __rich__(self) -> RenderableType:
        """One line a study, and the sum."""
        if not self.pruned:
            return Text(f"nothing to delete in {self.location}")
        trials = sum(study.trials for study in self.pruned)
        done = "would be deleted" if self.dry_run else "deleted"
        total = f"{plural(trials, 'trial')} of {plural(len(self.pruned), 'study', 'studies')} {done} in {self.location}"
        headings = ("kernel", "problem", "device", f"{RIGHT}trials", f"{RIGHT}of", "why", "left")
        return Group(Listing(headings, list(map(_pruned_row, self.pruned)), ("device",)), below(Text(total)))


def _pair_row(pair: Compared) -> tuple[str, ...]:
    key = pair.ours.key
    ratio = f"{pair.ratio.value:.3f}" if pair.ratio is not None else NOTHING
    return (
        key.kernel,
        key_text(key),
        source_text(key.gpu_name, key.source),
        _side_text(pair.ours.measurement, config_text(pair.ours.config)),
        "the same, " + _time_text(pair.theirs.measurement)
        if pair.same_config
        else _side_text(pair.theirs.measurement, config_text(pair.theirs.config)),
        ratio,
        pair.verdict,
    )


def _lone_row(lone: Lone) -> tuple[str, ...]:
    winner, key = lone.winner, lone.winner.key
    where = source_text(key.gpu_name, key.source)
    time = time_text(winner.measurement.time_us if winner.measurement else None)
    differs = ", ".join(lone.differs) or NOTHING
    return key.kernel, key_text(key), where, config_text(winner.config), time, differs


def _merged_row(study: MergedStudy) -> tuple[str, ...]:
    key = study.key
    return (
        key.kernel,
        key_text(key),
        source_text(key.gpu_name, key.source),
        config_text(study.served.config),
        time_text(study.served.time_us),
        config_text(study.other.config),
        time_text(study.other.time_us),
        study.decision,
    )


def _pruned_row(study: Pruned) -> tuple[str, ...]:
    key = study.key
    left = "nothing" if study.whole else plural(study.of - study.trials, "trial")
    where = source_text(key.gpu_name, key.source)
    figures = (f"{study.trials:,}", f"{study.of:,}")
    return key.kernel, key_text(key), where, *figures, ", ".join(study.reasons), left


def _side_text(measurement: Measurement | None, config: str) -> str:
    return f"{config}, {_time_text(measurement)}"


def _time_text(measurement: Measurement | None) -> str:
    if measurement is None:
        return "not measured"
    return f"{time_text(measurement.time_us)} ({interval_text(measurement.low_us, measurement.high_us)})"


def _key_document(key: TuningKey) -> dict[str, Any]:
    return {
        "kernel": key.kernel,
        "problem": dict(key.sizes),
        "dtype": key.dtype,
        "device": key.gpu_name,
        "source": key.source,
        "nvrtc_version": key.nvrtc_version,
        "l2": key.l2_mode,
        "template_hash": key.template_hash,
    }


def _side_document(winner: Winner) -> dict[str, Any]:
    measured: dict[str, Any] = winner.measurement.to_json() if winner.measurement else {}
    return {"config": dict(winner.config), "time_us": None, "interval_us": None, **measured}


def _lone_document(lone: Lone) -> dict[str, Any]:
    return {**_key_document(lone.winner.key), **_side_document(lone.winner), "differs": list(lone.differs)}


def _trial_document(trial: Trial) -> dict[str, Any]:
    measured = trial.measurement
    interval = [measured.low_us, measured.high_us] if measured is not None else None
    return {"config": dict(trial.config), "time_us": trial.time_us, "interval_us": interval}


def _ratio_document(ratio: Interval | None) -> dict[str, Any] | None:
    return {"value": ratio.value, "interval": [ratio.low, ratio.high]} if ratio is not None else None
