"""The CUDA toolkit with parts missing."""

import sys

import pytest

from autotile.cuda import headers
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError


def test_without_the_wheels_there_are_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(headers, "toolkit_folders", tuple)
    assert headers.header_folders.__wrapped__().toolkit == ()


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ToolchainError, match=r"CuPy is not installed .*pip install"):
        load_cupy.__wrapped__()
