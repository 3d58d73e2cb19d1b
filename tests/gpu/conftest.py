"""What several tests on a GPU need: measurements of an operation's problems as a family makes them."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

import pytest

from autotile.cuda.driver import live_device
from autotile.families.family import Family
from autotile.kernel.operation import Library, Operation
from autotile.settings import read_settings
from autotile.tuning.lanes import Lane
from autotile.tuning.operation_family import Sweep
from autotile.tuning.options import TuneOptions
from autotile.tuning.schedule import Schedule, open_gpu
from autotile.workers.compile_pool import CompilePool


@pytest.fixture
def sweep_of():
    """Return a function that opens a GPU worker which measures problems of an operation, into the test's database."""
    with ExitStack() as stack:

        def opened(operation: Operation, dtype: str, libraries: Sequence[Library] = ()) -> Sweep:
            settings, options, lane = read_settings(), TuneOptions(), Lane()
            schedule = stack.enter_context(Schedule.open(settings, options, lambda _: None, lane))
            compilers = CompilePool(settings, None, 120.0, worker_pool=lane.worker_pool)
            return Sweep(
                operation,
                dtype,
                libraries,
                Family({}),
                schedule,
                device=live_device(),
                compile_pool=stack.enter_context(closing(compilers)),
                run_job=stack.enter_context(open_gpu(lane, options)),
            )

        yield opened
