"""Problems on the device: inputs, outputs, and the verdict on a candidate."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.documents import canonical_json
from autotile.core.dtypes import DTYPES, Array, Dtype, output_tolerance
from autotile.core.model import Config, Outcome, Problem
from autotile.core.text import plural, sizes_text
from autotile.cuda.driver import constant_copies, copy_constants
from autotile.cuda.expected_outputs import (
    ExpectedOutputs,
    ReferenceOutput,
    Waiting,
    agreed_outputs,
    checked_output,
    launch_key,
)
from autotile.cuda.packing import pack_launches
from autotile.cuda.support import GuardedBuffer, Queued, SupportKernels, compared, workspace_buffer
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError
from autotile.kernel.arguments import BufferArgument, decode_scalar
from autotile.kernel.inputs import input_maker
from autotile.kernel.launch import LaunchData, LaunchPlan, problem_scalars
from autotile.kernel.spec import KernelSpec, Tolerance

_ROUNDING, _LONG_SUM = 0.01, 100.0
"""Largest error that may be rounding: relative, and over the tolerance of one term, of a sum of 10,000."""
_EXACT_BYTES = 4
"""Size of integers in which sums and products of what is measured seldom exceed the type."""


class Verdict(NamedTuple):
    """Result of verifying a candidate; ``max_error`` if the outcome is ``OK``, else a reason.

    The error of an output element is relative to the larger of its expected magnitude and the RMS of the output's
    expected values.
    """

    outcome: Outcome
    reason: str = ""
    max_error: float = 0.0


@dataclass(frozen=True, slots=True)
class BoundArguments:
    """Launches of a configuration on the buffers of a problem, and the workspaces of the configuration.

    Of the workspaces, without empty ones, each launch must leave those in ``zeroed`` zeroed. ``launch_key`` is that of
    `autotile.cuda.expected_outputs`.
    """

    instance: ProblemInstance
    plan: LaunchPlan
    arguments: tuple[tuple[Any, ...], ...]
    workspaces: Mapping[str, GuardedBuffer]
    zeroed: frozenset[str]
    launch_key: Hashable = None


@dataclass(slots=True)
class _InputSet:
    """Contents of the inputs, the outputs that are expected for them, and those that configurations must agree on."""

    pristine: Mapping[str, GuardedBuffer]
    expected: dict[str, ReferenceOutput]
    waiting: Waiting = field(default_factory=list)
    hashes: Sequence[tuple[int, int]] = ()
    """Of the arrays that no launch may change."""

    @property
    def arrays(self) -> list[Any]:
        """These arrays."""
        return [*(one.array for one in self.pristine.values()), *(one.values for one in self.expected.values())]


class ProblemInstance:
    """Buffers and scalars of a kernel for a problem.

    They are created once and shared by all candidates, except for workspaces, whose shapes depend on the candidate.
    Scalars that have a check value have it with ``check``. The expected outputs come from ``references``, unless they
    are expressions. Of the problems ``like`` it, of other kernels of the operation, one that has the same buffers,
    inputs and expected outputs shares them. Raise `InputError` if the reference cannot be computed, its shape is not
    the output's, its value is not finite, or a scalar does not fit in its type; `ToolchainError` if the reference
    values of the device and of NumPy differ.
    """

    def __init__(
        self,
        spec: KernelSpec,
        problem: Problem,
        support: SupportKernels,
        *,
        check: bool,
        references: ExpectedOutputs | None = None,
        like: Sequence[ProblemInstance] = (),
    ) -> None:
        self._spec, self._problem = spec, problem
        self._names, self._dtype = problem.names, problem.dtype
        self._support = support
        self._check = check
        self._references = references or ExpectedOutputs(spec, support)
        self._scalars = problem_scalars(spec, problem, check=check)
        self._buffers: dict[str, GuardedBuffer] = {}
        identity = self._data_identity if like else None
        twin = next((one for one in like if one._data_identity == identity), None)
        if twin is None:
            for buffer in spec.buffers:
                self._buffers[buffer.name] = self._new_buffer(buffer)
        else:
            self._buffers = twin._buffers
        self._sets: dict[int, _InputSet] = {0: self._new_inputs(0)} if twin is None else twin._sets
        self._input_digests: dict[int, str] = {}
        self.arrays: list[Any] = [self._buffers[buffer.name].array for buffer in spec.buffers]
        """CuPy arrays of the buffers, in the order of the kernel's arguments."""
        self.element_types = [self._element_type(buffer.name).name for buffer in spec.buffers]
        """Element type of each of these arrays."""
        self.use_inputs(0)

    @property
    def _data_identity(self) -> Any:
        """All that determines the buffers, the inputs and the expected outputs."""
        buffers = [
            (b.name, b.extents(self._names), self._element_type(b.name).name, b.init, b.content, b.is_written)
            for b in self._spec.buffers
        ]
        operands = {
            scalar.name: scalar.given(self._names, check=self._check)
            for scalar in self._spec.scalars
            if scalar.is_operand and not scalar.repeats_size
        }
        names = frozenset[str]().union(*(e.names for e in self._spec.reference.outputs.values()))
        used = {name: size for name, size in self._names.items() if name in names}
        return buffers, operands, used, self._spec.reference.meaning(), self._dtype, self._check

    @property
    def size_bytes(self) -> int:
        """Device memory of the buffers, the inputs and the expected outputs, without guard bands."""
        kept = [*self.arrays, *(array for one in self._sets.values() for array in one.arrays)]
        return sum(int(array.nbytes) for array in kept)

    def add_inputs(self, seed: int) -> None:
        """Draw a second set of inputs, and compute its reference; the set of seed 0 stays in use. See `use_inputs`.

        Errors are those of the constructor; after an error there is no second set.
        """
        if seed not in self._sets:
            if len(self._sets) > 1:
                self.drop_inputs()
            self._sets[seed] = self._new_inputs(seed)

    def use_inputs(self, seed: int) -> None:
        """Copy a set of inputs to the buffers that kernels read; its reference is expected from then on."""
        self._seed = seed
        used = self._sets[seed]
        self._pristine, self._expected, self._waiting = used.pristine, used.expected, used.waiting
        for name, pristine in self._pristine.items():
            self._buffers[name].copy_from(pristine)

    def drop_inputs(self) -> None:
        """Use the inputs of seed 0, and free those of other seeds."""
        self.use_inputs(0)
        self._sets = {0: self._sets[0]}

    def is_intact(self) -> bool:
        """Restore what kernels read; return True if no launch has changed an input's content or an expected output."""
        self.use_inputs(self._seed)
        return all(self._support.hashes(one.arrays) == one.hashes for one in self._sets.values())

    def bind(self, config: Config, device: DeviceProperties) -> BoundArguments:
        """Return the launch arguments of a configuration, which keep its workspaces alive.

        Raise `ConfigError` if a workspace has a negative extent; `ToolchainError` if the driver refuses a tensor map.
        """
        of = self._spec, config, self._problem, device
        plan, data = LaunchPlan.of(*of), LaunchData.of(*of)
        workspaces = {w.name: workspace_buffer(w, self._support) for w in data.workspaces if w.size_bytes}
        arguments = pack_launches(
            self._spec,
            plan,
            data,
            self._dtype,
            addresses={name: buffer.pointer for name, buffer in {**self._buffers, **workspaces}.items()},
            scalars=self._scalars,
        )
        zeroed = frozenset(w.name for w in data.workspaces if w.zeroed)
        key = launch_key(self._spec, config, plan) if self._spec.reference.is_agreement else None
        return BoundArguments(self, plan, arguments, workspaces, zeroed, key)

    def copy_constants(self, module: int) -> None:
        """Copy the inputs in use to the ``__constant__`` variables of a module, given by its driver handle."""
        copies = constant_copies(self._spec, module, self._problem)
        pointers = {name: buffer.pointer for name, buffer in self._buffers.items()}
        copy_constants(copies, pointers, load_cupy().cuda.get_current_stream().ptr)

    def prepare(self, bound: BoundArguments) -> None:
        """Poison the buffers that the kernel must write, and restore those that it updates."""
        for name, workspace in bound.workspaces.items():
            if name not in bound.zeroed:
                workspace.poison()
        for buffer in self._spec.buffers:
            if not buffer.is_initialized:
                self._buffers[buffer.name].poison()
            elif buffer.is_written:
                self._buffers[buffer.name].copy_from(self._pristine[buffer.name])

    def verdict(self, bound: BoundArguments) -> Verdict:
        """Verify the state after a launch: guard bands, inputs, workspaces, outputs."""
        at = sizes_text(self._problem.sizes)
        guarded = {**self._buffers, **bound.workspaces}
        read = [buffer.name for buffer in self._spec.buffers if not buffer.is_written]
        zeroed = [name for name in bound.workspaces if name in bound.zeroed]
        # outputs without expected values are compared by the process that tunes, or with those of other configurations
        outputs = [] if self._spec.reference.comparison is not None or self.is_unconfirmed else [*self._expected]
        words = self._support.results(
            [
                *(buffer.count_broken for buffer in guarded.values()),
                *(partial(self._buffers[name].count_unlike, self._pristine[name]) for name in read),
                *(bound.workspaces[name].count_nonzero for name in zeroed),
                *(self._comparison(name, self._expected[name]) for name in outputs),
            ]
        )
        broken, changed, left, found = np.split(words, np.cumsum([len(guarded), len(read), len(zeroed)]))
        if broken.any():
            for buffer in guarded.values():
                buffer.restore_guards()
            name, (count, *_) = next(pair for pair in zip(guarded, broken, strict=True) if pair[1].any())
            return Verdict(Outcome.OUT_OF_BOUNDS, f"wrote {plural(count, 'word')} outside {name} at {at}")
        for name, (count, *_) in zip(read, changed, strict=True):
            if count:
                self._buffers[name].copy_from(self._pristine[name])
                return Verdict(Outcome.WRONG_RESULT, f"changed its input {name} at {at}")
        for name, (count, *_) in zip(zeroed, left, strict=True):
            if count:
                bound.workspaces[name].clear()
                reason = f"left {plural(count, 'word')} of the workspace {name} other than zero"
                return Verdict(Outcome.WRONG_RESULT, f"{reason}, which the next launch relies on, at {at}")
        if self.is_unconfirmed and self._spec.reference.comparison is None:
            return self._compared_with_others(bound)
        errors = [0.0]
        for name, row in zip(outputs, found, strict=True):
            wrong, first, max_error = compared(row)
            errors.append(max_error)
            if wrong:
                output, dtype, expected = self._buffers[name], self._element_type(name), self._expected[name]
                index = np.unravel_index(first, output.array.shape)
                stored = output.array.ravel()[first : first + 1].get()
                got = stored[0] if dtype.component.is_integer else dtype.decode(stored)[0]
                want = expected.values.ravel()[first : first + 1].get()[0]
                tolerance = self._tolerance(name)
                place, within = ", ".join(str(int(i)) for i in index), tolerance.text(expected.scale)
                return Verdict(
                    Outcome.WRONG_RESULT,
                    f"{wrong} of {output.elements} elements of {name} are wrong at {at}: "
                    f"{name}[{place}] is {_shown(got)}, expected {_shown(want)} within {within}"
                    + self._hint(max_error, tolerance),
                )
        return Verdict(Outcome.OK, max_error=max(errors))

    def _hint(self, max_error: float, tolerance: Tolerance) -> str:
        """Return how the reference rather than the kernel may be at fault; empty if nothing suggests it."""
        reference = self._spec.reference
        is_computed = reference.tolerance is None and not reference.tolerances and reference.reduction.text == "1"
        if is_computed and 0.0 < max_error < min(_ROUNDING, _LONG_SUM * tolerance.relative):
            return "; if that is rounding, state the reduction, the number of terms of a sum, or a tolerance"
        types = {self._element_type(one.name).component for one in self._spec.buffers if one.is_read}
        narrow = sorted(one.name for one in types if one.is_integer and one.component_bytes < _EXACT_BYTES)
        if reference.function is not None and narrow:
            return f"; NumPy's arithmetic wraps around in {narrow[0]}, of which the reference takes arrays: use astype"
        return ""

    def digest(self) -> str:
        """Return a digest of the inputs in use and one of the outputs as they are, to the bit.

        Configurations whose digests are equal have computed the same bits from the same inputs.
        """
        if self._seed not in self._input_digests:
            scalars = {name: np.asarray(value).tobytes().hex() for name, value in self._scalars.items()}
            self._input_digests[self._seed] = self._digest_of(self._pristine, scalars)
        written = {b.name: self._buffers[b.name] for b in self._spec.buffers if b.is_written}
        return f"{self._input_digests[self._seed]}:{self._digest_of(written)}"

    def _digest_of(self, buffers: Mapping[str, GuardedBuffer], scalars: Mapping[str, str] | None = None) -> str:
        arrays = [buffer.array for buffer in buffers.values()]
        hashes = zip(buffers, arrays, self._support.hashes(arrays), strict=True)
        content = {name: (array.shape, str(array.dtype), *found) for name, array, found in hashes}
        return hashlib.sha256(canonical_json([content, scalars]).encode()).hexdigest()[:32]

    @property
    def is_unconfirmed(self) -> bool:
        """Whether nothing is expected of the outputs yet, as no two configurations have agreed."""
        return self._spec.reference.is_agreement and not self._expected

    def _compared_with_others(self, bound: BoundArguments) -> Verdict:
        """Compare the outputs with those of other configurations; they are correct as long as none tells otherwise."""

        def agrees(outputs: Mapping[str, ReferenceOutput]) -> bool:
            words = self._support.results([self._comparison(name, other) for name, other in outputs.items()])
            return not any(compared(row)[0] for row in words)

        def copies() -> dict[str, ReferenceOutput]:
            """Return copies of the outputs, which must be finite."""
            found: dict[str, ReferenceOutput] = {}
            for buffer in self._spec.buffers:
                if buffer.is_written and buffer.name not in self._spec.reference.unchecked:
                    array, dtype = self._buffers[buffer.name].array, self._element_type(buffer.name)
                    values = array.copy() if dtype.component.is_integer else dtype.decode(array)
                    place = f"{buffer.name}, as it was written, or left, at {sizes_text(self._problem.sizes)},"
                    found[buffer.name] = checked_output(
                        values, buffer.name, array.shape, dtype, place=place, support=self._support
                    )
            return found

        try:
            agreed = agreed_outputs(self._waiting, bound.launch_key, agrees, copies)
        except InputError as error:
            return Verdict(Outcome.WRONG_RESULT, str(error))
        if agreed is not None:
            self._expected.update(agreed)
            used = self._sets[self._seed]
            used.hashes = self._support.hashes(used.arrays)
            self._references.keep(self._problem, agreed, seed=self._seed, check=self._check)
        return Verdict(Outcome.OK)

    def content(self, name: str) -> Array:
        """Return the content of a buffer, in the type that it is stored in; see `Inspection.buffers` for suffixes."""
        name, _, what = name.partition(".")
        if what == "expected":
            expected: Array = self._expected[name].values.get()
            return expected
        stored: Array = self._buffers[name].array.get()
        dtype = self._element_type(name)
        return dtype.decode(stored) if what == "value" and not dtype.component.is_integer else stored

    def _comparison(self, name: str, expected: ReferenceOutput) -> Queued:
        output, dtype = self._buffers[name], self._element_type(name)
        return self._support.comparison(
            output.pointer,
            expected.values,
            output.elements,
            dtype,
            tolerance=self._tolerance(name),
            scale=expected.scale,
        )

    def _tolerance(self, name: str) -> Tolerance:
        reference = self._spec.reference
        found = reference.tolerances.get(name)
        if found is None and reference.tolerance is not None:
            found = Tolerance(reference.tolerance)
        if found is None:
            inputs = [self._element_type(b.name) for b in self._spec.buffers]
            reduction = int(reference.reduction.evaluate(self._names))
            found = Tolerance(output_tolerance(self._element_type(name), inputs, reduction))
        return found

    def _new_inputs(self, seed: int) -> _InputSet:
        pristine: dict[str, GuardedBuffer] = {}
        inputs = input_maker(self._spec, self._problem, seed=seed, check=self._check)
        for buffer in self._spec.buffers:
            if buffer.is_initialized:
                pristine[buffer.name] = self._new_buffer(buffer)
                pristine[buffer.name].array.set(inputs(buffer.name))
        operands = [scalar for scalar in self._spec.scalars if scalar.is_operand]
        scalars = {a.name: decode_scalar(a, self._scalars[a.name], self._dtype) for a in operands}
        expected = self._references.compute(self._problem, pristine, scalars, seed=seed, check=self._check)
        made = _InputSet(pristine, expected)
        made.hashes = self._support.hashes(made.arrays)
        return made

    def _new_buffer(self, buffer: BufferArgument) -> GuardedBuffer:
        return GuardedBuffer(buffer.extents(self._names), self._element_type(buffer.name), self._support)

    def _element_type(self, name: str) -> Dtype:
        return DTYPES[self._spec.buffer(name).element_type(self._dtype, self._names)]


