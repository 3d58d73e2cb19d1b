"""Which configuration is served: exact, of a family's rule, nearest, transferred or the default, and what never is."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_python import python
from made_models import rule_of
from msgspec import structs
from sqlalchemy import update

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, Measurement, Problem, Resources, config_key
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.engine import RUNS, TRIALS
from autotile.database.keys import key_of
from autotile.database.learned import FamilyState, save_family_state, save_rule
from autotile.database.winners import StoredRule, StoredVerdict
from autotile.errors import InputError, NotTunedError
from autotile.exchange import shipped as shipped_file
from autotile.exchange.recording import read_recording
from autotile.exchange.shipped import shipped_winners, write_rules
from autotile.families.family import FamilyRule, RuleConfig, RulePoint, Split, parse_family
from autotile.families.features import Feature
from autotile.families.preference import Tuned, prefer
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import resolve_problem
from autotile.serving import selection
from autotile.serving.choice import Choice, explain
from autotile.serving.dispatcher import Dispatcher
from autotile.serving.selection import KernelRequest, Shelf, choose, untuned
from autotile.settings import read_settings
from autotile.space.limits import check_config, meets_heuristics
from autotile.space.time_estimate import estimate_configs

SMALL, LARGE, DEFAULT = ({"THREADS": threads, "WORK": work} for threads, work in ((64, 1), (256, 4), (128, 1)))
PROFILE = device_profile("h200")
H200, A100, H100 = (structs.replace(device_profile(name), source="cuda") for name in ("h200", "a100", "h100"))
REPLAYED = structs.replace(PROFILE, source="replayed")
NOW = datetime.now(UTC)
BY_SIZE = Split(Feature("size", "n"), 10_000, (0, 1), (1, 0))
FOLDER = Path(__file__).parents[2] / "recordings"
Step = Callable[[Any], object]
"""A change of what is stored, or a question with its expected answer; it gets the `ResultStore`."""


def put(n: int, config: Config, **changes: Any) -> Step:
    return lambda store: store.put(n, config, **changes)


def asked(
    n: int, tier: str, config: Config | None = None, *said: str, device: str | None = "h200", **fields: Any
) -> Step:
    """Expect a tier, a configuration, words of the explanation, and attributes, with ``__`` for the dots."""

    def check(store: Any) -> None:
        kernel = store.ask(n, device=device)
        assert (kernel.tier, kernel.config) == (tier, kernel.config if config is None else config)
        assert {name: attrgetter(name.replace("__", "."))(kernel) for name in fields} == fields
        text = kernel.explain()
        assert [words for words in said if words not in text] == [], text

    return check


def edited(old: str, new: str, suffix: str = ".toml") -> Step:
    """Change the search space, or the template."""

    def edit(store: Any) -> None:
        path = store.path.with_suffix(suffix)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        store.kernel = load_kernel(str(store.path))

    return edit


def redated(date: str) -> Step:
    """Let everything that is stored have been measured on a date."""

    def redate(_: Any) -> None:
        with Database.open(read_settings().database) as database, database.writing() as connection:
            connection.execute(update(RUNS).values(ended_at=date))
            connection.execute(update(TRIALS).values(created_at=date))

    return redate


def learned(text: str = "n=1000..100000", device: DeviceProperties = H200, **changes: Any) -> Step:
    """Store a rule: SMALL up to 10,000 elements, LARGE above; ``changes`` are of the key."""

    def learn(store: Any) -> None:
        kernel: Kernel = store.kernel
        problem = Problem(kernel.name, {}, "float32")
        key = structs.replace(key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold"), **changes)
        rule = rule_of(parse_family(kernel.spec, text.split()), (SMALL, LARGE), BY_SIZE)
        with Database.open(read_settings().database) as database:
            save_family_state(database, key, rule.family, device, FamilyState({}))
            save_rule(database, key, device, rule)

    return learn


def chosen(kernel: Kernel, problem: Problem, device: DeviceProperties = H200, **shelf: Any) -> Choice:
    return choose(KernelRequest(kernel, problem, device, "13.0", Shelf(**shelf)))


SPILLING = Resources(24, 8, 8, 16, 0)
BLOCK = 'block = ["THREADS"]'
NEAREST = "It is the nearest that was tuned on this GPU"
SCENARIOS: dict[str, list[Step]] = {
    "nearest by doublings": [
        put(1024, SMALL),
        put(65536, LARGE),
        asked(4096, "nearest", SMALL, f"{NEAREST}: sizes n=1024 instead of n=4096"),
        asked(16384, "nearest", LARGE),
    ],
    "of other GPUs the same architecture comes before a nearer size": [
        put(4096, LARGE, device=A100),
        put(65536, SMALL, device=H100),
        asked(4096, "transferred", SMALL, tuned_on="NVIDIA H100 80GB HBM3"),
    ],
    "a nearer tier comes before a nearer size": [
        put(4096, LARGE, device=A100),
        asked(4096, "transferred"),
        put(16384, SMALL),
        asked(4096, "nearest", SMALL),
        put(4096, DEFAULT),
        asked(4096, "exact", DEFAULT),
    ],
    "of equally near ones the fewest differences, then the newest": [
        put(2048, LARGE, nvrtc_version="12.9"),
        put(8192, SMALL),
        asked(4096, "nearest", SMALL),
        put(2048, {"THREADS": 64, "WORK": 2}),
        asked(4096, "nearest", {"THREADS": 64, "WORK": 2}),
    ],
    **{
        f"the clock does not decide which is newest: {date:%Y}": [
            put(2048, LARGE),
            redated(date.isoformat(timespec="microseconds")),
            put(8192, SMALL),
            asked(4096, "nearest", SMALL),
            put(4096, LARGE),
            redated(date.isoformat(timespec="microseconds")),
            put(4096, SMALL),
            asked(4096, "exact", SMALL),
        ]
        for date in (datetime(1970, 1, 1, tzinfo=UTC), datetime(2140, 1, 1, tzinfo=UTC))
    },
    "another NVRTC or L2 mode is not exact": [
        put(4096, LARGE, nvrtc_version="1.0"),
        asked(4096, "nearest", LARGE, "NVRTC version 1.0 instead of"),
        put(4096, SMALL, l2_mode="hot"),
        asked(4096, "nearest", SMALL, "L2 mode hot instead of cold"),
    ],
    "the fastest of a search that has not finished": [put(4096, LARGE, finished=False), asked(4096, "exact", LARGE)],
    "a replayed result is told": [
        put(4096, LARGE, device=REPLAYED),
        asked(4096, "exact", LARGE, "replayed from a recording, not measured on this machine", source="replayed"),
        asked(4096, "exact", device__source="replayed"),
    ],
    "a measured result comes before a replayed one, however old": [
        put(4096, SMALL),
        put(4096, LARGE, device=REPLAYED),
        asked(4096, "exact", SMALL, source="cuda"),
    ],
    "what breaks a rule at these sizes": [
        put(4096, LARGE),
        asked(500, "default", DEFAULT),  # THREADS * WORK is 1,024
        put(1024, SMALL),
        asked(500, "nearest", SMALL),
    ],
    "a changed comment forgets nothing, a changed template does": [
        put(4096, LARGE),
        edited('extern "C"', '// The same kernel.\nextern "C"', ".cu"),
        asked(4096, "exact"),
        edited("factor * x[i]", "x[i] * factor", ".cu"),
        asked(4096, "default"),
    ],
    "a value that the space no longer has": [
        put(4096, LARGE),
        edited("WORK = [1, 2, 4]", "WORK = [1, 2]"),
        asked(4096, "default"),
    ],
    "what exceeds the device's limits": [
        edited(BLOCK, f'{BLOCK}\ndynamic_smem_bytes = "256 * THREADS * WORK"'),
        put(1 << 20, {"THREADS": 256, "WORK": 2}),  # 128 KiB
        asked(1 << 20, "exact"),
        asked(1 << 20, "default", device="t4"),  # 64 KiB
    ],
    "what does not fit with its registers": [
        edited("128, 256]", "128, 256, 512]"),
        put(4096, {"THREADS": 512, "WORK": 1}, resources=Resources(200, 0, 0, 0, 0)),  # more than an SM has
        asked(4096, "default"),
        put(4096, {"THREADS": 512, "WORK": 1}),
        asked(4096, "exact"),
    ],
    "what spills more than the author now accepts": [
        put(4096, LARGE, resources=SPILLING),
        asked(4096, "exact"),
        edited('"8 * n"\n', '"8 * n"\n[limits]\nmax_spill_bytes = 0\n'),
        asked(4096, "default"),
    ],
    "where the default breaks a rule, another valid one serves": [asked(100, "default", {"THREADS": 32, "WORK": 1})],
    "where it breaks a heuristic, too": [
        edited("[launch]", '[heuristics]\nlarge = "THREADS >= 256 or n <= 4096"\n\n[launch]'),
        asked(8192, "default", {"THREADS": 256, "WORK": 1}),
    ],
    "a gain within the doubt displaces no default": [
        put(4096, SMALL, default_ratio=1.05),
        asked(8192, "default", DEFAULT),
        asked(4096, "exact"),
    ],
    "a result near the size displaces the default by what it gained there": [
        put(4096, SMALL, default_ratio=1.5),
        asked(4000, "nearest", SMALL, NEAREST, choice__compared__ratio=pytest.approx(1 / 1.5, rel=0.02)),
        asked(4000, "nearest", SMALL, "to take 0.67 times as long here as what an empty database"),
    ],
    "a finalist whose value has left the file since is not compared": [
        put(4096, LARGE),
        edited("\nTHREADS = 128", "\nTHREADS = 64"),
        edited("64, 128, 256]", "64, 256]"),
        asked(4100, "nearest", LARGE, NEAREST),
    ],
    "where the default was not measured, it gained what is usual": [
        put(4096, SMALL, default_ratio=None),
        asked(4100, "nearest", SMALL, NEAREST, choice__compared__ratio=pytest.approx(0.887, abs=0.01)),
    ],
    "where the default won it is the nearest result": [
        put(4096, DEFAULT),
        asked(8192, "nearest", DEFAULT, choice__compared=None),
    ],
    "far away, where latencies are no longer hidden, the default serves": [
        put(1 << 22, LARGE, default_ratio=1.3),
        asked(1 << 21, "nearest", LARGE),
        asked(2048, "default"),
    ],
    "a far better result is preferred to a nearer one": [
        put(4096, SMALL, default_ratio=1.2),
        put(16384, LARGE, default_ratio=3.0),
        asked(5000, "nearest", LARGE, "It was among the fastest at other sizes: sizes n=16384 instead of n=5000"),
    ],
    "a result of this GPU comes before a better one of another": [
        put(4096, LARGE, default_ratio=9.0, device=A100),
        asked(4096, "transferred"),
        put(8192, SMALL, default_ratio=1.5),
        asked(4096, "nearest", SMALL),
        put(8192, SMALL, default_ratio=1.01),  # not surely faster, so the other GPU's is asked
        asked(4096, "transferred", LARGE),
    ],
    "exact comes before a family, and nearest serves outside": [
        put(4097, DEFAULT),
        learned(),
        asked(4097, "exact", DEFAULT),
        asked(4098, "family", SMALL),
        asked(200_000, "nearest", DEFAULT),
    ],
    "of two families the newest chooses": [
        learned("n=1..1000000"),
        learned("n=40000..60000"),
        asked(50_000, "family", None, "n=40000..60000"),
        asked(30_000, "family", None, "n=1..1000000"),
    ],
    "what breaks a rule gives way to the next of the leaf": [
        learned("n=1..1000000"),
        edited("n >= THREADS * WORK", "n % (THREADS * WORK) == 0"),
        asked(64_000, "family", SMALL),  # no multiple of 1,024
        asked(64 * 1024, "family", LARGE),
        asked(128 * 3 + 32, "default"),
    ],
    "a family's rule of another GPU": [learned(device=H100), asked(4097, "default")],
    "a family's rule from replay on the GPU itself": [learned(device=REPLAYED), asked(4097, "default")],
}


@pytest.mark.parametrize("steps", SCENARIOS.values(), ids=SCENARIOS)
def test_what_is_served_step_by_step(store, steps):
    for step in steps:
        step(store)


OTHER_VERSIONS = [{"template_hash": "0" * 64}, {"space_hash": "0" * 64}, {"options": ("--use_fast_math",)}]


@pytest.mark.parametrize("store_one", [lambda **key: put(4096, LARGE, **key), learned], ids=["result", "rule"])
@pytest.mark.parametrize("changes", [*OTHER_VERSIONS, {"dtype": "float64"}, {"kernel": "other"}])
def test_results_and_rules_of_another_version_are_not_served(store, store_one, changes):
    store_one(**changes)(store)
    asked(4096, "default", choice__compared=None)(store)


@pytest.mark.usefixtures("no_gpu")
def test_the_default(store):
    asked(4096, "default", DEFAULT, "the default configuration; run `autotile tune`", measurement=None)(store)
    asked(4096, "default", tuned_at=None, source="")(store)
    with pytest.raises(InputError, match="enough_blocks"):
        store.ask(8)  # nothing is valid


@pytest.mark.usefixtures("live_gpu")
def test_replayed_elsewhere_nothing_is_said_in_terms_of_the_key_but_on_the_gpu_itself_that_it_is_a_recording(store):
    store.put(4096, LARGE, time_us=12345.6, device=REPLAYED)
    kernel = store.ask(4096, device="rtx-3090")
    assert (kernel.tier, kernel.tuned_on) == ("transferred", "NVIDIA H200")
    assert kernel.explain() == (
        "scale n=4096 float32 on NVIDIA GeForce RTX 3090 is served THREADS=256 WORK=4. It was tuned elsewhere: "
        "GPU NVIDIA H200 instead of NVIDIA GeForce RTX 3090; number of SMs 132 instead of 82. Rules and limits "
        "hold here too. By the measurements there, it is expected to take 0.50 times as long here as what an empty "
        "database serves (default), 0.45 to 0.56 times. There it took 12,346 us (95 % interval 12,222 to 12,469, cold "
        "L2) when tuned today. The time was replayed from a recording, not measured on this machine."
    )
    said = "It was tuned from a recording of this GPU, not on the GPU itself. There it took"
    asked(4096, "transferred", LARGE, said, device=None)(store)


@pytest.mark.parametrize(
    ("age", "said"),
    [
        (timedelta(hours=1), "when tuned today."),
        (timedelta(days=1, hours=1), "when tuned yesterday."),
        (timedelta(days=40, hours=1), "when tuned 40 days ago."),
        (NOW - datetime(2140, 5, 1, 12, tzinfo=UTC), "when tuned, on 2140-05-01 by a clock ahead of this one."),
    ],
)
def test_the_age_is_told(age, said):
    choice = Choice("exact", SMALL, Measurement(10.0, 9.0, 11.0), source="cuda", tuned_at=datetime.now(UTC) - age)
    assert explain(Problem("scale", {"n": 1}, "float32"), PROFILE, choice).endswith(said)


class TestUntuned:
    def serve(self, name: str, wrong: Any = (), estimates: bool = True, **sizes: int) -> tuple[Config, Any]:
        kernel, shelf = load_kernel(name), Shelf(bundled=not estimates)
        request = KernelRequest(kernel, resolve_problem(kernel.spec, sizes, None), PROFILE, "13.0", shelf)
        vars(request)["wrong"] = wrong
        choice = untuned(request)
        return choice.config, choice.estimated

    def test_one_block_of_a_deep_product_is_split(self):
        config, estimated = self.serve("gemm_mma", M=64, N=64, K=131072)
        assert estimated.default_us > 20 * estimated.time_us
        assert config["SPLIT_K"] > 8
        assert "the default's 1 block of 128 threads on 1 of 132 SMs" in estimated.reason
        kernel = load_kernel("gemm_mma")
        problem = resolve_problem(kernel.spec, {"M": 64, "N": 64, "K": 131072}, None)
        assert not check_config(kernel.spec, config, problem, PROFILE)
        choice = chosen(kernel, problem, PROFILE)
        assert choice == Choice("default", config, estimated=estimated)
        text = explain(problem, PROFILE, choice)
        assert "It is estimated to be faster than the default: about" in text
        assert "each within about a factor of two" in text
        assert estimated.reason in text
        assert chosen(kernel, problem, PROFILE, bundled=True).config == kernel.spec.default

    def test_where_the_default_does_not_suit_the_least_estimate_is_served(self):
        config, estimated = self.serve("sgemm", M=2047, N=2049, K=2051)
        assert config["VEC"] == 1
        assert estimated.default_us is None
        first, nothing = self.serve("sgemm", M=2047, N=2049, K=2051, estimates=False)
        assert nothing is None
        assert first != config

    def test_a_wrong_configuration_is_not_served(self):
        best, _ = self.serve("gemm_mma", M=16, N=4096, K=4096)
        other, estimated = self.serve("gemm_mma", M=16, N=4096, K=4096, wrong={config_key(best)})
        assert other != best
        assert estimated is not None
        kernel = load_kernel("gemm_mma")
        default = dict(kernel.spec.default)

        class AllOthers:
            def __contains__(self, key: str) -> bool:
                return key != config_key(default)

        assert self.serve("gemm_mma", M=16, N=4096, K=4096, wrong=AllOthers()) == (default, None)

    def test_of_a_large_space_a_sample_is_estimated_of_a_huge_one_nothing(self, monkeypatch):
        whole = self.serve("gemm_mma", M=16, N=4096, K=4096)[1]
        monkeypatch.setattr(selection, "_MAX_ROWS", 200)
        sample = self.serve("gemm_mma", M=16, N=4096, K=4096)[1]
        assert whole.time_us < sample.time_us < 1.5 * whole.time_us
        monkeypatch.setattr(selection, "_MAX_COMBINATIONS", 10)
        assert self.serve("gemm_mma", M=16, N=4096, K=4096) == (dict(load_kernel("gemm_mma").spec.default), None)


class TestFarAway:
    """Far from all tuned sizes, only configurations are served that a search would try there."""

    SHIPPED = shipped_winners("sgemm", "float32")

    @pytest.mark.parametrize("device", ["h200", "a100"])
    @pytest.mark.parametrize("size", [1024, 2048, 4096])
    def test_a_winner_of_far_smaller_products_is_not_served(self, device, size):
        kernel, properties = load_kernel("sgemm"), device_profile(device)
        problem = resolve_problem(kernel.spec, dict.fromkeys("MNK", size), "float32")
        small = [best for best in self.SHIPPED if all(best.key.sizes[name] <= 256 for name in "MNK")]
        assert small
        choice = chosen(kernel, problem, properties, winners=small)
        assert meets_heuristics(kernel.spec, choice.config, problem, properties)

    def test_a_winner_nearby_is_served_though_a_search_would_not_try_it(self):
        best = next(best for best in self.SHIPPED if best.key.sizes["M"] == best.key.sizes["N"] == 256)
        problem = Problem("sgemm", {**best.key.sizes, "M": 400}, "float32")
        choice = chosen(load_kernel("sgemm"), problem, winners=[best])
        assert (choice.tier, choice.config) == ("nearest", best.config)

    def test_a_size_beyond_what_was_checked_gets_the_default(self, tmp_path):
        tune(tmp_path / "far.db", "4096x4096x4096", seed=11)
        assert serve(tmp_path / "far.db", "2048x2048x2048").choice.tier == "nearest"
        far = serve(tmp_path / "far.db", "100000x100000x8")
        empty = untuned(KernelRequest(SGEMM, far.problem, PROFILE, "", Shelf())).config
        assert (far.choice.tier, far.config) == ("default", empty)


SGEMM = load_kernel("sgemm_2d")
RECORDINGS = {
    text: read_recording(FOLDER / f"sgemm_2d-nvidia-h200-{text}-float32.npz", kernel="sgemm_2d")
    for text in ("1024x1024x1024", "2000x3000x1000", "4096x4096x4096")
}


def sizes_of(text: str) -> dict[str, int]:
    return dict(zip("MNK", map(int, text.split("x")), strict=True))


def time_us(text: str, config: Config) -> float:
    """Return the recorded time; infinite if the configuration was not recorded or failed."""
    recorded = RECORDINGS[text].lookup(config)
    return recorded.measurement.time_us if recorded is not None and recorded.measurement is not None else np.inf


def tune(path: Path, text: str, seed: int, trials: int = 200) -> dict[str, Any]:
    """Store a random search of a recorded problem with its finals, and return the winner's configuration."""
    recording = RECORDINGS[text]
    problem = Problem("sgemm_2d", sizes_of(text), "float32")
    key = key_of(SGEMM, problem, H200, nvrtc_version=nvrtc_version(), l2_mode="cold")
    rows = np.random.default_rng(seed).choice(len(recording), trials, replace=False).tolist()
    ran = sorted((row for row in rows if recording.ok[row]), key=lambda row: recording.columns["time_us"][row])
    default = recording.row_of(SGEMM.spec.default)
    finalists = sorted({*ran[:12], default}, key=lambda row: recording.columns["time_us"][row])
    run: dict[str, Any] = {"sampler": "random", "driver": "", "device": H200}
    with Database.open(path) as database:
        database.add_run(key, map(recording.trial, rows), phase="search", **run)
        database.add_run(key, map(recording.trial, finalists), phase="final", is_ranked=True, **run)
    return recording.config(finalists[0])


