"""Time left, columns, plot and survey of a session that was measured."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import autotile

pytestmark = pytest.mark.gpu


def test_a_session_that_was_measured_can_be_followed_and_looked_at(scale_toml: Path) -> None:
    states: list[autotile.Progress] = []
    options = autotile.TuneOptions(trials=8, finals=3)
    result = autotile.tune(scale_toml, n=1 << 20, options=options, progress=states.append)
    assert isinstance(result, autotile.TuneResult)
    searching = [state for state in states if state.phase == "searching"]
    assert searching[-1].remaining_s is not None
    assert searching[-1].remaining_s > 0  # the finals are yet to come
    (finals,) = [state for state in states if state.phase == "finals"]
    assert finals.remaining_s is not None
    assert 0.2 < finals.remaining_s < 10

    trials = autotile.trials(scale_toml)
    stream = io.StringIO()
    trials.columns().write_csv(stream)
    rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert {row["phase"] for row in rows} == {"search", "final"}
    measured = next(row for row in rows if row["phase"] == "search" and row["outcome"] == "ok")
    assert float(measured["stage.verify_s"]) > 0
    assert float(measured["time_low_us"]) <= float(measured["time_us"]) <= float(measured["time_high_us"])

    (plot,) = autotile.plot(scale_toml, n=1 << 20).plots
    assert plot.best_so_far[-1] == min(one.trial.time_us for one in plot.study.trials if one.trial.time_us)
    found = autotile.survey(scale_toml, n=1 << 20)
    assert found.device.source == "cuda"
    registers = {tuple(found.config(i).values()): int(found.columns["registers"][i]) for i in range(len(found))}
    for entry in trials.trials:
        trial = entry.stored.trial
        if trial.resources is not None:
            assert registers[tuple(trial.config.values())] == trial.resources.registers
