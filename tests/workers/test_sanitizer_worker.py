"""Buffers and launches of the child under the sanitizer, on a device that records them; needs no GPU."""

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
from autotile.workers import sanitizer
from autotile.workers.jobs import Candidate, Workload
from autotile.workers.sanitizer import Notice, SanitizedCandidate, format_notice


class RecordedArray:
    """A device array that keeps the data copied into it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.data = SimpleNamespace(ptr=id(self))
        self.shape, self.stored = shape, None
        made.append(self)

    def set(self, stored: Any) -> None:
        self.stored = stored


made: list[RecordedArray] = []
launches: list[tuple[Any, ...]] = []


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that records launches without running them."""
    made.clear()
    launches.clear()
    cuda = SimpleNamespace(
        Device=lambda _: SimpleNamespace(use=lambda: None),
        set_allocator=lambda allocator: None,
        runtime=SimpleNamespace(deviceSynchronize=lambda: launches.append(("wait",))),
    )
    function = SimpleNamespace(opt_in=lambda _: None, launch=lambda *launch: launches.append(launch))
    monkeypatch.setattr(sanitizer, "load_cupy", lambda: SimpleNamespace(cuda=cuda, ndarray=RecordedArray))
    monkeypatch.setattr(sanitizer, "live_device", lambda _: device_profile("h200"))
    monkeypatch.setattr(
        "autotile.cuda.function.Module", lambda _: SimpleNamespace(function=lambda _: function, pointer=1)
    )


def launcher(toml: Path, config: Config, *others: int) -> SanitizedCandidate:
    spec = load_kernel(str(toml)).spec
    sizes = tuple({"n": n} for n in others)
    workload = Workload(spec.text, spec.source, {"n": 4096}, "float32", "cold", "", 1, 0.1, verify_sizes=sizes)
    return SanitizedCandidate(workload, Candidate(config, ""))


def test_the_tuned_problem_comes_last(scale_toml: Path) -> None:
    problems = list(launcher(scale_toml, {"THREADS": 64, "WORK": 1}, 7777).problems())
    assert problems == [({"n": 1001}, True), ({"n": 7777}, True), ({"n": 4096}, False)]


def test_a_problem_that_the_rules_exclude_is_left_out(scale_toml: Path) -> None:
    problems = list(launcher(scale_toml, {"THREADS": 256, "WORK": 4}, 5000, 100).problems())
    assert [sizes["n"] for sizes, _ in problems] == [5000, 4096]


@pytest.mark.parametrize(("check", "factor"), [(True, -0.5), (False, 2.0)])
def test_only_what_is_read_is_filled(scale_toml: Path, check: bool, factor: float) -> None:
    notices: list[tuple[Notice, str]] = []
    ready = launcher(scale_toml, {"THREADS": 64, "WORK": 1})
    ready.launch({"n": 1001}, lambda notice, text: notices.append((notice, text)), check=check)
    assert [(array.shape, array.stored is None) for array in made] == [((1001,), False), ((1001,), True)]
    (grid, block, arguments, smem_bytes), waited = launches
    assert (grid, block, smem_bytes, waited) == ((16, 1, 1), (64, 1, 1), 0, ("wait",))
    assert arguments == (np.uint64(made[0].data.ptr), np.uint64(made[1].data.ptr), np.int32(1001), np.float32(factor))
    assert notices == [(Notice.AT, "n=1001")]


def test_a_notice_is_one_line() -> None:
    line = format_notice(Notice.ERROR, "first\nsecond\n\n third")
    assert re.fullmatch(rb"autotile: error first second third\n", line)