def _shown(value: Any) -> str:
    """Return a value as text; of a whole number all digits."""
    return str(value) if value.dtype.kind in "biu" else f"{value:.9g}"


MEMORY_SHARE = 0.25
"""Share of the device's memory that the instances of a problem may take together."""


@dataclass(eq=False)
class Instances:
    """Instances of a problem, made when they are first needed; the least recently used give way to new ones.

    A kernel whose arrays and reference do not depend on parameters has one. ``make`` makes the instance of a problem
    with the parameters of `KernelSpec.shaping` among its sizes. One that is larger than the limit is kept alone.
    """

    spec: KernelSpec
    problem: Problem
    make: Callable[[Problem], ProblemInstance]
    limit_bytes: float
    _kept: OrderedDict[tuple[int, ...], ProblemInstance] = field(default_factory=OrderedDict)

    def __iter__(self) -> Iterator[ProblemInstance]:
        """Iterate over the instances that exist."""
        return iter(list(self._kept.values()))

    @property
    def size_bytes(self) -> int:
        """Device memory of the instances that exist."""
        return sum(one.size_bytes for one in self)

    def of(self, config: Config) -> ProblemInstance:
        """Return the instance that a configuration runs on; errors are those of `ProblemInstance`."""
        shaped = self.spec.shaped(self.problem, config)
        key = tuple(shaped.sizes[name] for name in self.spec.shaping)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._kept[key] = self.make(shaped)
        while len(self._kept) > 1 and self.size_bytes > self.limit_bytes:
            self._kept.popitem(last=False)
        return made
