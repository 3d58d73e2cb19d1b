"""A database with rows in every table, and everything that reads it."""

import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs
from msgspec.structs import replace
from stored_runs import add_trial, end_run, measured, record_miss, start_run

import autotile
from autotile.core.ceilings import Ceiling, DeviceCeilings
from autotile.core.device import device_profile
from autotile.core.model import Outcome, Problem, Resources, Trial, config_key
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import TuningKey, key_of
from autotile.database.learned import FamilyState, miss_costs, save_ceilings, save_family_state, save_model, save_rule
from autotile.errors import InputError
from autotile.families.family import Extent, Family, FamilyRule, RuleConfig, RulePoint
from autotile.kernel.library import load_kernel

DEVICE = replace(device_profile("h200"), source="cuda")
KERNEL = "sgemm_2d"
SIZES = {"M": 512, "N": 512, "K": 512}
GPU = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
CEILINGS = DeviceCeilings(
    gpu_uuid=GPU,
    gpu_name=DEVICE.name,
    compute_capability=DEVICE.compute_capability,
    driver="13.0",
    measured_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    ceilings=(
        Ceiling("dram_read", 4.2e12, 4.1e12, 4.3e12, "16 bytes a thread"),
        Ceiling("dram_copy", 4.0e12, 3.9e12, 4.1e12, "16 bytes a thread", 1830.0),
        Ceiling("fma_float32", 59e12, 58e12, 60e12, "FFMA", 1830.0),
        Ceiling("tensor_tf32", 400e12, 390e12, 410e12, "wgmma m64n256k8", 1755.0),
        Ceiling("launch_graph", 1.5, 1.4, 1.6, "empty kernel"),
    ),
    warnings=("2 other processes use the GPU",),
)
"""Ceilings of an H200, rounded."""


def make_database(path: Path) -> Path:
    """Make a database of three problems of a kernel, with runs, trials, finals, misses, and all other kinds of rows."""
    kernel = load_kernel(KERNEL)
    configs = [{p.name: p.values[n % len(p.values)] for p in kernel.spec.parameters} for n in range(4)]
    configs.insert(0, dict(kernel.spec.default))
    with Database.open(path) as database:
        for size in (512, 1024, 2048):
            problem = Problem(KERNEL, {**SIZES, "M": size}, "float32")
            key = key_of(kernel, problem, DEVICE, nvrtc_version=nvrtc_version(), l2_mode="cold")
            study = database.study(key, DEVICE)
            run = start_run(database, study, sampler="tpe", seed=1, settings={"trials": 5}, driver="13.0", host="host")
            for number, config in enumerate(configs):
                add_trial(database, study, run, measured(config, 10.0 + number))
            add_trial(database, study, run, Trial(configs[1], Outcome.COMPILE_FAILED, 'error: "x"', "compile"))
            for rank, config in enumerate(configs[:2], 1):
                add_trial(database, study, run, measured(config, 9.0 + rank), phase="final", rank=rank)
            end_run(database, run, {"trials": 5})
        record_miss(database, Problem(KERNEL, {**SIZES, "M": 700}, "float32"), DEVICE.name, "nearest", 7)
        record_miss(database, Problem(KERNEL, {**SIZES, "M": 900}, "float32"), DEVICE.name, "default")
        save_ceilings(database, CEILINGS)
        save_model(database, "matmul", "float32", DEVICE, {"format": 1, "candidates": []})
        _add_families(database, structs.replace(key, sizes={}), configs)
    return path


def _add_families(database: Database, key: TuningKey, configs: list[dict[str, int | bool | str]]) -> None:
    for top in (4096, 8192):
        family = Family({"M": Extent(((1, top),)), "N": Extent(((512, 512),)), "K": Extent(((512, 512),))})
        points = tuple(
            RulePoint({**SIZES, "M": m}, ((9.0, 8.9, 9.1), (8.0, 7.9, 8.1)), 8.0, 0.1, 0.2) for m in (1, 900, top)
        )
        rule_configs = tuple(RuleConfig(config, 4, Resources(64, 0, 0, 0, 8192)) for config in configs[:2])
        save_family_state(database, key, family, DEVICE, FamilyState({"points": []}, 1, 1, 2.0))
        save_rule(database, key, DEVICE, FamilyRule(family, rule_configs, (1, 0), points))
    family = Family({"M": Extent(((1, 2),)), "N": Extent(((512, 512),)), "K": Extent(((512, 512),))})
    save_family_state(database, key, family, DEVICE, FamilyState({"points": []}, 1, 0, 2.0))


def sweep(path: Path, folder: Path) -> Iterator[tuple[str, Exception]]:
    """Read a database in every way; yield the errors, with the name of the reader.

    Bad rows are skipped, so only an export may fail, of a problem that has no usable row any more.
    """
    for name, read in _readers(path, folder).items():
        try:
            read()
        except Exception as error:
            if not (name == "export" and isinstance(error, InputError)):
                yield name, error


def _readers(path: Path, folder: Path) -> dict[str, Callable[[], object]]:
    def resume() -> None:
        with Database.open(path) as database:
            for study in database.studies():
                for stored in database.stored_trials(study.study_id):
                    config_key(stored.trial.config)
                database.runs(study.study_id)
                database.trials(study.study_id)
            miss_costs(database, load_kernel(KERNEL))

    def fresh(name: str) -> Path:
        for old in folder.glob(f"{name}*"):
            old.unlink()
        return folder / name

    def merge() -> None:
        autotile.db_merge([path], fresh("merged.db"))
        assert autotile.db_check(folder / "merged.db").ok

    def merge_into() -> None:
        autotile.db_merge([folder / "template.db"], Path(shutil.copy(path, fresh("target.db"))))

    def export() -> None:
        for kind in ("t4", "kernel-tuner", "recording"):
            autotile.export(KERNEL, SIZES, output=folder / f"out-{kind}.npz", format=kind, database=path)

    def serve(m: int) -> Callable[[], object]:
        return lambda: autotile.get_best_kernel(KERNEL, M=m, N=512, K=512, device="h200", database=path)

    def check() -> None:
        assert autotile.db_check(path).exists

    return {
        "list": lambda: repr(autotile.list(database=path)) + autotile.list(database=path)._repr_html_(),
        "trials": lambda: repr(autotile.trials(KERNEL, database=path)),
        "best": lambda: autotile.best(KERNEL, SIZES, device="h200", database=path),
        "misses": lambda: repr(autotile.list(misses=True, database=path)),
        "families": lambda: repr(autotile.list(families=True, database=path)),
        "get_best_kernel": serve(512),
        "get_best_kernel, family": serve(900),
        "get_best_kernel, nearest": serve(9999),
        "resume": resume,
        "merge": merge,
        "merge_into": merge_into,
        "diff": lambda: autotile.db_diff(path, folder / "template.db"),
        "export": export,
        "clean": lambda: autotile.db_clean(database=path, stale=True, dry_run=True),
        "db_check": check,
    }
