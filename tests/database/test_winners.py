"""Files of winners: read back as written, refused when damaged."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Problem, Resources
from autotile.database.keys import TuningKey
from autotile.database.winners import Winner, read_winners, write_winners
from autotile.errors import InputError

H200 = replace(device_profile("h200"), source="cuda")


def winner(n: int, **changes: object) -> Winner:
    key = TuningKey.for_device(
        Problem("scale", {"n": n, "T": 0}, "float32"),
        H200,
        template_hash="a" * 64,
        space_hash="b" * 64,
        options=("--use_fast_math",),
        nvrtc_version="13.0",
        l2_mode="cold",
    )
    tuned_at = datetime(2026, 5, 1, 12, 30, 15, tzinfo=UTC)
    found = Winner(
        key, H200, {"THREADS": 64, "FAST": True}, Resources(24, 0, 8, 16, 32), Measurement(2.5, 2.4, 2.75), tuned_at
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def test_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    bare = winner(64, resources=None, measurement=None)
    assert write_winners(path, [winner(4096), bare, winner(512)]) == 3
    assert read_winners(path) == [bare, winner(512), winner(4096)]


def test_one_line_a_winner(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    write_winners(path, [winner(1), winner(2)])
    lines = path.read_text().splitlines()
    assert sum('"config"' in line for line in lines) == 2


def test_winners_of_two_gpus_are_refused(tmp_path: Path) -> None:
    other = winner(8, device=device_profile("a100"))
    with pytest.raises(InputError, match="got 2 GPUs"):
        write_winners(tmp_path / "both.json", [winner(4), other])


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.pop("device"),
        lambda document: document["winners"][0].pop("config"),
        lambda document: document["winners"][0].update(tuned_at="yesterday"),
        lambda document: document["winners"].append(7),
    ],
)
def test_damage_is_told(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "h200.json"
    write_winners(path, [winner(4)])
    document = json.loads(path.read_text())
    damage(document)  # type: ignore[operator]
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="no file of winners"):
        read_winners(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    write_winners(path, [winner(4)])
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(InputError, match=r"^\S+ has format 2, this autotile reads 1; upgrade it$"):
        read_winners(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_winners(tmp_path / "absent.json")
