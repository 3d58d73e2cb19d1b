from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rich.console import Console

from autotile.cli.tables import render
from autotile.core.model import Config, Measurement, Outcome, Resources, Trial
from autotile.core.text import Part, Result
from autotile.tuning.result import Front


def trial(number: int) -> Trial:
    time_us = 100.0 + number
    return Trial(
        {"BM": number, "SWIZZLE": "row-major-in-groups"},
        Outcome.OK,
        resources=Resources(200 - number, 0, 0, 0, 0),
        measurement=Measurement(time_us, time_us, time_us),
        telemetry={"energy_mj": 12.3456 * number, "max_error": 1.26e-6},
    )


@dataclass(repr=False)
class Shown(Result):
    front: Front
    winner: Config

    def _parts(self) -> Iterator[Part]:
        yield self.front.table(self.winner)


def shown(count: int, *objectives: str, winner: int = 0, width: int = 120) -> list[str]:
    front = Front(("time", *objectives), tuple(trial(number) for number in range(count)))
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(render(Shown(front, {"BM": winner, "SWIZZLE": "row-major-in-groups"})))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_each_objective_has_a_column_with_its_unit() -> None:
    heading, names, _, first, second = shown(2, "registers", "energy", "error")
    assert heading == "front of time, registers, energy and error: 2 configurations"
    assert names.split() == ["time", "registers", "energy", "error", "configuration"]
    assert " ".join(first.split()) == "winner 100.0 us 200 0.000 mJ 1.3e-06 BM=0 SWIZZLE=row-major-in-groups"
    assert " ".join(second.split()) == "101.0 us 199 12.35 mJ 1.3e-06 BM=1 SWIZZLE=row-major-in-groups"


def test_of_many_ten_are_shown_with_both_ends() -> None:
    heading, _, _, *rows = shown(37, "registers")
    assert heading == "front of time and registers: 37 configurations, 10 shown; --json lists all"
    assert len(rows) == 10
    assert "BM=0 " in rows[0]
    assert "BM=36 " in rows[-1]


def test_a_winner_that_is_not_on_the_front_is_not_marked() -> None:
    assert "winner" not in "\n".join(shown(3, "registers", winner=99))


@pytest.mark.parametrize("width", [60, 80])
def test_it_fits_the_terminal(width: int) -> None:
    lines = shown(3, "registers", "energy", "error", width=width)
    assert max(len(line) for line in lines[1:]) <= width
    assert "\n".join(lines).count("SWIZZLE=row-major-in-groups") == 3


def test_one_configuration_alone() -> None:
    assert shown(1, "registers")[0] == "front of time and registers: 1 configuration"
