"""Families and plans on the GPUs of a cluster, and how their sessions share them."""

import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cluster_kit import kill_all
from judges import FAMILY_SIZES as SIZES
from judges import FEW, MANY, by_size
from processes import wait_until

from autotile.api.plans import _models_of, tune_plan
from autotile.core.device import device_profile
from autotile.core.model import config_key
from autotile.errors import InputError, WorkerError
from autotile.families.family import parse_family
from autotile.settings import read_settings
from autotile.tuning.backend import choose_backend
from autotile.tuning.cluster import connection as cluster_connection
from autotile.tuning.cluster import gpus as cluster_gpus
from autotile.tuning.cluster import requests as cluster_requests
from autotile.tuning.cluster.gpus import ClusterLane
from autotile.tuning.cluster.worker import GpuReply, GpuRequest
from autotile.tuning.family_session import tune_family
from autotile.tuning.lanes import GpuName, Lane, run_jobs
from autotile.tuning.options import FamilyPlan, TuneOptions
from autotile.tuning.plan import PlannedProblem, TuningPlan


@pytest.fixture(scope="module")
def own_site(cluster, tmp_path_factory):
    """A cluster, the folder of its recordings, and its workers."""
    return SimpleNamespace(kit=cluster, folder=tmp_path_factory.mktemp("recordings"), workers=[])


@pytest.fixture
def site(own_site, bench):
    """The cluster, with recordings of the tiny kernel at several sizes, and two workers."""
    bench.folder = own_site.folder
    if not own_site.workers:
        for n in SIZES:
            bench.record(by_size(n), n=n)
    alive = {number: one for number, one in enumerate(own_site.workers) if one.poll() is None}
    new = partial(own_site.kit.simulated, own_site.folder, seconds=0.02)  # in place of one that a test has killed
    own_site.workers = [alive.get(number) or new(number) for number in range(2)]
    return own_site


@pytest.fixture
def options(site):
    return TuneOptions(replay="auto", workers=1, scheduler=site.kit.scheduler)


def test_points_of_a_family_are_tuned_on_all_gpus(bench, options):
    family = parse_family(bench.kernel.spec, ["n=1000..65536"])
    plan = FamilyPlan(points=6, max_configs=4)
    result = tune_family(bench.kernel, family, "float32", bench.settings, options, plan=plan)
    assert (result.rule.mean_loss, len(result.rule.points)) == (0.0, 6)
    assert {config_key(FEW), config_key(MANY)} <= {config_key(one.config) for one in result.rule.configs}
    assert len({trial.gpu for trial in bench.stored()}) == 2


def test_a_plan_goes_on_when_a_machine_dies_and_one_that_dies_at_once_is_missed(
    bench, site, recordings_found, options, monkeypatch
):
    """The session on its GPU goes on with another one. The other machine was offered in the first look only."""
    monkeypatch.setattr(cluster_requests, "_ABSENT_S", 1.0)
    planned = tuple(PlannedProblem("scale", bench.kernel, bench.problem(n)) for n in SIZES)
    killed = threading.Event()

    def observe(step):
        if step.ending and not killed.is_set():
            killed.set()
            kill_all(site.workers[0])

    result = tune_plan(TuningPlan("all", planned), replace(options, sampler="brute-force"), observe)
    assert killed.is_set()
    assert [entry.state for entry in result.entries] == ["tuned"] * len(SIZES), [e.reason for e in result.entries]
    assert sum(len(bench.configs(n)) for n in SIZES) == len(bench.stored())

    monkeypatch.setattr(cluster_connection, "_POLL_S", 3.0)
    with closing(cluster_connection.Connection(site.kit.scheduler, insecure=False)) as connection:
        names = {name for resources in connection.offers() for name in resources}
        kill_all(site.workers[1])
        assert names
        wait_until(lambda: all(connection.absent_s(name) > 0 for name in names))


class Pool(Lane):
    """GPUs that a test lets come and go."""

    def __init__(self, *gpus: GpuName) -> None:
        super().__init__(gpus, cluster=object())

    def set(self, *gpus: GpuName) -> None:
        self._devices = gpus


