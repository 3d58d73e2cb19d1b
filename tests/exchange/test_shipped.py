"""Files of winners and of rules: read back as written, refused when damaged."""

from datetime import UTC, datetime

import pytest
from msgspec import structs
from msgspec.structs import replace
from stored_runs import KEY

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Problem, Resources
from autotile.database.keys import TuningKey
from autotile.database.winners import Winner
from autotile.errors import InputError
from autotile.exchange.shipped import (
    read_rules,
    read_winners,
    shipped_rules,
    shipped_winners,
    write_rules,
    write_winners,
)
from autotile.settings import data_folder

H200 = replace(device_profile("h200"), source="cuda")


def winner(n: int, **changes: object) -> Winner:
    problem = Problem("scale", {"n": n, "T": 0}, "float32")
    others = {name: getattr(KEY, name) for name in ("template_hash", "space_hash", "nvrtc_version", "l2_mode")}
    key = TuningKey.for_device(problem, H200, options=("--use_fast_math",), **others)
    config, tuned_at = {"THREADS": 64, "FAST": True}, datetime(2026, 5, 1, 12, 30, 15, tzinfo=UTC)
    found = Winner(key, H200, config, Resources(24, 0, 8, 16, 32), Measurement(2.5, 2.4, 2.75), tuned_at)
    return structs.replace(found, **changes)  # type: ignore[arg-type]


def test_read_back_as_written_one_line_a_winner(tmp_path):
    path = tmp_path / "h200.json"
    bare = winner(64, resources=None, measurement=None)
    assert write_winners(path, [winner(4096), bare, winner(512)]) == 3
    assert read_winners(path) == [bare, winner(512), winner(4096)]
    assert sum('"config"' in line for line in path.read_text().splitlines()) == 3
    replayed = winner(64, device=replace(H200, source="replayed"), key=replace(bare.key, source="replayed"))
    write_winners(path, [replayed])
    assert read_winners(path) == [replayed]  # not as one that was measured


def test_what_is_missing_newer_damaged_or_of_two_gpus_is_refused(tmp_path):
    path = tmp_path / "h200.json"
    for read, message in ((read_winners, "the winners in"), (read_rules, "the rules in")):
        with pytest.raises(InputError, match=f"cannot read {message}"):
            read(path)
    write_winners(path, [winner(4)])
    text = path.read_text()
    newer = "has format 2, this version of autotile reads 1: upgrade autotile$"
    damaged, no_rules = (f"is not a file of {what}" for what in ("winners", "rules"))
    for number, (read, content, said) in enumerate(
        (
            (read_winners, text.replace('"format": 1', '"format": 2'), newer),
            (read_winners, text.replace('"device"', '"other"'), damaged),
            (read_winners, text.replace('"config"', '"other"'), damaged),
            (read_winners, text.replace("2026-05-01", "yesterday"), damaged),
            (read_winners, text.replace('"winners": [', '"winners": [7,'), damaged),
            (read_rules, "{", no_rules),
            (read_rules, "[" * 100_000, no_rules),
            (read_rules, '{"format": 2}', newer),
            (read_rules, '{"format": 1}', no_rules),
        )
    ):
        assert content != text
        file = tmp_path / f"{number}.json"
        file.write_text(content)
        with pytest.raises(InputError, match=rf"^\S+ {said}"):
            read(file)
    with pytest.raises(InputError, match="got 2 GPUs"):
        write_winners(tmp_path / "both.json", [winner(4), winner(8, device=device_profile("a100"))])


@pytest.mark.parametrize(
    ("shipped", "kernel", "dtype", "other"),
    [(shipped_rules, "gemm_mma", "bfloat16", "float32"), (shipped_winners, "sgemm", "float32", "bfloat16")],
)
def test_what_ships_is_of_the_kernel_and_dtype(shipped, kernel, dtype, other):
    found = shipped(kernel, dtype)
    assert found
    assert all((one.key.kernel, one.key.dtype, one.shipped) == (kernel, dtype, True) for one in found)
    assert shipped(kernel, other) == []


TUNED = [*sorted(data_folder("tuned").glob("*.json")), *sorted((data_folder("tuned") / "families").glob("*.json"))]


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.name)
def test_a_shipped_file_is_written_again_byte_for_byte(path, tmp_path):
    if path.parent.name == "families":
        assert write_rules(tmp_path / path.name, read_rules(path)) == len(read_rules(path)) > 0
    else:
        write_winners(tmp_path / path.name, read_winners(path))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
