"""Families tuned by replay: points, matrix, rule, resuming, budget, faults."""

import signal
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from judges import FAMILY_SIZES as SIZES
from judges import FEW, MANY, by_size, failed, timed

from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.database.learned import FamilyState, family_state, save_family_state
from autotile.errors import InputError, SpecError
from autotile.families.family import parse_family
from autotile.kernel.library import load_kernel
from autotile.serving import dispatcher as serving
from autotile.serving.dispatcher import get_best_kernel
from autotile.tuning import schedule
from autotile.tuning.family_session import tune_family
from autotile.tuning.options import FamilyPlan, TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.session import Session


@pytest.fixture
def recorded(bench):
    """Recordings in which FEW is best up to 10,000 elements, and MANY beyond."""
    for n in SIZES:
        bench.record(by_size(n), n=n)


PAIRS = tuple(sorted({n + odd for n in (4096, 8192, 20_000, 40_000, 50_048, 65_536) for odd in (0, 1)}))


def record_by_alignment(bench: Any, sizes: tuple[int, ...]) -> None:
    """Write recordings in which FEW is best for odd sizes, MANY for even ones: a near problem has another winner."""

    def judge(config: Config, best: Config, worst: Config) -> Trial:
        return timed(config, 10.0 if config == best else 40.0 if config == worst else 20.0 + int(config["WORK"]))

    for n in sizes:
        best, worst = (FEW, MANY) if n % 2 else (MANY, FEW)
        bench.record(partial(judge, best=best, worst=worst), n=n)


@pytest.fixture
def run(bench):
    """Tune a family of the tiny kernel from the test's own recordings."""

    def tune(words="n=1000..65536", observe=lambda _: None, plan=None, **options):
        chosen = TuneOptions(**{"replay": "auto", "workers": 1, **options})
        family = parse_family(bench.kernel.spec, words.split())
        plan = plan or FamilyPlan(points=6, max_configs=4)
        return tune_family(bench.kernel, family, "float32", bench.settings, chosen, plan=plan, observe=observe)

    return tune


def kill_at_third(step: Progress) -> None:
    if (step.path[0].of, step.path[0].number) == ("tuning point", 3):
        raise RuntimeError("killed")


def serve(bench: Any, n: int) -> Any:
    serving.forget_served()
    return get_best_kernel(bench.kernel.spec.source, n=n, device="NVIDIA H200")


@pytest.mark.parametrize("change", [{'flops = "n"': 'flops = "n ** 3"'}, {'"n >= THREADS * WORK"': '"n ** 3 > WORK"'}])
def test_sizes_for_which_the_file_gives_no_value_are_said_before_anything_is_tuned(rewrite, change):
    bench = rewrite(change)
    bench.record(by_size(1000), n=1000)
    family = parse_family(bench.kernel.spec, ["n=1..2147483647"])
    with pytest.raises(SpecError, match=r"does not fit in 64 bits where .*n = \d+"):
        tune_family(bench.kernel, family, "float32", bench.settings, TuneOptions(replay="auto"))
    assert not bench.stored()


