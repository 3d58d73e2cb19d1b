"""Tuning of problems, families and operations, also by a search of the caller's own; recording of search spaces."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from msgspec import Meta

from autotile.api.progress import observing
from autotile.api.targets import (
    check_device_index,
    check_gpu,
    checked_options,
    complete_config,
    forgetting_served,
    open_problem,
    read_keywords,
    serving_call,
    sizes_notice,
    tune_loaded_operation,
    tune_problem,
)
from autotile.core.argument_types import check_value, checked
from autotile.core.model import OBJECTIVES, TIME, Config, Problem, Trial, config_key, split_objectives
from autotile.core.text import Result, device_text, plural, time_text
from autotile.database.paths import check_output
from autotile.errors import InputError
from autotile.kernel.library import KernelName, held_kernel, load_kernel
from autotile.kernel.operation import named_operation
from autotile.kernel.problem import resolve_problem
from autotile.kernel.spec import KernelSpec
from autotile.settings import absolute_path, read_settings, user_path
from autotile.tuning import session as sessions
from autotile.tuning.options import FamilyPlan, TuneOptions, check_whole
from autotile.tuning.progress_state import Observer
from autotile.tuning.result import TuneResult

if TYPE_CHECKING:
    from autotile.api.plans import PlanResult
    from autotile.tuning.family_session import FamilyResult
    from autotile.tuning.operation_family import OperationFamilyResult
    from autotile.tuning.operation_session import OperationResult
    from autotile.tuning.plan import TuningPlan
    from autotile.tuning.result import Recorded

FamilySize = int | str | Sequence[int] | range
"""Sizes of a family: a number, several numbers, a range, or text such as ``"1..8192"``."""
MAX_ASKED = 1000
"""Configurations of one call of a session that the caller drives, at most."""
_Time = Annotated[float, Meta(ge=1e-6, le=1e15, description="a positive number of microseconds")]
"""Bounds as of stored times."""


@checked
def tune(
    kernel: KernelName | None = None,
    sizes: Mapping[str, FamilySize] | None = None,
    /,
    *,
    dtype: str | None = None,
    misses: bool = False,
    plan: TuningPlan | str | Path | None = None,
    points: int | None = None,
    max_configs: int | None = None,
    search: Callable[[TuningSession], object] | None = None,
    device: int | str | Sequence[int | str] | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
    observe: Observer | None = None,
    announce: Callable[[str], None] | None = None,
    **named: Any,
) -> TuneResult | OperationResult | FamilyResult | OperationFamilyResult | PlanResult:
    """Find the fastest configuration, verify it, and keep it.

    The space is searched for valid configurations only; each one tried is compiled, verified against a float64
    reference, measured and stored. The best of them are measured again side by side with the default. A second run goes
    on where an interrupted one stopped.

    Of a family (M=1..8192), a few problems are tuned, and what to serve for all is learned from them; ``trials`` is for
    each of them. The kernels of an operation, such as matmul, share ``budget`` or ``trials``; the best of them are
    raced with the libraries that compute it.

    Parameters
    ----------
    kernel
        Name of a kernel or an operation, or path of its file. Or a kernel from `autotile.kernel`.
    sizes
        Problem sizes and flags, such as M=4096 TRANS_A=1; ranges (M=1..8192) and lists (K=4096,7168) are a family of
        problems. In Python, a list of numbers and a ``range``, too. None for those in the search-space file.
    **named
        Sizes and flags by name, such as ``M=4096``, and options by the names that they have below or in `TuneOptions`,
        which take the place of those of ``options``. A name that the kernel has a size of is that size.
    dtype
        Element type, one of the kernel's. None for the kernel's first.
    misses
        Tune what programs asked for and could not be served exactly.
    plan
        Tune all problems of a plan, of `autotile export --format plan`; those that are tuned are left out.
    points
        Problems of a family to tune.
    max_configs
        Configurations of a family's rule.
    search
        Search in place of autotile's: a function of the open session, see `autotile.session`.
    device
        GPU to run on: the name or the index of a GPU of this machine. In Python, also ``"all"``, or a sequence of GPUs
        of one model, which share the session; that of ``options`` if none is given. None for the first.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.
    options
        Options of the session; None for the defaults.
    progress
        True to show a line of progress on a terminal or in a notebook; False to show nothing; or a callable, called
        with a `Progress` as the session proceeds.
    observe
        Callable that takes the place of ``progress``.
    announce
        Called with each remark before the session; None to have them in the result.

    Other Parameters
    ----------------
    tries : list of configurations
        A configuration to try first and race in the finals; parameters left out have their defaults. May be given
        again.
    trials : int
        Stop when the study holds this many trials, those of earlier sessions included. None for 200, or as many as
        ``budget`` or ``until`` allows.
    budget : str or float
        Wall time of the search, such as 90s, 5m or 1h. None for none.
    until : str or float
        Stop when the last 256 candidates were together expected to gain less than this, such as 1%. None for none.
    spend : bool, default False
        Go on to the end of the budget when nothing more is expected from it.
    sampler : str, default 'auto'
        Search method: feasible, tpe, random, brute-force and others.
    objective : list of str
        What to minimise beside time: registers, energy or error; or an expression instead of it, such as 'time_us /
        STEPS'. May be given again. None for time alone.
    maximize : bool, default False
        Maximise the expression of ``objective``.
    seed : int, default 0
        Seed of the search; equal seeds search alike.
    transfer : bool, default True
        Learn from the kernel's trials at other sizes and on other GPUs.
    fresh : bool, default False
        Measure again what is stored already.
    l2 : {'cold', 'hot'}, default 'cold'
        Whether inputs start in memory or in the L2 cache.
    finals : int, default 12
        Best candidates re-measured interleaved at the end; 0 for none.
    precision : str or float, default '0.5%'
        The finals end when the ratios of the best times are known to this.
    verify_problem : list of sizes
        One more problem that every configuration must be right on; sizes left out are the tuned ones. May be given
        again. None for the tuned problem and a ragged one.
    sanitize : bool, default False
        Run the finalists under compute-sanitizer; none with a fault can win.
    replay : str
        Replay launches from a recording; without a file, from a built-in one. None for only where there is no GPU.
    workers : int
        Compile processes, at most two a core. None for one a core.
    devices : str
        GPUs that share the work: all of this machine, or those of the given indices. None for one, see ``device``.
    scheduler : str, default ''
        Run on the GPUs that `autotile worker` offers to this scheduler; ``device`` names their model. None for this
        machine's GPU.
    insecure : bool, default False
        Allow a scheduler of another machine without TLS.
    captured : str
        Tune on the arguments of a captured call.
    trace : str
        Write a timeline of the session, for ui.perfetto.dev.

    Returns
    -------
    TuneResult, OperationResult, FamilyResult, OperationFamilyResult or PlanResult
        Winner and default, the ratio of their times with its interval, and the numbers of rejected configurations; of
        an operation, the winner among its kernels and libraries, and what each of them reached; of a family, the rule
        and its loss at each tuned problem; of misses and plans, what became of each problem.

    Raises
    ------
    InputError
        The kernel, a size, the dtype, the device or an option is invalid, the space is empty, or the database cannot
        be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    WorkerError
        The GPU worker died repeatedly.

    Examples
    --------
    >>> result = tune("sgemm_2d", M=4096, N=4096, K=4096, budget="5m")  # doctest: +SKIP
    >>> result.winner.config  # doctest: +SKIP
    {'BM': 128, 'BN': 128, ...}
    """
    given, chosen = read_keywords(kernel, sizes, named, options, device=device, database=database)
    is_family = any(
        isinstance(size, list | tuple | range) or (isinstance(size, str) and (".." in size or "," in size))
        for size in given.values()
    )
    if is_family or misses or plan is not None:
        for option, is_given in (
            ("--trace", chosen.trace is not None),
            ("--try", bool(chosen.tries)),
            ("--ask-tell", search is not None),
            ("--captured", chosen.captured is not None),
            ("--objective", is_family and (chosen.objectives != (TIME,) or chosen.maximize)),
            ("--verify-problem", is_family and bool(chosen.verify_sizes)),
        ):
            if is_given:
                raise InputError(f"{option} is of one session; use it with one problem")
    if not is_family and (points is not None or max_configs is not None):
        raise InputError("--points and --max-configs are of families of sizes; give a range such as M=1..8192")
    if search is not None and _differ(chosen, "sampler", "trials", "budget_s", "until", "spend"):
        raise InputError(
            "--sampler, --trials, --budget, --until and --spend are of autotile's own search; leave them out"
        )
    shown = observe or progress
    announced: Any = {} if announce is None else {"announce": announce}
    if plan is not None:
        if kernel is not None or given or dtype is not None or misses:
            raise InputError("--plan states its kernels, sizes and dtypes; leave them and --misses out")
        from autotile.api.plans import tune_plan

        with observing(shown) as observer:
            return tune_plan(plan, chosen, observer)
    if misses:
        if given or dtype is not None:
            raise InputError("--misses takes its sizes from the database, with their dtypes; leave them out")
        from autotile.api.plans import tune_misses

        return tune_misses(kernel, options=chosen, progress=shown, **announced)
    if chosen.captured is not None:
        if given or dtype is not None:
            raise InputError("--captured takes the sizes and the dtype from the call; leave them out")
        from autotile.kernel.inputs import call_folder, kernel_of_call, read_captured_call

        path = call_folder(absolute_path(user_path(chosen.captured, "a captured call"), "a captured call"))
        call = read_captured_call(path)
        kernel, given, dtype = kernel or kernel_of_call(call), dict(call.sizes), call.dtype
        chosen = replace(chosen, captured=str(path), fresh=True)
    if kernel is None:
        raise InputError("no kernel is named; expected `autotile tune KERNEL SIZE=N ...`, or `autotile tune --misses`")
    if is_family:
        limits: Any = {"points": points, "max_configs": max_configs}
        return tune_family(kernel, given, dtype=dtype, options=chosen, progress=shown, **announced, **limits)
    operation = named_operation(kernel)
    if operation is not None:
        _check_no_session_options(kernel, chosen, search)
        problem = operation.resolve(given, dtype, defaults=True)
    else:
        loaded, problem = open_problem(kernel, given, dtype)
    notice = sizes_notice(operation or loaded.spec, problem.sizes, given)
    assumed: list[str] = []
    if notice:
        (announce or assumed.append)(notice)
    served: Mapping[str, int] = problem.sizes
    if operation is not None:
        with observing(shown) as observer, forgetting_served():
            found: Any = tune_loaded_operation(operation, problem, chosen, observer)
        served = {name: size for name, size in served.items() if name not in operation.conditions or name in given}
    else:
        if len(chosen.devices) > 1 or chosen.scheduler:
            from autotile.api.plans import has_several_models, tune_plan
            from autotile.tuning.plan import PlannedProblem, TuningPlan

            if has_several_models(chosen):  # their times are studies of their own
                _check_no_session_options(kernel, chosen, search)
                planned = TuningPlan(
                    loaded.name, (PlannedProblem(loaded.name if held_kernel(kernel) else str(kernel), loaded, problem),)
                )
                with observing(shown) as observer:
                    return tune_plan(planned, chosen, observer)
        if search is not None:
            with session(loaded, problem.sizes, dtype=problem.dtype, options=chosen) as opened:
                search(opened)
            found = opened.finish()
        else:
            with observing(shown) as observer, forgetting_served():
                found = tune_problem(loaded, problem, chosen, observer)
    line = serving_call(kernel, replace(problem, sizes=served), dtype=dtype, database=chosen.database)
    result: TuneResult | OperationResult = replace(found, call=line, notices=(*assumed, *found.notices))
    return result


def _differ(options: TuneOptions, *names: str) -> bool:
    """Return True if some options have other values than they have by default."""
    return any(getattr(options, name) != getattr(TuneOptions(), name) for name in names)


def _check_no_session_options(name: KernelName, options: TuneOptions, search: object) -> None:
    if options.tries or options.trace is not None or search is not None:
        raise InputError(f"--try, --ask-tell and --trace are of one kernel's session, and {name} is an operation")


@checked
def tune_family(
    kernel: KernelName,
    sizes: Mapping[str, FamilySize] | None = None,
    /,
    *,
    dtype: str | None = None,
    plan: FamilyPlan | None = None,
    points: int | None = None,
    max_configs: int | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
    observe: Observer | None = None,
    announce: Callable[[str], None] = lambda _: None,
    **named: Any,
) -> FamilyResult | OperationFamilyResult:
    """Tune a few problems of a family, learn a rule from them that serves all others, and store it.

    Of an operation, many configurations of all its kernels are measured at many problems, and a model of time is
    learned that chooses among them and the libraries.

    Parameters
    ----------
    kernel
        Name of a kernel or an operation, path of a search-space or operation file, or a kernel from `autotile.kernel`.
    sizes
        The family: for each size a number, a list of numbers, a ``range``, or text such as ``"1..8192"``; missing ones
        are taken from the search-space file.
    **named
        Sizes and options by name, as for `tune`.
    dtype
        Element type; None for the kernel's first.
    plan
        Number of problems to tune, and of configurations that the rule chooses from; None for the defaults.
    points, max_configs
        As in ``plan``, in place of its values.
    device, database, progress, observe, announce
        As for `tune`.
    options
        Options of each session; None for the defaults. ``budget_s`` is the wall time of all sessions together.

    Returns
    -------
    FamilyResult or OperationFamilyResult
        The rule, and its loss at each tuned problem; of an operation, how well the model chooses.

    Raises
    ------
    InputError
        The family cannot be read or covered, an option does not apply to families, or as for `tune`.
    ToolchainError, WorkerError
        As for `tune`.

    Examples
    --------
    >>> result = tune_family("sgemm_2d", M="1..8192", N=4096, K=[4096, 7168])  # doctest: +SKIP
    >>> result.rule.mean_held_out  # doctest: +SKIP
    0.021
    """
    from autotile.families.family import extent_text, family_of

    given, chosen = read_keywords(kernel, sizes, named, options, device=device, database=database)
    limits = {name: value for name, value in (("points", points), ("max_configs", max_configs)) if value is not None}
    operation = named_operation(kernel)
    if operation is not None:
        if limits:
            raise InputError(f"--points and --max-configs are of a kernel's family, and {kernel} is an operation")
        if plan is not None:
            raise InputError("a plan is of a kernel's family; of an operation's, trials is the number of problems")
        announce(sizes_notice(operation, operation.sizes, given))
        of_sessions = ("sampler", "until", "spend", "transfer", "fresh", "only", "tries", "verify_sizes")
        if _differ(chosen, *of_sessions, "objectives", "maximize", "finals", "precision", "sanitize"):
            raise InputError("a family of an operation takes only a budget, a number of problems, and a seed")
        check_gpu(chosen)
        element_type = operation.resolve({}, dtype, defaults=True).dtype
        from autotile.serving.operations import libraries_for
        from autotile.tuning import operation_family

        words = [f"{name}={extent_text(name, size)}" for name, size in given.items()]
        of = operation, operation_family.operation_family(operation, words, element_type), element_type
        with observing(observe or progress) as observer, forgetting_served():
            return operation_family.tune_operation_family(
                *of, read_settings(), chosen, libraries=libraries_for(operation), observe=observer
            )
    from autotile.tuning import family_session

    loaded = load_kernel(kernel)
    family = family_of(loaded.spec, given)
    problem = resolve_problem(loaded.spec, family.largest, dtype)
    announce(sizes_notice(loaded.spec, family.largest, given))
    objectives, expression = split_objectives(chosen.objectives, [*loaded.spec.metrics])
    is_time = {expression, chosen.objective} <= {None, OBJECTIVES[TIME]} and objectives == (TIME,)
    chosen = replace(chosen, objectives=objectives, objective=None)
    if not is_time or loaded.spec.objective is not None or chosen.verify_sizes or chosen.only is not None:
        raise InputError("a family is tuned for time, at points of its own; leave other objectives and problems out")
    check_gpu(chosen)
    limited = replace(plan or FamilyPlan(), **limits)
    with observing(observe or progress) as observer, forgetting_served():
        found = family_session.tune_family(
            loaded, family, problem.dtype, read_settings(), chosen, plan=limited, observe=observer
        )
    largest = replace(problem, sizes=family.largest)
    return replace(found, call=serving_call(kernel, largest, dtype=dtype, database=chosen.database))


@checked
def record(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    output: str | Path | None = None,
    sample: int | None = None,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
    observe: Observer | None = None,
    **named: Any,
) -> Recorded:
    """Measure a whole search space on a GPU, and write a recording that sessions replay without one.

    Parameters
    ----------
    kernel, sizes, dtype, device, database, progress, observe, **named
        As for `tune`.
    output
        File or folder to write to; None for the current folder, under a name made from the problem and the GPU.
    sample
        Number of configurations to measure, drawn at random; None for all.
    options
        Options of the session; the number of trials, the sampler and the finals are fixed here.

    Returns
    -------
    Recorded
        The recording; its ``path`` is None if the user interrupted, and the same call resumes.

    Raises
    ------
    InputError
        As for `tune`; or there is no GPU, or the file cannot be written.
    ToolchainError, WorkerError
        As for `tune`.
    """
    given, chosen = read_keywords(kernel, sizes, named, options, device=device, database=database)
    loaded, problem = open_problem(kernel, given, dtype)
    path = user_path(Path() if output is None else output, "a recording")
    check_output(path / f"{loaded.name}.npz" if path.is_dir() else path, makes_folder=True)
    check_device_index(chosen.device_index)
    with observing(observe or progress) as observer:
        return sessions.record(loaded, problem, read_settings(), chosen, sample=sample, output=path, observe=observer)


class TuningSession(Result):
    """A tuning session that the caller's own search drives; from `autotile.session`.

    Configurations are compiled, verified against the reference, measured and stored as in `autotile.tune`. `finish`
    races the best of them and names the winner, which is served from then on. Leaving a ``with`` block finishes the
    session, unless an exception left it.

    A configuration may leave parameters out, which then have their default values. Calls of several threads take turns;
    one call that evaluates several configurations compiles them in parallel.

    Attributes
    ----------
    problem, device
        Problem that is tuned, and device that the configurations run on.
    parameters, default
        Values of each parameter, and the default configuration.
    combinations
        Number of combinations of the parameters' values.
    valid
        Number of configurations that meet the rules, the heuristics and the limits of the device.
    result
        Result of the session; None before it is finished.
    """

    def __init__(self, session: sessions.Session, spec: KernelSpec, problem: Problem, resources: ExitStack) -> None:
        self._session, self._spec, self._resources, self._is_open = session, spec, resources, True
        self._process, self._lock = os.getpid(), threading.RLock()
        self.problem, self.device = problem, session.device
        self.parameters = {parameter.name: parameter.values for parameter in spec.parameters}
        self.default: Config = spec.default
        self.combinations, self.valid = session.space.combinations, len(session.space)
        self.result: TuneResult | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks about the session, one line each, such as that launches are replayed."""
        return self._session.notices

    @property
    def trials(self) -> list[Trial]:
        """Newest trial of each configuration, including those of earlier sessions of the study."""
        return self._session.trials

    @property
    def best(self) -> Trial | None:
        """The fastest trial that was verified; None where there is none."""
        return self._session.best

    @checked
    def ask(self, n: int = 1) -> list[Config]:
        """Return configurations that autotile proposes, the default first; fewer than ``n`` if no others are left.

        Pass them to `evaluate`, or to `tell` with a time of your own.

        Raises
        ------
        InputError
            ``n`` is not from 1 to 1000, or the session is closed.
        """
        check_whole("n", n, 1)
        if n > MAX_ASKED:
            raise InputError(f"n is {n}, expected at most {MAX_ASKED}")
        with self._turn():
            return self._session.ask(n)

    @checked
    def evaluate(self, configs: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Trial]:
        """Compile, verify, measure and store configurations; return a trial for each, in their order.

        Several are compiled in parallel. An invalid configuration has the outcome ``infeasible`` and a reason, and is
        not stored; one that has a trial in the study is not run again.

        Parameters
        ----------
        configs
            One configuration, or several.

        Raises
        ------
        ConfigError
            A name is not a parameter, or a value has another type than the parameter.
        InputError
            The session is closed.
        WorkerError
            The GPU worker died repeatedly.
        """
        given = [configs] if isinstance(configs, Mapping) else list(configs)
        for config in given:
            check_value("a configuration", config, Mapping[str, Any])
        completed = [complete_config(self._spec, config) for config in given]
        with self._turn():
            found = {config_key(trial.config): trial for trial in self._session.evaluate(completed)}
        return [found[config_key(config)] for config in completed]

    @checked
    def tell(self, config: Mapping[str, Any], time_us: _Time | None) -> None:
        """Tell the sampler of `ask` a time that was measured elsewhere.

        It steers the proposals only: it is neither stored nor served. What `evaluate` measures is known already.

        Parameters
        ----------
        config
            A valid configuration.
        time_us
            Its time in microseconds; None if it does not work.

        Raises
        ------
        InputError
            The configuration is not valid, the time is not a positive number or is not all that the session's objective
            needs, or the session is closed.
        """
        self.tell_all([(config, time_us)])

    @checked
    def tell_all(self, results: Iterable[tuple[Mapping[str, Any], float | None]]) -> None:
        """Tell several configurations with their times, as `tell` does; if one is refused, none is told."""
        told = list[tuple[Config, float | None]]()
        for config, time_us in results:
            check_value("time_us", time_us, _Time | None)
            told.append((complete_config(self._spec, config), None if time_us is None else float(time_us)))
        with self._turn():
            self._session.tell(told)

    def finish(self) -> TuneResult:
        """Race the best configurations and the default, store the winner, and close the session.

        Returns
        -------
        TuneResult
            As from `autotile.tune`. A second call returns the same.
        """
        if self.result is None:
            with self._turn(finishes=True), forgetting_served(), self._resources:
                if self.result is None:  # nor has another thread finished it meanwhile
                    self._is_open = False
                    self.result = self._session.finish()
        return self.result

    def close(self) -> None:
        """Close the session without a result; its trials are stored. Closing twice is harmless."""
        if os.getpid() != self._process:  # a forked child leaves it to its parent
            return
        with self._lock:
            if self._is_open:
                self._is_open = False
                with self._resources:
                    self._session.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._is_open:
            self.finish()
        else:
            self.close()

    @contextmanager
    def _turn(self, *, finishes: bool = False) -> Iterator[None]:
        """Use the session, which one thread does at a time."""
        if os.getpid() != self._process:  # whose trials the parent would miss, and whose answers it would read
            raise InputError("the session is of the process that forked this one; use it there, or open another one")
        with self._lock:
            if not (self._is_open or (finishes and self.result)):
                raise InputError("the session is closed; open another with autotile.session")
            yield

    def _headline(self) -> str:
        best = self.best
        tried = f"{plural(len(self.trials), 'trial')}, best {time_text(best.time_us if best is not None else None)}"
        return f"{self.problem} on {device_text(self.device)}: {'open' if self._is_open else 'closed'}, {tried}"


@checked
def session(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    **named: Any,
) -> TuningSession:
    """Open a tuning session that a search of the caller's own drives.

    Parameters
    ----------
    kernel, sizes, dtype, device, database, options, **named
        As for `autotile.tune`; of the options, those that end a search have no effect. With ``discard=False``, slow
        configurations are measured as long as fast ones.

    Raises
    ------
    InputError, ToolchainError
        As for `autotile.tune`.

    Examples
    --------
    >>> with session("sgemm_2d", M=4096, N=4096, K=4096) as tuning:  # doctest: +SKIP
    ...     for config in my_search(tuning.evaluate):
    ...         (trial,) = tuning.evaluate(config)
    ...         print(trial.time_us, trial.reason)
    >>> tuning.result.winner.config  # doctest: +SKIP
    {'BM': 128, 'BN': 128, ...}
    """
    given, chosen = read_keywords(kernel, sizes, named, options, device=device, database=database)
    loaded, problem = open_problem(kernel, given, dtype)
    chosen = checked_options(loaded, problem, chosen)
    with ExitStack() as stack:
        opened = stack.enter_context(sessions.open_session(loaded, problem, read_settings(), chosen))
        opened.begin()
        return TuningSession(opened, loaded.spec, problem, stack.pop_all())
