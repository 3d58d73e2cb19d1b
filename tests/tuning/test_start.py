"""What a session knows at its start: studies to learn from, steps that are tuned apart, the objective and metrics."""

from dataclasses import replace
from pathlib import Path

import pytest
from feature_kernels import copy_kernel
from judges import BEST, timed
from msgspec import structs

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Problem, Resources, Trial
from autotile.errors import InputError, SpecError
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.spec import KernelSpec
from autotile.space.search_space import feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.start import (
    Scorer,
    StepTimes,
    find_sources,
    independent_groups,
    measures_energy,
    session_objective,
)


def _time_at(_):
    return lambda trial: trial.time_us


def test_the_nearest_studies_come_first_but_not_the_own_one_nor_one_without_a_size_in_common(bench, database):
    for n in (512, 1024, 8192):
        bench.tune(bench.record(n=n), n=n, trials=8)
    key = next(study.key for study in database.studies() if study.key.sizes == {"n": 1024})
    sources = find_sources(database, database.studies(), key, _time_at)
    assert find_sources(database, database.studies(), structs.replace(key, sizes={"x": 1024}), _time_at) == []
    assert [name for name, _ in sources] == ["n=512", "n=8192"]
    assert all(len(timed) >= 6 for _, timed in sources)


def test_a_taught_session_finds_the_best_at_once_and_tells_from_what(bench):
    bench.tune(bench.record(n=1024), n=1024, sampler="brute-force")
    taught = bench.tune(bench.record(), trials=3, sampler="feasible")
    assert (taught.winner.config, taught.learnt_from) == (BEST, ("n=1024",))
    assert taught.to_json()["learnt_from"] == ["n=1024"]
    for n, options in ((512, {"sampler": "feasible", "transfer": False}), (256, {"sampler": "random"})):
        assert bench.tune(bench.record(n=n), n=n, trials=6, **options).learnt_from == ()


def test_a_study_that_misleads_is_named(bench):
    fewest_threads_win = bench.record(lambda one: timed(one, float(one["THREADS"] * one["WORK"])), n=1024)
    bench.tune(fewest_threads_win, n=1024, sampler="brute-force")
    found = bench.tune(bench.record(), sampler="feasible", trials=8)
    (misleading,) = found.not_learnt_from
    assert (found.learnt_from, misleading.name) == ((), "n=1024")
    assert found.to_json()["not_learnt_from"] == [misleading.to_json()]
    assert misleading.correlation < 0


@pytest.mark.parametrize(
    ("place", "condition", "work"),
    [("[launch]", "[heuristics]\n{}\n\n[launch]", 4), ("[rules]\n", "[rules]\n{}\n", 2)],
    ids=["heuristics", "rules"],
)
def test_what_was_best_elsewhere_is_tried_where_the_search_would_not_look(bench, rewrite, place, condition, work):
    """But not a configuration that breaks a rule."""
    bench.tune(bench.record(n=1024), n=1024, sampler="brute-force")
    recording = bench.record()
    bench.kernel = rewrite({place: condition.format('little = "WORK < 4 or n < 4096"')}).kernel
    assert bench.tune(recording, sampler="feasible", trials=6).winner.config == {"THREADS": 256, "WORK": work}


def test_a_study_beside_one_of_another_version_of_the_kernel_says_so(bench, rewrite):
    said = "a new study begins, beside 3 trials of another version of the kernel"
    assert said not in str(bench.tune(bench.record(), trials=3).notices)
    changed = rewrite({"factor * x[i]": "x[i] * factor"})
    notices = [changed.tune(changed.record(), trials=trials).notices for trials in (2, 4)]
    assert [said in str(each) for each in notices] == [True, False]


H200 = device_profile("h200")


def kernel_of(folder: Path, old: str = "", new: str = "", helpers: str = "") -> Kernel:
    path = copy_kernel(folder, "apart")
    template, space = path.with_suffix(".cu"), path.read_text()
    template.write_text(f"{helpers}\n{template.read_text()}")
    assert not old or space.count(old) == 1
    path.write_text(space.replace(old, new) if old else space)
    return load_kernel(str(path))


