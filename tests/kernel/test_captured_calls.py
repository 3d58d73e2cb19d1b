"""Captured calls: written with their limits, read back, and used as inputs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from spec_samples import copy_spec

from autotile.core.model import Problem
from autotile.errors import InputError
from autotile.kernel.inputs import InputMaker, missing_input, read_captured_call, with_captured_call
from autotile.serving.launching import CaptureFolder
from autotile.settings import read_settings

SPEC = copy_spec('alpha = { scalar = "float32", value = 1.0, check = 2.0 }')


class View(np.ndarray):
    """A CuPy array as far as a capture needs it."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


def kernel() -> Any:
    return SimpleNamespace(definition=SimpleNamespace(spec=SPEC), problem=Problem("k", {"N": 100}, "float32"))


def views() -> dict[str, Any]:
    return {name: np.arange(100, dtype=np.float32).view(View) for name in ("x", "y")}


def test_a_call_is_written_and_used(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    written = CaptureFolder(folder, 1, 10**6).write(kernel(), views(), {"alpha": 0.5})
    assert written is not None
    assert folder.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in written.iterdir()) == ["call.json", "x.npy"]  # y is written only
    call = read_captured_call(folder)
    assert (call.kernel, call.sizes, call.dtype, call.scalars) == ("k", {"N": 100}, "float32", {"alpha": 0.5})
    spec = with_captured_call(SPEC, folder)
    maker = InputMaker(spec, call.sizes, "float32", check=True)
    np.testing.assert_array_equal(maker.stored("x"), np.arange(100))
    assert spec.scalars[0].given(call.sizes, check=True) == 0.5
    assert missing_input(spec, {"N": 99}, "float32")  # used as a whole only


def test_the_limits_hold_and_a_folder_must_be_writable(tmp_path: Path) -> None:
    by_count = CaptureFolder(tmp_path / "a", 2, 10**6)
    assert [by_count.write(kernel(), views(), {}) is not None for _ in range(3)] == [True, True, False]
    assert by_count.is_full
    by_size = CaptureFolder(tmp_path / "b", 9, 500)
    assert [by_size.write(kernel(), views(), {}) is not None for _ in range(2)] == [True, False]
    assert len(list((tmp_path / "b").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be captured"):
        CaptureFolder(tmp_path / "file", 1, 10**6).write(kernel(), views(), {})


def write_document(folder: Path, **changes: Any) -> None:
    document = {"kernel": "k", "source": "k.toml", "sizes": {"N": 4}, "dtype": "float32", "scalars": {}, "arrays": {}}
    folder.mkdir(parents=True)
    (folder / "call.json").write_text(json.dumps({**document, **changes}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kernel": "other"}, "is not 'other'"),
        ({"arrays": {"z": "z.npy"}}, "has no argument 'z'"),
        ({"arrays": {"x": "../x.npy"}}, "is not the document of a captured call"),
        ({"arrays": {"x": "/etc/x.npy"}}, "is not the document of a captured call"),
        ({"sizes": {"N": "4"}}, "is not the document of a captured call"),
        ({"more": 1}, "is not the document of a captured call"),
    ],
)
def test_documents_that_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    write_document(tmp_path / "call", **changes)
    with pytest.raises(InputError, match=problem):
        with_captured_call(SPEC, tmp_path / "call")


def test_one_of_several_calls_must_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has no call\.json"):
        read_captured_call(tmp_path)
    for name in ("one", "two"):
        write_document(tmp_path / name)
    with pytest.raises(InputError, match="choose one of one, two"):
        read_captured_call(tmp_path)


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_settings().capture is None
    for name, value in (("", str(tmp_path)), ("_CALLS", "3"), ("_LIMIT_MIB", "2")):
        monkeypatch.setenv(f"AUTOTILE_CAPTURE{name}", value)
    settings = read_settings()
    assert (settings.capture, settings.capture_calls, settings.capture_limit_bytes) == (tmp_path, 3, 2 << 20)
    monkeypatch.setenv("AUTOTILE_CAPTURE_CALLS", "many")
    with pytest.raises(InputError, match="AUTOTILE_CAPTURE_CALLS"):
        read_settings()