def serve(path: Path, text: str) -> Any:
    return Dispatcher(database=path).get_best_kernel("sgemm_2d", device="h200", **sizes_of(text))


class TestOtherSizes:
    def test_a_slower_tile_gives_way_and_a_finalist_serves_where_the_winner_would_be_slow(self, tmp_path):
        winner = tune(tmp_path / "t.db", "4096x4096x4096", 0)
        exact, near, small = (
            serve(tmp_path / "t.db", text) for text in ("4096x4096x4096", "2000x3000x1000", "1024x1024x1024")
        )
        assert (exact.tier, exact.config, exact.choice.compared) == ("exact", winner, None)
        assert (near.tier, near.config) == ("default", SGEMM.spec.default)
        compared = near.choice.compared
        assert not compared.serves
        assert compared.interval[0] < compared.ratio < compared.interval[1]
        assert compared.tuned_sizes == sizes_of("4096x4096x4096")
        assert (
            "The result for M=4096 N=4096 K=4096 on NVIDIA H200 is not served: it is expected to take "
            f"{compared.ratio:.2f} times as long here as what an empty database serves (default), "
            f"{compared.interval[0]:.2f} to {compared.interval[1]:.2f} times"
        ) in near.explain()
        assert near.to_json()["compared"] == compared.to_json()
        assert small.tier == "nearest"
        assert small.config != winner
        served = time_us("1024x1024x1024", small.config)
        assert served < 0.6 * time_us("1024x1024x1024", SGEMM.spec.default)
        assert served < 0.6 * time_us("1024x1024x1024", winner)
        assert "It was among the fastest at other sizes: sizes M=4096 N=4096 K=4096 instead of" in small.explain()
        assert "it is expected to take 0." in small.explain()


