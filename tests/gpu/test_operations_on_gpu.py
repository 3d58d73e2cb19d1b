"""Operations on a GPU: the last race with cuBLAS, its times in the database, and inputs that are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.fault_kit import HEALTHY, fault_kernel

import autotile
from autotile.core.documents import to_fields
from autotile.core.model import Outcome
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.database.database import Database
from autotile.database.learned import read_models
from autotile.families.operation_model import ModelCandidate
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import Library, load_operation
from autotile.serving.operations import libraries_for
from autotile.settings import read_settings
from autotile.tuning.operation_family import Sweep, problem_of
from autotile.tuning.operation_session import OperationResult, tune_operation
from autotile.tuning.options import TuneOptions
from autotile.workers import gpu as gpu_module
from autotile.workers.bench import GpuWorker
from autotile.workers.jobs import Candidate, Entry, Time, Workload, job_message

pytestmark = pytest.mark.gpu

SCALING = """
[operation]
name = "scaling"
sizes = { n = 4096 }
dtypes = ["float32"]

[kernels.scale]
kernel = "./scale.toml"
"""


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("bfloat16", {"M": 257, "N": 128, "K": 513}), ("float32", {"M": 64, "N": 512, "K": 256, "TRANS_B": 1})],
)
def test_kernels_and_cublas_are_raced(dtype: str, sizes: dict[str, int]) -> None:
    result = autotile.tune("matmul", sizes, dtype=dtype, options=TuneOptions(trials=8, finals=2), progress=False)
    assert isinstance(result, OperationResult)
    assert not result.notices, result.notices
    cublas = result.libraries[0]
    assert (cublas.name, cublas.reason, cublas.state in ("won", "raced")) == ("cublas", "", True)
    winner = result.winner
    assert winner is not None
    assert winner.time_us <= cublas.time_us
    with Database.open(read_settings().database) as database:
        stored = database.best("matmul:cublas", dtype=dtype)
        assert [one.trial.time_us for one in stored] == [cublas.time_us]
        assert stored[0].key.sizes["M"] == sizes["M"]
        raced = [one for one in result.contenders if one.state in ("won", "raced") and not one.is_library]
        for one in raced:
            assert database.best(one.name, dtype=dtype)[0].trial.time_us == one.time_us


def test_a_function_of_ones_own_is_raced_and_a_wrong_one_fails(scale_toml: Path, cupy: Any) -> None:
    path = scale_toml.with_name("scaling.toml")
    path.write_text(SCALING)
    operation = load_operation(str(path))

    def right(x: Any, y: Any) -> None:
        cupy.multiply(x, cupy.float32(2.0), out=y)

    def wrong(x: Any, y: Any) -> None:
        y.fill(0)

    result = tune_operation(
        operation,
        operation.resolve({"n": 100_000}),
        read_settings(),
        TuneOptions(trials=3, finals=2),
        libraries=[Library("right", "1", right), Library("wrong", "1", wrong)],
    )
    states = {one.name: one.state for one in result.contenders}
    assert states["wrong"] == "failed"
    assert {states["right"], states["scale"]} == {"won", "raced"}


def test_the_inputs_of_two_kernels_are_kept_by_the_worker(scale_toml: Path, tmp_path: Path) -> None:
    """A worker that is opened for a problem again verifies the candidate that passed, and lays nothing out."""
    kernel = load_kernel(str(scale_toml))
    config = dict(kernel.spec.default)
    cubin = CubinCache(tmp_path, 10**9).get_or_compile(
        compile_job(kernel, config, "float32", live_device().architecture, {"n": 1000})
    )
    first = Workload(kernel.spec.text, kernel.spec.source, {"n": 1000}, "float32", "cold", str(tmp_path), 10**9, 0.02)
    second = replace(first, sizes={"n": 2000})
    worker = GpuWorker()

    def ask(message: Any) -> Any:
        return worker(message, lambda stage: None)

    problems = []
    for workload in (first, second, first):
        ask({"op": "open", "workload": to_fields(workload)})
        problems.append(worker._bench._present)
        reply = ask(job_message(Time((Entry(Candidate(config, str(cubin.path), cubin.symbols)),))))
        assert [one.outcome for one in reply["readings"]] == [Outcome.OK]
    assert problems[0] is problems[2]
    assert problems[0] is not problems[1]


def test_a_family_is_measured_and_its_model_stored(scale_toml: Path) -> None:
    """Every pair of a problem and a configuration is verified; a run after it measures nothing again."""
    path = scale_toml.with_name("scaling.toml")
    path.write_text(SCALING)
    options = TuneOptions(trials=26, workers=4)
    result = autotile.tune_family(str(path), n="1000..1000000", options=options, progress=False)
    assert result.problems == 26
    assert result.pairs >= 26 * 6
    assert result.refused == 0
    assert result.losses is not None
    assert 0 <= result.losses.mean <= result.losses.worst
    with Database.open(read_settings().database) as database:
        assert [(one.operation, one.dtype) for one in read_models(database)] == [("scaling", "float32")]
    again = autotile.tune_family(str(path), n="1000..1000000", options=options, progress=False)
    assert (again.resumed, again.pairs) == (26, result.pairs)


def test_products_are_swept_beside_cublas(sweep_of: Callable[..., Sweep]) -> None:
    operation = load_operation("matmul")
    sweep = sweep_of(operation, "float32", libraries_for(operation))
    kernels = {member.name: member.load() for member in operation.members if "float32" in member.dtypes}
    candidates = [ModelCandidate(name, dict(kernel.spec.default)) for name, kernel in kernels.items()]
    for sizes in ({"M": 256, "N": 512, "K": 128}, {"M": 33, "N": 65, "K": 129, "TRANS_A": 1}):
        problem = operation.resolve(sizes, "float32")
        named = problem_of(operation, kernels, problem, live_device())
        swept = sweep.run(sweep.prepare(problem, named, candidates))
        assert swept is not None
        assert swept.libraries["cublas"] > 0
        assert {trial.outcome.has_time for trial in swept.trials.values()} == {True}, swept.trials
        with Database.open(read_settings().database) as database:
            assert len(database.best("matmul:cublas")) >= 1


FAULTS = {
    "trap": Outcome.CRASHED,
    "infinite_loop": Outcome.TIMED_OUT,
    "wrong_element": Outcome.WRONG_RESULT,
    "write_outside": Outcome.OUT_OF_BOUNDS,
    "keeps_result": Outcome.WRONG_RESULT,
    "hangs_later": Outcome.TIMED_OUT,
}
"""Faults of the kit, the last two of which show in repeated launches only, with the outcome of each in a sweep."""


@pytest.mark.timeout(600)
def test_a_sweep_blames_the_configuration_that_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep_of: Callable[..., Sweep]
) -> None:
    """Whatever one does to the worker, those before and after it are right."""
    monkeypatch.setattr(gpu_module, "_GRID_DEADLINE_S", 20.0)
    monkeypatch.setattr(gpu_module, "_ENTRY_DEADLINE_S", 0.0)
    fault_kernel(tmp_path, *FAULTS)
    path = tmp_path / "doubling.toml"
    path.write_text(
        '[operation]\nname = "doubling"\nsizes = { n = 100000 }\ndtypes = ["float32"]\n\n'
        '[kernels.faults]\nkernel = "./faults.toml"\n'
    )
    operation = load_operation(str(path))
    (name,) = (member.name for member in operation.members)
    healthy = [ModelCandidate(name, {"THREADS": threads, "FAULT": HEALTHY}) for threads in (64, 128, 256)]
    faulty = [ModelCandidate(name, {"THREADS": 128, "FAULT": fault}) for fault in FAULTS]
    order = [healthy[0], *faulty[:3], healthy[1], *faulty[3:], healthy[2]]
    sweep = sweep_of(operation, "float32")
    for n in (100_000, 200_000):
        swept = sweep.run(sweep.prepare(operation.resolve({"n": n}), {name: {"n": n}}, order))
        assert swept is not None
        assert all(swept.trials[one.key].outcome.has_time for one in healthy), swept.trials
        if n == 100_000:
            assert {one.config["FAULT"]: swept.trials[one.key].outcome for one in faulty} == FAULTS
        else:
            assert len(swept.trials) == len(healthy)  # the others are excluded
