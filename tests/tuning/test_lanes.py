"""Jobs of several problems on several GPUs."""

import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from autotile.tuning.lanes import Lane, run_jobs
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import StopRequest

Seen = list[tuple[int, tuple[int, ...]]]


def jobs_seen(count: int) -> tuple[Seen, list[Callable[[Lane], int]]]:
    """Return jobs that return their numbers, and the list to which each adds its number and its GPUs.

    No GPU has two of them at once.
    """
    seen: Seen = []
    busy: set[int] = set()

    def job(number: int) -> Callable[[Lane], int]:
        def run(lane: Lane) -> int:
            devices = lane.devices
            assert not busy & {*devices}
            busy.update(devices)
            seen.append((number, devices))
            time.sleep(0.02)
            busy.difference_update(devices)
            return number

        return run

    return seen, [job(number) for number in range(count)]


def test_each_problem_gets_a_gpu_and_the_last_ones_several():
    seen, jobs = jobs_seen(9)
    assert dict(run_jobs(jobs, Lane((0, 1, 2, 3)))) == {number: number for number in range(9)}
    assert [number for number, _ in seen] == sorted(number for number, _ in seen)
    assert all(len(devices) == 1 for number, devices in seen if number < 4)
    for count, expected in ((1, [(0, 1, 2, 3)]), (2, [(0, 1), (2, 3)])):
        seen, jobs = jobs_seen(count)
        dict(run_jobs(jobs, Lane((0, 1, 2, 3))))
        assert sorted(devices for _, devices in seen) == expected


def test_a_job_may_use_some_of_the_gpus_only():
    seen, jobs = jobs_seen(6)
    found = run_jobs(jobs, Lane((0, 1, 2)), lambda number, gpu: gpu in ((2,) if number % 2 else (0, 1)))
    assert len(list(found)) == 6
    assert {devices for number, devices in seen if number % 2} == {(2,)}
    assert all(set(devices) <= {0, 1} for number, devices in seen if not number % 2)


def test_one_gpu_takes_them_in_order_in_this_thread():
    def run(lane):
        return threading.current_thread(), lane.devices

    here = threading.current_thread()
    assert list(run_jobs([run, run], Lane(()))) == [(0, (here, ())), (1, (here, ()))]


def test_no_other_begins_after_an_interrupt():
    stop = StopRequest()
    seen, jobs = jobs_seen(10)
    ended = []
    for number, _ in run_jobs(jobs, Lane((0, 1), stop)):
        ended.append(number)
        stop.requested = True
    assert len(ended) == len(seen) <= 3


def test_a_caller_who_leaves_ends_the_sessions():
    stop = StopRequest()

    def run(lane):
        while lane.stop is not None and not lane.stop.aborted:
            time.sleep(0.01)

    with closing(run_jobs([lambda lane: None, run], Lane((0, 1), stop))) as ended:
        assert next(ended) == (0, None)
    assert stop.aborted
    assert not any(thread.name.startswith("problem ") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        ((3,), {}, {"device_index": 3, "devices": ()}),
        ((1, 3), {}, {"devices": (1, 3)}),
        ((), {}, {"devices": (1, 3), "device_index": 0}),
        ((2,), {"replay": "auto"}, {"device_index": 0}),
    ],
)
def test_the_options_of_a_lane(devices, given, expected):
    found = Lane(devices).options(TuneOptions(**{"devices": (1, 3), **given}))
    assert {name: getattr(found, name) for name in expected} == expected
