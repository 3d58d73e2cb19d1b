"""Relearn the rule of a family and time its configurations at the sizes of an earlier run of ``unseen_sizes.py``.

    python benchmarks/unseen_again.py EARLIER.json EARLIER-rules.json --folder DIR --output FILE.json
        --rules FILE-rules.json

For use when the learning of rules has changed but the measurements have not: the rule is learned from the times of its
own configurations at its own points, the sizes and the results of their own tuning are those of the earlier run, and
all four ways of serving are timed interleaved as in that run. The held-out loss of the rule is kept from the earlier
run, in which there were more configurations to choose from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from unseen_sizes import Bench, losses, show, summary

from autotile.core.model import Config, Problem, config_key
from autotile.database.winners import StoredRule
from autotile.exchange.shipped import read_rules, write_rules
from autotile.families.family import FamilyRule, TrainingData, learn_rule, sample_members
from autotile.families.features import Traits, list_features, meet_rules
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config
from autotile.workers.child import WorkerPool


def main() -> None:
    """Learn the rule, time it, print the table and write the JSON and the rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", type=Path, help="JSON file of unseen_sizes.py")
    parser.add_argument("earlier_rules", type=Path, help="file of the rule written by that run")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the databases, which stay empty")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rules", type=Path, required=True, help="file to write the rule to")
    arguments = parser.parse_args()
    earlier = json.loads(arguments.earlier.read_text())
    (stored,) = read_rules(arguments.earlier_rules)
    with WorkerPool() as worker_pool:
        bench = Bench(_as_then(arguments, earlier["options"], stored), worker_pool)
        rule = relearned(bench, stored.rule)
        rows = [_again(bench, rule, row) for row in earlier["rows"]]
    family = {**earlier["family"], "rule": rule.to_json(), "loss": rule.mean_loss}
    write_rules(arguments.rules, [structs.replace(stored, rule=rule)])
    bench.write(family, rows)
    show(rows)
    print("\n".join(rule.lines()), summary(rows)["family"], sep="\n")


def _as_then(arguments: argparse.Namespace, options: Mapping[str, str], stored: StoredRule) -> argparse.Namespace:
    """Return the arguments of the earlier run, except for the output files."""
    numbers = {name: int(options[name]) for name in ("points", "max_configs", "sizes", "trials", "finals", "seed")}
    family = [f"{name}={extent}" for name, extent in stored.rule.family.extents.items()]
    names = {"kernel": stored.key.kernel, "dtype": stored.key.dtype, "draw": options["draw"]}
    return argparse.Namespace(**vars(arguments), **numbers, **names, family=family)


def relearned(bench: Bench, rule: FamilyRule) -> FamilyRule:
    """Return the rule learned from the data that an earlier rule has kept."""
    spec, device = bench.kernel.spec, bench.device
    times_us = np.array([[np.nan if time is None else time[0] for time in point.times_us] for point in rule.points])
    configs, resident = [one.config for one in rule.configs], [one.blocks_per_sm for one in rule.configs]
    points = [spec.at(point.sizes, bench.dtype) for point in rule.points]
    members = [spec.at(sizes, bench.dtype) for sizes in sample_members(rule.family)]
    over_best = times_us / np.nanmin(times_us, axis=1, keepdims=True)
    measured = TrainingData(
        times_us,
        over_best == np.nanmin(over_best, axis=0),  # each one was proposed at some point
        Traits.of(spec, device, configs, resident, points),
        Traits.of(spec, device, configs, resident, members),
        meet_rules(spec, device, configs, members),
    )
    max_configs = bench.arguments.max_configs
    columns, tree, losses, _ = learn_rule(measured, list_features(spec, max_configs), max_configs)
    kept = [
        replace(point, times_us=tuple(point.times_us[c] for c in columns), loss=float(loss))
        for point, loss in zip(rule.points, losses, strict=True)
    ]
    return FamilyRule(rule.family, tuple(rule.configs[c] for c in columns), tree, tuple(kept))


def _again(bench: Bench, rule: FamilyRule, row: Mapping[str, Any]) -> dict[str, Any]:
    sizes = row["sizes"]
    configs: dict[str, Config] = {**row["configs"], "family": _served(bench.kernel.spec, bench, rule, sizes)}
    distinct = {config_key(config): config for config in configs.values()}
    times_us = bench.timed(Problem(bench.kernel.name, sizes, bench.dtype), list(distinct.values()))
    found = {way: times_us.get(config_key(config)) for way, config in configs.items()}
    return {**row, "time_us": found, "configs": {way: dict(one) for way, one in configs.items()}, **losses(found)}


def _served(spec: KernelSpec, bench: Bench, rule: FamilyRule, sizes: Mapping[str, int]) -> Config:
    problem = spec.at(sizes, bench.dtype)
    configs = (rule.configs[number].config for number in rule.order(spec, bench.device, problem))
    return next(one for one in configs if not check_config(spec, one, problem, bench.device))


if __name__ == "__main__":
    main()
