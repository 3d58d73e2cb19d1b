"""The functions of `autotile.api.exchange` as programs call them."""

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
def tuned(scale_toml: Path, recording: Path) -> Path:
    """The tiny kernel, tuned by replay of an H200."""
    autotile.tune(scale_toml, n=N, options=autotile.TuneOptions(replay=recording))
    return scale_toml


class TestExport:
    def test_trials_and_a_header(self, tuned: Path, tmp_path: Path) -> None:
        assert autotile.export(tuned, {"n": N}, output=tmp_path / "x", device="h200").configurations == 12
        made = autotile.export(tuned, n=N, output=tmp_path / "results.json")
        assert (made.configurations, made.device, made.file_format) == (12, "NVIDIA H200 (replayed)", "t4")
        assert json.loads((tmp_path / "results.json").read_text())["results"]
        assert repr(made) == (
            "<Transfer: scale n=1048576 float32 on NVIDIA H200 (replayed): 12 configurations exported, "
            f"{tmp_path / 'results.json'} (t4)>"
        )
        assert "<th>study</th>" in made._repr_html_()
        made = autotile.export(tuned, output=str(tmp_path / "scale.hpp"), format="c-header")
        assert isinstance(made, ExportedHeader)
        assert (made.namespace, made.problems, len(made.cubins)) == ("autotile::scale", 1, 2)
        assert all((tmp_path / name).is_file() for name in made.cubins)
        assert repr(made) == f"<ExportedHeader: autotile::scale: 1 tuned problem, 2 cubins, {tmp_path / 'scale.hpp'}>"
        assert "2 cubins beside the header" in made._repr_html_()

    def test_trials_of_another_version_of_the_kernel_are_said_to_be_such(self, tuned: Path, tmp_path: Path) -> None:
        assert "note" not in autotile.export(tuned, n=N, output=tmp_path / "x").details
        (tuned.with_suffix(".cu")).write_text("\n#define NEWER\n" + tuned.with_suffix(".cu").read_text())
        note = autotile.export(tuned, n=N, output=tmp_path / "x").details["note"]
        assert note == "another version of the kernel was tuned; of the present one nothing is"

    def test_what_cannot_be_exported(self, tuned: Path, tmp_path: Path) -> None:
        refused: list[tuple[dict[str, Any], str]] = [
            ({}, "scale n=4096 float32 was not tuned; tuned are: n=1048576"),
            ({"n": N, "architectures": ["sm_90"]}, "--arch is for --format c-header"),
            ({"n": N, "format": "recording"}, "replayed from a recording already"),
            ({"n": N, "format": "csv"}, "there is no format 'csv'; expected one of t4,"),
            ({"format": "c-header", "device": 0}, "--device is not for --format c-header"),
            ({"format": "c-header", "n": 4}, "n=4 is not tuned"),
            ({"kernel": [tuned], "n": N}, "give each with its own"),
            ({"n": N, "database": Path("nowhere.db")}, "there is no database nowhere.db"),
            ({"n": N, "database": "mysql://x/y"}, "not supported"),
        ]
        for given, said in refused:
            with pytest.raises(autotile.InputError, match=said):
                autotile.export(given.pop("kernel", tuned), output=tmp_path / "x", **given)
        assert not (tmp_path / "x").exists()
        for output, file_format in product(("/", "", "."), ("t4", "c-header")):
            with pytest.raises(autotile.InputError, match=r"it names a folder|is not the path of an output file"):
                autotile.export(tuned, n=N, output=output, format=file_format)  # type: ignore[arg-type]


class TestImport:
    def test_into_a_database_and_into_a_recording(self, tuned: Path, tmp_path: Path) -> None:
        cache, database, recording = (tmp_path / name for name in ("cache.json", "other.db", "imported.npz"))
        autotile.export(tuned, n=N, output=cache, format="kernel-tuner")
        made = autotile.import_(cache, n=N, database=database)
        assert made.details == {"study": 1, "database": str(database)}
        assert repr(made).startswith("<Transfer: scale n=1048576 float32 on NVIDIA H200: 12 configurations imported, ")
        again = autotile.import_(cache, n=N, database=database)
        assert (again.configurations, again.details["note"]) == (0, "12 of the file's 12 were imported before")
        made = autotile.import_(str(cache), {"n": N}, output=recording)
        assert made.details == {"recording": str(recording)}
        assert recording.is_file()

        for given, said in (({}, r"nothing\.json"), ({"format": "csv"}, "no format 'csv'; expected kernel-tuner")):
            with pytest.raises(autotile.InputError, match=said):
                autotile.import_(tmp_path / "nothing.json", **given)


class TestBundle:
    def test_a_kernel_or_several_or_one_problem(self, tuned: Path, tmp_path: Path) -> None:
        for number, kernels in enumerate([tuned, [str(tuned)], [(tuned, {"n": N})], [(tuned, None)]]):
            made = autotile.bundle(kernels, output=tmp_path / f"{number}.autotile")  # type: ignore[arg-type]
            assert made.kernels == (("scale", 1, 2, ("sm_90",)),)
            kernel = autotile.get_best_kernel("scale", n=N, device="h200", bundle=made.file)
            assert kernel.config == {"THREADS": 256, "WORK": 4}
        assert repr(made).startswith(f"<WrittenBundle: {tmp_path / '3.autotile'} (")
        assert repr(made).endswith("KiB): scale>")
        assert "<td>scale</td><td>1</td><td>2</td><td>sm_90</td>" in made._repr_html_()
        assert made.digest in made._repr_html_()

    @pytest.mark.parametrize(
        ("kernels", "said"),
        [
            ([], "no kernel is named"),
            ([3], "3 is no kernel; expected a name"),
            ([("scale",)], "is no kernel; expected a name"),
            ("nosuch", "no kernel named 'nosuch'"),
        ],
    )
    def test_what_is_no_kernel(self, tmp_path: Path, kernels: Any, said: str) -> None:
        with pytest.raises(autotile.InputError, match=said):
            autotile.bundle(kernels, output=tmp_path / "x")
