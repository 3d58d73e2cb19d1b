"""Search methods replayed on a recorded space: the samplers of autotile and Optuna, and Kernel Tuner's strategies.

A method is ``NAME`` or ``autotile:NAME`` (a sampler of autotile, through its `Search`), ``measured:NAME`` (the same,
where failures do not count), ``session:NAME`` (as a tuning session asks it, with look-ahead and queue; failures, which
take no GPU time, do not count), ``measured-estimated:NAME`` and ``session-estimated:NAME`` (the same, with estimated
times where the space has any), ``optuna:NAME`` (Optuna's sampler on its own study over all combinations; repeated and
invalid ones are redrawn without counting), ``optuna-counted:NAME`` (the same, but they count as measurements) or
``kernel-tuner:STRATEGY`` (with a fresh `Searchspace`; repeated proposals are answered and do not count).
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from autotile.core.device import DeviceProperties, device_profile, parse_profile
from autotile.core.forks import cached_property
from autotile.core.model import Measurement, Outcome, Trial, Value
from autotile.exchange.recording import Recording, read_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec, Parameter
from autotile.space.search_space import SearchSpace
from autotile.space.time_estimate import estimate_times

if TYPE_CHECKING:
    from autotile.search.search import Shortlist
    from autotile.search.transfer import Estimate

_REDRAWS = 200
"""Maximum draws of an Optuna sampler per measurement; after that, the measurement is lost."""

_REPEATS = 200
"""Proposals per measurement after which a strategy that only repeats itself is stopped."""

_MAX_SECONDS = 120
"""Time limit of a strategy; some wait for a row that they never draw."""


@dataclass(frozen=True)
class RecordedSpace:
    """A space with the time of every valid configuration, in ms; NaN for failures."""

    name: str
    space: SearchSpace
    times_ms: np.ndarray
    estimate: Estimate | None = None
    """Estimates the time of each row; None if it is not known what the kernel launches."""

    @classmethod
    def read(cls, path: Path) -> RecordedSpace:
        """Read a recording of autotile, or an ``.npz`` of names, values (JSON lists), codes and times.

        The latter is named ``KERNEL_GPU``; it has estimates if the kernel's launch and the GPU are known.
        """
        with np.load(path, allow_pickle=False) as data:
            if "header" in data:
                return cls.of(read_recording(path), path.stem)
            names, values = data["names"].tolist(), [json.loads(text) for text in data["values"].tolist()]
            codes, times = data["codes"].astype(np.int64), data["time_ms"]
        parameters = tuple(Parameter(name, tuple(each)) for name, each in zip(names, values, strict=True))
        sizes = [len(each) for each in values]
        order = np.lexsort(codes.T[::-1])
        table = np.asfortranarray(codes[order].astype(np.min_scalar_type(max(sizes) - 1)))
        space = SearchSpace(parameters, table, int(np.prod(sizes)), rules=(), limits=(), seconds=0.0)
        return cls(path.stem, space, times[order], _known_launch(path.stem))

    @classmethod
    def of(cls, recording: Recording, name: str) -> RecordedSpace:
        """Return the space of a recording."""
        order = np.lexsort(recording.codes.T[::-1])
        codes = np.asfortranarray(recording.codes[order])
        space = SearchSpace(recording.header.parameters, codes, len(codes), rules=(), limits=(), seconds=0.0)
        times_ms = np.where(recording.ok, recording.columns["time_us"], np.nan).astype(np.float64)[order] / 1e3
        key, device = recording.header.key, recording.header.device
        assert device is not None
        spec = load_kernel(_example_files().get(key.kernel, key.kernel)).spec
        estimate = partial(_estimate, spec, key.sizes, device, key.dtype) if spec.objective is None else None
        return cls(name, space, times_ms, estimate)  # a session estimates times, not other objectives

    @cached_property
    def best_ms(self) -> float:
        """Minimum time, in ms."""
        return float(np.nanmin(self.times_ms))

    def reached(self, rows: list[int], budget: int) -> np.ndarray:
        """Return the ratio of best possible to best found time, shape (budget,); 0 before the first success."""
        times = np.full(budget, np.inf)
        measured = np.array([self.times_ms[row] if row >= 0 else np.nan for row in rows[:budget]], np.float64)
        times[: len(measured)] = np.where(np.isnan(measured), np.inf, measured)
        return np.asarray(self.best_ms / np.minimum.accumulate(times))


@cache
def _example_files() -> dict[str, str]:
    """Return the search-space file of each example, by the name of its kernel."""
    examples = Path(__file__).resolve().parents[1] / "examples"
    tables = {path: tomllib.loads(path.read_text(encoding="utf-8")) for path in examples.glob("*/*.toml")}
    return {table["kernel"]["name"]: str(path) for path, table in tables.items() if "kernel" in table}


_SPACES = Path(__file__).with_name("spaces")
"""Launches, arguments and work of recorded kernels, as search-space files without templates; and profiles of GPUs."""


def _known_launch(name: str) -> Estimate | None:
    """Return the estimate of a space named ``KERNEL_GPU``; None if its launch or the GPU is not known."""
    kernel, _, gpu = name.partition("_")
    launch, profile = _SPACES / f"{kernel}.toml", _SPACES / "devices" / f"{gpu}.toml"
    known = {"A100": "a100", "3090": "rtx-3090"}
    if not launch.is_file() or not (profile.is_file() or gpu in known):
        return None
    device = device_profile(known[gpu]) if gpu in known else parse_profile(profile.read_text(), str(profile))
    spec = parse_spec(launch.read_text(), str(launch))
    return partial(_estimate, spec, spec.sizes, device, spec.dtypes[0])


def _estimate(
    spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties, dtype: str, space: SearchSpace
) -> np.ndarray | None:
    found = estimate_times(spec, spec.at(sizes, dtype), device, space)
    return found.time_us if found is not None else None


def run_method(method: str, recorded: RecordedSpace, seed: int, budget: int, batch: int) -> list[int]:
    """Return the rows in the order in which a method measured them; -1 for a measurement spent on no row."""
    kind, _, name = method.rpartition(":")
    run = {
        "": _autotile,
        "autotile": _autotile,
        "measured": partial(_autotile, counts_failures=False),
        "session": _session,
        "measured-estimated": partial(_autotile, counts_failures=False, estimates=True),
        "session-estimated": partial(_session, estimates=True),
        "optuna": _optuna,
        "kernel-tuner": _kernel_tuner,
    }.get(kind)
    if kind == "optuna-counted":
        run = partial(_optuna, counted=True)
    if run is None:
        raise SystemExit(f"unknown kind of method {kind!r}")
    return run(name, recorded, seed, min(budget, len(recorded.space)), batch)


def all_methods() -> list[str]:
    """Return every method that can run with the installed packages."""
    from kernel_tuner.interface import strategy_map

    from autotile.search.samplers import SAMPLERS

    ours = [name for name, entry in SAMPLERS.items() if not entry.exhaustive and entry.missing_package is None]
    theirs = [name for name in strategy_map if name != "brute_force" and _loads(strategy_map[name])]
    needs = {"gp": "torch", "cmaes": "cmaes"}
    optuna = [name for name in _optuna_samplers() if _has(needs.get(name, ""))]
    return [*ours, *(f"{kind}:{name}" for kind in ("optuna", "optuna-counted") for name in optuna)] + [
        f"kernel-tuner:{name}" for name in theirs
    ]


def _autotile(
    name: str,
    recorded: RecordedSpace,
    seed: int,
    budget: int,
    batch: int,
    *,
    counts_failures: bool = True,
    estimates: bool = False,
) -> list[int]:
    from autotile.search.search import Search

    search = Search(recorded.space, name, seed, estimate=recorded.estimate if estimates else None)
    rows: list[int] = []
    while len(rows) < budget:
        proposals = [search.propose() for _ in range(min(batch, budget - len(rows)))]
        for proposal in proposals:
            if proposal is None:
                return rows
            row, config = proposal
            trial = as_trial(config, recorded.times_ms[row])
            search.tell(row, trial)
            if counts_failures or trial.outcome is Outcome.OK:
                rows.append(row)
    return rows


SESSION_WORKERS = 16
"""Compile workers of a session; a sampler that learns asks the same with any number."""
SESSION_GPUS = 1
"""GPUs of a session, each of which runs one trial and has another at hand."""


def _session(
    name: str, recorded: RecordedSpace, seed: int, budget: int, batch: int, *, estimates: bool = False
) -> list[int]:
    _, ended = replayed(name, recorded, seed, estimates=estimates)
    return list(islice((row for row, trial in ended if trial.outcome is Outcome.OK), budget))


def replayed(
    name: str, recorded: RecordedSpace, seed: int, *, estimates: bool = False
) -> tuple[Shortlist, Iterator[tuple[int, Trial]]]:
    """Return the search of a session on a recorded space, and what `session` yields of it."""
    from autotile.search.samplers import lookahead_of
    from autotile.search.search import Search, Shortlist

    lookahead = lookahead_of(name, SESSION_WORKERS, SESSION_GPUS)
    estimate = recorded.estimate if estimates else None
    shortlist = Shortlist(Search(recorded.space, name, seed, estimate=estimate), lookahead)
    trials = cache(lambda row: as_trial(recorded.space.config(row), recorded.times_ms[row]))
    return shortlist, session(shortlist, trials)


def session(shortlist: Shortlist, trial_of: Callable[[int], Trial]) -> Iterator[tuple[int, Trial]]:
    """Yield the rows and trials of a session in the order in which they end, until no row is left.

    The session chooses a trial whenever it may, as `autotile.search.search.Shortlist` describes: while one runs and
    `Lookahead.queued` wait for the GPU, it waits for the oldest. A candidate that does not compile ends at once.

    Parameters
    ----------
    shortlist
        Source of the candidates.
    trial_of
        Return the trial of a row.
    """
    chosen: deque[int] = deque()
    while True:
        while shortlist.propose() is not None:
            pass
        compiled = {row: trial_of(row) for row in shortlist.ready()}
        rejected = (row for row, trial in compiled.items() if trial.stage in ("compile", "resources"))
        row = next(rejected, None)
        if row is None and compiled:
            chosen.append(shortlist.choose(compiled))
            continue
        if row is None:
            if not chosen:
                return
            row = chosen.popleft()
        shortlist.tell(row, trial_of(row))
        yield row, trial_of(row)


_DIGEST_TRIALS = 30


def proposals_digest() -> str:
    """Return a digest of what the default sampler proposes, by which a record shows that it is of the present code.

    The space is built in: five parameters with interactions, and failures. The sampler is asked one at a time and as a
    session asks it, with one seed.
    """
    values = {
        "BM": (16, 32, 64, 128),
        "BN": (16, 32, 64, 128),
        "TM": (1, 2, 4, 8),
        "BK": (8, 12, 16),
        "MODE": ("a", "b"),
    }
    sizes = [len(each) for each in values.values()]
    codes = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=1)
    bm, bn, tm, bk, mode = codes.T
    away = abs(bm + bn - 3.9) + 0.53 * abs(bm - bn + 0.3) + 0.71 * abs(tm - 1.8) + 0.37 * abs(bk - 1.1) + 0.61 * mode
    times_ms = np.where(bm + bn + tm > 7, np.nan, 1 + away + 0.013 * np.sin(np.arange(len(codes))))
    parameters = tuple(Parameter(name, each) for name, each in values.items())
    space = SearchSpace(parameters, np.asfortranarray(codes.astype(np.uint8)), len(codes), (), (), seconds=0.0)
    recorded = RecordedSpace("built-in", space, times_ms)
    rows = [run_method(method, recorded, 0, _DIGEST_TRIALS, 1) for method in ("feasible", "session:feasible")]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def as_trial(config: dict[str, Value], time_ms: float) -> Trial:
    """Return the trial of a recorded configuration; NaN is a failure."""
    if np.isnan(time_ms):
        return Trial(config, Outcome.COMPILE_FAILED, "recorded as failed", "compile")
    time_us = 1e3 * float(time_ms)
    return Trial(config, Outcome.OK, measurement=Measurement(time_us, time_us, time_us))


def _optuna_samplers() -> dict[str, Callable[[int], Any]]:
    from optuna import samplers

    return {
        "tpe": lambda seed: samplers.TPESampler(seed=seed),
        "tpe-independent": lambda seed: samplers.TPESampler(seed=seed, multivariate=False),
        "gp": lambda seed: samplers.GPSampler(seed=seed),
        "nsga2": lambda seed: samplers.NSGAIISampler(seed=seed),
        "cmaes": lambda seed: samplers.CmaEsSampler(seed=seed),
        "qmc": lambda seed: samplers.QMCSampler(seed=seed),
        "random": lambda seed: samplers.RandomSampler(seed=seed),
    }


def _optuna(
    name: str, recorded: RecordedSpace, seed: int, budget: int, batch: int, *, counted: bool = False
) -> list[int]:
    """Run an Optuna sampler one at a time or in batches; methods that need numbers get indices of values."""
    import warnings

    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    study = optuna.create_study(sampler=_optuna_samplers()[name](seed))
    numbers = name in {"cmaes", "gp", "qmc"}
    rows: list[int] = []
    tried: set[int] = set()
    longest = 0.0
    while len(rows) < budget:
        asked: list[tuple[optuna.Trial, int]] = []
        while len(asked) < min(batch, budget - len(rows)):
            for draw in range(_REDRAWS):
                trial = study.ask()
                row = _suggested(trial, recorded.space, numbers)
                if counted or draw == _REDRAWS - 1 or (row >= 0 and row not in tried):
                    break
                _tell(study, trial, recorded, row, longest)
            tried.add(row)
            asked.append((trial, row))
        for trial, row in asked:
            time_ms = recorded.times_ms[row] if row >= 0 else np.nan
            longest = longest if np.isnan(time_ms) else max(longest, float(time_ms))
            _tell(study, trial, recorded, row, longest)
            rows.append(row)
    return rows


def _suggested(trial: Any, space: SearchSpace, numbers: bool) -> int:
    config = {
        each.name: each.values[trial.suggest_int(each.name, 0, len(each.values) - 1)]
        if numbers
        else trial.suggest_categorical(each.name, each.values)
        for each in space.parameters
    }
    row = space.row_of(config)
    return -1 if row is None else row


def _tell(study: Any, trial: Any, recorded: RecordedSpace, row: int, longest_ms: float) -> None:
    """Report a failure as twice the longest time with a violated constraint; Optuna ignores failed trials."""
    time_ms = recorded.times_ms[row] if row >= 0 else np.nan
    failed = bool(np.isnan(time_ms))
    trial.set_constraint("failed", float(failed))
    study.tell(trial, (2 * longest_ms or 1e3) if failed else float(time_ms))


def _kernel_tuner(name: str, recorded: RecordedSpace, seed: int, budget: int, batch: int) -> list[int]:
    """Run a strategy as in Kernel Tuner's simulation mode, with the recording as its cache."""
    import warnings

    from kernel_tuner import util
    from kernel_tuner.interface import Options, strategy_map
    from kernel_tuner.searchspace import Searchspace

    warnings.simplefilter("ignore")
    space = recorded.space
    values = {each.name: list(each.values) for each in space.parameters}
    cache: dict[str, dict[str, Any]] = {}
    row_of: dict[str, int] = {}
    for row in range(len(space)):
        config = space.config(row)
        key = ",".join(map(str, config.values()))
        time_ms = recorded.times_ms[row]
        failure = {"time": util.RuntimeFailedConfig(), "__error__": util.RuntimeFailedConfig()}
        cache[key] = {**config, **(failure if np.isnan(time_ms) else {"time": float(time_ms)})}
        row_of[key] = row
    random.seed(seed)
    np.random.seed(seed)
    searchspace = Searchspace(None, None, None, from_cache={"tune_params": values, "cache": cache})
    runner = _replaying_runner(row_of, budget)
    options = Options(
        strategy=name,
        strategy_options=Options(max_fevals=budget),
        seed=seed,
        tune_params=values,
        cache=cache,
        cachefile=None,
        restrictions=[],
        restrictions_unmodified=[],
        objective=["time"],
        objective_higher_is_better=[False],
        metrics=None,
        budget=util.TuningBudget(None, budget),
        verbose=False,
        simulated_time=0,
    )
    with suppress(util.StopCriterionReached, TimeoutError), _time_limit():
        strategy_map[name].tune(searchspace, runner, options)
    return list(runner.rows)


