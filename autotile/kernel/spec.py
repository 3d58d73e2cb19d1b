"""A kernel with its search space, metrics and objective, as declared in a search-space file; see docs/file-format.md.

The smaller parts are named tuples for the reason given in `autotile.kernel.expressions`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from autotile.core.documents import Name
from autotile.core.frozen import dataclass
from autotile.core.model import Value, config_text
from autotile.core.text import html_of, plural
from autotile.kernel.arguments import Argument, BufferArgument, ScalarArgument, WorkspaceArgument, arguments_of_kind
from autotile.kernel.array_expressions import ArrayExpression, parse_array_expression
from autotile.kernel.compiler_options import Build
from autotile.kernel.descriptors import TensorMapArgument
from autotile.kernel.expressions import Expression, Kind, Location
from autotile.kernel.reference import Reference
from autotile.kernel.table import Table, check_names

if TYPE_CHECKING:
    from autotile.kernel.computed import Computed

MEASURED = (
    "time_us",
    "registers",
    "spill_bytes",
    "static_smem_bytes",
    "dynamic_smem_bytes",
    "threads",
    "blocks",
    "occupancy",
    "energy_mj",
    "max_error",
)
"""Values of a trial that expressions may use, beside parameters, sizes, flags and metrics."""

RUN_VALUES = ("time_us", "energy_mj", "max_error")
"""Values that only a run gives; the others are known after compilation."""


class Parameter(NamedTuple):
    """A tunable parameter; its value is passed to the template as ``-DNAME=VALUE``."""

    name: Name
    values: tuple[Value, ...]


class Rule(NamedTuple):
    """A named condition over parameters, sizes and ``device.*``."""

    name: str
    expression: Expression
    is_heuristic: bool = False
    """Whether a configuration that violates it is valid, but not worth a trial."""

    def __str__(self) -> str:
        return f"{'heuristic' if self.is_heuristic else 'rule'} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch geometry and declared resources, as expressions over parameters, sizes and ``device.*``."""

    block: tuple[Expression, ...]
    grid: tuple[Expression, ...]
    cluster: tuple[Expression, ...]
    """Blocks of a cluster; empty if the kernel has no clusters. A launch sets them unless the template does."""
    dynamic_smem_bytes: Expression | None
    static_smem_bytes: Expression | None
    """Shared memory that the template declares statically; the limits apply to it before compilation."""
    min_registers: Expression | None
    """Lower bound on the registers of a thread (its accumulators, for example)."""
    is_cooperative: bool = False
    """Whether all blocks must be resident at once, as they wait for each other."""


STEP = "step"
"""Number of a launch among those of its step, from 0, in the step's expressions and in the values of scalars."""


