"""The C++ header: its expressions have the same values as in Python, and it chooses what serving chooses."""

import random
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feature_kernels import space_text
from msgspec import structs
from msgspec.structs import replace

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, Measurement, Resources, config_key
from autotile.cuda.headers import toolkit_headers
from autotile.database.keys import key_of
from autotile.database.winners import StoredRule, Winner
from autotile.errors import InputError
from autotile.exchange.bundle import BundledCubin
from autotile.exchange.cpp_header import literal, to_cpp, write_header
from autotile.families.family import Extent, Family, FamilyRule, RuleConfig, RulePoint, Split
from autotile.families.features import Feature, Traits
from autotile.kernel.expressions import parse_expression
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import resolve_problem
from autotile.serving.selection import KernelRequest, Shelf, choose
from autotile.space.search_space import feasible_space

COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-O0"]
KINDS = {"A": "number", "B": "number", "C": "number", "P": "boolean", "L": "string", "X": "real"}
PLACES = {name: f"row.{name}" for name in KINDS}
EXPRESSIONS = [
    "A + B * C - 3",
    "(A + B) * C",
    "A - (B - C)",
    "-A // B",
    "A // -B",
    "-A % B",
    "(A - 7) % -B",
    "A ** 2 + 2 ** 40",
    "3 * 1024 * 1024 * 1024 * A",
    "ceil_div(A, B) + ceil_div(-A, B)",
    "min(A, B, C) + max(A, B)",
    "A < B < C",
    "1 <= A <= 64 != B",
    "A in (1, 2, 4) or B not in [3, 5]",
    "not A < B and (P or C > 3)",
    "P + P * 2 + (A > B)",
    "A if P else B if A > B else C",
    "(A if P else B) * 2 + (8 if P else 4) // (2 if A > 1 else 1)",
    "L == 'row' and A > 1",
    "L in ('row', 'column')",
    'L != "column"',
    "not (P and A > 2)",
    "-(-A)",
    "-(2 - 5) * A",
    "A if not P else -B",
    "P == (A > 2)",
    "A & B | C ^ 5",
    "~A + (A << 3) - (-A >> 2)",
    "(P & (A > 2)) + (P | False)",
    "abs(B - A) * gcd(A, B, 12) + lcm(A, B)",
    "ceil_log2(A) + is_power_of_two(A)",
    "floor(A / B) + ceil(A / B) * 100 + round(A / 2) + int(-A / 3) + floor(B) + ceil(C) + int(A) - round(A)",
    "A / B > 0.75 and A * 0.5 < C",
    "floor(A * 1.5 // (C - 0.5) * 1000 + -A % 2.5)",
    "floor(1000 * (sqrt(A) + log2(B) + X ** 2 + min(X, A) + max(B, 1.5) + abs(-X) + exp(-X) - log(C)))",
    "floor(float(A) if P else X)",
]
ROWS = [
    (a, b, c, p, text, a / 7)
    for a, b, c in ((1, 1, 1), (7, 2, 3), (64, 5, 4), (4096, 128, 8), (3, 64, 2))
    for p in (False, True)
    for text in ("row", "column", "a\\b")
]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


def compile_program(source: str, folder: Path, option: str = "-Wl,--unresolved-symbols=ignore-all") -> Path:
    """Compile a program, with warnings as errors, and return its path.

    It is linked without the driver, which is not installed everywhere, so it must not call the driver.
    """
    includes = [f"-isystem{path}" for path in toolkit_headers()]
    program = folder / "program"
    command = [str(COMPILER), *FLAGS, *includes, "-I", str(folder), "-x", "c++", "-", "-o", str(program), option]
    built = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return program


def source_of(name: str) -> str:
    return Path(__file__).with_name(f"{name}.cpp").read_text()


