"""`bundle` and `export --format c-header` as they are typed, and `best --bundle`."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import Run


@pytest.fixture
def tuned(tune: Run) -> None:
    """The tiny kernel, tuned by replay of an H200."""
    assert tune().code == 0


@pytest.mark.usefixtures("tuned")
class TestBundle:
    def test_it_is_made_and_looked_into(self, run: Run, scale_toml: Path, tmp_path: Path) -> None:
        path = tmp_path / "app.autotile"
        answer = run("export", "--format", "bundle", scale_toml, "-o", path, "--json")
        assert answer.code == 0
        made = answer.document
        assert (made["file"], made["bytes"]) == (str(path), path.stat().st_size)
        assert made["kernels"] == [{"kernel": "scale", "problems": 1, "cubins": 2, "architectures": ["sm_90"]}]
        assert len(made["digest"]) == 64
        served = run("best", "scale", "n=1048576", "--device", "h200", "--bundle", path, "--json").document
        assert served["config"] == {"THREADS": 256, "WORK": 4}
        assert served["bundle"].startswith(f"{path}, compiled for sm_90 with NVRTC ")
        assert str(path) in run("best", "scale", "n=1048576", "--device", "h200", "--bundle", path).out

    def test_a_person_reads_what_is_in_it(self, run: Run, scale_toml: Path, tmp_path: Path) -> None:
        words = ("-o", tmp_path / "x", "--arch", "sm_80", "--arch", "sm_90")
        answer = run("export", "--format", "bundle", scale_toml, "n=1048576", *words)
        assert answer.code == 0
        assert "sm_80 sm_90" in answer.out
        assert "digest" in answer.out

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("n=4",), "n=4 is not tuned; tuned is n=1048576"),
            (("m=4",), "has no size 'm'"),
            (("--arch", "hopper"), "'hopper' is no architecture"),
            (("--arch", "sm_9000"), "does not know the architecture 'sm_9000'; it compiles for sm_"),
            (("--dtype", "float64"), "not written for dtype 'float64'"),
            (("nosuch",), "no kernel named 'nosuch'"),
            (("--db", "nowhere.db"), "there is no database nowhere.db"),
        ],
    )
    def test_what_cannot_be_bundled(
        self, run: Run, scale_toml: Path, tmp_path: Path, words: tuple[str, ...], said: str
    ) -> None:
        run("export", "--format", "bundle", scale_toml, *words, "-o", tmp_path / "x").is_refused(said)
        assert not (tmp_path / "x").exists()

    def test_a_place_that_cannot_be_written(self, run: Run, scale_toml: Path, tmp_path: Path) -> None:
        run("export", "--format", "bundle", scale_toml, "-o", tmp_path / "no" / "folder" / "x").is_refused(
            "cannot write the bundle"
        )


@pytest.mark.usefixtures("tuned")
class TestHeader:
    def test_it_is_written_with_its_cubins(self, run: Run, scale_toml: Path, tmp_path: Path) -> None:
        path = tmp_path / "include" / "scale.hpp"
        made = run("export", scale_toml, "--format", "c-header", "-o", path, "--json").document
        assert (made["namespace"], made["problems"], len(made["cubins"])) == ("autotile::scale", 1, 2)
        text = path.read_text()
        for cubin in made["cubins"]:
            assert (path.parent / cubin).read_bytes()[:4] == b"\x7fELF"
            assert cubin in text
        assert "if (!(sizes.n >= (config.THREADS * config.WORK))) return false;  // enough_blocks" in text
        assert "{{1048576}, " in text
        assert "@@" not in text

    def test_a_header_is_not_of_one_gpu(self, run: Run, scale_toml: Path, tmp_path: Path) -> None:
        run("export", scale_toml, "--format", "c-header", "-o", tmp_path / "x.hpp", "--device", "h200").is_refused(
            "--device is not for --format c-header"
        )

    def test_an_architecture_is_for_headers_only(self, run: Run, scale_toml: Path, tmp_path: Path) -> None:
        run("export", scale_toml, "n=1048576", "-o", tmp_path / "x.json", "--arch", "sm_90").is_refused(
            "--arch is for --format c-header"
        )


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("h200", ""),
        ("a100", "was not tuned on NVIDIA A100"),
        ("nosuch", "no GPU profile is named"),
        ("7", "no CUDA device 7"),
    ],
)
def test_trials_of_one_gpu(run: Run, scale_toml: Path, tmp_path: Path, device: str, said: str) -> None:
    answer = run("export", scale_toml, "n=1048576", "-o", tmp_path / "x.json", "--device", device)
    assert answer.code == (2 if said else 0)
    assert said in answer.err
    assert (tmp_path / "x.json").exists() == (not said)
