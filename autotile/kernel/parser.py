"""Parse a search-space file to a checked `KernelSpec`; docs/file-format.md specifies the format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotile.core.device import EXPRESSION_NAMES
from autotile.core.dtypes import DTYPES, canonical_dtype
from autotile.core.model import Sizes, Value, dtype_names
from autotile.errors import SpecError, listing
from autotile.kernel.arguments import ArgumentScope, TensorMapArgument, TextureArgument, parse_arguments, type_hint
from autotile.kernel.functions import Kind, Kinds
from autotile.kernel.launch import launch_kinds, parse_steps
from autotile.kernel.problem import ARCHITECTURE, CAPABILITY, derived_default, target_conflict
from autotile.kernel.spec import (
    PREFIX,
    Computed,
    ConfigFunction,
    KernelSpec,
    Parameter,
    Rule,
    Step,
    Work,
    parse_build,
    parse_metrics,
    parse_objective,
    parse_reference,
)
from autotile.kernel.table import MAX_WHOLE_NUMBER, ProblemSection, Table, check_names, describe, read_document

if TYPE_CHECKING:
    from autotile.kernel.python_kernel import Predicate

_SECTION_NAMES = (
    "kernel problem parameters default rules heuristics launch steps limits arguments reference work objective metrics "
    "computed"
)
SECTIONS = tuple(_SECTION_NAMES.split())
_FORMER_HEURISTICS = "pruning"
"""Deprecated name of the section ``[heuristics]``."""

# Patterns are compiled only when a file has the entries that they check.
_TEMPLATE = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.cu"
KERNEL_NAME = r"[A-Za-z][A-Za-z0-9_\-]*"
NAME_RULE = "letters, digits, '_' and '-', starting with a letter"
_STRING_VALUE = r"(?a)[A-Za-z_.\d](?:[\w.:<>,*& +-]{0,98}[\w.>*&])?"

# Distinct primes, so that no size is a multiple of a tile or of another size; larger if there are fewer sizes.
_RAGGED_PRIMES = (389, 277, 149, 101, 67, 43, 29, 19, 13, 11, 7, 5, 3)
_RAGGED_FIRST: Mapping[int, tuple[int, ...]] = {1: (100_003, 10_007, 1009, 613), 2: (1009, 613)}


def parse_spec(
    text: str,
    source: str,
    *,
    folder: str = "",
    predicates: Mapping[str, Predicate] | None = None,
    heuristic_predicates: Mapping[str, Predicate] | None = None,
    functions: Mapping[str, ConfigFunction] | None = None,
) -> KernelSpec:
    """Parse and check a search-space file.

    ``source`` is the path of the file as the user gave it, or `python_source`; ``folder`` that of the files which the
    arguments name, by default the folder of ``source``. A kernel that is written in Python has rules and heuristics
    that are functions, by name (see `parse_predicate`), and the functions of ``[computed]``. Raise `SpecError` if the
    file is malformed; the message gives the file, the line, the key and the remedy.
    """
    document = read_document(text, source, folder)
    if "operation" in document.data:
        members = listing(document.table("kernels", optional=True).data)
        fault = f"this file is of an operation, not of a kernel; name one of its kernels: {members}"
        raise SpecError(fault, source=source)
    document.allow(SECTIONS, deprecated=(_FORMER_HEURISTICS,))
    kernel, problem_table = document.table("kernel"), document.table("problem")
    kernel.allow(
        (
            *("name", "template", "entry", "summary", "options", "defines", "include", "compiler", "architecture"),
            "minimum_compute_capability",
        )
    )
    problem_table.allow(("sizes", "flags", "ragged", "dtypes"))

    taken: dict[str, str] = {}
    sizes, flags = (parse_defaults(problem_table, each, taken) for each in ("sizes", "flags"))
    parameters_table = document.table("parameters")
    if not parameters_table.data:
        raise parameters_table.error("", "no parameter is declared; declare at least one, as in BM = [64, 128]")
    check_names(parameters_table, what="a parameter", taken=taken)
    parameters = tuple(Parameter(name, _values(parameters_table, name)) for name in parameters_table.data)
    dtypes = parse_dtypes(problem_table)
    ragged_table = problem_table.table("ragged", optional=True)
    ragged_table.allow(sizes)
    given = {name: ragged_table.whole_number(name, minimum=1) for name in ragged_table.data}
    ragged = {**derived_ragged(sizes), **given, **flags}
    of_dtype = dtype_names(dtypes[0])
    problem = ProblemSection({**sizes, **flags, **of_dtype}, {**ragged, **of_dtype}, tuple(flags), dtypes)
    own_kinds = {**{parameter.name: _kind(parameter.values[0]) for parameter in parameters}, **problem.kinds}
    all_kinds: dict[str, Kind] = {**own_kinds, **{f"device.{name}": "number" for name in EXPRESSION_NAMES}}
    values, computed = document.table("computed", optional=True), []
    for name in values.data:
        values.check_identifier(name)
        kind, function = values.choice(name, ("number", "string")), (functions or {}).get(name)
        computed.append(Computed(PREFIX + name, kind, function, values.location(name)))
    names = [parameter.name for parameter in parameters]
    rules = _rules(document.table("rules", optional=True), all_kinds, predicates or {}, names)
    heuristics_table = document.table("heuristics", optional=True)
    if _FORMER_HEURISTICS in document.data:
        if "heuristics" in document.data:
            raise document.error(
                _FORMER_HEURISTICS,
                f"[{_FORMER_HEURISTICS}] is the deprecated name of [heuristics], and the file has both; move its "
                "entries to [heuristics]",
            )
        heuristics_table = document.table(_FORMER_HEURISTICS)
    heuristics = _rules(
        heuristics_table, all_kinds, heuristic_predicates or {}, names, taken=rules, are_heuristics=True
    )
    launched_kinds = {**all_kinds, **{each.name: each.kind for each in computed}}
    # Shapes and references may use whole numbers: a value of each, of the default configuration if it is declared.
    declared = document.table("default", optional=True).data
    chosen = {name: declared[name] if declared.get(name) in values else values[0] for name, values in parameters}
    whole = {name: value for name, value in chosen.items() if isinstance(value, int)}
    whole_kinds = {name: _kind(value) for name, value in whole.items()}
    at_both = {**problem.sizes, **whole}, {**problem.ragged, **whole}
    shaped = ProblemSection(*at_both, problem.flags, dtypes, whole_kinds)
    scope = ArgumentScope(shaped, all_kinds, launch_kinds(document, launched_kinds))
    arguments = parse_arguments(document.table("arguments"), scope, taken)
    steps = parse_steps(document, arguments, launched_kinds)
    scored: dict[str, Kind] = {name: kind for name, kind in own_kinds.items() if kind != "string"}
    metrics = parse_metrics(document.table("metrics", optional=True), scored, taken)
    objective, section = None, document.table("objective", optional=True)
    section.allow(("value", "maximize"))
    if section.data:
        value, maximize = section.text("value", multiline=True), section.boolean("maximize", default=False)
        objective = parse_objective(value, metrics, scored, section.location("value"), maximize=maximize)
    limits = document.table("limits", optional=True)
    limits.allow(("min_occupancy", "max_spill_bytes"))
    min_occupancy, max_spill_bytes = limits.number("min_occupancy", 0.0), None
    if not 0.0 <= min_occupancy <= 1.0:
        raise limits.error("min_occupancy", f"expected a fraction from 0 to 1, got {min_occupancy}")
    if "max_spill_bytes" in limits.data:
        max_spill_bytes = limits.whole_number("max_spill_bytes", minimum=0)
    has_target, has_minimum = "architecture" in kernel.data, "minimum_compute_capability" in kernel.data
    spec = KernelSpec(
        name=kernel.matching("name", KERNEL_NAME, NAME_RULE),
        summary=kernel.text("summary", ""),
        template=kernel.matching("template", _TEMPLATE, "a bare file name that ends in .cu, without directories"),
        options=kernel.texts("options", optional=True),
        include=kernel.texts("include", optional=True),
        build=parse_build(kernel, own_kinds, [*flags, *names]),
        architecture=kernel.matching("architecture", ARCHITECTURE, "a target such as 'sm_90a'") if has_target else None,
        minimum_compute_capability=(
            kernel.matching("minimum_compute_capability", CAPABILITY, "a compute capability such as '8.0'")
            if has_minimum
            else None
        ),
        sizes={**sizes, **flags},
        flags=problem.flags,
        ragged=ragged,
        dtypes=dtypes,
        parameters=parameters,
        default=_default(document, parameters, (*rules, *heuristics), problem.sizes, steps),
        rules=rules,
        heuristics=heuristics,
        steps=steps,
        min_occupancy=min_occupancy,
        max_spill_bytes=max_spill_bytes,
        arguments=arguments,
        reference=parse_reference(document.table("reference"), arguments, shaped, all_kinds),
        work=_work(document.table("work", optional=True), shaped),
        objective=objective,
        metrics=metrics,
        score_kinds=scored,
        source=source,
        text=text,
        computed=tuple(computed),
        folder=folder,
    )
    for argument in arguments:
        if isinstance(argument, TensorMapArgument | TextureArgument):
            table = document.table("arguments").table(argument.name)
            argument.check_ragged({**problem.ragged, **spec.default}, dtypes, table)
    if conflict := target_conflict(spec):
        raise kernel.error("architecture", conflict)
    return spec


def derived_ragged(sizes: Sizes) -> dict[str, int]:
    """Return ragged sizes for a file that declares none.

    Each size in turn takes the first unused prime that is not above its default, from a list that starts at 389, 277,
    149 for three or more sizes, at 1009, 613 for two, and at 100,003 for one. A size below every unused prime takes the
    largest odd number up to its default.
    """
    primes = [*_RAGGED_FIRST.get(len(sizes), ()), *_RAGGED_PRIMES]
    ragged: dict[str, int] = {}
    for name, size in sizes.items():
        unused = (prime for prime in primes if prime <= size and prime not in ragged.values())
        ragged[name] = next(unused, size - 1 + size % 2)
    return ragged


def parse_defaults(problem: Table, section: str, taken: dict[str, str]) -> dict[str, int]:
    """Return the names in a section, of sizes or of flags, with their defaults; ``taken`` holds the names in use."""
    table = problem.table(section, optional=True)
    noun, least, most = ("a size", 1, MAX_WHOLE_NUMBER) if section == "sizes" else ("a flag", 0, 1)
    check_names(table, what=noun, taken=taken)
    return {name: table.whole_number(name, minimum=least, maximum=most) for name in table.data}


def _values(table: Table, name: str) -> tuple[Value, ...]:
    values = table.entries(name)
    if any(isinstance(value, float) for value in values):
        values = [float(value) if type(value) is int else value for value in values]
    for position, value in enumerate(values):
        if not isinstance(value, int | float | str):
            raise table.error(name, f"a value is a number, a boolean or a string, not {describe(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise table.error(name, f"{describe(value)} is not finite")
        if type(value) is not type(values[0]):
            raise table.error(name, f"{describe(values[0])} and {describe(value)} are of different types; use one type")
        if value in values[:position]:
            raise table.error(name, f"{describe(value)} is listed twice; remove one")
        if isinstance(value, int) and abs(value) >= 2**63:
            limit = "expected 2**63 - 1 at most in magnitude, the largest literal of C++"
            raise table.error(name, f"{describe(value)} does not fit in 64 bits; {limit}")
        if isinstance(value, str) and not re.fullmatch(_STRING_VALUE, value):
            raise table.error(name, f"{describe(value)} is neither a C identifier, a C type nor a C number")
    return tuple(values)


def _kind(value: Value) -> Kind:
    if isinstance(value, str):
        return "string"
    return "real" if isinstance(value, float) else "boolean" if isinstance(value, bool) else "number"


def _rules(
    table: Table,
    kinds: Kinds,
    predicates: Mapping[str, Predicate],
    parameters: Sequence[str],
    *,
    taken: tuple[Rule, ...] = (),
    are_heuristics: bool = False,
) -> tuple[Rule, ...]:
    for name in (*table.data, *predicates):
        table.check_identifier(name)
        if any(rule.name == name for rule in taken):
            raise table.error(name, f"{name!r} already names a rule; use another name")
    expressions = {name: table.expression(name, kinds, "boolean") for name in table.data}
    if predicates:
        from autotile.kernel.python_kernel import parse_predicate
    for name, function in predicates.items():
        expressions[name] = parse_predicate(function, parameters, table.location(name))
    return tuple(Rule(name, expression, are_heuristics) for name, expression in expressions.items())


def _default(
    document: Table, parameters: tuple[Parameter, ...], rules: tuple[Rule, ...], sizes: Sizes, steps: tuple[Step, ...]
) -> dict[str, Value]:
    table = document.table("default", optional=True)
    if not table.data:
        derived = derived_default(parameters, rules, [step.launch.block for step in steps], sizes)
        if derived is None:
            raise document.error(
                "default",
                "no configuration that meets the rules at the default sizes, with a block of at most 1024 threads, was "
                "found to be the default; declare one, or relax the rules",
            )
        return derived
    table.allow(parameter.name for parameter in parameters)
    default: dict[str, Value] = {}
    for name, values in parameters:
        value = default[name] = table.require(name)
        if not any(type(known) is type(value) and known == value for known in values):
            shown = ", ".join(map(str, values[:20]))
            raise table.error(name, f"{describe(value)} is not among the values of {name}: {shown}")
    known = {**sizes, **default}
    for rule in rules:  # rules about device.* are checked for each device
        if rule.expression.names <= known.keys() and not rule.expression.evaluate(known):
            raise table.error("", f"the default breaks the {rule} at default sizes: {rule.expression.text}")
    return default


def parse_dtypes(table: Table) -> tuple[str, ...]:
    """Return the element types of problems, which are no vectors: an argument's shape must not depend on them."""
    scalars = tuple(name for name, dtype in DTYPES.items() if not dtype.components)
    chosen = tuple(map(canonical_dtype, table.texts("dtypes", optional=True)))
    for name in chosen:
        if name in DTYPES and name not in scalars:
            hint = "use the type of its components here, and declare buffers of vectors with their type"
            raise table.error("dtypes", f"{name!r} is a vector; {hint}")
        if name not in scalars:
            raise table.error("dtypes", f"{name[:60]!r} is not accepted{type_hint(name, scalars)}")
        if chosen.count(name) > 1:
            raise table.error("dtypes", f"{name!r} is listed twice; remove one")
    return chosen or ("float32",)


def _work(table: Table, problem: ProblemSection) -> Work:
    table.allow(("flops", "bytes", "unit", "passes"))
    amounts = {
        name: table.expression(name, problem.kinds, "real").as_whole()
        for name in ("flops", "bytes")
        if name in table.data
    }
    for name, expression in amounts.items():
        problem.check_positive(table, name, [expression])
    unit = table.text("unit") if "unit" in table.data else None
    if unit is not None:
        from autotile.core.ceilings import ARITHMETIC, UNITS

        table.check_known("unit", unit, (*UNITS, *ARITHMETIC), "is not an arithmetic unit")
    passes = table.whole_number("passes", minimum=1, maximum=1024) if "passes" in table.data else 1
    return Work(amounts.get("flops"), amounts.get("bytes"), unit, passes)
