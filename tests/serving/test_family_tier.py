"""Configurations that a family's rule serves, and those that it never serves."""

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, Problem, Resources, config_key
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.database.learned import FamilyState, save_family_state, save_rule
from autotile.database.winners import StoredRule, StoredVerdict
from autotile.errors import NotTunedError
from autotile.exchange import shipped as shipped_file
from autotile.exchange.shipped import write_rules
from autotile.families.family import Family, FamilyRule, Leaf, RuleConfig, RulePoint, Split, Tree, parse_family
from autotile.families.features import Feature
from autotile.kernel.library import Kernel, load_kernel
from autotile.serving.choice import explain
from autotile.serving.selection import KernelRequest, Shelf, choose
from autotile.settings import read_settings
from autotile.space.limits import check_config

SMALL, LARGE, DEFAULT = ({"THREADS": threads, "WORK": work} for threads, work in ((64, 1), (256, 4), (128, 1)))
H200 = replace(device_profile("h200"), source="cuda")
NOW = datetime.now(UTC)
BY_SIZE = Split(Feature("size", "n"), 10_000, Leaf((0, 1)), Leaf((1, 0)))


def rule_of(family: Family, configs: tuple[Config, ...], tree: Tree, resources: Resources | None = None) -> FamilyRule:
    timed = tuple((10.0 + number, 9.0, 12.0) for number in range(len(configs)))
    point = RulePoint(family.largest, timed, 10.0, 0.0, 0.02)
    return FamilyRule(family, tuple(RuleConfig(config, resources, 8) for config in configs), tree, (point,))


