"""Rules of families in C++: a decision tree as nested ifs, whose leaves put configurations in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autotile.ground.features import Feature, Traits
from autotile.ground.model import config_key
from autotile.ground.rule import FamilyRule
from autotile.ground.spec import KernelSpec
from autotile.ground.tree import Leaf, Split
from autotile.store.cpp_expression import literal, to_cpp
from autotile.store.rules import StoredRule


def family_code(spec: KernelSpec, rules: Sequence[StoredRule], numbers: Mapping[str, int]) -> dict[str, str]:
    """Functions of the rules, and where `choose` asks them; a rule with a configuration that is not here is left out.

    Parameters
    ----------
    numbers
        Of the header's configurations, by their keys.
    """
    known = [stored for stored in rules if all(config_key(one.config) in numbers for one in stored.rule.configs)]
    functions = [line for number, stored in enumerate(known) for line in _Family(spec, stored, numbers, number).lines()]
    asked = [line for number, stored in enumerate(known) for line in _question(stored, number)]
    return {
        "families": "\n".join(["", *functions, ""]) if functions else "",
        "by_family": "".join(f"    {line}\n" for line in asked),
    }


def _question(stored: StoredRule, number: int) -> Iterator[str]:
    here = f"device.name == {literal(stored.device.name)}"
    yield f"if (best.tier != Tier::exact && {here} && family_{number}::holds(sizes)) {{"
    yield f"    for (const std::size_t config : family_{number}::order(sizes, device)) {{"
    yield "        const Cubin* cubin = detail::usable(config, sizes, device);"
    yield "        if (cubin != nullptr) return {config, cubin, Tier::family};"
    yield "    }"
    yield "}"


class _Family:
    """One rule as a namespace of two functions."""

    def __init__(self, spec: KernelSpec, stored: StoredRule, numbers: Mapping[str, int], number: int) -> None:
        self._spec = spec
        self._rule: FamilyRule = stored.rule
        self._gpu = stored.device.name
        self._numbers = [numbers[config_key(one.config)] for one in stored.rule.configs]
        self._number = number
        self._places = {name: f"sizes.{name}" for name in spec.sizes}
        resident = [one.blocks_per_sm for one in stored.rule.configs]
        configs = [one.config for one in stored.rule.configs]
        self._traits = Traits.of(spec, stored.device, configs, resident, [stored.rule.family.largest])

    def lines(self) -> Iterator[str]:
        """The namespace."""
        rule, names = self._rule, self._spec.sizes
        yield f"/// {rule.family} on {self._gpu}, learned from {len(rule.points)} of its problems."
        yield f"namespace family_{self._number} {{"
        yield ""
        yield "inline bool holds(const Sizes& sizes) {"
        yield f"    return {' && '.join(self._holds(name) for name in names)};"
        yield "}"
        yield ""
        yield "/// Configurations, the best first: where one breaks a rule or a limit, the next is launched."
        size = len(self._numbers)
        yield f"inline std::array<std::size_t, {size}> order([[maybe_unused]] const Sizes& sizes,"
        yield "                                         [[maybe_unused]] const Device& device) {"
        yield from self._branch(rule.tree, "    ")
        yield "}"
        yield ""
        yield f"}}  // namespace family_{self._number}"

    def _holds(self, name: str) -> str:
        parts = []
        for low, high in self._rule.family.extents[name].parts:
            here = f"sizes.{name}"
            parts.append(f"{here} == {low}" if low == high else f"({low} <= {here} && {here} <= {high})")
        return f"({' || '.join(parts)})"

    def _branch(self, tree: Leaf | Split, indent: str) -> Iterator[str]:
        if isinstance(tree, Leaf):
            yield f"{indent}return {{{', '.join(str(self._numbers[number]) for number in tree.order)}}};"
            return
        yield f"{indent}if ({self._value(tree.feature)} <= {float(tree.at_most)!r}) {{  // {tree.feature}"
        yield from self._branch(tree.then, indent + "    ")
        yield f"{indent}}}"
        yield from self._branch(tree.otherwise, indent)

    def _value(self, feature: Feature) -> str:
        """A feature as a double."""
        match feature.kind:
            case "size":
                value = f"double(sizes.{feature.of})"
            case "alignment":
                value = f"detail::alignment(sizes.{feature.of})"
            case "outputs":
                value = self._outputs()
            case "intensity":
                value = f"{self._work(flops=True)} / std::max({self._work(flops=False)}, 1.0)"
            case "blocks":
                value = self._blocks(feature.config)
            case "waves":
                value = f"{self._blocks(feature.config)} / {float(self._traits.slots[feature.config])!r}"
            case "work_ratio":
                value = f"{self._rounds(feature.config)} / ({self._rounds(feature.over)})"
            case unknown:
                raise ValueError(f"no feature of a rule is of the kind {unknown!r}")
        return value

    def _outputs(self) -> str:
        written = [buffer for buffer in self._spec.buffers if buffer.access != "in"]
        products = (" * ".join(f"double({to_cpp(e, self._places)})" for e in buffer.shape) for buffer in written)
        return " + ".join(products)

    def _work(self, *, flops: bool) -> str:
        expression = self._spec.work.flops if flops else self._spec.work.bytes
        return f"double({to_cpp(expression, self._places)})" if expression is not None else "0.0"

    def _blocks(self, config: int) -> str:
        return f"detail::blocks({self._numbers[config]}, sizes, device)"

    def _rounds(self, config: int) -> str:
        """Outputs that the busiest SM makes room for."""
        tile, sms = float(self._traits.tile[config]), float(self._traits.sm_count)
        return f"std::ceil({self._blocks(config)} / {sms!r}) * {tile!r}"
