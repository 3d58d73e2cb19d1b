"""Kernels that are written in Python, and the files of a new kernel to begin with."""

from __future__ import annotations

import atexit
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from autotile.api.targets import merge_sizes
from autotile.core.argument_types import checked, checked_except
from autotile.core.documents import to_document, toml_text
from autotile.core.model import Config
from autotile.core.text import Facts, Part, Result, Written
from autotile.database.paths import write_output
from autotile.errors import InputError
from autotile.kernel.expressions import is_c_identifier, is_keyword, python_source
from autotile.kernel.library import Inspection, Kernel, load_kernel, make_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import resolve_problem
from autotile.kernel.python_kernel import ArrayLibrary, PythonDocument, build_document, function_name
from autotile.kernel.sources import check_source
from autotile.kernel.spec import KernelSpec
from autotile.settings import user_path

if TYPE_CHECKING:
    from autotile.api.inspection import Explanation, SpaceSummary
    from autotile.report.survey import Survey
    from autotile.serving.bound import BoundKernel
    from autotile.tuning.result import TuneResult


@checked_except(
    *("source", "entry", "parameters", "arguments", "launch", "sizes", "rules", "heuristics"),
    *("default", "flags", "ragged", "defines", "sections", "tolerance"),
)
def kernel(
    source: str | os.PathLike[str],
    entry: str | None = None,
    /,
    *,
    parameters: Mapping[str, Sequence[Any]],
    arguments: Mapping[str, Any] | Sequence[Any],
    launch: Mapping[str, Any] | Sequence[Any] | None = None,
    steps: Sequence[Mapping[str, Any]] = (),
    reference: Any = None,
    reference_on: ArrayLibrary = "numpy",
    tolerance: float | Mapping[str, Any] | None = None,
    reduction: int | str | None = None,
    verify: Callable[..., Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    rules: Mapping[str, Any] | Sequence[Any] = (),
    heuristics: Mapping[str, Any] | Sequence[Any] = (),
    default: Mapping[str, Any] | None = None,
    name: str | None = None,
    summary: str = "",
    flags: Mapping[str, int] | None = None,
    ragged: Mapping[str, int] | None = None,
    dtypes: str | Sequence[str] = (),
    flops: int | str | None = None,
    bytes: int | str | None = None,
    options: str | Sequence[str] = (),
    defines: Mapping[str, Any] | None = None,
    include: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    compiler: str | None = None,
    architecture: str | None = None,
    minimum_compute_capability: str | None = None,
    sections: Mapping[str, Any] | None = None,
) -> TunableKernel:
    """Describe a kernel to tune, as a search-space file would.

    Expressions are those of such a file; see docs/file-format.md.

    Parameters
    ----------
    source
        CUDA C++ code, or the path of a file that contains it. A text with a line break, a brace or a semicolon is code.
    entry
        Name of the ``__global__`` function; left out with ``steps``.
    parameters
        Values of each tunable parameter, by name; each is passed to the code as a macro.
    arguments
        The function's arguments in order: a mapping from their names to `autotile.Buffer`, `autotile.Scalar`,
        `autotile.Scratch`, an array of NumPy or CuPy (an input with this content), a NumPy number, or a table as in a
        search-space file. Or a list of them, which are named as in the code.
    launch
        ``block``, ``grid``, ``dynamic_smem_bytes`` and the other keys of ``[launch]``, or a tuple of the first two or
        three: numbers or expressions, or lists of up to three.
    steps
        For a computation of several launches: a mapping for each with the keys of ``[[steps]]``, in place of ``entry``
        and ``launch``.
    reference
        The expected outputs: an array expression of the only output, its values as an array, or a mapping of one of
        these for each output; the name of another ``__global__`` function of the source, with the same launch and
        arguments; a Python function; a table as in a search-space file. Or None: configurations are then compared with
        each other.
    reference_on
        Library whose arrays a Python function takes as its reference. Real numbers are passed in double precision. The
        function runs in a child process for at most ten minutes; one over CuPy arrays runs in this process if CUDA is
        already initialized here.
    tolerance
        Relative tolerance, or one for each output, as in ``[reference]``; None for that of the element type.
    reduction
        Number of terms in the sum that an element of an output is, by which that tolerance grows: ``"K"``; None for 1.
    verify
        Function that compares outputs, instead of a tolerance. It is called in this process for every configuration
        that runs, with the expected and the written values: two arrays of NumPy, or two mappings from names to arrays
        if the kernel writes several buffers; and with the tolerance if it takes three arguments. It returns whether
        they agree, or a text that says what is wrong.
    sizes
        Sizes that the best configuration depends on, with their defaults.
    rules
        Conditions that a configuration must meet: texts, or functions of parameters, as a list or by name. A function
        names its arguments as parameters, or takes one mapping of all of them; it is called with NumPy columns of
        values, and where that fails once for each configuration. Write a condition on sizes as a text.
    heuristics
        Conditions on what is worth a trial, in the same forms.
    default
        Default configuration; None for the valid one nearest to the middle of each parameter's values.
    name
        Name for results and messages; None for that of the entry.
    summary
        One line for listings.
    flags, ragged, dtypes
        As in ``[problem]``.
    flops, bytes
        Minimum operations and bytes of a problem, as in ``[work]``.
    options, defines, include, compiler, architecture, minimum_compute_capability
        As in ``[kernel]``.
    sections
        Further sections and keys of a search-space file, such as ``{"limits": {"max_spill_bytes": 0}}``.

    Returns
    -------
    TunableKernel
        The kernel, which every function of autotile accepts in place of a kernel's name.

    Raises
    ------
    SpecError
        The description is malformed; the message names the argument.
    InputError
        The source is neither code nor a file that can be read.

    Examples
    --------
    >>> code = '''
    ... extern "C" __global__ void scale(const float* x, float* y, int n) {
    ...     for (int i = (blockIdx.x * BLOCK + threadIdx.x) * WORK, end = i + WORK; i < end && i < n; ++i)
    ...         y[i] = 2.0f * x[i];
    ... }'''
    >>> scale = kernel(
    ...     code,
    ...     "scale",
    ...     sizes={"n": 1 << 24},
    ...     parameters={"BLOCK": [64, 128, 256], "WORK": [1, 2, 4]},
    ...     rules=[lambda BLOCK, WORK: BLOCK * WORK <= 512],
    ...     arguments={
    ...         "x": Buffer("float32", "n"), "y": Buffer("float32", "n", "out"), "n": Scalar("int32", "n"),
    ...     },
    ...     launch={"block": "BLOCK", "grid": "ceil_div(n, BLOCK * WORK)"},
    ...     reference="2.0 * x",
    ... )
    >>> scale
    <TunableKernel: scale, 2 parameters, 9 combinations, default BLOCK=128 WORK=2>
    >>> scale.tune(n=1 << 20)  # doctest: +SKIP
    <TuneResult: scale n=1048576 float32 on NVIDIA H200: ...>
    """
    comparison = function_name(verify) if verify is not None else None
    described = build_document(
        source,
        entry,
        parameters=parameters,
        arguments=arguments,
        launch=launch,
        steps=steps,
        reference=reference,
        sizes=sizes,
        rules=rules,
        heuristics=heuristics,
        default=default,
        name=name,
        kernel={
            "summary": summary,
            "options": _strings(options),
            "defines": defines,
            "include": [str(Path(folder).expanduser().absolute()) for folder in _strings(include)],
            "compiler": compiler,
            "architecture": architecture,
            "minimum_compute_capability": minimum_compute_capability,
        },
        problem={"flags": flags, "ragged": ragged, "dtypes": _strings(dtypes)},
        work={"flops": flops, "bytes": bytes},
        checks={"tolerance": tolerance, "reduction": reduction, "comparison": comparison},
        sections=sections,
    )
    return TunableKernel(described, reference_on, verify)


def _strings(given: Any) -> list[Any]:
    """Return the entries of a list; a single one may stand alone."""
    return [given] if isinstance(given, str | os.PathLike) else list(given)


class TunableKernel(Result):
    """A kernel that is written in Python; from `autotile.kernel`.

    Every function of autotile that takes the name of a kernel takes such an object, too. A source that is a file is
    read again at each use.

    Attributes
    ----------
    document
        The search-space file that the kernel would have, without rules that are functions.
    """

    def __init__(
        self, described: PythonDocument, reference_on: ArrayLibrary = "numpy", verify: Callable[..., Any] | None = None
    ) -> None:
        self.document = described.document
        self._arguments, self._described = (described, reference_on, verify), described
        self._folder = private_folder() if described.arrays or described.template is None else None
        for file, array in described.arrays.items():
            np.save(Path(str(self._folder)) / file, array, allow_pickle=False)
        self.document["default"] = dict(self._parse().default)
        spec, template = self._parse(), described.template
        if template is None:
            template = Path(str(self._folder)) / spec.template
            template.write_text(str(described.source), encoding="utf-8")
        self._functions: Any = {  # that no search-space file can hold
            "reference_function": (described.reference, reference_on) if described.reference else None,
            "inspection": comparison_of(spec, verify, private_folder()) if verify is not None else None,
        }
        self._kernel = replace(make_kernel(spec, template, described.source), **self._functions)
        check_source(spec, self._kernel.source)

    def _parse(self) -> KernelSpec:
        return parse_spec(
            toml_text(self.document),
            python_source(str(self.document["kernel"]["name"])),
            folder=str(self._folder or Path(str(self._described.template)).parent),
            predicates=self._described.rules,
            heuristic_predicates=self._described.heuristics,
        )

    @property
    def definition(self) -> Kernel:
        """The kernel, with its source as it is now."""
        if self._described.source is None:
            read = replace(make_kernel(self._kernel.spec, self._kernel.template_path), **self._functions)
            if read != self._kernel:
                self._kernel = read
        return self._kernel

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self._kernel.name

    def tune(self, sizes: Mapping[str, int] | None = None, /, **arguments: Any) -> TuneResult:
        """Tune the kernel as `autotile.tune` does; sizes that are not given have their defaults."""
        from autotile.api.tuning import tune

        return cast("TuneResult", tune(self, self._given(sizes, arguments), **arguments))  # of one problem

    def space(self, sizes: Mapping[str, int] | None = None, /, **arguments: Any) -> SpaceSummary | Survey:
        """Count the configurations that each rule and limit leaves, or compile them, as `autotile.space` does."""
        from autotile.api.inspection import space

        return space(self, sizes, **arguments)

    def explain(self, assignments: Mapping[str, Any] | None = None, /, **arguments: Any) -> Explanation:
        """Explain one configuration; arguments are those of `autotile.explain`."""
        from autotile.api.inspection import explain_kernel

        named = {name: arguments.pop(name) for name in ("dtype", "device") if name in arguments}
        return explain_kernel(self, merge_sizes(assignments, arguments), **named)

    def best(self, sizes: Mapping[str, int] | None = None, /, **arguments: Any) -> BoundKernel:
        """Return the best known configuration, ready to launch, as `autotile.get_best_kernel` does.

        Sizes that are not given have their defaults.
        """
        from autotile.serving.dispatcher import get_best_kernel

        given = self._given(sizes, arguments)
        problem = resolve_problem(self._kernel.spec, given, defaults=True)
        return get_best_kernel(self, **{**problem.sizes, **arguments})

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the search-space file, with the template and all arrays beside it, for use from the command line.

        Parameters
        ----------
        path
            Path of the file, ending in ``.toml``.
        overwrite
            Whether existing files are replaced.

        Returns
        -------
        pathlib.Path
            The search-space file.

        Raises
        ------
        InputError
            A rule or the reference is a function, which no file can hold, a file exists, or a file cannot be written.
        """
        target = user_path(str(path), "a search-space file")
        if target.suffix != ".toml":
            raise InputError(f"{str(path)!r} is not the path of a search-space file; let it end in .toml")
        if functions := [*self._described.rules, *self._described.heuristics]:
            raise InputError(
                f"{functions[0]} is a Python function, which a search-space file cannot hold; write it as text, such "
                "as 'BLOCK * WORK <= 512'"
            )
        definition = self.definition
        template = target.parent / definition.spec.template
        is_own = definition.template_path.exists() and template.exists() and template.samefile(definition.template_path)
        if self._described.reference is not None:
            raise InputError(
                "the reference is a Python function, which a search-space file cannot hold; give expressions, another "
                "kernel, or arrays"
            )
        if definition.inspection is not None:
            raise InputError(
                "outputs are compared by a Python function, which a search-space file cannot hold; give a tolerance"
            )
        files = [target, *([] if is_own else [template]), *(target.parent / file for file in self._described.arrays)]
        for file in files:
            if (file.exists() or file.is_symlink()) and not overwrite:
                raise InputError(f"{file} exists already; name another file, or pass overwrite=True")
        try:
            if not is_own:
                write_output(template, definition.source)
            for name, array in self._described.arrays.items():
                np.save(target.parent / name, array, allow_pickle=False)
            write_output(target, toml_text(self.document))
        except OSError as error:
            raise InputError(f"cannot write {error.filename}: {error.strerror}") from None
        if load_kernel(target).source_hash != definition.source_hash:
            raise InputError(
                f"{template} includes other files than {definition.template_path}; save the kernel in the folder of "
                "its source, or copy the files that it includes"
            )
        return target

    def _given(self, sizes: Mapping[str, int] | None, arguments: dict[str, Any]) -> dict[str, int]:
        """Return the sizes that are given, and remove them from the arguments of a call."""
        named = {name: arguments.pop(name) for name in self._kernel.spec.sizes if name in arguments}
        return merge_sizes(sizes, named)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the description, from which it is made anew; its functions must be ones that can be pickled."""
        return TunableKernel, self._arguments

    def _headline(self) -> str:
        return self._kernel.spec.headline

    def _parts(self) -> Iterator[Part]:
        yield [*self._kernel.spec.facts]

    def to_json(self) -> Any:
        """Return the document of the search-space file, without rules that are functions."""
        return to_document(self.document)


@cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="autotile-"))
    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not in a child that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def private_folder() -> Path:
    """Return a new folder for a kernel; the one around it holds only such folders, as templates may include from it."""
    return Path(tempfile.mkdtemp(dir=_session_folder()))


