"""The functions of `autotile.api.exchange` as programs call them; the commands test what is refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import autotile
from autotile.api.exchange import ExportedHeader

N = 1048576


@pytest.fixture
def scale(tuned: Path, scale_toml: Path) -> Path:
    """The tiny kernel, tuned by replay of an H200."""
    return scale_toml


def test_trials_and_a_header_are_exported(scale: Path, tmp_path: Path) -> None:
    assert autotile.export(scale, {"n": N}, output=tmp_path / "x", device="h200").configurations == 12
    made = autotile.export(scale, n=N, output=tmp_path / "results.json")
    assert (made.device, made.file_format) == ("NVIDIA H200 (replayed)", "t4")
    assert json.loads((tmp_path / "results.json").read_text())["results"]
    assert repr(made) == (
        "<Transfer: scale n=1048576 float32 on NVIDIA H200 (replayed): 12 configurations exported, "
        f"{tmp_path / 'results.json'} (t4)>"
    )
    assert "<th>study</th>" in made._repr_html_()
    made = autotile.export(scale, output=str(tmp_path / "scale.hpp"), format="c-header")
    assert isinstance(made, ExportedHeader)
    assert repr(made) == f"<ExportedHeader: autotile::scale: 1 tuned problem, 2 cubins, {tmp_path / 'scale.hpp'}>"
    assert "2 cubins beside the header" in made._repr_html_()

    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "scale n=4096 float32 was not tuned; tuned are: n=1048576"),
        ({"n": N, "format": "csv"}, "there is no format 'csv'; expected one of t4,"),
        ({"format": "c-header", "n": 4}, "n=4 is not tuned"),
        ({"kernel": [scale], "n": N}, "give each with its own"),
    ]
    for given, said in refused:
        with pytest.raises(autotile.InputError, match=said):
            autotile.export(given.pop("kernel", scale), output=tmp_path / "none", **given)
    assert not (tmp_path / "none").exists()
    for output, file_format in product(("/", "", "."), ("t4", "c-header")):
        with pytest.raises(autotile.InputError, match=r"it names a folder|is not the path of an output file"):
            autotile.export(scale, n=N, output=output, format=file_format)  # type: ignore[arg-type]


def test_a_cache_file_is_imported_into_a_database_and_into_a_recording(scale: Path, tmp_path: Path) -> None:
    cache, database, recording = (tmp_path / name for name in ("cache.json", "other.db", "imported.npz"))
    autotile.export(scale, n=N, output=cache, format="kernel-tuner")
    made = autotile.import_(cache, n=N, database=database)
    assert made.details == {"study": 1, "database": str(database)}
    assert repr(made).startswith("<Transfer: scale n=1048576 float32 on NVIDIA H200: 12 configurations imported, ")
    made = autotile.import_(str(cache), {"n": N}, output=recording)
    assert made.details == {"recording": str(recording)}
    with pytest.raises(autotile.InputError, match="no format 'csv'; expected kernel-tuner"):
        autotile.import_(cache, format="csv")  # type: ignore[arg-type]


def test_a_bundle_is_of_a_kernel_or_several_or_one_problem(scale: Path, tmp_path: Path) -> None:
    for number, kernels in enumerate([scale, [str(scale)], [(scale, {"n": N})], [(scale, None)]]):
        made = autotile.bundle(kernels, output=tmp_path / f"{number}.autotile")  # type: ignore[arg-type]
        assert made.kernels == (("scale", 1, 2, ("sm_90",)),)
        kernel = autotile.get_best_kernel("scale", n=N, device="h200", bundle=made.file)
        assert kernel.config == {"THREADS": 256, "WORK": 4}
    assert repr(made).startswith(f"<WrittenBundle: {tmp_path / '3.autotile'} (")
    assert repr(made).endswith("KiB): scale>")
    assert "<td>scale</td><td>1</td><td>2</td><td>sm_90</td>" in made._repr_html_()
    assert made.digest in made._repr_html_()
    for nothing, said in (
        ([], "no kernel is named"),
        ([3], "3 is no kernel; expected a name"),
        ([("scale",)], "is no kernel; expected a name"),
    ):
        with pytest.raises(autotile.InputError, match=said):
            autotile.bundle(nothing, output=tmp_path / "x")  # type: ignore[arg-type]
