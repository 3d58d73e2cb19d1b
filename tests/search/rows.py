"""Small search spaces for the tests of the samplers."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial, Value
from autotile.kernel.spec import Parameter
from autotile.search.search import Search, Shortlist
from autotile.space.search_space import SearchSpace

TrialOf = Callable[[Config], Trial]
SIDES, SWITCH = (32, 64, 128, 256), (False, True)
TILES = {"BM": SIDES, "BN": SIDES, "TM": (2, 4, 8), "LAYOUT": ("row", "column"), "ASYNC": SWITCH}
DEFAULT: Config = {"BM": 64, "BN": 64, "TM": 2, "LAYOUT": "row", "ASYNC": False}


def make_space(values: Mapping[str, Sequence[Value]], keep: Callable[[Config], bool] = lambda _: True) -> SearchSpace:
    """Build the space of the combinations that ``keep`` accepts, in the order of nested loops."""
    parameters = tuple(Parameter(name, tuple(choices)) for name, choices in values.items())
    grid = product(*(range(len(each.values)) for each in parameters))
    codes = [c for c in grid if keep({p.name: p.values[i] for p, i in zip(parameters, c, strict=True)})]
    table = np.asfortranarray(np.array(codes, np.uint8).reshape(-1, len(parameters)))
    combinations = int(np.prod([len(each.values) for each in parameters]))
    return SearchSpace(parameters, table, combinations, rules=(), limits=(), seconds=0.0)


def tile_space() -> SearchSpace:
    """Tiles of at least 2048 threads: 116 of 192 combinations."""
    return make_space(TILES, lambda c: int(c["BM"]) * int(c["BN"]) // int(c["TM"]) >= 2048)


def tile_time_us(config: Config) -> float:
    """Return the time of a tile: smooth, with a minimum of 100 us at BM=128 BN=64 TM=4 LAYOUT=column ASYNC=True."""
    away = [abs(np.log2(int(config[name]) / best)) for name, best in (("BM", 128), ("BN", 64), ("TM", 4))]
    layout = 1.0 if config["LAYOUT"] == "column" else 1.5
    return float(100 * (1 + 0.4 * sum(away)) * layout * (1.0 if config["ASYNC"] else 1.2))


def ok(config: Config, time_us: float, outcome: Outcome = Outcome.OK) -> Trial:
    return Trial(dict(config), outcome, measurement=Measurement(time_us, 0.99 * time_us, 1.01 * time_us))


def broken(config: Config, outcome: Outcome = Outcome.WRONG_RESULT) -> Trial:
    return Trial(dict(config), outcome, "element 3 is 7, expected 5", "verify")


_VALUES = st.one_of(
    st.lists(st.integers(1, 512), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from(["row", "column", "tiled", "swizzled"]), min_size=1, max_size=4, unique=True),
    st.just([False, True]),
)


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Draw spaces of one to four parameters of any kind, with a random part of their combinations."""
    lists = draw(st.lists(_VALUES, min_size=1, max_size=4))
    values = {f"P{index}": choices for index, choices in enumerate(lists)}
    whole = make_space(values)
    share = draw(st.floats(0.05, 1.0))
    kept = np.random.default_rng(draw(st.integers(0, 2**32))).random(len(whole)) < share
    kept[draw(st.integers(0, len(whole) - 1))] = True
    return whole.select(kept)


def compiled_trial(config: Config, registers: int = 32) -> Trial:
    geometry = LaunchGeometry((100, 1, 1), (128, 1, 1), 0)
    occupancy = Occupancy(4, 16, 0.25, ("registers",), {"registers": 4})
    return Trial(config, Outcome.OK, "", "compile", geometry, Resources(registers, 0, 0, 0, 0), occupancy)


def session(shortlist: Shortlist, trials: int, trial_of: TrialOf, done: int = 0) -> tuple[list[Trial], int]:
    """Run a session, which has the next candidate at hand while one runs; return its trials and compilations.

    It ends when ``trials`` have ended, with those ``done`` by earlier sessions, or when no row is left.
    """
    compilations = 0
    ended: list[Trial] = []
    running: deque[int] = deque()
    config = shortlist._search.space.config
    while (room := trials - done - len(ended) - len(running)) or running:
        while shortlist.propose(room) is not None:
            compilations += 1
        ready = shortlist.ready() if room else []
        bad = [row for row in ready if trial_of(config(row)).stage == "resources"]
        if ready and not bad:
            running.append(shortlist.choose({row: compiled_trial(config(row)) for row in ready}))
            continue
        if not bad and not running:
            break
        row = bad[0] if bad else running.popleft()
        ended.append(trial_of(config(row)))
        shortlist.tell(row, ended[-1])
    return ended, compilations


def advance(search: Search, trials: int, trial_of: TrialOf, ahead: int = 1) -> list[Trial]:
    """Tell a number of trials, with up to ``ahead`` proposals pending."""
    done: list[Trial] = []
    pending: list[tuple[int, Config]] = []
    while len(done) < trials:
        while len(pending) < min(ahead, trials - len(done)):
            pending.append(search.propose() or pytest.fail("too few rows"))
        row, config = pending.pop(0)
        done.append(trial_of(config))
        search.tell(row, done[-1])
    return done


def check_resuming(make: Callable[[], Search], trial_of: TrialOf, ahead: int, killed: set[int]) -> None:
    """Assert that a search that is rebuilt after some of 45 trials proposes what the original did."""
    whole = advance(make(), 45, trial_of, ahead)
    for done in killed:
        resumed = make()
        assert resumed.replay(whole[:done], ahead) == done
        assert [t.config for t in advance(resumed, 45 - done, trial_of, ahead)] == [t.config for t in whole[done:]]


def check_ranked_resuming(
    make: Callable[[list[Trial]], Shortlist], trial_of: TrialOf, trials: int, killed: Sequence[int]
) -> list[Trial]:
    """Assert that a session that is killed after some trials goes on as if it had not been; return those of a whole."""
    whole, _ = session(make([]), trials, trial_of)
    for done in killed:
        rest, _ = session(make(whole[:done]), trials, trial_of, done)
        assert [trial.config for trial in rest] == [trial.config for trial in whole[done:]], done
    return whole


def wide_space() -> SearchSpace:
    """Build a space of 1,296 of 13,824 combinations: one in ten, a typical share of valid ones."""
    powers, few = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
    return make_space(
        {"BM": powers, "BN": powers, "TM": few, "TN": few, "LAYOUT": ("a", "b", "c"), "VEC": (1, 2)},
        lambda c: c["BM"] % c["TM"] == 0 and c["BN"] % c["TN"] == 0 and c["BM"] * c["BN"] >= 64,
    )


def wide_time_us(config: Config) -> float:
    """Return a time with interactions: of the area and the shape of the tile, and of both thread tiles."""
    bm, bn, tm, tn = (np.log2(int(config[name])) for name in ("BM", "BN", "TM", "TN"))
    distance = abs(bm + bn - 8) + 0.5 * abs(bm - bn) + 0.7 * abs(tm + tn - 4) + 0.3 * abs(tm - tn)
    layout = {"a": 1.3, "b": 1.0, "c": 1.6}[str(config["LAYOUT"])]
    return float(10 * (1 + distance) * layout / (1 + 0.1 * int(config["VEC"])))


def tile_ok(config: Config) -> Trial:
    return ok(config, tile_time_us(config))


def wide_ok(config: Config) -> Trial:
    return ok(config, wide_time_us(config))
