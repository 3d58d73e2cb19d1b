"""Sessions that know their GPU by its UUID, and sessions on two GPUs where there are two."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import autotile
from autotile.cuda.driver import device_count, device_uuid
from autotile.database.database import Database
from autotile.tuning.options import TuneOptions

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(device_count() < 2, reason="this machine has one GPU")


def test_the_uuid_is_that_of_the_system() -> None:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert device_uuid(0).startswith("GPU-")
    assert device_uuid(0) in listed
    assert device_uuid(99) == ""


def test_trials_carry_the_uuid(scale_toml: Path, tmp_path: Path) -> None:
    options = TuneOptions(trials=4, finals=2, database=str(tmp_path / "one.db"))
    autotile.tune(str(scale_toml), n=4096, options=options, progress=False)
    with Database.open(tmp_path / "one.db") as database:
        trials = [trial for study in database.studies() for trial in database.trials(study.study_id)]
    assert {trial.gpu for trial in trials} == {device_uuid(0)}


@two_gpus
def test_two_gpus_share_a_session(scale_toml: Path, tmp_path: Path) -> None:
    options = TuneOptions(finals=3, database=str(tmp_path / "two.db"))
    result = autotile.tune(str(scale_toml), n=1 << 20, device="all", options=options, progress=False)
    assert result.winner is not None
    assert {use.uuid for use in result.gpus} == {device_uuid(index) for index in range(device_count())}
    assert not any(use.lost for use in result.gpus)
    assert result.confirmation is not None
    assert abs(result.confirmation.spread) < 0.2
    assert result.confirmation.gpu != result.confirmation.home