@pytest.mark.parametrize(
    ("old", "new", "helpers"),
    [
        ('small = "A * UNROLL <= 256"', 'small = "A * UNROLL <= 256 and A <= 4 * B"', ""),
        ('block = ["B"]', 'block = ["B"]\nwhen = "A > 0"', ""),
        ('t = { workspace = "float32", shape = ["N"] }', 't = { workspace = "float32", shape = ["N + A"] }', ""),
        ('[reference]\noutputs = { y = "x" }', '[reference]\noutputs = { y = "x + 0 * A + 0 * B" }', ""),
        ("[rules]", '[objective]\nvalue = "time_us / UNROLL"\n[rules]', ""),
        ("", "", "constexpr int both = A + B;"),
        ("", "", '#include "helpers.cuh"'),
        ("", "", "__global__ void first(int) { }"),
    ],
)
def test_what_ties_steps_together(tmp_path, old, new, helpers):
    (tmp_path / "helpers.cuh").write_text("")
    assert independent_groups(kernel_of(tmp_path, old, new, helpers)) == []


@pytest.mark.parametrize("name", ["two_step_sum", "split_rows", "scan_rounds", "block_sums"])
def test_steps_that_share_parameters(tmp_path, name):
    assert independent_groups(load_kernel(str(copy_kernel(tmp_path, name)))) == []


@pytest.fixture
def times(tmp_path):
    kernel = kernel_of(tmp_path)
    spec = kernel.spec
    return StepTimes(independent_groups(kernel), feasible_space(spec, spec.at(), H200), spec.default, 0)


def stepped(config: dict[str, int], first_us: float, second_us: float) -> Trial:
    measured = Measurement(first_us + second_us, 0, 0)
    steps = {"step_us.0.first": first_us, "step_us.1.second<B>": second_us}
    return Trial(config, Outcome.OK, measurement=measured, telemetry=steps)


def test_what_each_step_alone_uses_is_apart_and_a_few_trials_have_every_setting_of_it(times, tmp_path):
    assert independent_groups(kernel_of(tmp_path)) == [((0,), ("A", "UNROLL")), ((1,), ("B",))]
    configs = [dict(config) for config in times.first_configs()]
    assert (len(configs), times.count) == (7, 7)  # 8 pairs of A and UNROLL, less one that breaks the rule
    assert configs[0] == {"A": 64, "UNROLL": 1, "B": 128}
    assert {(config["A"], config["UNROLL"]) for config in configs} == {
        (a, u) for a in (32, 64, 128, 256) for u in (1, 2) if a * u <= 256
    }
    assert {config["B"] for config in configs} == {32, 64, 128}
    # one without a time is tried with the default
    done = [stepped(config, 1, 1) for config in configs]
    assert times.untimed_configs(done) == []
    assert times.untimed_configs(done[:-1]) == [{**done[-1].config, "B": 128}]


def test_the_best_of_each_step_are_combined(times):
    trials = [
        stepped({"A": 64, "UNROLL": 1, "B": 128}, 9, 9),
        stepped({"A": 32, "UNROLL": 2, "B": 64}, 2, 20),
        stepped({"A": 128, "UNROLL": 1, "B": 32}, 20, 3),
        Trial({"A": 256, "UNROLL": 1, "B": 32}, Outcome.CRASHED),
    ]
    combined = [dict(config) for config in times.best_configs(trials)]
    assert combined[0] == {"A": 32, "UNROLL": 2, "B": 32}
    assert len(combined) == 4
    assert times.best_configs(trials[3:]) == []


METRICS = '[metrics]\nrate = "4 * n / time_us"\nshare = "rate / 1000"\n[arguments]'


@pytest.fixture
def scored(rewrite):
    return rewrite({"[arguments]": METRICS})


def trial(work: int, time_us: float, **telemetry: float) -> Trial:
    measured = Measurement(time_us, 0.9 * time_us, 1.1 * time_us)
    config = {"THREADS": 64, "WORK": work}
    return Trial(config, Outcome.OK, resources=Resources(32, 0, 0, 0, 0), measurement=measured, telemetry=telemetry)


def scorer(spec: KernelSpec, text: str | None, *, maximize: bool = False) -> Scorer:
    objective = session_objective(spec, TuneOptions(objective=text, maximize=maximize))
    return Scorer(spec, Problem("scale", {"n": 1000}, "float32"), objective)