def learn(store: Any, text: str = "n=1000..100000", device: DeviceProperties = H200, **changes: Any) -> None:
    """Store a rule: SMALL up to 10,000 elements, LARGE above; ``changes`` are of the key."""
    kernel: Kernel = store.kernel
    problem = Problem(kernel.name, {}, "float32")
    key = replace(key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold"), **changes)
    rule = rule_of(parse_family(kernel.spec, text.split()), (SMALL, LARGE), BY_SIZE)
    with Database.open(read_settings().database) as database:
        save_family_state(database, key, rule.family, device, FamilyState({}))
        save_rule(database, key, device, rule)


class TestTier:
    def test_inside_the_family_the_rule_chooses(self, store: Any) -> None:
        learn(store)
        small, large = store.ask(4097), store.ask(50_001)
        assert (small.tier, small.config) == ("family", SMALL)
        assert (large.tier, large.config) == ("family", LARGE)
        assert large.measurement.time_us == 11.0
        assert large.explain() == (
            "scale n=50001 float32 on NVIDIA H200 is served THREADS=256 WORK=4. A rule chose it for the family "
            "n=1000..100000, learned from 1 of its problems, which lost 2.0 % on average when left out. Rules and "
            "limits hold here too. At n=100000, the nearest problem where it was timed, it took 11 us (95 % interval 9 "
            "to 12, cold L2) when tuned today."
        )

    def test_exact_comes_first_and_nearest_serves_outside(self, store: Any) -> None:
        store.put(4097, DEFAULT)
        learn(store)
        assert (store.ask(4097).tier, store.ask(4097).config) == ("exact", DEFAULT)
        assert (store.ask(4098).tier, store.ask(4098).config) == ("family", SMALL)
        assert (store.ask(200_000).tier, store.ask(200_000).config) == ("nearest", DEFAULT)

    def test_of_two_families_the_newest_chooses(self, store: Any) -> None:
        learn(store, "n=1..1000000")
        learn(store, "n=40000..60000")
        assert "n=40000..60000" in store.ask(50_000).explain()
        assert "n=1..1000000" in store.ask(30_000).explain()

    def test_rules_that_come_with_autotile_serve_behind_the_users(
        self, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learn(store)
        with Database.open(read_settings().database) as database:
            (stored,) = database.rules()
        wide = replace(stored, rule=replace(stored.rule, family=parse_family(store.kernel.spec, ["n=1..1000000"])))
        (tmp_path / "families").mkdir()
        write_rules(tmp_path / "families" / "h200.scale.json", [wide])
        monkeypatch.setattr(shipped_file, "data_folder", lambda _: tmp_path)
        assert "n=1000..100000" in store.ask(4097).explain()
        shipped = store.ask(200_000)
        assert (shipped.tier, shipped.config) == ("family", LARGE)
        assert "The result came with autotile" in shipped.explain()

    def test_what_breaks_a_rule_gives_way_to_the_next_of_the_leaf(self, store: Any) -> None:
        learn(store, "n=1..1000000")
        store.path.write_text(store.path.read_text().replace("n >= THREADS * WORK", "n % (THREADS * WORK) == 0"))
        other = type(store)(load_kernel(str(store.path)), store.path)
        assert other.ask(64_000).config == SMALL  # 64,000 is no multiple of 1,024
        assert other.ask(64 * 1024).config == LARGE
        assert other.ask(128 * 3 + 32).tier == "default"

    @pytest.mark.usefixtures("live_gpu")
    def test_strict_serving_takes_no_rule(self, store: Any) -> None:
        store.put(200_000, DEFAULT)
        learn(store)
        assert store.ask(4097, device=None).tier == "family"
        with pytest.raises(NotTunedError, match=r"strict=True allows no fallback \(family\)"):
            store.ask(4097, device=None, strict=True)


class TestForce:
    """Rules that are not better than what they displace."""

    @pytest.mark.parametrize(
        ("losses", "said"),
        [
            ([(0.0, 0.5)] * 4, "4 held-out points are too few to judge it, at least 5 are needed"),
            ([(0.0, 0.5), (0.3, 0.0)] * 5, "which is not clearly better"),
            ([(2.24, 0.1)] * 6, "it took 2.95 times as long as serving without it"),
        ],
    )
    def test_a_rule_that_is_not_surely_better_is_not_served(self, losses: Any, said: str) -> None:
        choice = self.served(losses)
        assert (choice.tier, choice.config) == ("default", DEFAULT)
        assert "A rule was learned for the family n=1..10000, but is not in force: " in choice.unapplied
        assert said in choice.unapplied
        assert choice.unapplied in explain(Problem("scale", {"n": 4097}, "float32"), H200, choice)

    def test_a_rule_that_is_surely_better_is_served(self) -> None:
        choice = self.served([(0.0, 0.5), (0.1, 0.4)] * 5)
        assert (choice.tier, choice.config, choice.unapplied) == ("family", SMALL, "")
        assert "at 10 held-out points it took 0.7" in choice.rule

    def test_an_older_rule_in_force_serves_in_place_of_a_newer_one_that_is_not(self) -> None:
        good, bad = self.stored([(0.0, 0.5)] * 8), self.stored([(0.5, 0.0)] * 8, LARGE)
        assert self.choice(bad, good).config == SMALL
        assert self.choice(good, bad).config == SMALL

    @pytest.fixture(autouse=True)
    def _kernel(self, store: Any) -> None:
        self.kernel: Kernel = store.kernel

    def served(self, losses: Any) -> Any:
        return self.choice(self.stored(losses))

    def choice(self, *rules: StoredRule) -> Any:
        return choose(
            KernelRequest(self.kernel, Problem("scale", {"n": 4097}, "float32"), H200, "13.0", Shelf(rules=rules))
        )

    def stored(self, losses: Any, config: Config = SMALL) -> StoredRule:
        """Return a rule with points of given losses when left out, and without the rule."""
        problem = Problem("scale", {}, "float32")
        family = parse_family(self.kernel.spec, ["n=1..10000"])
        points = tuple(
            RulePoint({"n": 1000 + number}, ((10.0, 9.0, 11.0),), 10.0, 0.0, held_out, without)
            for number, (held_out, without) in enumerate(losses)
        )
        rule = FamilyRule(family, (RuleConfig(config, None, 8),), Leaf((0,)), points)
        read = FamilyRule.from_json(rule.to_json())
        assert read == rule
        return StoredRule(key_of(self.kernel, problem, H200, nvrtc_version="13.0", l2_mode="cold"), H200, read, NOW)


def test_a_rules_choice_that_is_expected_to_be_slower_is_passed_over() -> None:
    kernel = load_kernel("sgemm_2d")
    wide = {**kernel.spec.default, "BN": 256, "BK": 16, "TM": 16, "STAGES": 1, "UNROLL": 16, "MIN_BLOCKS": 1}
    family = parse_family(kernel.spec, [f"{name}=1..8192" for name in "MNK"])
    point = RulePoint(
        dict.fromkeys("MNK", 4096), ((2775.0, 2770.0, 2780.0), (3127.0, 3120.0, 3130.0)), 2775.0, 0.0, 0.0
    )
    configs = (RuleConfig(wide, None, 1), RuleConfig(dict(kernel.spec.default), None, 2))
    rule = FamilyRule(family, configs, Leaf((0, 1)), (point,))
    key = key_of(kernel, Problem("sgemm_2d", {}, "float32"), H200, nvrtc_version="13.0", l2_mode="cold")

    def served(n: int) -> Any:
        problem = Problem("sgemm_2d", dict.fromkeys("MNK", n), "float32")
        return choose(KernelRequest(kernel, problem, H200, "13.0", Shelf(rules=[StoredRule(key, H200, rule, NOW)])))

    assert (served(4096).tier, served(4096).config) == ("family", wide)
    assert (served(1024).tier, served(1024).config) == ("default", kernel.spec.default)
    assert "The rule of the family M=1..8192 N=1..8192 K=1..8192 is not followed here" in served(1024).unapplied
    assert "it is expected to take 1." in served(1024).unapplied


class TestNeverServed:
    @pytest.mark.parametrize(
        "changes",
        [
            {"template_hash": "0" * 64},
            {"space_hash": "0" * 64},
            {"options": ("--use_fast_math",)},
            {"dtype": "float64"},
        ],
    )
    def test_a_rule_of_another_version(self, store: Any, changes: dict[str, Any]) -> None:
        learn(store, **changes)
        assert store.ask(4097).tier == "default"

    def test_a_rule_of_another_gpu(self, store: Any) -> None:
        learn(store, device=replace(device_profile("h100"), source="cuda"))
        assert store.ask(4097).tier == "default"

    def test_a_rule_from_replay_on_the_gpu_itself(self, store: Any) -> None:
        learn(store, device=replace(H200, source="replayed"))
        assert store.ask(4097).tier == "default"

    def test_what_with_its_registers_does_not_fit(self, store: Any) -> None:
        problem = Problem(store.kernel.name, {"n": 4097}, "float32")
        family = parse_family(store.kernel.spec, ["n=1..10000"])
        key = replace(key_of(store.kernel, problem, H200, nvrtc_version="13.0", l2_mode="cold"), sizes={})
        for registers, expected in ((64, SMALL), (400, DEFAULT)):
            rule = rule_of(family, (SMALL,), Leaf((0,)), Resources(registers, 0, 0, 0, 0))
            stored = StoredRule(key, H200, rule, NOW)
            assert choose(KernelRequest(store.kernel, problem, H200, "13.0", Shelf(rules=[stored]))).config == expected

    def test_what_was_found_to_be_wrong_for_this_problem(self, store: Any) -> None:
        problem = Problem(store.kernel.name, {"n": 4097}, "float32")
        requested = key_of(store.kernel, problem, H200, nvrtc_version="13.0", l2_mode="cold")
        family = parse_family(store.kernel.spec, ["n=1..10000"])
        rule = rule_of(family, (SMALL, LARGE), Leaf((0, 1)))
        stored = StoredRule(replace(requested, sizes={}), H200, rule, NOW)

        def served(*checks: StoredVerdict) -> Any:
            return choose(
                KernelRequest(store.kernel, problem, H200, "13.0", Shelf(rules=[stored], checks=checks))
            ).config

        wrong = StoredVerdict(requested, config_key(SMALL), passed=False)
        assert served() == SMALL
        assert served(wrong) == LARGE
        assert served(replace(wrong, key=replace(requested, nvrtc_version="12.0"))) == LARGE
        assert served(replace(wrong, key=replace(requested, sizes={"n": 4098}))) == SMALL
        assert served(replace(wrong, key=replace(requested, template_hash="another"))) == SMALL
        assert served(wrong, replace(wrong, passed=True)) == SMALL
        assert served(wrong, StoredVerdict(requested, config_key(LARGE), passed=False)) == DEFAULT


TILED = load_kernel("matmul_tiled")
TILES = tuple(
    {"TILE": tile, "PAD": 0, "UNROLL": unroll, "GUARDED": guarded}
    for tile, unroll, guarded in ((32, 32, False), (16, 16, False), (16, 16, True))
)
sizes = st.integers(1, 4096)


@given(sizes, sizes, sizes, st.permutations(range(3)), st.sampled_from(["waves", "work_ratio", "size", "alignment"]))
def test_whatever_the_sizes_and_the_order_what_is_served_is_valid(
    m: int, n: int, k: int, order: list[int], kind: Any
) -> None:
    problem = Problem("matmul_tiled", {"M": m, "N": n, "K": k}, "float32")
    key = replace(key_of(TILED, problem, H200, nvrtc_version="13.0", l2_mode="cold"), sizes={})
    question = (
        Feature(kind, "M") if kind in ("size", "alignment") else Feature(kind, config=0, over=2 * (kind != "waves"))
    )
    tree = Split(question, 1.0, Leaf(tuple(order)), Leaf(tuple(reversed(order))))
    family = parse_family(TILED.spec, ["M=1..4096", "N=1..4096", "K=1..4096"])
    stored = StoredRule(key, H200, rule_of(family, TILES, tree), NOW)
    choice = choose(KernelRequest(TILED, problem, H200, "13.0", Shelf(rules=[stored])))
    assert check_config(TILED.spec, choice.config, problem.sizes, H200) == ""
    served = stored.rule.order(TILED.spec, H200, problem.sizes)
    valid = [number for number in served if not check_config(TILED.spec, TILES[number], problem.sizes, H200)]
    if valid:
        assert (choice.tier, choice.config) == ("family", TILES[valid[0]])
    else:
        assert choice.tier == "default"


def test_a_rule_does_not_load_what_learning_needs(store: Any) -> None:
    learn(store)
    code = (
        "import sys, autotile\n"
        f"kernel = autotile.get_best_kernel({str(store.path)!r}, n=4097, device='h200')\n"
        "assert kernel.tier == 'family', kernel.tier\n"
        "print([name for name in ('scipy', 'sqlalchemy', 'optuna') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