class TestRule:
    def test_it_serves_what_is_best_at_each_point(self, bench, run, recorded, database):
        result = run()
        rule = result.rule
        assert [point.sizes["n"] for point in sorted(rule.points, key=lambda p: p.sizes["n"])] == list(SIZES)
        assert (rule.mean_loss, result.interrupted) == (0.0, False)
        assert {config_key(FEW), config_key(MANY)} <= {config_key(one.config) for one in rule.configs}
        for n, expected in ((2999, FEW), (50_000, MANY)):
            order = rule.order(bench.kernel.spec, bench.device, bench.kernel.spec.at({"n": n}))
            assert rule.configs[order[0]].config == expected
        assert result.default_loss == pytest.approx(0.4)  # 14 us instead of 10
        assert result.to_json()["loss"] == {"mean": 0.0, "worst": 0.0, "worst_at": dict(rule.worst.sizes)}
        assert not rule.in_force  # serving the nearest equals it
        kernel = serve(bench, 2999)
        assert (kernel.tier, kernel.config) == ("nearest", FEW)
        # progress is forgotten when there is a rule
        (stored,) = database.rules("scale")
        assert stored.rule == rule
        of = stored.key, stored.rule.family
        assert family_state(database, *of) is None
        save_family_state(database, *of, stored.device, FamilyState({"points": []}, 5, 5))
        before, steps = len(bench.stored()), set[str]()
        few = run(observe=lambda step: steps.add(step.path[0].of), plan=FamilyPlan(points=6, max_configs=1))
        assert (steps, len(bench.stored())) == ({"tuning point"}, before)  # what is measured is not measured again
        assert few.resumed == 0  # the progress was that of other points
        assert len(few.rule.configs) == 1
        assert few.rule.mean_loss > 0

    def test_one_that_helps_is_in_force_and_served_and_its_points_exactly(self, bench, run):
        record_by_alignment(bench, PAIRS[:8])
        result = run(plan=FamilyPlan(points=8, max_configs=4))
        judgement = result.rule.judgement
        assert (judgement.points, result.rule.in_force) == (len(result.rule.points), True)
        assert judgement.ratio < judgement.upper < 0.5
        assert all(point.without == pytest.approx(3.0) for point in result.rule.points)  # 40 us of the neighbour's
        assert result.to_json()["in_force"]
        near, exact = (serve(bench, n) for n in (30_001, 20_001))
        assert (near.tier, near.config, near.source) == ("family", FEW, "replayed")
        assert (exact.tier, exact.config) == ("exact", FEW)

    def test_noise_is_not_taken_for_a_gain(self, bench, run):
        """Every configuration takes the same time but for noise: whatever the rule chooses is not better for sure."""
        draw = np.random.default_rng(2)
        for n in PAIRS[:10]:
            bench.record(lambda config: timed(config, float(10.0 * draw.lognormal(0.0, 0.1))), n=n)
        rule = run(plan=FamilyPlan(points=10, max_configs=4)).rule
        assert rule.judgement.points == len(rule.points) >= 10
        assert rule.judgement.upper > 1
        assert not rule.in_force
        kernel = serve(bench, 30_000)
        assert kernel.tier != "family"
        assert "which is not clearly better" in kernel.explain()

    def test_a_configuration_that_fails_at_any_point_is_not_among_them(self, bench, run):
        def judge(config):
            return failed(config, Outcome.WRONG_RESULT) if config == MANY else timed(config, 10.0)

        for n in SIZES:
            bench.record(by_size(n) if n != SIZES[0] else judge, n=n)
        result = run(plan=FamilyPlan(points=6, max_configs=12))
        assert config_key(MANY) not in {config_key(one.config) for one in result.rule.configs}
        assert result.rule.mean_loss == 0.0  # relative to the best configuration that may be served


