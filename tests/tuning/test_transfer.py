"""Transfer from other studies of the same kernel."""

from dataclasses import replace
from typing import Any

import pytest

from autotile.database.database import Database
from autotile.settings import read_settings
from autotile.tuning.start import find_sources


def test_the_nearest_studies_come_first(bench: Any) -> None:
    for n in (512, 1024, 8192):
        bench.tune(bench.record(n=n), n=n, trials=8)
    with Database.open(read_settings().database) as database:
        key = next(study.key for study in database.studies() if study.key.sizes == {"n": 1024})
        sources = find_sources(database, key)
    assert [source.name for source in sources] == ["n=512", "n=8192"]
    assert all(len(source.configs) == len(source.times_us) >= 6 for source in sources)


def test_a_study_does_not_teach_itself(bench: Any) -> None:
    bench.tune(bench.record(), trials=8)
    again = bench.tune(bench.record(), trials=10, sampler="feasible")
    assert again.learnt_from == ()


def test_a_study_without_a_size_in_common_teaches_nothing(bench: Any) -> None:
    bench.tune(bench.record(n=1024), n=1024, trials=8)
    with Database.open(read_settings().database) as database:
        key = next(study.key for study in database.studies())
        assert find_sources(database, replace(key, sizes={"n": 4096}))
        assert find_sources(database, replace(key, sizes={"x": 4096})) == []


def test_what_was_learnt_from_is_told(bench: Any) -> None:
    bench.tune(bench.record(n=1024), n=1024, trials=8)
    taught = bench.tune(bench.record(), trials=6, sampler="feasible")
    assert taught.learnt_from == ("n=1024",)
    assert taught.to_json()["learnt_from"] == ["n=1024"]
    assert bench.tune(bench.record(n=512), n=512, trials=6, sampler="feasible", transfer=False).learnt_from == ()
    assert bench.tune(bench.record(n=256), n=256, trials=6, sampler="random").learnt_from == ()


def test_a_study_that_misleads_is_named(bench: Any, judges: dict[str, Any]) -> None:
    def fewest_threads_win(config: Any) -> Any:
        return judges["timed"](config, float(config["THREADS"] * config["WORK"]))

    bench.tune(bench.record(fewest_threads_win, n=1024), n=1024, sampler="brute-force")
    found = bench.tune(bench.record(), sampler="feasible", trials=8)
    assert found.learnt_from == ()
    (misleading,) = found.not_learnt_from
    assert misleading.name == "n=1024"
    assert found.to_json()["not_learnt_from"] == [misleading.to_json()]
    assert misleading.correlation < 0


def test_a_taught_session_finds_the_best_at_once(bench: Any) -> None:
    bench.tune(bench.record(n=1024), n=1024, sampler="brute-force")
    taught = bench.tune(bench.record(), trials=3, sampler="feasible")
    assert taught.winner is not None
    assert taught.winner.config == {"THREADS": 256, "WORK": 4}


@pytest.mark.parametrize(
    ("place", "condition", "work"),
    [("[launch]", "[heuristics]\n{}\n\n[launch]", 4), ("[rules]\n", "[rules]\n{}\n", 2)],
    ids=["heuristics", "rules"],
)
def test_what_was_best_elsewhere_is_tried_where_the_search_would_not_look(
    bench: Any, rewrite: Any, place: str, condition: str, work: int
) -> None:
    """But not a configuration that breaks a rule."""
    bench.tune(bench.record(n=1024), n=1024, sampler="brute-force")
    recording = bench.record()
    bench.kernel = rewrite({place: condition.format('little = "WORK < 4 or n < 4096"')}).kernel
    found = bench.tune(recording, sampler="feasible", trials=6).winner
    assert found is not None
    assert found.config == {"THREADS": 256, "WORK": work}
