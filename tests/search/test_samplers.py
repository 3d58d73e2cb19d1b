"""Samplers by name, and their traits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from rows import tile_space

from autotile.core.model import TIME
from autotile.errors import InputError
from autotile.search import samplers
from autotile.search.gp_sampler import FeasibleGPSampler
from autotile.search.samplers import (
    AUTO,
    BRUTE_FORCE,
    SAMPLERS,
    Lookahead,
    check_sampler,
    gain_predicting_samplers,
    is_exhaustive,
    lookahead_of,
    make_sampler,
    resolve_sampler,
    sampler_entry,
    sampler_names,
)

INSTALLED = [name for name, entry in SAMPLERS.items() if entry.missing_package is None]


def test_auto_is_brute_force_where_the_trials_cover_the_space() -> None:
    space = tile_space()
    assert resolve_sampler("auto", space, None, len(space)) == "brute-force"
    assert resolve_sampler("auto", space, None, len(space) - 1) == "feasible"
    assert resolve_sampler("auto", space) == "feasible"
    assert resolve_sampler("auto", space, np.arange(len(space)) < 10, 10) == "brute-force"
    assert resolve_sampler("gp", space, None, len(space)) == "gp"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no sampler 'tpee'; did you mean 'tpe'\? \(known: auto, feasible, tpe, gp"):
        make_sampler("tpee", tile_space(), 0)
    assert {AUTO, *SAMPLERS} <= set(sampler_names())


@pytest.mark.parametrize("name", [name for name, entry in SAMPLERS.items() if entry.packages])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "find_spec", lambda package: None)
    _, package, install = SAMPLERS[name].packages[0]
    with pytest.raises(InputError, match=f"needs {package}: pip install {install}, or choose tpe"):
        make_sampler(name, tile_space(), 0)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_sampler_can_what_its_lookahead_asks_for(name: str) -> None:
    assert isinstance(make_sampler(name, tile_space(), 0), FeasibleGPSampler) == SAMPLERS[name].lookahead.ranks


def test_only_samplers_that_do_not_learn_look_further_ahead_with_more_workers() -> None:
    assert lookahead_of("feasible", 64) == lookahead_of("feasible", 1) == Lookahead(32, per_measured=2, queued=1)
    assert lookahead_of("tpe", 64) == Lookahead(16)
    assert lookahead_of("kernel-tuner:pso", 64) == Lookahead(1)
    for name in ("random", BRUTE_FORCE):
        assert (lookahead_of(name, 1), lookahead_of(name, 64)) == (Lookahead(16, queued=1), Lookahead(256, queued=1))


def test_several_gpus_look_as_many_times_further_ahead() -> None:
    one, four = lookahead_of("feasible", 64), lookahead_of("feasible", 64, gpu_count=4)
    assert (four.compiling, four.queued) == (4 * one.compiling, 7)
    assert lookahead_of("kernel-tuner:pso", 64, gpu_count=4) == Lookahead(1)
    nominated = [four.nominated(begun) for begun in range(400)]
    for begun in range(14, 400):
        compiled = four.compiled(begun)
        assert begun < compiled <= nominated[begun]
        delay = next(count for count in range(begun) if nominated[begun - count] <= compiled)
        assert delay <= max(8, begun // 2)
        assert delay <= 64
    for begun in range(30, 400):
        assert nominated[begun] - four.compiled(begun) >= 2 * (one.nominated(begun) - one.compiled(begun))


def test_the_traits_that_sessions_ask_for() -> None:
    assert gain_predicting_samplers() == ["auto", "feasible"]
    assert [name for name in [*sampler_names(), "nonsense"] if is_exhaustive(name)] == [BRUTE_FORCE]
    assert [name for name in SAMPLERS if sampler_entry(name).transfers] == ["feasible"]


@pytest.mark.parametrize("name", ["cmaes", "kernel-tuner:pso"])
def test_several_objectives_are_refused_by_samplers_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "_strategy_names", lambda: ["kernel-tuner:pso"])
    with pytest.raises(InputError, match=f"'{name}' cannot follow several objectives .*; feasible, tpe"):
        check_sampler(name, (TIME, "energy"))


def test_listing_the_samplers_does_not_load_optuna() -> None:
    code = "import sys, autotile.search.samplers; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_choice_among_ranked_candidates_lacks_a_bounded_share_of_the_results() -> None:
    lookahead = lookahead_of("feasible", 16)
    nominated = [lookahead.nominated(begun) for begun in range(700)]
    compiled = [lookahead.compiled(begun) for begun in range(700)]
    assert compiled[:7] == list(range(1, 8))  # the first ones in the order of the proposals
    assert nominated == sorted(nominated)
    assert compiled == sorted(compiled)
    for begun in range(7, 700):
        assert begun < compiled[begun] <= nominated[begun]
        delay = next(count for count in range(begun) if nominated[begun - count] <= compiled[begun])
        assert delay <= max(2, begun // 6, 0)
        assert delay <= 16
        assert nominated[begun] - compiled[begun] <= lookahead.compiling
    assert nominated[699] - nominated[695] == 8