@pytest.mark.parametrize(
    ("default_us", "near", "far"),
    [(13.0, 4097, 4096 * 256), (11.0, 4097, 8192), (None, 4097, 16384)],  # a large, a small, and the usual gain
)
def test_a_gain_whose_launch_cannot_be_estimated_is_kept_near_and_not_far_away(store, default_us, near, far):
    """Only the blocks are counted."""
    text = store.path.read_text().partition("[work]")[0] + '[computed]\nblocks = "number"\n'
    text = text.replace("ceil_div(n, THREADS * WORK)", "computed.blocks")
    spec = parse_spec(text, "opaque.toml", functions={"blocks": lambda config: 2**20 // config["THREADS"]})
    chosen = {"THREADS": 256, "WORK": 1}
    times = {config_key(chosen): 10.0} | ({config_key(spec.default): default_us} if default_us else {})
    tuned = [Tuned({"n": 4096}, PROFILE, {config_key(chosen): chosen}, times)]
    for n, is_faster in ((near, True), (far, False)):
        assert estimate_configs(spec, spec.at({"n": n}), PROFILE, [spec.default]) is None
        found = prefer(spec, spec.at({"n": n}), PROFILE, spec.default, tuned)
        assert found.is_faster is is_faster


class TestFamilies:
    @pytest.fixture(autouse=True)
    def _kernel(self, store):
        self.kernel: Kernel = store.kernel
        self.problem = Problem("scale", {"n": 4097}, "float32")
        self.key = key_of(self.kernel, self.problem, H200, nvrtc_version="13.0", l2_mode="cold")
        self.family = parse_family(self.kernel.spec, ["n=1..10000"])

    def choice(self, *rules: StoredRule, **shelf: Any) -> Choice:
        return chosen(self.kernel, self.problem, rules=rules, **shelf)

    def timed(self, losses: Any, config: Config = SMALL) -> StoredRule:
        """Return a rule with points of given losses when left out, and without the rule."""
        points = tuple(
            RulePoint({"n": 1000 + number}, ((10.0, 9.0, 11.0),), 10.0, 0.0, held_out, without)
            for number, (held_out, without) in enumerate(losses)
        )
        rule = FamilyRule(self.family, (RuleConfig(config, 8, None),), (0,), points)
        read = FamilyRule.from_json(rule.to_json())
        assert read == rule
        return StoredRule(structs.replace(self.key, sizes={}), H200, read, NOW)

    def test_inside_the_family_the_rule_chooses_unless_serving_is_strict(self, store):
        learned()(store)
        small, large = store.ask(4097), store.ask(50_001)
        assert (small.tier, small.config) == ("family", SMALL)
        assert (large.tier, large.config, large.measurement.time_us) == ("family", LARGE, 11.0)
        assert large.explain() == (
            "scale n=50001 float32 on NVIDIA H200 is served THREADS=256 WORK=4. A rule chose it for the family "
            "n=1000..100000, learned from 1 of its problems, which lost 2.0 % on average when left out. Rules and "
            "limits hold here too. At n=100000, the nearest problem where it was timed, it took 11.00 us (95 % "
            "interval 9.000 to 12.00, cold L2) when tuned today."
        )
        store.put(200_000, DEFAULT)
        with pytest.raises(NotTunedError, match=r"strict=True allows no fallback \(family\)"):
            store.ask(4097, strict=True)

    def test_rules_that_come_with_autotile_serve_behind_the_users(self, store, tmp_path, monkeypatch):
        learned()(store)
        with Database.open(read_settings().database) as database:
            (stored,) = database.rules()
        wide = structs.replace(
            stored, rule=replace(stored.rule, family=parse_family(store.kernel.spec, ["n=1..1000000"]))
        )
        (tmp_path / "families").mkdir()
        write_rules(tmp_path / "families" / "h200.scale.json", [wide])
        monkeypatch.setattr(shipped_file, "data_folder", lambda _: tmp_path)
        asked(4097, "family", SMALL, "n=1000..100000")(store)
        asked(200_000, "family", LARGE, "The result came with autotile")(store)

    @pytest.mark.parametrize(
        ("losses", "said"),
        [
            ([(0.0, 0.5)] * 4, "4 held-out points are too few to judge it, at least 5 are needed"),
            ([(0.0, 0.5), (0.3, 0.0)] * 5, "which is not clearly better"),
            ([(2.24, 0.1)] * 6, "it took 2.95 times as long as serving without it"),
        ],
    )
    def test_a_rule_that_is_not_surely_better_is_not_served(self, losses, said):
        choice = self.choice(self.timed(losses))
        assert (choice.tier, choice.config) == ("default", DEFAULT)
        assert "A rule was learned for the family n=1..10000, but is not in force: " in choice.unapplied
        assert said in choice.unapplied
        assert choice.unapplied in explain(self.problem, H200, choice)

    def test_a_rule_that_is_surely_better_is_served_also_in_place_of_a_newer_one_that_is_not(self):
        choice = self.choice(self.timed([(0.0, 0.5), (0.1, 0.4)] * 5))
        assert (choice.tier, choice.config, choice.unapplied) == ("family", SMALL, "")
        assert "at 10 held-out points it took 0.7" in choice.rule
        good, bad = self.timed([(0.0, 0.5)] * 8), self.timed([(0.5, 0.0)] * 8, LARGE)
        assert (self.choice(bad, good).config, self.choice(good, bad).config) == (SMALL, SMALL)

    def test_a_choice_that_is_expected_to_be_slower_is_passed_over(self):
        wide = {**SGEMM.spec.default, "BN": 256, "BK": 16, "TM": 16, "STAGES": 1, "UNROLL": 16, "MIN_BLOCKS": 1}
        family = parse_family(SGEMM.spec, [f"{name}=1..8192" for name in "MNK"])
        times_us = (2775.0, 2770.0, 2780.0), (3127.0, 3120.0, 3130.0)
        point = RulePoint(dict.fromkeys("MNK", 4096), times_us, 2775.0, 0.0, 0.0)
        configs = (RuleConfig(wide, 1, None), RuleConfig(dict(SGEMM.spec.default), 2, None))
        rule = FamilyRule(family, configs, (0, 1), (point,))
        key = key_of(SGEMM, Problem("sgemm_2d", {}, "float32"), H200, nvrtc_version="13.0", l2_mode="cold")
        rules = [StoredRule(key, H200, rule, NOW)]
        large, small = (
            chosen(SGEMM, Problem("sgemm_2d", dict.fromkeys("MNK", n), "float32"), rules=rules) for n in (4096, 1024)
        )
        assert (large.tier, large.config, small.tier, small.config) == ("family", wide, "default", SGEMM.spec.default)
        assert "The rule of the family M=1..8192 N=1..8192 K=1..8192 is not followed here" in small.unapplied
        assert "it is expected to take 1." in small.unapplied

    @pytest.mark.parametrize(("registers", "expected"), [(64, SMALL), (400, DEFAULT)])
    def test_what_with_its_registers_does_not_fit(self, registers, expected):
        rule = rule_of(self.family, (SMALL,), (0,), Resources(registers, 0, 0, 0, 0))
        assert self.choice(StoredRule(structs.replace(self.key, sizes={}), H200, rule, NOW)).config == expected

    def test_what_was_found_to_be_wrong_for_this_problem(self):
        rule = rule_of(self.family, (SMALL, LARGE), (0, 1))
        stored = StoredRule(structs.replace(self.key, sizes={}), H200, rule, NOW)
        key, small = self.key, config_key(SMALL)
        wrong: StoredVerdict = key, small, False
        for checks, expected in (
            ([], SMALL),
            ([wrong], LARGE),
            ([(structs.replace(key, nvrtc_version="12.0"), small, False)], LARGE),
            ([(structs.replace(key, sizes={"n": 4098}), small, False)], SMALL),
            ([(structs.replace(key, template_hash="another"), small, False)], SMALL),
            ([wrong, (key, small, True)], SMALL),
            ([wrong, (key, config_key(LARGE), False)], DEFAULT),
        ):
            assert self.choice(stored, checks=checks).config == expected, checks

    def test_a_rule_does_not_load_what_learning_needs(self, store):
        learned()(store)
        code = (
            "import sys, autotile\n"
            f"kernel = autotile.get_best_kernel({str(store.path)!r}, n=4097, device='h200')\n"
            "print(kernel.tier, [name for name in ('scipy', 'sqlalchemy', 'optuna') if name in sys.modules])"
        )
        assert python("-c", code).stdout == "family []\n"
