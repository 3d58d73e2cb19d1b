"""T4, and exchange with Kernel Tuner, checked with Kernel Tuner itself."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from stored_runs import PARAMETERS, SPACE, add_trial, begin, measured

from autotile.core.model import Measurement, Outcome, Trial, config_key
from autotile.database.database import standing_trials
from autotile.errors import InputError
from autotile.exchange.kernel_tuner import (
    import_into_database,
    import_into_recording,
    read_results,
    write_cache,
    write_t4,
)
from autotile.exchange.recording import read_recording
from autotile.kernel.spec import Parameter

FAILURES = [outcome for outcome in Outcome if not outcome.has_time]


@pytest.fixture
def stored(database, key):
    """Three measured configurations, one of them measured again in the finals, and one for each failure."""
    study, run = begin(database, key)
    for config, time_us in zip(SPACE, (50.0, 40.0, 60.0), strict=False):
        add_trial(database, study, run, measured(config, time_us))
    for config, outcome in zip(SPACE[3:], FAILURES, strict=False):
        add_trial(database, study, run, Trial(config, outcome, "why", "stage"))
    add_trial(database, study, run, measured(SPACE[1], 41.0), phase="final", rank=1)
    return database.stored_trials(study)


def simulate(path: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    interface = pytest.importorskip("kernel_tuner.interface")
    results, environment = interface.tune_cache(str(path), quiet=True, block_size_names=["BM"], **options)
    return results, environment


class TestT4:
    def test_documents_meet_kernel_tuners_schema(self, tmp_path, key, stored, device):
        file_utils = pytest.importorskip("kernel_tuner.file_utils")
        with pytest.raises(InputError, match=r"cannot write .*nowhere"):
            write_t4(tmp_path / "nowhere" / "x.json", key, [], None)
        (tmp_path / "mine-metadata.json").touch()
        with pytest.raises(InputError, match=r"would replace .*mine-metadata.json"):
            write_t4(tmp_path / "mine.json", key, [], None)
        assert write_t4(Path("/dev/null"), key, stored, device) is None
        results = tmp_path / "sgemm.json"
        metadata = write_t4(results, key, stored, device)
        assert metadata == tmp_path / "sgemm-metadata.json"
        for path, target in ((results, "results"), (metadata, "metadata")):
            version, schema = file_utils.output_file_schema(target)
            document = json.loads(path.read_text())
            assert document["schema_version"] == version
            jsonschema.validate(document, schema)

    def test_everything_that_was_measured_is_there_with_its_unit(self, tmp_path, key, stored):
        measurement = Measurement(50.0, 49.0, 51.0, (50.0, 50.5))
        one = replace(stored[0], trial=replace(stored[0].trial, measurement=measurement))
        write_t4(tmp_path / "t4.json", key, [one], None)
        (result,) = json.loads((tmp_path / "t4.json").read_text())["results"]
        found = {entry["name"]: (entry["value"], entry["unit"]) for entry in result["measurements"]}
        expected = {"time": (0.05, "ms"), "time_low": (0.049, "ms"), "time_high": (0.051, "ms")}
        expected |= {"registers": (96, ""), "occupancy": (0.25, ""), "power_w": (512.5, ""), "spill_bytes": (0, "B")}
        assert {name: found[name] for name in expected} == expected
        assert (result["configuration"], result["times"]["runtimes"]) == (SPACE[0], [0.05, 0.0505])
        assert (result["times"]["compilation"], result["times"]["benchmark"]) == (250.0, 50.0)
        assert (result["invalidity"], result["correctness"]) == ("correct", 1)


class TestExport:
    def test_kernel_tuner_replays_our_results_finds_our_best_and_searches(self, tmp_path, key, stored):
        write_cache(tmp_path / "ours.json", key, PARAMETERS, standing_trials(stored))
        results, environment = simulate(tmp_path / "ours.json")
        assert len(results) == 3
        best = environment["best_config"]
        assert {name: best[name] for name in ("BM", "WIDE", "KIND")} == SPACE[1]
        assert best["time"] == pytest.approx(0.041), "the finals replace the search"
        assert environment["device_name"] == key.gpu_name
        results, _ = simulate(tmp_path / "ours.json", strategy="random_sample", strategy_options={"max_fevals": 2})
        assert len(results) == 2

    def test_an_empty_cache_file_can_be_read_and_a_name_of_its_own_is_refused(self, tmp_path, key, stored):
        write_cache(tmp_path / "empty.json", key, PARAMETERS, [])
        util = pytest.importorskip("kernel_tuner.util")
        assert util.read_cache(tmp_path / "empty.json", open_cache=False)["cache"] == {}
        with pytest.raises(InputError, match="reserves the name 'times'; rename"):
            write_cache(path := tmp_path / "x.json", key, [Parameter("times", (1, 2))], [])
        with pytest.raises(InputError, match="reserves the name 'time'; rename"):
            write_t4(path, key, [replace(stored[0], trial=replace(stored[0].trial, config={"time": 7}))], None)
        write_t4(path, key, stored[:1], None)
        path.write_text(path.read_text().replace('"BM"', '"time"'))  # which does not become the time
        with pytest.raises(InputError, match=r"x\.json cannot be read as T4 results: Kernel Tuner reserves the name"):
            read_results(path)


@pytest.fixture
def theirs(tmp_path):
    """A cache file written by Kernel Tuner's own functions, unclosed as after a killed session."""
    util = pytest.importorskip("kernel_tuner.util")
    path = tmp_path / "theirs.json"
    tune_params = {"block_size_x": [32, 64, 128], "vector": [True, False], "kind": ["a", "b"]}
    options = SimpleNamespace(tune_params=tune_params, simulation_mode=False, objective="time")
    runner = SimpleNamespace(
        simulation_mode=False, get_device_info=lambda: SimpleNamespace(name="NVIDIA GeForce RTX 3060")
    )
    cache = util.process_cache(str(path), SimpleNamespace(kernel_name="add", problem_size=(4096, 2)), options, runner)
    timings = {"compile_time": 250.0, "verification_time": 0, "benchmark_time": 12.5, "strategy_time": 0.5}
    for element, result in (
        ((32, True, "a"), {"time": 0.5, "times": [0.4, 0.5, 0.6], "GFLOP/s": 12.5}),
        ((64, True, "a"), {"__error__": util.CompilationFailedConfig()}),
        ((128, False, "a"), {"__error__": util.RuntimeFailedConfig()}),
        ((64, False, "b"), {"time": util.InvalidConfig()}),
        ((128, False, "b"), {"time": 0.25}),
    ):
        entry = {**dict(zip(tune_params, element, strict=True)), **result, **timings, "timestamp": "2025-01-01"}
        util.store_cache(",".join(map(str, element)), entry, str(path), cache)
    return path


