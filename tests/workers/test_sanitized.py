"""What the child under the sanitizer lays out and launches, with a device that only notes it; needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotile.core.device import device_profile
from autotile.core.model import Config
from autotile.kernel.library import load_kernel
from autotile.workers import sanitized
from autotile.workers.protocol import Candidate, Workload
from autotile.workers.sanitized import Launcher
from autotile.workers.sanitizer import Said


class NotedArray:
    """A device array that keeps what was copied into it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.data = SimpleNamespace(ptr=id(self))
        self.shape, self.stored = shape, None
        made.append(self)

    def set(self, stored: Any) -> None:
        self.stored = stored


made: list[NotedArray] = []
launches: list[tuple[Any, ...]] = []


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that launches nothing."""
    made.clear()
    launches.clear()
    cuda = SimpleNamespace(
        Device=lambda _: SimpleNamespace(use=lambda: None),
        set_allocator=lambda allocator: None,
        runtime=SimpleNamespace(deviceSynchronize=lambda: launches.append(("wait",))),
    )
    function = SimpleNamespace(opt_in=lambda _: None, launch=lambda *launch: launches.append(launch))
    monkeypatch.setattr(sanitized, "load_cupy", lambda: SimpleNamespace(cuda=cuda, ndarray=NotedArray))
    monkeypatch.setattr(sanitized, "live_device", lambda _: device_profile("h200"))
    monkeypatch.setattr(sanitized, "Module", lambda _: SimpleNamespace(function=lambda _: function))


def launcher(toml: Path, config: Config, *others: int) -> Launcher:
    spec = load_kernel(str(toml)).spec
    sizes = tuple({"n": n} for n in others)
    workload = Workload(spec.text, spec.source, {"n": 4096}, "float32", "cold", "", 1, 0.1, verify_sizes=sizes)
    return Launcher(workload, Candidate(config, ""))


def test_the_tuned_problem_comes_last(scale_toml: Path) -> None:
    problems = list(launcher(scale_toml, {"THREADS": 64, "WORK": 1}, 7777).problems())
    assert problems == [({"n": 1001}, True), ({"n": 7777}, True), ({"n": 4096}, False)]


def test_a_problem_that_the_rules_exclude_is_left_out(scale_toml: Path) -> None:
    problems = list(launcher(scale_toml, {"THREADS": 256, "WORK": 4}, 5000, 100).problems())
    assert [sizes["n"] for sizes, _ in problems] == [5000, 4096]


@pytest.mark.parametrize(("check", "factor"), [(True, -0.5), (False, 2.0)])
def test_only_what_is_read_is_filled(scale_toml: Path, check: bool, factor: float) -> None:
    said: list[tuple[Said, str]] = []
    ready = launcher(scale_toml, {"THREADS": 64, "WORK": 1})
    ready.launch({"n": 1001}, lambda word, text: said.append((word, text)), check=check)
    assert [(array.shape, array.stored is None) for array in made] == [((1001,), False), ((1001,), True)]
    (grid, block, arguments, smem_bytes), waited = launches
    assert (grid, block, smem_bytes, waited) == ((16, 1, 1), (64, 1, 1), 0, ("wait",))
    assert arguments == (np.uint64(made[0].data.ptr), np.uint64(made[1].data.ptr), np.int32(1001), np.float32(factor))
    assert said == [(Said.AT, "n=1001")]


def test_what_the_child_says_is_one_line() -> None:
    line = sanitized.spoken(Said.ERROR, "first\nsecond\n\n third")
    assert re.fullmatch(rb"autotile: error first second third\n", line)