def test_the_cost_is_the_objective_or_its_reciprocal_and_metrics_are_stored(scored, rewrite):
    spec = scored.kernel.spec
    found = scorer(spec, None).scored(trial(2, 8.0, max_error=1e-6))
    assert found.scores == {"rate": 500.0, "share": 0.5}
    assert (found.cost, found.telemetry["max_error"]) == (8.0, 1e-6)
    assert scorer(spec, "time_us / WORK").scored(trial(4, 8.0)).cost == 2.0
    assert scorer(spec, "time_us / dtype_bytes").scored(trial(4, 8.0)).cost == 2.0
    found = scorer(spec, "rate * WORK", maximize=True).scored(trial(4, 8.0))
    assert list(found.scores.items()) == [("objective", 2000.0), ("rate", 500.0), ("share", 0.5)]
    assert found.cost == 1 / 2000
    assert scorer(spec, "registers + 0 * n").scored(trial(4, 8.0)).cost == 32
    assert scorer(spec, "max(time_us, 9, min(registers, 40))").scored(trial(4, 8.0)).cost == 32
    with pytest.raises(SpecError, match=r"max is called as max\(a, b, ...\)"):
        scorer(spec, "max()")
    # a trial of another objective is scored anew
    first = scorer(spec, "time_us * WORK").scored(trial(4, 8.0))
    assert scorer(spec, None).scored(first).cost == 8.0
    assert scorer(spec, "time_us / WORK").scored(first).scores["objective"] == 2.0
    spec = rewrite({"\n[default]": "PART = [0.5, 1.0]\n[default]\nPART = 1.0"}).kernel.spec
    assert scorer(spec, "time_us * PART").scored(replace(trial(4, 8.0), config={"PART": 0.5})).cost == 4.0


@pytest.mark.parametrize(("text", "maximize"), [("time_us / WORK", False), ("n * WORK / time_us", True)])
def test_slow_is_what_costs_more_than_the_best(scored, text, maximize):
    found = scorer(scored.kernel.spec, text, maximize=maximize)
    best = found.scored(trial(2, 10.0))
    assert found.time_limit_us(trial(4, 1.0), best) == pytest.approx(20.0)
    assert found.time_limit_us(trial(1, 1.0), best) == pytest.approx(5.0)
    assert found.time_limit_us(trial(1, 1.0), None) is None


@pytest.mark.parametrize("text", ["energy_mj * time_us", "1000 - time_us", "registers + 0 * time_us"])
def test_nothing_is_pruned_where_the_time_does_not_tell(scored, text):
    found = scorer(scored.kernel.spec, text)
    best = found.scored(trial(2, 10.0, energy_mj=3.0))
    assert found.time_limit_us(trial(4, 1.0), best) is None


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("5 - time_us", InputError, r"'5 - time_us' is -3\.0 with THREADS=64 WORK=2; expected a positive number"),
        ("1j * time_us", InputError, "is no finite real number with THREADS=64 WORK=2"),
        ("arange(2) * time_us", InputError, "is no finite real number with THREADS=64 WORK=2"),
        ("time_us / (WORK - 2)", InputError, "is no finite real number with THREADS=64 WORK=2"),
        ("energy_mj", InputError, "needs energy_mj, which has no value here"),
        ("time_us / WROK", SpecError, "unknown name 'WROK'; did you mean 'WORK'"),
    ],
)
def test_an_objective_needs_a_positive_value(scored, text, error, said):
    with pytest.raises(error, match=said):
        scorer(scored.kernel.spec, text).scored(trial(2, 8.0))


def test_energy_is_measured_where_it_is_used(rewrite, scored):
    spec = scored.kernel.spec
    assert not measures_energy(spec, None)
    assert measures_energy(spec, session_objective(spec, TuneOptions(objective="energy_mj * time_us")))
    assert measures_energy(rewrite({"share = ": 'watts = "1e3 * energy_mj / time_us"\nshare = '}).kernel.spec, None)


