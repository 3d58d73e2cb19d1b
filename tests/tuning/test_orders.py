"""Orders of trials that may not change unseen: of samplers, resumed and killed sessions, tries and several GPUs.

`tests/pinned/orders.json` holds them as row numbers of the space; ``pytest tests/tuning/test_orders.py --pin`` writes
those of the present code.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from judges import failed, timed

from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.space.search_space import feasible_space
from autotile.tuning.progress_state import Progress

FILE = Path(__file__).parents[1] / "pinned" / "orders.json"
TRIALS = 48

WIDER = {
    "THREADS = [32, 64, 128, 256]\nWORK = [1, 2, 4]": (
        "THREADS = [32, 64, 96, 128, 160, 192, 224, 256]\nWORK = [1, 2, 3, 4]\n"
        'PAD = [0, 1, 2, 3, 4]\nMODE = ["a", "b", "c"]'
    ),
    "WORK = 1\n\n[rules]": 'WORK = 1\nPAD = 0\nMODE = "a"\n\n[rules]',
}
"""Changes of the tiny kernel that give it 480 configurations."""


def judged(config: Config) -> Trial:
    """Return the trial of a configuration in a landscape with interactions, failures and a narrow optimum."""
    threads, work, pad = (int(config[name]) for name in ("THREADS", "WORK", "PAD"))
    if threads * work > 768:
        return failed(config, Outcome.WRONG_RESULT)
    away = abs(threads / 32 - 5.2) + 0.6 * abs(work - 2.4) + 0.3 * abs(pad - 1.7) * work
    slow = {"a": 0.0, "b": 0.4, "c": 0.9}[str(config["MODE"])]
    return timed(config, 100 + 20 * away + 30 * slow + (threads * 7 + work * 3 + pad) % 5)


@pytest.fixture
def pinned(request: pytest.FixtureRequest) -> Callable[[str, list[int]], None]:
    """Compare an order with the pinned one, or pin it."""

    def check(name: str, rows: list[int]) -> None:
        orders = json.loads(FILE.read_text()) if FILE.is_file() else {}
        if request.config.getoption("--pin"):
            orders[name] = rows
            FILE.write_text("{\n" + ",\n".join(f'"{one}": {orders[one]}' for one in sorted(orders)) + "\n}\n")
        assert rows == orders[name]

    return check


@pytest.fixture
def wide(rewrite: Callable[[Mapping[str, str]], Any], compiled_once: None) -> Any:
    """Return the wider kernel, its recording and the rows of the trials that are stored, in their order."""
    bench = rewrite(WIDER)
    space = feasible_space(bench.kernel.spec, bench.problem().sizes, bench.device)
    row_of = {config_key(space.config(row)): row for row in range(len(space))}
    recording = bench.record(judged)

    class Wide:
        def tune(self, **options: Any) -> Any:
            return bench.tune(recording, **{"trials": TRIALS, "workers": 2, **options})

        def killed(self, after: int, **options: Any) -> None:
            """Interrupt a session when ``after`` trials are stored."""
            before = len(self.rows())

            def interrupt(progress: Progress) -> None:
                if progress.phase == "searching" and progress.done == after - before:
                    raise KeyboardInterrupt

            result = bench.tune(recording, interrupt, **{"trials": TRIALS, "workers": 2, **options})
            assert result.interrupted
            assert len(self.rows()) == after

        def rows(self) -> list[int]:
            return [row_of[config_key(trial.config)] for trial in bench.stored()]

        def config(self, row: int) -> Config:
            return space.config(row)

    return Wide()


@pytest.mark.parametrize("sampler", ["auto", "feasible", "random", "tpe", "brute-force"])
def test_of_a_sampler(wide: Any, pinned: Any, sampler: str) -> None:
    wide.tune(sampler=sampler, seed=3)
    assert len(wide.rows()) == TRIALS
    pinned(sampler, wide.rows())


def test_workers_do_not_change_it(wide: Any, pinned: Any) -> None:
    wide.tune(seed=3, workers=1)
    pinned("auto", wide.rows())


@pytest.mark.parametrize("after", [1, 2, 9, 10, 23, 40])
def test_of_a_session_that_was_killed_is_that_of_one_that_was_not(wide: Any, pinned: Any, after: int) -> None:
    wide.killed(after, seed=3)
    wide.tune(seed=3)
    pinned("auto", wide.rows())


def test_of_a_session_that_was_killed_thrice(wide: Any, pinned: Any) -> None:
    for after in (5, 6, 30):
        wide.killed(after, seed=3)
    wide.tune(seed=3)
    pinned("auto", wide.rows())


def test_of_a_session_that_goes_on_with_more_trials(wide: Any, pinned: Any) -> None:
    wide.tune(seed=3, trials=20)
    wide.tune(seed=3)
    pinned("auto, 20 and more", wide.rows())


def test_of_tries(wide: Any, pinned: Any) -> None:
    wide.tune(seed=3, tries=(wide.config(400), wide.config(77)), trials=24)
    pinned("auto, two tries", wide.rows())


def test_of_given_configurations_only(wide: Any, pinned: Any) -> None:
    wide.tune(seed=3, only=tuple(wide.config(row) for row in (11, 5, 300, 42)), trials=None)
    pinned("only four", wide.rows())


def test_of_a_search_that_ends_by_itself(wide: Any, pinned: Any) -> None:
    wide.tune(seed=3, trials=None, until=0.05)
    pinned("auto, until 5 %", wide.rows())


def test_of_several_objectives(wide: Any, pinned: Any) -> None:
    wide.tune(seed=3, trials=24, objectives=("time", "registers"), sampler="nsga2")
    pinned("nsga2, two objectives", wide.rows())


def test_of_several_gpus_has_each_configuration_once(wide: Any) -> None:
    wide.tune(seed=3, devices=(0, 1))
    assert len(wide.rows()) == len(set(wide.rows())) == TRIALS