def comparison_of(spec: KernelSpec, function: Callable[..., Any], folder: Path) -> Inspection:
    """Return the check of a kernel's outputs, which reach this process through a folder, by a function of the user.

    It is called with the expected and the written values, and with the tolerance if it takes three arguments, and
    returns whether they agree, or a text that says what is wrong.
    """
    unchecked = spec.reference.unchecked
    names = [buffer.name for buffer in spec.buffers if buffer.is_written and buffer.name not in unchecked]
    tolerance = spec.reference.tolerance
    takes_tolerance, plain = False, (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    with suppress(TypeError, ValueError):  # a function of C without a signature
        takes_tolerance = sum(one.kind in plain for one in inspect.signature(function).parameters.values()) >= 3

    def check(config: Config, contents: Mapping[str, NDArray[Any]]) -> tuple[str, Mapping[str, float | str]]:
        expected, got = ([contents[f"{name}.{what}"] for name in names] for what in ("expected", "value"))
        given = [values[0] if len(names) == 1 else dict(zip(names, values, strict=True)) for values in (expected, got)]
        try:
            found = function(*given, *([tolerance] if takes_tolerance else []))
        except Exception as error:
            return f"the comparison raises {type(error).__name__}: {error}", {}
        if isinstance(found, str):
            return found, {}
        return ("" if found is None or np.all(found) else "the comparison found a difference"), {}

    buffers = tuple(f"{name}.{what}" for name in names for what in ("expected", "value"))
    return Inspection(buffers, check, str(folder))


_FILES = {"{}.cu": "NAME.cu", "{}.toml": "NAME.toml", "test_{}.py": "test_NAME.py.txt"}
"""Files of a new kernel, and those of the folder ``assets`` that they are made of."""
_MAX_NAME = 64


@checked
def new(name: str, folder: str | Path = ".") -> Written:
    """Write a small kernel, its search-space file and a test, which tune as they are.

    The files are NAME.cu, NAME.toml and test_NAME.py. Nothing is overwritten.

    Parameters
    ----------
    name
        Name of the kernel, a C identifier; its function is NAME_kernel.
    folder
        Folder of the files. It must exist.

    Returns
    -------
    Written
        Its ``file`` is the search-space file.

    Raises
    ------
    InputError
        The name cannot be that of a kernel, a file exists, or a file cannot be written. Nothing is written then.
    """
    if not is_c_identifier(name) or not name[0].isalpha() or is_keyword(name) or len(name) > _MAX_NAME:
        raise InputError(
            f"{name[:_MAX_NAME]!r} cannot be the name of a kernel: use letters, digits and '_', a letter first, "
            f"{_MAX_NAME} characters at most, and no keyword"
        )
    target = user_path(str(folder), "a folder")
    if not target.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; make it first, or name another")
    assets = resources.files("autotile.api").joinpath("assets")
    contents = {
        target / pattern.format(name): assets.joinpath(file).read_text("utf-8").replace("NAME", name)
        for pattern, file in _FILES.items()
    }
    for path in contents:
        if path.exists() or path.is_symlink():
            raise InputError(f"{path} exists already, and nothing is overwritten; choose another name or folder")
    written: list[Path] = []
    try:
        for path, text in contents.items():
            with path.open("x") as file:  # fails if another process has made it meanwhile
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise InputError(f"cannot write {error.filename}: {error.strerror}") from None
    source, space, test = contents
    facts: Facts = [
        ("source", str(source)),
        ("search space", str(space)),
        ("test", f"{test}, for pytest"),
        ("inspect it", f"autotile space {space}"),
        ("tune it", f"autotile tune {space} N=16777216"),
    ]
    document = {"name": name, "source": str(source), "space": str(space), "test": str(test)}
    return Written(space, f"{name}: {source}, {space}, {test}", [facts], document)
