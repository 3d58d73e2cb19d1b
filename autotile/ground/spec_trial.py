"""Try [reference] on shapes alone, so that a fault in it is told when the file is read and not when a GPU runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from autotile.ground.array_shapes import ShapeOnly
from autotile.ground.spec import Argument, BufferArgument, Reference, ScalarArgument
from autotile.ground.spec_frame import ProblemFrame


def try_reference(reference: Reference, arguments: tuple[Argument, ...], frame: ProblemFrame) -> None:
    """Evaluate the shape of every output, at the default and the ragged sizes, and with each flag turned.

    Raises
    ------
    SpecError
        Shapes do not fit together, an axis does not exist, a divisor is zero, or an output has another shape than its
        buffer.
    """
    buffers = {a.name: a for a in arguments if isinstance(a, BufferArgument)}
    for sizes, check in _problems(frame):
        environment: dict[str, Any] = {**sizes, **_scalars(arguments, sizes, check=check)}
        environment |= {name: ShapeOnly(buffer.extents(sizes)) for name, buffer in buffers.items()}
        for name, expression in reference.outputs.items():
            shape, expected = np.shape(expression.evaluate(environment)), buffers[name].extents(sizes)
            if shape != expected:
                at = " ".join(f"{size}={value}" for size, value in sizes.items())
                problem = f"the result has the shape {shape}, but the buffer {name} has {expected}, at {at}"
                raise expression.place.error(problem, expression=expression.text)


def _problems(frame: ProblemFrame) -> Iterator[tuple[Mapping[str, int], bool]]:
    """Sizes to try, each with whether scalars take their check values there."""
    for sizes, check in ((frame.sizes, False), (frame.ragged, True)):
        yield sizes, check
        for flag in frame.flags:
            yield {**sizes, flag: 1 - sizes[flag]}, check


def _scalars(arguments: tuple[Argument, ...], sizes: Mapping[str, int], *, check: bool) -> dict[str, float]:
    found = {}
    for scalar in (a for a in arguments if isinstance(a, ScalarArgument)):
        if isinstance(scalar.value, int | float):
            found[scalar.name] = scalar.check_value if check and scalar.check_value is not None else scalar.value
        else:
            found[scalar.name] = scalar.value.evaluate(sizes)
    return found