class TestSessions:
    @pytest.mark.parametrize(("text", "maximize"), [("time_us * WORK", False), ("n / time_us / WORK", True)])
    def test_the_best_by_the_objective_wins_and_is_served(self, scored, text, maximize, database):
        result = scored.tune(scored.record(), objective=text, maximize=maximize, discard=False)
        best = min(scored.stored(), key=lambda one: one.time_us * one.config["WORK"])
        assert result.winner.config == best.config
        assert result.winner.config["WORK"] == 1
        assert result.winner.cost == min(one.cost for one in scored.stored() if one.cost is not None)
        assert result.speedup.value == pytest.approx(result.default.cost / result.winner.cost)
        assert result.to_json()["winner"]["scores"].keys() == {"objective", "rate", "share"}
        (served,) = database.best()
        assert served.trial.config == best.config

    def test_pruning_compares_the_objective(self, scored):
        scored.tune(scored.record(), objective="time_us * WORK ** 2")
        trials = scored.stored()
        least = min(one.cost for one in trials)
        assert next(one for one in trials if one.cost == least).outcome is Outcome.OK
        assert all(one.cost > 1.25 * least for one in trials if one.outcome is Outcome.PRUNED)
        assert all(one.outcome is Outcome.OK for one in trials if one.cost <= 1.25 * least)

    def test_a_session_resumes_with_another_objective_but_measures_again_what_was_pruned(self, scored):
        by_work = scored.tune(scored.record(), objective="time_us * WORK ** 4")
        pruned = [one.config for one in scored.stored() if one.outcome is Outcome.PRUNED]
        assert BEST in pruned
        by_time = scored.tune(scored.record())
        assert (by_work.winner.config["WORK"], by_time.winner.config) == (1, BEST)
        assert by_time.resumed == 12 - len(pruned)
        assert scored.tune(scored.record()).resumed == 12

    @pytest.mark.parametrize(("limit", "resumed"), [("", 12), ("max_spill_bytes = 9", 12), ("max_spill_bytes = 5", 9)])
    def test_what_broke_or_breaks_a_limit_that_has_changed_is_tried_again(self, rewrite, database, limit, resumed):
        first = rewrite({})
        first.tune(first.record(), discard=False)
        with database.writing() as connection:
            connection.exec_driver_sql("UPDATE trials SET spill_load_bytes = 6 WHERE config LIKE '%64%'")
        changed = rewrite({"[arguments]": f"[limits]\n{limit}\n[arguments]"})
        assert changed.tune(changed.record(), discard=False).resumed == resumed

    def test_a_parameter_whose_values_were_texts_before(self, rewrite):
        texts = {"[1, 2]": '["a", "b"]', "KIND = 1": 'KIND = "a"'}
        numbers = {new: old for old, new in texts.items()}
        rewrite({"\n[default]": "KIND = [1, 2]\n[default]\nKIND = 1"} | texts)
        for changes, resumed in (({}, 0), (numbers, 0), (texts, 24)):
            kernel = rewrite(changes)
            assert kernel.tune(kernel.record(), discard=False).resumed == resumed

    def test_what_took_too_long_is_tried_again_with_another_deadline(self, bench):
        late = Trial({"THREADS": 64, "WORK": 1}, Outcome.TIMED_OUT, "it ran for 1 s", "measure")
        replay = bench.record(lambda config: late if config == late.config else timed(config, 5.0))
        resumed = [bench.tune(replay, discard=False, run_deadline_s=limit_s).resumed for limit_s in (1, 1, 2)]
        assert resumed == [0, 12, 11]

    def test_what_has_no_value_of_the_objective_is_measured_again(self, scored, database):
        scored.tune(scored.record())
        with database.writing() as connection:
            names = "registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes"
            connection.exec_driver_sql(f"UPDATE trials SET {', '.join(f'{name} = NULL' for name in names)}")
        assert scored.tune(scored.record(), objective="time_us / registers").resumed == 0

    def test_costs_of_other_objectives_are_no_source(self, bench, database):
        bench.tune(
            bench.record(n=1024), n=1024, objective="time_us * THREADS ** 4", sampler="brute-force", discard=False
        )
        taught = bench.tune(bench.record(), trials=3, sampler="feasible")
        assert (taught.winner.config, taught.learnt_from) == (BEST, ("n=1024",))

    def test_that_of_the_file(self, rewrite, database):
        kernel = rewrite({"[arguments]": '[objective]\nvalue = "1 / (time_us * WORK)"\nmaximize = true\n[arguments]'})
        assert kernel.tune(kernel.record(), discard=False).winner.config["WORK"] == 1
        (run,) = database.runs(1)  # a report says what was best by what
        assert (run.settings["objective"], run.settings["maximize"]) == ("1 / (time_us * WORK)", True)