@dataclass(frozen=True, slots=True)
class Step:
    """A function that a call of the kernel launches, once or several times, after those of the steps before it."""

    entry: str
    launch: Launch
    arguments: tuple[str, ...]
    """Names of the arguments that the function takes, in order."""
    when: Expression | None = None
    """Condition on which it is launched; None for always."""
    times: Expression | None = None
    """Number of launches; None for one."""
    swap: tuple[str, ...] = ()
    """Two arrays whose memory is exchanged after each launch, for all launches that follow in the call."""
    is_main: bool = False
    """Whether it is declared to be the one that stands for all where one launch is shown or estimated."""

    @property
    def is_always_once(self) -> bool:
        """Whether every configuration launches it exactly once."""
        return self.when is None and self.times is None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the author sets on a compiled candidate."""

    min_occupancy: float
    max_spill_bytes: int | None


class Work(NamedTuple):
    """Minimum operations and bytes of the problem, for TFLOP/s and GB/s, and the arithmetic unit that does them."""

    flops: Expression | None
    bytes: Expression | None
    unit: str | None = None
    """One of `autotile.core.ceilings.UNITS` or `ARITHMETIC`; None if it is not stated."""
    passes: int = 1
    """Operations of the unit for each one of `flops`."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Content of a search-space file, parsed and checked."""

    name: str
    summary: str
    template: str
    """File name of the template."""
    options: tuple[str, ...]
    build: Build
    """Options as they are given to the compiler, further macros, and the compiler itself."""
    include: tuple[str, ...]
    """Folders of the author's headers, as written."""
    architecture: str | None
    """The only compilation target, such as ``sm_90a``; None for that of the device."""
    minimum_compute_capability: str | None
    """Lowest supported compute capability, such as ``"8.0"``."""
    sizes: Mapping[str, int]
    """Sizes, followed by flags, of a problem with their defaults."""
    flags: tuple[str, ...]
    """Names in ``sizes`` that are 0 or 1."""
    ragged: Mapping[str, int]
    """A second problem for verification, whose sizes are not multiples of a tile; flags have their defaults."""
    dtypes: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    default: Mapping[str, Value]
    rules: tuple[Rule, ...]
    heuristics: tuple[Rule, ...]
    """Conditions on the configurations that the search tries; see `Rule.is_heuristic`."""
    steps: tuple[Step, ...]
    """Launches of a call, in order; one step unless the file has ``[[steps]]``."""
    limits: Limits
    arguments: tuple[Argument, ...]
    reference: Reference
    work: Work
    objective: Objective | None
    """Quantity that a search minimises or maximises; None for the time."""
    metrics: tuple[Metric, ...]
    """Values that are computed for each trial."""
    source: str
    """Path of the file, as the user gave it."""
    text: str
    """Text of the file."""
    computed: tuple[Computed, ...] = ()
    """Values that functions compute from the configuration."""
    folder: str = ""
    """Folder of the files that the arguments name."""

    @property
    def headline(self) -> str:
        """Name, numbers of parameters and combinations, and the default configuration."""
        combinations = prod(len(parameter.values) for parameter in self.parameters)
        counts = f"{plural(len(self.parameters), 'parameter')}, {plural(combinations, 'combination')}"
        return f"{self.name}, {counts}, default {config_text(self.default)}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Sizes, values of the parameters, and rules, each with its name."""
        sizes = [(name, str(value)) for name, value in self.sizes.items()]
        values = [(each.name, " ".join(map(str, each.values))) for each in self.parameters]
        return [*sizes, *values, *((rule.name, rule.expression.text) for rule in (*self.rules, *self.heuristics))]

    def _repr_html_(self) -> str:
        return html_of(self.headline, self.facts)

    @property
    def shaping(self) -> tuple[str, ...]:
        """The parameters that the buffers, their contents or the reference depend on."""
        used = {name for buffer in self.buffers for extent in buffer.shape for name in extent.names}
        used |= {name for buffer in self.buffers for name in getattr(buffer.content, "inputs", ())}
        used |= {name for expression in self.reference.outputs.values() for name in expression.names}
        used |= self.reference.reduction.names
        return tuple(parameter.name for parameter in self.parameters if parameter.name in used)

    def shaped_sizes(self, sizes: Mapping[str, int], config: Mapping[str, Value]) -> dict[str, int]:
        """Return sizes and flags with the values of the parameters that the buffers or the reference depend on."""
        return {**sizes, **{name: int(config[name]) for name in self.shaping}}

    @property
    def score_kinds(self) -> dict[str, Kind]:
        """Kind of each size, flag, and parameter that objectives and metrics may use."""
        kinds: dict[str, Kind] = {name: "boolean" if name in self.flags else "number" for name in self.sizes}
        numbers = (each for each in self.parameters if isinstance(each.values[0], int))
        return kinds | {each.name: "boolean" if isinstance(each.values[0], bool) else "number" for each in numbers}

    @property
    def has_one_launch(self) -> bool:
        """Whether a call is one launch, in every configuration."""
        return len(self.steps) == 1 and self.steps[0].is_always_once

    @property
    def entry(self) -> str:
        """The function of the first step."""
        return self.steps[0].entry

    @property
    def main_steps(self) -> tuple[Step, ...]:
        """The step that is declared to be the main one; all if none is."""
        return tuple(step for step in self.steps if step.is_main) or self.steps

    @property
    def entries(self) -> tuple[str, ...]:
        """The functions of all steps, each once."""
        return tuple(dict.fromkeys(step.entry for step in self.steps))

    def argument(self, name: str) -> Argument:
        """Return the argument of the given name.

        Raises
        ------
        KeyError
            There is no such argument.
        """
        for argument in self.arguments:
            if argument.name == name:
                return argument
        raise KeyError(name)

    @property
    def compiled_names(self) -> tuple[str, ...]:
        """Sizes and flags that are compiled in: another value of one needs another cubin."""
        used = self.build.names.union(*map(names_in, self.entries))
        return tuple(name for name in self.sizes if name in self.flags or name in used)

    def is_optional(self, name: str) -> bool:
        """Whether a size or flag may be omitted from a problem: flags, and sizes with a default of 1."""
        return name in self.flags or self.sizes[name] == 1

    def ragged_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the ragged sizes with the flags of a problem."""
        return {name: sizes[name] if name in self.flags else ragged for name, ragged in self.ragged.items()}

    @property
    def buffers(self) -> tuple[BufferArgument, ...]:
        """The buffers, in order."""
        return arguments_of_kind(self.arguments, BufferArgument)

    def buffer(self, name: str) -> BufferArgument:
        """Return the buffer of the given name.

        Raises
        ------
        KeyError
            There is no such buffer.
        """
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

    @property
    def scalars(self) -> tuple[ScalarArgument, ...]:
        """The scalars, in order."""
        return arguments_of_kind(self.arguments, ScalarArgument)

    @property
    def workspaces(self) -> tuple[WorkspaceArgument, ...]:
        """The workspaces, in order."""
        return arguments_of_kind(self.arguments, WorkspaceArgument)

    @property
    def tensor_maps(self) -> tuple[TensorMapArgument, ...]:
        """The tensor maps, in order."""
        return arguments_of_kind(self.arguments, TensorMapArgument)


class Metric(NamedTuple):
    """A named value that is computed for each trial."""

    name: str
    expression: ArrayExpression


class Objective(NamedTuple):
    """Quantity that a search minimises or maximises instead of the time."""

    expression: ArrayExpression
    maximize: bool = False


def parse_metrics(table: Table, kinds: Mapping[str, Kind], taken: Mapping[str, str]) -> tuple[Metric, ...]:
    """Parse ``[metrics]``; a metric may use those before it.

    Parameters
    ----------
    table
        The section.
    kinds
        Kind of each size, flag and parameter that is a number or a boolean.
    taken
        Names of sizes, flags and parameters, with their nouns.

    Raises
    ------
    SpecError
        A name is taken, or an expression is malformed or uses an unknown name.
    """
    check_names(table, what="a metric", taken={**taken, **dict.fromkeys(MEASURED, "a measured value")})
    metrics: list[Metric] = []
    for name in table.data:
        names = [metric.name for metric in metrics]
        metrics.append(Metric(name, parse_score(table.text(name, multiline=True), names, kinds, table.location(name))))
    return tuple(metrics)


def parse_objective(table: Table, metrics: Sequence[Metric], kinds: Mapping[str, Kind]) -> Objective | None:
    """Parse ``[objective]``; None if the section is empty."""
    table.allow(("value", "maximize"))
    if not table.data:
        return None
    names = [metric.name for metric in metrics]
    expression = parse_score(table.text("value", multiline=True), names, kinds, table.location("value"))
    return Objective(expression, table.boolean("maximize", default=False))


def parse_score(text: str, metrics: Sequence[str], kinds: Mapping[str, Kind], location: Location) -> ArrayExpression:
    """Parse an expression over measured values, metrics, and the names in ``kinds``.

    Raises
    ------
    SpecError
        The expression is malformed or uses an unknown name.
    """
    return parse_array_expression(text, (*MEASURED, *metrics, *kinds), kinds, location)


_MAX_ENTRY_CHARACTERS = 1000
_QUALIFIED = r"(?a:(?:::\s*)?[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*)"
_CAST = r"\(\s*void\s*\(\s*\*\s*\)\s*\((?P<types>[^;{}]*?)\)\s*\)\s*&?"
"""An overloaded function with its type."""
_OTHER = re.compile(r"[^\w\s:,<>()\[\]*&+\-/%!=|^~.?']|//|/\*|\n", re.ASCII)
"""Characters that no template argument contains."""
_IDENTIFIER = re.compile(r"(?<![\w:])[A-Za-z_]\w*(?!\w|\s*::)", re.ASCII)


def is_entry(text: str) -> bool:
    """Return whether a text can be the C++ name of a function.

    That is a name with its namespaces, ``space::name``, maybe followed by template arguments, ``name<BLOCK, float>``,
    or an overloaded name with its type, ``(void (*)(float*, int))name``. The compiler reads it as an expression, so it
    must not be able to end it.
    """
    if len(text) > _MAX_ENTRY_CHARACTERS or _OTHER.search(text):
        return False
    if match := re.match(_CAST, text.lstrip()):
        return _is_balanced(match["types"]) and is_entry(text.lstrip()[match.end() :])
    name, opening, arguments = text.partition("<")
    if re.fullmatch(_QUALIFIED, name.strip()) is None:
        return False
    return not opening or (arguments.rstrip().endswith(">") and _is_balanced(arguments.rstrip()[:-1]))


def template_arguments(entry: str) -> str:
    """Return the template arguments of an entry as written; "" if it has none."""
    return entry.partition("<")[2].rpartition(">")[0]


def names_in(entry: str) -> frozenset[str]:
    """Return the identifiers in the template arguments of an entry, without those that a namespace or class holds."""
    return frozenset(_IDENTIFIER.findall(template_arguments(entry)))


def with_values(entry: str, values: Mapping[str, str]) -> str:
    """Return an entry with values in place of names in its template arguments."""
    name, opening, _ = entry.partition("<")
    if not opening:
        return entry
    arguments = _IDENTIFIER.sub(lambda match: values.get(match[0], match[0]), template_arguments(entry))
    return f"{name}<{arguments}>"


def _is_balanced(text: str) -> bool:
    """Return whether each parenthesis and bracket is closed; ``<`` and ``>`` may be comparisons."""
    opened: list[str] = []
    for character in text:
        if character in "([":
            opened.append(character)
        elif character in ")]" and (not opened or opened.pop() + character not in ("()", "[]")):
            return False
    return not opened
