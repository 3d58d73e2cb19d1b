"""``autotile new``: what it writes is valid, compiles, has a test that passes, and overwrites nothing."""

from __future__ import annotations

import pytest
from child_python import python

import autotile
from autotile.errors import InputError


def test_its_files_are_a_valid_kernel_and_its_test_passes(tmp_path):
    made = autotile.new("blur", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"blur.cu", "blur.toml", "test_blur.py"}
    assert autotile.space(made.space, device="h200").valid == 19
    explanation = autotile.explain(made.space, device="h200")
    assert explanation.fault == ""
    assert explanation.resources.registers > 0
    assert "NAME" not in made.source.read_text() + made.space.read_text() + made.test.read_text()
    done = python("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_a_name_is_an_identifier_that_is_free_and_the_folder_exists(tmp_path):
    for existing in ("blur.cu", "blur.toml", "test_blur.py"):
        (tmp_path / existing).write_text("mine")
        with pytest.raises(InputError, match=f"{existing} exists already, and nothing is overwritten"):
            autotile.new("blur", tmp_path)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {existing: "mine"}
        (tmp_path / existing).unlink()
    for name in ("", "2d", "a-b", "a b", "../up", "int", "class", "x", "N", "_hidden", "n" * 65, "é"):
        with pytest.raises(InputError, match="name"):
            autotile.new(name, tmp_path)
    with pytest.raises(InputError, match="is not a folder; make it first"):
        autotile.new("blur", tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_the_command(run, tmp_path):
    answer = run("new", "blur", "--in", tmp_path, "--json")
    assert answer.code == 0
    assert answer.document == {
        "name": "blur",
        "source": str(tmp_path / "blur.cu"),
        "space": str(tmp_path / "blur.toml"),
        "test": str(tmp_path / "test_blur.py"),
    }
    shown = run("new", "sharpen", "--in", tmp_path)
    assert f"autotile tune {tmp_path / 'sharpen.toml'} N=16777216" in shown.out
