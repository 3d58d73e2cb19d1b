"""Calls of a GPU with single candidates, and a GPU worker made of functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from autotile.core.device import device_profile
from autotile.core.model import Outcome
from autotile.cuda.support import SupportKernels, compared
from autotile.workers.child import Handler, Stage
from autotile.workers.gpu import Backend, Gpu
from autotile.workers.jobs import Candidate, Check, Entry, Job, Race, Reading


def evaluate(gpu: Backend, candidate: Candidate, best_us: float | None = None) -> Reading:
    """Submit one candidate while no other waits, and return its reading."""
    gpu.submit(candidate, best_us)
    return gpu.result()[1]


def verify(gpu: Gpu, candidate: Candidate, repeats: int, seed: int = 0) -> Reading:
    return gpu.run(Check((Entry(candidate),), repeats, seed=seed))[0]


def race(gpu: Gpu, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[Reading]:
    return gpu.raced(Race(tuple(map(Entry, candidates)), rounds, seed))


def raced(times_us: Sequence[float], outcome: Outcome = Outcome.OK, reason: str = "") -> Reading:
    return Reading(outcome, reason, rounds_us=tuple(times_us))


def compare(support: SupportKernels, *output: Any, **criterion: Any) -> tuple[int, int, float]:
    """Compare an output with its expected values, as `SupportKernels.comparison` does."""
    return compared(support.results([support.comparison(*output, **criterion)])[0])


class GivenGpu:
    """A backend without a GPU; what derives from it says what `time`, `check` and `race` find."""

    source: Literal["cuda", "replayed"] = "cuda"
    gpu_count, has_result = 1, False
    recorded = sanitizer = None
    time: Any
    check: Any
    race: Any

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.given: list[tuple[Candidate, float | None]] = []

    def wait(self) -> None:
        """There is nothing to wait for."""

    def submit(self, candidate: Candidate, limit_us: float | None = None) -> None:
        self.given.append((candidate, limit_us))

    def result(self) -> tuple[Candidate, Reading]:
        candidate, limit_us = self.given.pop(0)
        return candidate, self.time(candidate, limit_us)

    def run(self, job: Job) -> list[Reading]:
        return self.race(job) if isinstance(job, Race) else [self.check(job)]


Run = Callable[[Mapping[str, Any], float | None, Stage], Reading]
"""Returns the reading of a configuration, given its limit."""


def worker(
    run: Run,
    race_us: Callable[[Mapping[str, Any], int], float] = lambda config, done: 5.0 + done / 1000,
    *,
    opened: Callable[[Mapping[str, Any]], None] = lambda workload: None,
    check: Callable[[Mapping[str, Any], Stage], Reading] | None = None,
) -> Handler:
    """Return the handler of a GPU worker without a GPU.

    ``run`` measures a configuration, and verifies it repeatedly unless ``check`` does; ``race_us`` returns its time in
    a round; ``opened`` is called with each problem. It ends with a crash, which leaves no context.
    """

    def handle(message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        if message["op"] == "open":
            opened(message["workload"] or {})
            return device_profile("h200").to_json()
        configs = [one["candidate"]["config"] for one in message["entries"]]
        if message["op"] == "race":
            readings = [raced([race_us(config, done) for done in range(message["rounds"])]) for config in configs]
        elif message["op"] == "check" and check is not None:
            readings = [check(config, stage) for config in configs]
        else:
            limits = [one["limit_us"] for one in message["entries"]]
            readings = [run(config, limit, stage) for config, limit in zip(configs, limits, strict=True)]
        return {"readings": readings, "last": any(one.outcome is Outcome.CRASHED for one in readings)}

    return handle
