"""Commands as they are derived: help and defaults from docstrings, types from signatures."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from autotile.cli.commands import COMMANDS
from autotile.cli.derivation import REQUIRED, describe, in_options, parameter_of

FUNCTIONS = {command.function for command in COMMANDS.values()}


@pytest.mark.parametrize("path", sorted(FUNCTIONS))
def test_the_source_says_what_the_function_does(path: str) -> None:
    """The derivation reads the source; what it finds is the signature of the function that is then called."""
    module, _, name = path.rpartition(".")
    function = getattr(import_module(f"autotile.{module}"), name)
    text, described = describe(path)
    assert text == inspect.cleandoc(function.__doc__).partition("\n\nParameters\n")[0]
    stated = inspect.signature(function).parameters
    own = [one for one in described if one.name in stated]
    assert own
    for one in own:
        parameter = stated[one.name]
        if parameter.kind is not parameter.VAR_POSITIONAL:
            assert (one.default is None and parameter.default == ()) or one.default == parameter.default
    assert all(one.help.endswith(".") for one in described)


def test_the_first_sentence_is_the_help_and_none_for_the_default() -> None:
    described = {one.name: one for one in describe("api.results.best")[1]}
    assert described["kernel"].help == "Name of a kernel or an operation, or path of its file."
    assert described["kernel"].default is REQUIRED
    assert (described["dtype"].help, described["dtype"].unsaid) == (
        "Element type, one of the kernel's.",
        "the kernel's first",
    )
    options = {one.name: one for one in describe("api.tuning.tune")[1]}
    assert (options["finals"].hint, options["finals"].default) == ("int", 12)
    assert options["l2"].default == "cold"
    assert options["objective"].help.endswith("May be given again.")


def test_parameters_in_a_text_are_shown_as_options() -> None:
    flags = {"output": "-o", "keep_gpus": "--keep-gpu"}
    assert in_options("With ``output`` and ``keep_gpus``; ``BM``.", flags) == "With -o and --keep-gpu; BM."


@pytest.mark.parametrize(
    ("function", "name", "form", "options"),
    [
        ("api.results.best", "library", "", ["--library/--no-library"]),
        ("api.exchange.export", "output", "-o --output FILE", ["-o", "--output"]),
        ("api.results.trials", "limit", "N 1..", ["--limit"]),
        ("api.inspection.space", "sample", "N 1..9", ["--sample"]),
    ],
)
def test_options_have_their_form(function: str, name: str, form: str, options: list[str]) -> None:
    (one,) = [one for one in describe(function)[1] if one.name == name]
    option = parameter_of(one, form, {}).annotation.__metadata__[0]
    assert [option.default, *option.param_decls] == options  # in an annotation, the first stands there
    assert option.max == (9 if form.endswith("9") else None)