def run(program: Path, *arguments: str, given: str = "") -> list[str]:
    done = subprocess.run([str(program), *arguments], input=given, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@needs_compiler
def test_expressions_have_the_values_that_they_have_in_python(tmp_path):
    template = (Path(__file__).parents[2] / "autotile" / "exchange" / "header_template.hpp").read_text()
    begin = template.index("// Division that rounds")  # the functions that expressions call
    helpers = template[begin : template.index("}  // namespace detail")]
    parsed = [parse_expression(text, KINDS) for text in EXPRESSIONS]  # type: ignore[arg-type]
    printed = "\n".join(f"        std::cout << std::int64_t({to_cpp(e, PLACES)}) << '\\n';" for e in parsed)
    rows = ", ".join(f"Row{{{', '.join(map(literal, row))}}}" for row in ROWS)
    texts = {"HELPERS": helpers, "ROWS": rows, "PRINTED": printed}
    source = re.sub("|".join(texts), lambda name: texts[name[0]], source_of("expressions"))
    got = iter(run(compile_program(source, tmp_path)))
    for row in ROWS:
        environment = dict(zip(KINDS, row, strict=True))
        for expression in parsed:
            expected = int(expression.evaluate(environment))
            assert (expression.text, row, int(next(got))) == (expression.text, row, expected)


def chooser(folder: Path, *stored: Any, **rules: Any) -> Path:
    """Compile a program that prints what a header chooses."""
    text = write_header(load_kernel("sgemm_2d").spec, "float32", *stored, **rules, stem="sgemm_2d")
    (folder / "sgemm_2d.hpp").write_text(text)
    return compile_program(source_of("choose"), folder)


def chosen_alike(
    program: Path, here: DeviceProperties, target: str, asked: Sequence[Mapping[str, int]], shelf: Shelf
) -> set[str]:
    """Assert that a program of `chooser` chooses what dispatch does for each of some sizes; return the tiers."""
    kernel, tiers = load_kernel("sgemm_2d"), set[str]()
    order = list({config_key(config): 0 for config in (*(w.config for w in shelf.winners), kernel.spec.default)})
    words = (here.name, here.compute_capability.replace(".", ""), str(here.smem_per_block_optin_bytes))
    given = "\n".join(f"{sizes['M']} {sizes['N']} {sizes['K']}" for sizes in asked)
    for sizes, line in zip(asked, run(program, *words, given=given), strict=True):
        choice = choose(KernelRequest(kernel, resolve_problem(kernel.spec, sizes), here, "13.0", shelf))
        number, tier, *_, cubin = line.split()
        expected = order.index(config_key(choice.config))
        assert (sizes, int(number), TIERS[int(tier)]) == (sizes, expected, choice.tier)
        assert cubin == f"{expected}.{target}"
        tiers.add(choice.tier)
    return tiers


def winners_of(device: DeviceProperties, sizes: Sequence[dict[str, int]], seed: int) -> list[Winner]:
    kernel = load_kernel("sgemm_2d")
    chosen = random.Random(seed)
    found = []
    for number, one in enumerate(sizes):
        space = feasible_space(kernel.spec, kernel.spec.at(one), device)
        config = space.config(chosen.randrange(len(space)))
        key = key_of(kernel, resolve_problem(kernel.spec, one), device, nvrtc_version="13.0", l2_mode="cold")
        tuned_at = datetime(2026, 1, 1, tzinfo=UTC) - timedelta(hours=number)
        found.append(Winner(key, device, config, RESOURCES, Measurement(10.0 + number, 9.0, 90.0), tuned_at))
    return found


RESOURCES = Resources(64, 0, 0, 0, 1024)
SIZES = (1, 17, 64, 100, 1000, 4096, 9000)
TIERS = ("exact", "family", "nearest", "transferred", "default")


@needs_compiler
def test_it_chooses_what_dispatch_chooses(tmp_path):
    kernel = load_kernel("sgemm_2d")
    hopper, ada, ampere = (replace(device_profile(name), source="cuda") for name in ("h200", "rtx-4090", "a100"))
    chosen = random.Random(7)
    some = [{name: 2 ** chosen.randrange(5, 14) for name in "MNK"} for _ in range(12)]
    winners = winners_of(hopper, some[:8], 1) + winners_of(ampere, some[4:], 2) + winners_of(ada, some[2:6], 4)
    winners += [
        structs.replace(w, key=structs.replace(w.key, source="replayed")) for w in winners_of(hopper, some[8:10], 3)
    ]
    configs = {config_key(c): c for c in (*(w.config for w in winners), kernel.spec.default)}
    targets = ("sm_80", "sm_86", "sm_90")
    numbered = [(number, config, target) for number, config in enumerate(configs.values()) for target in targets]
    cubins = [BundledCubin(t, "float32", {}, c, RESOURCES, f"{number}.{t}") for number, c, t in numbered]
    asked = some + [{name: chosen.choice(SIZES) for name in "MNK"} for _ in range(60)]
    program, shelf = chooser(tmp_path, winners, cubins), Shelf(winners, compares=False, bundled=True)
    for here, target in ((hopper, "sm_90"), (ada, "sm_86")):
        chosen_alike(program, here, target, asked, shelf)


FEATURES = [
    Feature("size", "M"),
    Feature("alignment", "K"),
    Feature("outputs"),
    Feature("intensity"),
    Feature("blocks", config=1),
    Feature("waves", config=0),
    Feature("work_ratio", config=0, over=2),
]


def rule_of(configs: Sequence[Config], n: int, feature: Feature, threshold: float) -> FamilyRule:
    """Return a rule of the problems with a value of N, whose tree tests a feature and then a size."""
    tree = Split(feature, threshold, (0, 1, 2), Split(Feature("size", "M"), 100, (1, 2, 0), (2, 0, 1)))
    family = Family({"M": Extent(((1, 4096), (9000, 9000))), "N": Extent(((n, n),)), "K": Extent(((17, 4096),))})
    point = RulePoint({"M": 64, "N": n, "K": 64}, ((1.0, 0.9, 1.1),) * 3, 1.0, 0.0, None)
    return FamilyRule(family, tuple(RuleConfig(config, 2, RESOURCES) for config in configs), tree, (point,))


@needs_compiler
def test_the_rule_of_a_family_is_the_same_tree(tmp_path):
    kernel = load_kernel("sgemm_2d")
    here = replace(device_profile("h200"), source="cuda")
    some = [{"M": 64, "N": 128, "K": 64}, {"M": 4096, "N": 4096, "K": 4096}, {"M": 512, "N": 2048, "K": 128}]
    winners = winners_of(here, some, 3)
    configs = {config_key(c): c for c in (*(w.config for w in winners), kernel.spec.default)}
    chosen = random.Random(1)
    asked, rules = list(some), []
    for n, feature in zip(SIZES, FEATURES, strict=True):  # each in a family of its own
        these = [{"M": chosen.choice(SIZES), "N": n, "K": chosen.choice(SIZES)} for _ in range(25)]
        problems = [kernel.spec.at(sizes) for sizes in these]
        traits = Traits.of(kernel.spec, here, list(configs.values())[:3], [2, 2, 2], problems)
        rule = rule_of(list(configs.values())[:3], n, feature, float(np.median(traits.column(feature))))
        rules.append(StoredRule(structs.replace(winners[0].key, sizes={}), here, rule, datetime.now(UTC)))
        asked += these
    cubins = [BundledCubin("sm_90", "float32", {}, c, RESOURCES, f"{n}.sm_90") for n, c in enumerate(configs.values())]
    program = chooser(tmp_path, winners, cubins, rules=rules)
    shelf = Shelf(winners, rules, compares=False, bundled=True)
    assert chosen_alike(program, here, "sm_90", asked, shelf) >= {"exact", "family", "nearest"}


@needs_compiler
def test_flags_workspaces_and_tensor_maps(tmp_path):
    """A kernel with every kind of argument compiles without warnings, and the flags select the cubin."""
    spec = parse_spec(space_text("everything"), "everything.toml")
    made = [({"TRANS_B": flag}, spec.default, RESOURCES, f"{flag}.cubin") for flag in (0, 1)]
    cubins = [BundledCubin("sm_90a", "bfloat16", *each) for each in made]
    text = write_header(spec, "bfloat16", [], cubins, stem="everything")
    (tmp_path / "everything.hpp").write_text(text)
    assert "namespace autotile::every_thing_bfloat16 {" in text
    assert run(compile_program(source_of("everything"), tmp_path)) == ["1.cubin 16256 3 8192", "1 1 1 0 1"]
    launching = '#include "everything.hpp"\nvoid go(autotile::every_thing_bfloat16::Kernel& k) { k.launch({}, {}); }\n'
    compile_program(launching, tmp_path, "-c")


@needs_compiler
def test_a_launch_has_its_attributes_and_the_arguments_of_its_step(tmp_path):
    spec = parse_spec(text := space_text("launching"), "launching.toml")
    cubins = [BundledCubin("sm_90a", "float32", {"symbol": 1}, spec.default, RESOURCES, "0.cubin")]
    (tmp_path / "launching.hpp").write_text(write_header(spec, "float32", [], cubins, stem="launching"))
    assert run(compile_program(source_of("launching"), tmp_path)) == [
        "512 64 1 512 64 4 1024 1 1 16 128 16384 cooperative 1 cluster 2 C 18 B 17 n 511 per 132",
        "512 64 1 512 64 4 1024 1 1 16 128 16384 cooperative 1 C 18 B 17 n 511 per 132",
        "513 64 1 512 64 4 1026 1 1 launching: too much data for the variable d_w",
        "101001",
    ]
    converted = parse_spec(text.replace("int16", "bfloat16"), "x")
    with pytest.raises(InputError, match=r"cannot convert p\.n, an expression, to bfloat16; declare it as float32"):
        write_header(converted, "float32", [], cubins, stem="x")


@needs_compiler
def test_kernels_may_have_names_that_no_namespace_can_have(tmp_path):
    names = ("float", "std", "autotile")
    for name in names:
        spec = parse_spec(space_text("everything").replace("every-thing", name).replace(', "bfloat16"]', "]"), "x")
        cubins = [BundledCubin("sm_90a", "float16", {"TRANS_B": 0}, spec.default, RESOURCES, "0.cubin")]
        (tmp_path / f"{name}.hpp").write_text(write_header(spec, "float16", [], cubins, stem=name))
    source = "".join(f'#include "{name}.hpp"\nvoid go(autotile::{name}_::Kernel&) {{}}\n' for name in names)
    compile_program(source, tmp_path, "-c")