class TestResuming:
    def test_a_run_that_was_broken_off_goes_on_and_several_gpus_tune_points_at_the_same_time(self, run, recorded):
        threads: dict[int, set[int]] = {}

        def observe(step):
            if step.path[0].of == "tuning point":
                threads.setdefault(step.path[0].number, set()).add(threading.get_ident())

        with pytest.raises(RuntimeError, match="killed"):  # an error at a point ends the others
            run(observe=lambda step: (observe(step), kill_at_third(step)), devices=(0, 1))
        assert not any(thread.name.startswith("problem ") for thread in threading.enumerate())
        several = run(observe=observe, devices=(0, 1))
        assert several.resumed <= 2
        assert sorted(threads) == [1, 2, 3, 4, 5, 6]
        assert threading.get_ident() not in set().union(*threads.values())
        threads.clear()
        with pytest.raises(RuntimeError, match="killed"):
            run(observe=kill_at_third, fresh=True)
        result = run(observe=observe)
        assert (result.resumed, min(threads)) == (2, 3)
        assert result.rule == several.rule
        assert result.rule.mean_loss == 0.0
        assert {config_key(FEW), config_key(MANY)} <= {config_key(one.config) for one in result.rule.configs}

    def test_another_plan_begins_anew_and_ctrl_c_keeps_what_was_tuned(self, run, recorded, database):
        def interrupt(step):
            if step.path[0].number == 2 and step.phase == "searching" and step.done == 2:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(RuntimeError, match="killed"):
            run(observe=kill_at_third, trials=1)
        result = run(observe=interrupt)
        assert (result.interrupted, result.resumed, result.to_json()["rule"]) == (True, 0, None)
        assert database.rules() == []
        assert run().resumed == 1

    @pytest.mark.usefixtures("recorded")
    def test_configurations_whose_values_have_left_the_file_since_are_no_candidates(self, bench, run, scale_toml):
        assert FEW in [one.config for one in run().rule.configs]
        scale_toml.write_text(scale_toml.read_text().replace("32, 64, 128", "32, 128"))
        bench.kernel = load_kernel(str(scale_toml))
        assert all(bench.kernel.spec.declares(one.config) for one in run().rule.configs)

    def test_candidates_are_measured_where_the_search_would_not_try_them(self, bench, run, rewrite, recorded, database):
        """And these trials count in later sessions."""
        bench.kernel = rewrite(
            {"[launch]": '[heuristics]\nwork_for_many = "WORK == 1 or n > 10000"\n\n[launch]'}
        ).kernel
        rule = run().rule
        many = next(number for number, one in enumerate(rule.configs) if one.config == MANY)
        times_us = {point.sizes["n"]: point.times_us[many] for point in rule.points}
        assert [times_us[n][0] for n in SIZES] == [19.0] * 3 + [10.0] * 3
        study = next(study for study in database.studies() if study.key.sizes == {"n": SIZES[1]})
        tried = {trial.config_key for trial in database.trials(study.study_id)}
        assert config_key(MANY) in tried
        assert config_key({"THREADS": 128, "WORK": 2}) not in tried
        assert bench.tune(bench.folder / "1.npz", n=SIZES[1]).resumed == len(tried)


def test_a_budget_is_shared_and_kept(run, recorded, monkeypatch):
    """An equal part of four fifths for each point, less what the last session took beside its search, 6 s at first."""
    tune, given = schedule.tune, list[float]()

    def tune_for_30_s(*arguments, **options):
        result = tune(*arguments, **options)
        given.append(arguments[3].budget_s)
        return replace(result, phases={"start": 1.0, "search": 21.0, "finals": 5.0})

    monkeypatch.setattr(Session, "_elapsed_s", lambda _: 0.0)
    monkeypatch.setattr(schedule.Schedule, "elapsed_s", property(lambda _: 30.0 * len(given)))
    monkeypatch.setattr(schedule, "tune", tune_for_30_s)
    assert run(budget_s=600.0).rule is not None
    shares = [(480 - 30 * number) / (6 - number) - (8 if number else 6) for number in range(6)]
    assert given[:6] == shares
    assert given[6:] == [(600 - 30 * (6 + number)) / (6 - number) for number in range(len(given) - 6)]


def test_what_cannot_be_replayed_or_does_not_run_is_refused(bench, run):
    with pytest.raises(InputError, match="leave the file's name out"):
        run(replay="some.npz")
    for n in SIZES[:2]:
        bench.record(lambda config: failed(config, Outcome.RESOURCE_EXCEEDED, stage="load"), n=n)
    with pytest.raises(InputError, match=r"no configuration of scale ran at any point of n=1000..4000"):
        run("n=1000..4000")
    said = r"no problem of the family n=1..10 is recorded .* recorded are: scale n=1024 float32; scale n=3000"
    with pytest.raises(InputError, match=said):
        run("n=1..10")
