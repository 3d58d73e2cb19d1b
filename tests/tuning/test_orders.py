"""Orders of trials that may not change unseen: of samplers, resumed and killed sessions, tries and several GPUs.

`tests/pinned/orders.json` holds them as row numbers of the space; ``pytest tests/tuning/test_orders.py --pin`` writes
those of the present code.
"""

import json
from pathlib import Path

import pytest
from judges import ending_at, failed, timed

from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.space.search_space import feasible_space

FILE = Path(__file__).parents[1] / "pinned" / "orders.json"
TRIALS = 48
SAMPLERS = ("auto", "feasible", "random", "tpe", "brute-force")

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
def pinned(request):

    def check(name, rows):
        orders = json.loads(FILE.read_text()) if FILE.is_file() else {}
        if request.config.getoption("--pin"):
            orders[name] = rows
            FILE.write_text("{\n" + ",\n".join(f'"{one}": {orders[one]}' for one in sorted(orders)) + "\n}\n")
        assert rows == orders[name]

    return check


@pytest.fixture
def wide(rewrite, compiled_once):
    """Return the wider kernel, its recording and the rows of the trials that are stored, in their order."""
    bench = rewrite(WIDER)
    space = feasible_space(bench.kernel.spec, bench.kernel.spec.at(bench.problem().sizes), bench.device)
    row_of = {config_key(space.config(row)): row for row in range(len(space))}
    recording = bench.record(judged)

    class Wide:
        def tune(self, observe=lambda _: None, **options):
            """Tune; ``tries`` and ``only`` are rows."""
            given = {name: tuple(map(space.config, options[name])) for name in ("tries", "only") if name in options}
            chosen = {"trials": TRIALS, "workers": 2, "seed": 3, **options, **given}
            return bench.tune(recording, observe, **chosen)

        def rows(self):
            return [row_of[config_key(trial.config)] for trial in bench.stored()]

    return Wide()


@pytest.mark.parametrize(
    ("name", "sessions"),
    [
        *((name, [{"sampler": name}]) for name in SAMPLERS),
        ("auto", [{"workers": 1}]),
        *((name, [{"sampler": name, "workers": workers}]) for name, workers in (("tpe", 4), ("random", 1))),
        ("auto", [{"trials": 20}, {}]),  # as if more had been granted from the start
        ("auto, two tries", [{"tries": (400, 77), "trials": 24}]),
        ("only four", [{"only": (11, 5, 300, 42), "trials": None}]),
        ("auto, until 5 %", [{"trials": None, "until": 0.05}]),
        ("nsga2, two objectives", [{"trials": 24, "objectives": ("time", "registers"), "sampler": "nsga2"}]),
    ],
)
def test_of_sessions(wide, pinned, name, sessions):
    for options in sessions:
        wide.tune(**options)
    assert name not in SAMPLERS or len(wide.rows()) == TRIALS
    pinned(name, wide.rows())


def test_of_a_session_that_was_killed_is_that_of_one_that_was_not(wide, pinned):
    for after in (1, 2, 5, 9, 23, 40):
        assert wide.tune(ending_at(after - len(wide.rows()), "searching")).interrupted
        assert len(wide.rows()) == after
    wide.tune()
    pinned("auto", wide.rows())


def test_of_several_gpus_has_each_configuration_once(wide):
    wide.tune(devices=(0, 1))
    assert len(wide.rows()) == len(set(wide.rows())) == TRIALS
