"""A session survives every fault of the kit, attributes it to the right configuration and names a healthy winner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.fault_kit import HEALTHY, Fault, read_faults
from faults.fault_session import RUN_DEADLINE_S, FaultSession, tune_faults
from faults.traces import no_traces, settles

from autotile.core.model import Outcome
from autotile.cuda.driver import live_device

pytestmark = pytest.mark.gpu
FAULTS = read_faults()
INTERMITTENT = "wrong_sometimes"
_LEAK_BYTES = 100 << 20
"""Tolerated growth of the GPU memory in use, by other programs; a leaked context holds several times as much."""


def used_gpu_bytes() -> int:
    """Return the memory in use on the GPU of these tests, in bytes."""
    import cupy
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.runtime.deviceGetPCIBusId(0).encode())
    return int(pynvml.nvmlDeviceGetMemoryInfo(device).used)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Fail if the ``with`` block leaves a process, an open file, a temporary file or GPU memory behind."""
    temporary = folder / "temporary"
    temporary.mkdir()
    live_device()  # the driver opens its files in this process before the count
    used = used_gpu_bytes()
    with pytest.MonkeyPatch.context() as patch, no_traces(temporary, patch):
        yield
    assert settles(lambda: used_gpu_bytes() < used + _LEAK_BYTES), f"{used_gpu_bytes() - used} bytes of the GPU left"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cubin cache shared by the tests of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def everything(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FaultSession:
    """One session with every fault but the intermittent one."""
    folder = tmp_path_factory.mktemp("everything")
    names = [fault.name for fault in FAULTS if fault.name != INTERMITTENT]
    with nothing_left(folder):
        return tune_faults(folder, *names, cache=cache)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name != INTERMITTENT], ids=lambda fault: fault.name)
def test_each_fault_is_blamed_on_its_configuration(everything: FaultSession, fault: Fault) -> None:
    assert fault.complaint(everything.trial_of(fault.name)) == ""


def test_no_other_configuration_suffers(everything: FaultSession) -> None:
    assert everything.damage() == []
    assert len(everything.trials) == 4 + len(FAULTS) - 1


@pytest.mark.parametrize("name", ["illegal_address", "infinite_loop", "write_overhang", "write_astray", "trap"])
def test_one_fault_alone_costs_a_few_seconds(cache: Path, tmp_path: Path, name: str) -> None:
    with nothing_left(tmp_path):
        session = tune_faults(tmp_path, name, cache=cache)
    fault = next(fault for fault in FAULTS if fault.name == name)
    assert fault.complaint(session.trial_of(name)) == ""
    assert session.damage() == []
    assert session.seconds < RUN_DEADLINE_S + 16


@pytest.mark.parametrize("name", [INTERMITTENT, "keeps_result", "wrong_later", "stores_once", "skips_work"])
def test_what_becomes_wrong_or_idle_later_neither_wins_nor_ties(cache: Path, tmp_path: Path, name: str) -> None:
    with nothing_left(tmp_path):
        session = tune_faults(tmp_path, name, cache=cache)
    assert session.damage() == []
    assert [config for config in session.result.ties if config["FAULT"] != HEALTHY] == []


def test_a_finalist_that_keeps_its_result_is_refused_with_the_reason(cache: Path, tmp_path: Path) -> None:
    session = tune_faults(tmp_path, "keeps_result", cache=cache, finals=8)
    kept = session.trial_of("keeps_result")
    assert kept is not None
    if kept.outcome is Outcome.OK:  # unless it happened to be pruned
        (refused,) = session.result.refused
        assert (refused.config, refused.outcome) == (kept.config, Outcome.WRONG_RESULT)
        assert "in repeat 3 of " in refused.reason  # the first with other inputs
