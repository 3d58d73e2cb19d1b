"""What compute-sanitizer and the child under it print, read into one verdict.

The tool's lines begin with ``=========``. A report is a headline and indented lines that say where: "at" a kernel and
an offset, "by thread" so-and-so. The formats are those of NVIDIA's Compute Sanitizer manual, versions 2021 to 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

_TOOL = "========="
_CHILD = "autotile: "
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error")
_RACE = re.compile(r"error: (race reported|potential \w+ hazard)", re.IGNORECASE)
_MILD = re.compile(r"(warning|info): ", re.IGNORECASE)
"""Warnings of racecheck concern the threads of one warp, which the author may have meant."""
_WHERE = re.compile(r"(at|by thread|and (read|write) access at) ", re.IGNORECASE)
_DOUBT = re.compile(r"internal|error|fail|unable|unsupported|not supported|disabled", re.IGNORECASE)
"""In a headline of the tool's about itself: what was not reported may have gone unseen."""
_MILD_DOUBT = re.compile(r"might|incorrect", re.IGNORECASE)
_AFTERMATH = re.compile(r"target application|terminate successfully|exit code", re.IGNORECASE)
"""In a headline that says no more than that the child failed; the child itself says why."""


class Said(StrEnum):
    """What the child says."""

    AT = "at"
    """It launches at the sizes that follow."""
    ERROR = "error"
    """It gives up, for the reason that follows."""
    DONE = "done"
    """It has launched everything, and all came to its end."""


def spoken(word: Said, text: str) -> bytes:
    """A line of the child's, as `read_report` takes it."""
    return f"{_CHILD}{word} {' '.join(text.split())}\n".encode()


@dataclass(frozen=True, slots=True)
class Report:
    """What was said during a run."""

    finding: str
    """The first fault of the kernel, on one line; empty where there is none."""
    trouble: str
    """Why no fault found means nothing; empty where nothing is known against it."""
    sizes: str
    """What the child launched last."""
    done: bool
    """Whether it launched everything."""
    errors: int | None
    """How many the tool counted; None where it did not come to its summary."""


def read_report(text: str) -> Report:
    """Read what the tool and the child printed; anything else in it is left out."""
    blocks: list[_Block] = []
    said = dict.fromkeys(Said, "")
    done, errors = False, None
    for speaker, line in _lines(text):
        if speaker == _CHILD:
            word, _, rest = line.partition(" ")
            done = done or word == Said.DONE
            said |= {known: rest for known in Said if known == word}
        elif found := _SUMMARY.search(line):
            errors = int(found[1] or found[2])
        elif line.startswith("  ") and blocks:
            blocks[-1].details.append(line.strip())
        elif line.strip() and "COMPUTE-SANITIZER" not in line:
            blocks.append(_Block(line.strip(), said[Said.AT]))
    finding = next((block.told() for block in blocks if block.is_finding), "")
    doubts = [block.headline for block in blocks if block.is_doubt]
    doubts.sort(key=lambda headline: bool(_AFTERMATH.search(headline)))
    trouble = said[Said.ERROR] if not doubts or _AFTERMATH.search(doubts[0]) else doubts[0]
    return Report(finding, trouble or next(iter(doubts), ""), said[Said.AT], done, errors)


@dataclass(slots=True)
class _Block:
    """A message of the tool's."""

    headline: str
    sizes: str
    """What the child launched last before it."""
    details: list[str] = field(default_factory=list)

    @property
    def is_finding(self) -> bool:
        """Whether it is about the kernel: those messages have a place in it."""
        if _MILD.match(self.headline):
            return False
        return bool(_RACE.match(self.headline)) or any(detail.startswith("at ") for detail in self.details)

    @property
    def is_doubt(self) -> bool:
        """Whether it is about the tool, and bad news."""
        return bool((_MILD_DOUBT if _MILD.match(self.headline) else _DOUBT).search(self.headline))

    def told(self) -> str:
        """On one line, with the problem that was launched."""
        headline = re.sub("^error: ", "", self.headline, flags=re.IGNORECASE).rstrip(".")
        places = [detail for detail in self.details if _WHERE.match(detail)]
        return " ".join([headline, *places]) + (f", at {self.sizes}" if self.sizes else "")


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Who speaks, and what, line by line."""
    for line in text.splitlines():
        for speaker in (_TOOL, _CHILD):
            if line.startswith(speaker):
                yield speaker, line.removeprefix(speaker)
