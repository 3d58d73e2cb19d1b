"""Jobs of several problems on several GPUs."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from autotile.errors import InputError
from autotile.tuning.options import TuneOptions
from autotile.tuning.problem_queue import Job, Lane, run_jobs
from autotile.tuning.stopping import StopRequest


def job(
    seen: list[tuple[int, tuple[int, ...]]], number: int, devices: tuple[int, ...] = (), s: float = 0.02
) -> Job[int]:
    def run(lane: Lane) -> int:
        seen.append((number, lane.devices))
        time.sleep(s)
        return number

    return Job(run, lambda gpu: not devices or gpu in devices)


def test_each_problem_gets_a_gpu_and_the_last_ones_several() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    jobs = [job(seen, number) for number in range(9)]
    ended = dict(run_jobs(jobs, Lane((0, 1, 2, 3))))
    assert ended == {number: number for number in range(9)}
    assert [number for number, _ in seen] == sorted(number for number, _ in seen)
    assert all(len(devices) == 1 for number, devices in seen if number < 4)
    one = list[tuple[int, tuple[int, ...]]]()
    dict(run_jobs([job(one, 0)], Lane((0, 1, 2, 3))))
    assert one == [(0, (0, 1, 2, 3))]
    two = list[tuple[int, tuple[int, ...]]]()
    dict(run_jobs([job(two, 0), job(two, 1)], Lane((0, 1, 2, 3))))
    assert sorted(devices for _, devices in two) == [(0, 1), (2, 3)]


def test_no_gpu_has_two_problems_at_once() -> None:
    busy: set[int] = set()
    lock = threading.Lock()

    def run(lane: Lane) -> None:
        with lock:
            assert not busy & {*lane.devices}
            busy.update(lane.devices)
        time.sleep(0.01)
        with lock:
            busy.difference_update(lane.devices)

    ended = list(run_jobs([Job(run) for _ in range(20)], Lane((0, 1, 2))))
    assert [outcome for _, outcome in ended] == [None] * 20


def test_a_job_may_use_some_of_the_gpus_only() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    jobs = [job(seen, number, (2,) if number % 2 else (0, 1)) for number in range(6)]
    assert len(list(run_jobs(jobs, Lane((0, 1, 2))))) == 6
    assert {devices for number, devices in seen if number % 2} == {(2,)}
    assert all(set(devices) <= {0, 1} for number, devices in seen if not number % 2)


def test_one_gpu_takes_them_in_order_in_this_thread() -> None:
    threads: list[threading.Thread] = []

    def run(lane: Lane) -> tuple[int, ...]:
        threads.append(threading.current_thread())
        return lane.devices

    assert list(run_jobs([Job(run), Job(run)], Lane(()))) == [(0, ()), (1, ())]
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("devices", [(), (0, 1)])
def test_an_error_is_a_result(devices: tuple[int, ...]) -> None:
    def fail(lane: Lane) -> int:
        raise InputError("no")

    ended = dict(run_jobs([Job(fail), job([], 1)], Lane(devices)))
    assert isinstance(ended[0], InputError)
    assert ended[1] == 1


def test_no_other_begins_after_an_interrupt() -> None:
    stop, seen = StopRequest(), list[tuple[int, tuple[int, ...]]]()
    jobs = [job(seen, number) for number in range(10)]
    ended = []
    for number, _ in run_jobs(jobs, Lane((0, 1), stop)):
        ended.append(number)
        stop.requested = True
    assert len(ended) == len(seen) <= 3


def test_a_caller_who_leaves_ends_the_sessions() -> None:
    stop = StopRequest()

    def run(lane: Lane) -> None:
        while lane.stop is not None and not lane.stop.aborted:
            time.sleep(0.01)

    with closing(run_jobs([job([], 0), Job(run)], Lane((0, 1), stop))) as ended:
        assert next(ended) == (0, 0)
    assert stop.aborted
    assert not any(thread.name.startswith("problem ") for thread in threading.enumerate())


def test_the_options_of_a_lane() -> None:
    options = TuneOptions(devices=(1, 3))
    assert Lane((3,)).options(options).device_index == 3
    assert Lane((3,)).options(options).devices == ()
    assert Lane((1, 3)).options(options).devices == (1, 3)
    assert Lane(()).options(options) is options
    assert Lane((2,)).options(TuneOptions(replay="auto")).device_index == 0