class TestImport:
    def test_every_entry_becomes_a_trial(self, theirs):
        cache = read_results(theirs)
        assert (cache.key().kernel, cache.key().gpu_name, cache.problem_size) == (
            "add",
            "NVIDIA GeForce RTX 3060",
            (4096, 2),
        )
        assert [parameter.name for parameter in cache.parameters] == ["block_size_x", "vector", "kind"]
        first, *failures, last = cache.trials
        assert first.config == {"block_size_x": 32, "vector": True, "kind": "a"}
        assert first.measurement == Measurement(500.0, 400.0, 600.0, (400.0, 500.0, 600.0), "hot")
        assert (first.outcome, first.source, first.telemetry) == (Outcome.OK, "replayed", {"GFLOP/s": 12.5})
        assert first.seconds == {"compile": 0.25, "verify": 0.0, "measure": 0.0125, "search": 0.0005}
        expected = [Outcome.COMPILE_FAILED, Outcome.RESOURCE_EXCEEDED, Outcome.INFEASIBLE]
        assert [trial.outcome for trial in failures] == expected
        assert all(trial.reason.startswith("Kernel Tuner: ") and trial.measurement is None for trial in failures)
        assert last.measurement == Measurement(250.0, 250.0, 250.0, (), "hot")

    def test_a_known_gpu_brings_its_properties(self, theirs):
        key = read_results(theirs).key()
        assert (key.compute_capability, key.sm_count, key.sizes) == ("8.6", 28, {"x": 4096, "y": 2})
        assert (key.source, key.l2_mode, key.template_hash) == ("replayed", "hot", "")
        theirs.write_text(theirs.read_text().replace("NVIDIA GeForce RTX 3060", "Unheard-of 9"))
        unknown = read_results(theirs)
        assert unknown.device is None
        assert unknown.key({"N": 4096, "M": 2}, "float16").sizes == {"N": 4096, "M": 2}
        assert unknown.key().gpu_name == "Unheard-of 9"

    def test_results_go_into_the_database_those_that_are_new(self, theirs, database):
        cache = read_results(theirs)
        shorter = replace(cache, trials=cache.trials[:1])
        stored = [import_into_database(database, each, cache.key()) for each in (shorter, cache, cache)]
        ((study, one), *others) = stored
        assert (one, *others) == (1, (study, len(cache.trials) - 1), (study, 0))
        assert tuple(database.trials(study)) == cache.trials
        assert [run.summary["trials"] for run in database.runs(study)] == [1, len(cache.trials) - 1]
        (best,) = database.best("add")
        assert best.trial.config == {"block_size_x": 128, "vector": False, "kind": "b"}
        assert (best.run.settings, best.winner.device) == ({"imported_from": "theirs.json"}, cache.device)

    def test_results_become_a_recording(self, theirs, tmp_path):
        cache = read_results(theirs)
        import_into_recording(tmp_path / "add.npz", cache, cache.key())
        recording = read_recording(tmp_path / "add.npz", kernel="add")
        assert recording.header.parameters == cache.parameters
        for trial in cache.trials:
            result = recording.lookup(trial.config)
            assert result.outcome is trial.outcome
        assert recording.lookup({"block_size_x": 32, "vector": True, "kind": "b"}) is None

    @pytest.mark.parametrize("is_t4", [False, True])
    def test_what_we_wrote_comes_back(self, tmp_path, key, stored, is_t4):
        ours, path = standing_trials(stored), tmp_path / "ours.json"
        if is_t4:  # which states the sizes, but not all values
            write_t4(path, key, ours, None)
        else:
            write_cache(path, key, PARAMETERS, ours)
        found = read_results(path)
        assert is_t4 or found.parameters == PARAMETERS
        unknown = {**dict.fromkeys(("template_hash", "space_hash", "nvrtc_version"), ""), "options": []}
        expected = key.to_json() | unknown | {"source": "replayed"}
        assert found.key(None if is_t4 else key.sizes).to_json() == expected
        newest = {config_key(one.trial.config): one.trial for one in ours}
        failed = [Outcome.INFEASIBLE, Outcome.COMPILE_FAILED, *[Outcome.RESOURCE_EXCEEDED] * 5]
        if is_t4:
            failed = [Outcome.INFEASIBLE, Outcome.COMPILE_FAILED, Outcome.INFEASIBLE]
            failed += [*[Outcome.WRONG_RESULT] * 2, Outcome.RESOURCE_EXCEEDED, Outcome.TIMED_OUT]
        assert [trial.outcome for trial in found.trials] == [Outcome.OK] * 3 + failed  # without what was never tried
        assert [trial.telemetry.get("reason") for trial in found.trials[3:]] == ["why" if is_t4 else None] * 7
        for trial in found.trials:
            mine = newest[config_key(trial.config)]
            assert trial.time_us == pytest.approx(mine.time_us)
            if is_t4 and mine.measurement and trial.measurement:
                assert trial.measurement.low_us == pytest.approx(mine.measurement.low_us)
                assert trial.measurement.high_us == pytest.approx(mine.measurement.high_us)
            assert {stage: trial.seconds[stage] for stage in mine.seconds} == pytest.approx(mine.seconds)

    def test_t4_results_of_theirs_lack_a_gpu_and_are_of_the_kernel_in_the_name(self, tmp_path):
        file_utils, util = (pytest.importorskip(f"kernel_tuner.{name}") for name in ("file_utils", "util"))
        names = ("compile_time", "benchmark_time", "framework_time", "strategy_time", "verification_time")
        spent = {**dict.fromkeys(names, 0.0), "compile_time": 250.0}
        results = [
            {"bx": 32, "time": 0.5, "times": [0.4, 0.6], "GFLOP/s": 12.5, **spent},
            {"bx": 64, "__error__": util.CompilationFailedConfig(), **spent},
        ]
        file_utils.store_output_file(str(path := tmp_path / "add.json"), results, {"bx": [32, 64]})
        with pytest.raises(InputError, match=r"as T4 results: device_name is empty; give the name of the device"):
            read_results(path)
        found = read_results(path, gpu_name="NVIDIA H200")
        key = found.key({"N": 7})
        assert (key.kernel, key.sm_count, key.l2_mode) == ("add", 132, "hot")
        assert read_results(path, kernel="sum", gpu_name="Unheard-of 9").key({"N": 7}).kernel == "sum"
        first, failed = found.trials
        assert first.measurement == Measurement(500.0, 400.0, 600.0, (400.0, 600.0), "hot")
        assert (first.telemetry, first.seconds["compile"]) == ({"GFLOP/s": 12.5}, 0.25)
        assert (failed.config, failed.outcome) == ({"bx": 64}, Outcome.COMPILE_FAILED)
        with pytest.raises(InputError, match="as a cache file of Kernel Tuner: object missing required field"):
            read_results(path, "kernel-tuner", gpu_name="x")
        path.write_text(path.read_text().replace("milli", "micro"))
        with pytest.raises(InputError, match="times are in 'microseconds', expected 'milliseconds'"):
            read_results(path)

    @pytest.mark.parametrize("sizes", [{"N": 7}, {"M": 1024, "N": 2}, {"N": 4096}])
    def test_sizes_that_contradict_those_of_the_file_are_refused(self, theirs, sizes):
        with pytest.raises(InputError, match=r"problem size 4096 x 2, which .* contradicts"):
            read_results(theirs).key(sizes)
        with pytest.raises(InputError, match="size N is '7', expected a whole number"):
            read_results(theirs).key({"N": "7"})
        assert read_results(theirs).key({"A": 64, "B": 64, "C": 2, "FLAG": 1}).sizes["C"] == 2

    def test_a_finished_file_is_read_and_a_line_that_was_cut_short_loses_only_itself(self, theirs):
        unfinished = theirs.read_bytes()
        pytest.importorskip("kernel_tuner.util").close_cache(str(theirs))
        assert len(read_results(theirs).trials) == 5
        for end in (b"\n", b"\r\n"):  # as on Linux and on Windows
            theirs.write_bytes(unfinished[:-40].replace(b"\n", end))
            assert len(read_results(theirs).trials) == 4

    def test_what_an_observer_could_not_measure_is_left_out(self, theirs):
        theirs.write_text(theirs.read_text().replace('"time": 0.5', '"time": 0.5, "power_w": NaN, "energy_j": 2.5', 1))
        assert read_results(theirs).trials[0].telemetry == {"GFLOP/s": 12.5, "energy_j": 2.5}

    def test_an_empty_name_is_not_that_of_the_file(self, theirs):
        for name, argument in (("kernel", "kernel"), ("device", "gpu_name")):
            with pytest.raises(InputError, match=f"{name}_name is empty; give the name of the {name}"):
                read_results(theirs, **{argument: ""})

    def test_a_time_that_none_of_the_runs_took_is_in_its_interval(self, theirs):
        theirs.write_text(theirs.read_text().replace('"time": 0.5', '"time": 0.75', 1))
        expected = Measurement(750.0, 400.0, 750.0, (400.0, 500.0, 600.0), "hot")
        assert read_results(theirs).trials[0].measurement == expected

    @pytest.mark.parametrize("said", ['"callable"', '"N * 2"', '["N * 2", 2]', "[4096, 1, 1, 0]"])
    def test_a_size_that_is_not_said_must_be_given(self, theirs, said):
        theirs.write_text(theirs.read_text().replace("[\n4096,\n2\n]", said))
        cache = read_results(theirs)
        with pytest.raises(InputError, match=r"does not state its problem size.*such as N=1024"):
            cache.key()
        assert cache.key(sizes := {"N": 4096, "FLAG": int("0]" not in said)}).sizes == sizes

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('"tune_params_keys"', '"other"', "object missing required field tune_params_keys"),
            ('"kernel_name": "add"', '"kernel_name": 3', "kernel_name: expected str, got int"),
            ("4096,", "40.5,", "problem_size[0]: expected int"),
            ("32,\n64,", "[32],\n64,", "tune_params[...][0]: expected bool | int | float | str, got array"),
            ('"kind": [', '"sort": [', "lacks values for 'kind'"),
            ('"block_size_x": 32, "v', '"block_size_x": 48, "v', "lacks a listed value of 'block_size_x'"),
            ('"vector": true, "kind"', '"vector": 1, "kind"', "lacks a listed value of 'vector'"),
            ('"time": 0.5', '"time": NaN', "entry '32,True,a': time: expected float, got null"),
            ('"kernel_name": "add"', '"kernel_name": ""', "kernel_name is empty"),
            ('"time": 0.5', '"name": "\\udc00", "time": 0.5', "invalid utf-16 surrogate pair"),
            ('"time": 0.5', '"seconds": 0.5', "entry '32,True,a': object missing required field time"),
            ('"time": 0.5', '"time": "__import__(\'os\')"', "entry '32,True,a': time: expected float, got str"),
            ('"32,True,a": {', '"32,True,a": 3, "x": {', "cache[...]: expected object, got int"),
        ],
    )  # fmt: skip
    def test_a_malformed_file_says_where(self, theirs, old, new, message):
        text = theirs.read_text()
        assert old in text
        theirs.write_text(text.replace(old, new, 1))
        with pytest.raises(InputError, match="cannot be read as a cache file of Kernel Tuner") as caught:
            read_results(theirs)
        assert message in str(caught.value)

    @pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"cache": {}}'])
    def test_what_is_no_cache_file_is_refused(self, tmp_path, content):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(InputError, match=r"x\.json cannot be read as a cache file"):
            read_results(tmp_path / "x.json")
        with pytest.raises(InputError, match=r"cannot read .*missing\.json: No such file"):
            read_results(tmp_path / "missing.json")