def _replaying_runner(row_of: dict[str, int], budget: int) -> Any:
    from kernel_tuner import util
    from kernel_tuner.interface import Options
    from kernel_tuner.runners.simulation import SimulationRunner

    class ReplayingRunner(SimulationRunner):
        """Kernel Tuner's simulation runner that records the rows and stops a strategy that only repeats itself."""

        def __init__(self) -> None:
            super().__init__(Options(kernel_name="replay"), Options(kernel_name="replay"), Options(quiet=True), 1, None)
            self.rows: dict[int, None] = {}
            self.proposals = 0

        def run(self, parameter_space: Any, tuning_options: Any) -> list[Any]:
            proposed = list(parameter_space)
            self.proposals += len(proposed)
            if self.proposals > _REPEATS * budget:
                raise util.StopCriterionReached("the strategy only repeats itself")
            results = super().run(proposed, tuning_options)
            for element, result in zip(proposed, results, strict=True):
                if result is not None:
                    self.rows.setdefault(row_of[",".join(map(str, element))])
            return results

    return ReplayingRunner()


class _time_limit:  # noqa: N801 - used as a function
    """Context manager that raises TimeoutError in the main thread after `_MAX_SECONDS`."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._end)
        signal.alarm(_MAX_SECONDS)

    def __exit__(self, *exception: object) -> None:
        signal.alarm(0)

    @staticmethod
    def _end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError


def timed(method: str, recorded: RecordedSpace, seed: int, budget: int, batch: int) -> dict[str, Any]:
    """Return the rows of one run and its seconds per measurement, including the look-up in the recording."""
    started = time.perf_counter()
    try:
        rows, error = run_method(method, recorded, seed, budget, batch), ""
    except Exception as failure:  # a method that fails is a result of the comparison
        rows, error = [], f"{type(failure).__name__}: {failure}"
    seconds = time.perf_counter() - started
    return {"rows": rows, "seconds_a_measurement": seconds / max(1, len(rows)), "error": error}


def _has(package: str) -> bool:
    return not package or find_spec(package) is not None


def _loads(strategy: Any) -> bool:
    try:
        return callable(strategy.tune) and not _missing(strategy)
    except ImportError:
        return False


def _missing(strategy: Any) -> bool:
    """Return True if a strategy requires a package that is not installed."""
    return {"skopt": not _has("skopt"), "pyatf_strategies": not _has("pyatf")}.get(str(strategy).split("'")[1], False)