def test_gpus_that_join_take_problems_and_help_with_the_last():
    pool, seen, helped = Pool("GPU-0"), list[tuple[int, tuple[GpuName, ...]]](), threading.Event()

    def run(number, lane):
        seen.append((number, lane.devices))
        if number == 0:
            pool.set("GPU-0", "GPU-1")
            wait_until(lambda: any(one == 1 for one, _ in seen))
        elif number == 2:
            wait_until(lambda: len(lane.devices) == 2)
            helped.set()
        return number

    jobs = [partial(run, number) for number in range(3)]
    assert sorted(run_jobs(jobs, pool)) == [(0, 0), (1, 1), (2, 2)]
    assert dict(seen)[1] == ("GPU-1",)
    assert helped.is_set()


def test_a_session_that_has_lost_its_gpu_gets_the_next_one():
    pool = Pool("GPU-0", "GPU-1")

    def lose(lane):
        pool.set(*({"GPU-0", "GPU-1", "GPU-2"} - {*lane.devices}))
        wait_until(lambda: len(lane.devices) == 2)
        return lane.devices

    def keep(lane):
        time.sleep(0.1)
        return lane.devices

    ended = dict(run_jobs([lose, keep, keep], pool))
    assert len(ended) == 3
    assert not isinstance(ended[0], Exception)
    assert len({*ended[0]}) == 2


def test_problems_do_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(import_module("autotile.tuning.lanes"), "_ABSENT_S", 0.3)
    with pytest.raises(WorkerError, match="no GPU for the problems left"):
        list(run_jobs([lambda lane: 1], Pool()))


class _Cluster:
    """A cluster whose GPUs say what a test wants."""

    def __init__(self, address: str, *, insecure: bool) -> None:
        self.gpus = {"GPU-a": "h200", "GPU-b": "h100", "GPU-c": "h200"}
        self.busy: set[str] = {"GPU-c"}

    def look(self) -> list[str]:
        return sorted(self.gpus)

    def send(self, gpu: str, op: str, work: GpuRequest) -> str:
        return gpu

    def answered(self, gpu: str) -> GpuReply:
        if gpu not in self.gpus:
            raise WorkerError("it is gone")
        return GpuReply(device=device_profile(self.gpus[gpu]), is_busy=gpu in self.busy)

    def close(self) -> None:
        return


@pytest.fixture
def two_models(monkeypatch):
    monkeypatch.setattr(cluster_gpus, "Cluster", _Cluster)
    monkeypatch.setattr(cluster_gpus, "_FRESH_S", 0.0)
    return TuneOptions(scheduler="tcp://127.0.0.1:1")


def test_gpus_of_several_models_need_a_choice_or_a_plan(two_models):
    with pytest.raises(InputError, match=r"2 models.*choose one, as in --device .*, or use a plan"):
        ClusterLane(two_models)
    with closing(ClusterLane(replace(two_models, gpu_model="H100"))) as lane:
        assert lane.devices == ("GPU-b",)
        assert lane.device == device_profile("h100")
    with closing(ClusterLane(two_models, is_of_one_model=False)) as lane:
        models = _models_of(lane, two_models)
        chosen = [{gpu for gpu in lane.devices if device_of(gpu) is not None} for _, device_of in models]
        assert [name for name, _ in models] == [device_profile(name).name for name in ("h200", "h100")]
        assert chosen == [{"GPU-a", "GPU-c"}, {"GPU-b"}]


def test_gpus_of_other_commands_and_models_are_left_alone(two_models, monkeypatch):
    with closing(ClusterLane(replace(two_models, gpu_model="h200"))) as lane:
        given: Any = lane.cluster

        def free(held=()):
            lane.free(held)  # asks
            return lane.free(held)

        assert free() == ["GPU-a"]
        given.busy = set()
        given.gpus["GPU-d"] = "h100"
        assert free({"GPU-a"}) == ["GPU-c"]
        del given.gpus["GPU-a"]
        assert lane.devices == ("GPU-c",)
    monkeypatch.setattr(cluster_gpus, "_FIRST_GPU_S", 0.1)
    with pytest.raises(InputError, match="is a RTX 4090 that is free"):
        ClusterLane(replace(two_models, gpu_model="RTX 4090"))


def test_a_session_that_gets_no_gpu_leaves_no_connection(bench, monkeypatch):
    lane, refused = Mock(), InputError("those there work for other sessions")
    monkeypatch.setattr(cluster_gpus, "ClusterLane", lambda options: lane)
    monkeypatch.setattr(cluster_gpus, "ClusterGpus", Mock(side_effect=refused))
    with pytest.raises(InputError, match="work for other sessions"):
        choose_backend(bench.kernel, bench.problem(), read_settings(), TuneOptions(scheduler="tcp://127.0.0.1:1"))
    lane.close.assert_called_once_with()
