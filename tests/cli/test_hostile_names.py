"""Names in databases and files that look like paths: nothing outside the folder of an output is written or read."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from answers import Run

from autotile.core.device import device_profile
from autotile.core.documents import decode_json
from autotile.cuda.compiler import CompileJob
from autotile.database.database import Database
from autotile.database.learned import save_model
from autotile.errors import DataError
from autotile.exchange.cpp_header import literal
from autotile.settings import data_folder
from autotile.tuning.cluster.compilers import CompileRequest

NAMES = ["../x", "/tmp/abs", "a/b", "..", ".", "", "a\0b", "x" * 900, "a\nb", "NVIDIA H200"]


def model() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((data_folder("tuned") / "models/nvidia-h200.matmul.float32.json").read_text())
    return document


def stored(folder: Path, gpu_name: str, dtype: str = "float32") -> Path:
    """Return a database with a model of a GPU."""
    path = folder / "models.db"
    with Database.open(str(path)) as opened:
        save_model(opened, "matmul", dtype, replace(device_profile("h200"), name=gpu_name), model())
    return path


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("models.db")}


@pytest.mark.parametrize("name", NAMES)
def test_models_are_written_in_their_folder(run: Run, tmp_path: Path, name: str) -> None:
    database = stored(tmp_path, name)
    folder = tmp_path / "deep" / "er" / "out"
    answer = run("export", "matmul", "-o", folder, "--db", database, "--json")
    assert answer.code == 0, answer.err
    (file,) = answer.document["files"]
    assert Path(file).parent == folder
    assert {path.parent for path in files_below(tmp_path)} == {folder}
    if name == "NVIDIA H200":
        assert [path.name for path in folder.iterdir()] == ["nvidia-h200.matmul.float32.json"]


def test_a_dtype_is_no_path(run: Run, tmp_path: Path) -> None:
    database = stored(tmp_path, "H200", dtype="../../x")
    assert run("export", "matmul", "-o", tmp_path / "deep" / "out", "--db", database).code == 0
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"out"}


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_in_the_folder_is_not_followed(run: Run, tmp_path: Path, is_dangling: bool) -> None:
    database = stored(tmp_path, "NVIDIA H200")
    target, folder = tmp_path / "precious", tmp_path / "out"
    if not is_dangling:
        target.write_text("kept")
    folder.mkdir()
    (folder / "nvidia-h200.matmul.float32.json").symlink_to(target)
    answer = run("export", "matmul", "-o", folder, "--db", database)
    assert answer.code == 2
    assert "symbolic link" in " ".join(answer.err.split())
    assert (not target.exists()) if is_dangling else target.read_text() == "kept"


@pytest.mark.parametrize("name", ["../sums", "/tmp/sums", "a/b", "..", ".", "", "a\\u0000b", "a\\nb", "x y"])
def test_an_operation_is_not_named_like_a_path(run: Run, tmp_path: Path, name: str) -> None:
    file = tmp_path / "sums.toml"
    file.write_text(
        f'[operation]\nname = "{name}"\nsizes = {{ ROWS = 64, N = 4096 }}\ndtypes = ["float32"]\n'
        '[kernels.sgemm_2d]\nsizes = { M = "ROWS", K = "2 * N", N = "N" }\n'
    )
    run("best", file, "ROWS=64", "N=4096", "--device", "h200").is_refused("name")


@pytest.mark.parametrize("name", ["../k", "/tmp/k.toml", "a/b", "..", "", "k\n", "k\0"])
def test_the_kernel_of_a_captured_call_is_a_name(run: Run, tmp_path: Path, name: str) -> None:
    call = {"kernel": name, "source": "", "sizes": {"n": 64}, "dtype": "float32", "scalars": {}, "arrays": {}}
    (tmp_path / "call.json").write_text(json.dumps(call))
    answer = run("tune", "--captured", tmp_path)
    assert answer.code == 2
    assert "not the document of a captured call" in " ".join(answer.err.split())


@pytest.mark.parametrize("files", ["../x", "/tmp/abs", "a" * 63, "a" * 64 + "\n", ".."])
def test_a_machine_of_the_farm_takes_only_a_digest_for_a_folder(files: str) -> None:
    job = CompileJob("", "", "/k.cu", "k", "sm_90", ())
    request = {"toolchain": "", "key": "", "job": asdict(job), "deadline_s": 1.0}
    assert decode_json(json.dumps({**request, "files": "a" * 64}), CompileRequest).files == "a" * 64
    with pytest.raises(DataError, match="files"):
        decode_json(json.dumps({**request, "files": files}), CompileRequest)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("name", ['a"; int x; //', 'a\nb"', "a\\", "tab\t", "é", "\u2028", "\ud800", "\x7f"])
def test_a_name_stays_in_its_cpp_string(tmp_path: Path, name: str) -> None:
    text = literal(name)
    assert text.isprintable()
    source = tmp_path / "one.cpp"
    source.write_text(
        f"#include <cstdio>\nint main() {{ const char s[] = {text}; fwrite(s, 1, sizeof s - 1, stdout); }}"
    )
    program = tmp_path / "one"
    subprocess.run(["g++", "-o", program, source], check=True)
    assert subprocess.run([program], capture_output=True, check=True).stdout == name.encode(errors="surrogatepass")


@pytest.mark.parametrize(
    "path", ["/dev/null", "/proc/self/mem", "/proc/self/status", "x" * 3000, "loop", "loop/x", "a\0b"]
)
@pytest.mark.parametrize(
    "words",
    [
        ("export", "--format", "bundle", "matmul_tiled", "--arch", "sm_90", "-o"),
        ("list", "--csv"),
        ("tune", "matmul_tiled", "--captured"),
        ("tune", "--plan"),
        ("tune", "matmul_tiled", "M=2048", "N=2048", "K=2048", "--replay"),
        ("verify", "matmul_tiled", "--like"),
        ("report", "matmul_tiled", "-o"),
        ("report",),
        ("import", "--format", "kernel-tuner"),
        ("new", "k", "--in"),
        ("export", "--format", "plan", "--captured"),
        ("export", "--format", "plan", "-o"),
        ("space",),
    ],
)
def test_a_path_that_cannot_be_used_is_an_error_with_words(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    answer = run(*words, path)
    assert answer.code in (0, 1, 2), answer.err
    assert "Traceback" not in answer.err
    assert "please report" not in answer.err
