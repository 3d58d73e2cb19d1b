"""Tuning by a search of the caller's own: sessions that are asked, told, and made to evaluate configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from msgspec import Meta

from autotile.api.keywords import read_keywords
from autotile.api.targets import complete_config, open_problem
from autotile.api.tuning import checked_options
from autotile.core.argument_types import check_value, checked
from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Problem, Trial, Value, config_key
from autotile.core.text import Result, device_text, plural, time_text
from autotile.errors import InputError
from autotile.kernel.library import KernelName
from autotile.kernel.spec import KernelSpec
from autotile.serving.dispatcher import forget_served
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions, check_whole
from autotile.tuning.result import TuneResult
from autotile.tuning.session import Session, open_session

MAX_ASKED = 1000
"""Maximum number of configurations of one call."""
_Time = Annotated[float, Meta(ge=1e-6, le=1e15, description="a positive number of microseconds")]
"""Bounds as of stored times."""


class TuningSession(Result):
    """A tuning session that the caller's own search drives; from `autotile.session`.

    Configurations are compiled, verified against the reference, measured and stored as in `autotile.tune`. `finish`
    races the best of them and names the winner, which is served from then on. Leaving a ``with`` block finishes the
    session, unless an exception left it.

    A configuration may leave parameters out, which then have their default values.
    """

    def __init__(self, session: Session, spec: KernelSpec, problem: Problem, resources: ExitStack) -> None:
        self._session = session
        self._spec = spec
        self._problem = problem
        self._resources = resources
        self._result: TuneResult | None = None
        self._is_open = True

    @property
    def problem(self) -> Problem:
        """Problem that is tuned."""
        return self._problem

    @property
    def device(self) -> DeviceProperties:
        """Device that the configurations run on."""
        return self._session.device

    @property
    def parameters(self) -> Mapping[str, tuple[Value, ...]]:
        """Values of each parameter."""
        return {parameter.name: parameter.values for parameter in self._spec.parameters}

    @property
    def default(self) -> Config:
        """The default configuration."""
        return self._spec.default

    @property
    def combinations(self) -> int:
        """Number of combinations of the parameters' values."""
        return self._session.space.combinations

    @property
    def valid(self) -> int:
        """Number of configurations that meet the rules, the heuristics and the limits of the device."""
        return len(self._session.space)

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

    @property
    def result(self) -> TuneResult | None:
        """Result of the session; None before it is finished."""
        return self._result

    @checked
    def ask(self, n: int = 1) -> list[Config]:
        """Return configurations that autotile proposes, the default first; fewer than ``n`` if no others are left.

        Pass them to `evaluate`, or to `tell` with a time of your own.

        Raises
        ------
        InputError
            ``n`` is not from 1 to 1000, or the session is closed.
        """
        self._check_open()
        check_whole("n", n, 1)
        if n > MAX_ASKED:
            raise InputError(f"n is {n}, expected at most {MAX_ASKED}")
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
        self._check_open()
        given = [configs] if isinstance(configs, Mapping) else list(configs)
        for config in given:
            check_value("a configuration", config, Mapping[str, Any])
        completed = [complete_config(self._spec, config) for config in given]
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
            The configuration is not valid, the time is not a positive number, or the session is closed.
        """
        self._check_open()
        self._session.tell(complete_config(self._spec, config), None if time_us is None else float(time_us))

    def finish(self) -> TuneResult:
        """Race the best configurations and the default, store the winner, and close the session.

        Returns
        -------
        TuneResult
            As from `autotile.tune`. A second call returns the same.
        """
        if self._result is None:
            self._check_open()
            self._is_open = False
            with self._resources:
                self._result = self._session.finish()
            forget_served()  # the next get_best_kernel reads the database again
        return self._result

    def close(self) -> None:
        """Close the session without a result; its trials are stored. Closing twice is harmless."""
        if self._is_open:
            self._is_open = False
            with self._resources:
                self._session.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._is_open:
            self.finish()
        else:
            self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise InputError("the session is closed; open another with autotile.session")

    def _headline(self) -> str:
        best = self.best
        tried = f"{plural(len(self.trials), 'trial')}, best {time_text(best.time_us if best is not None else None)}"
        return f"{self._problem} on {device_text(self.device)}: {'open' if self._is_open else 'closed'}, {tried}"


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
        opened = stack.enter_context(open_session(loaded, problem, read_settings(), chosen))
        opened.begin()
        return TuningSession(opened, loaded.spec, problem, stack.pop_all())
