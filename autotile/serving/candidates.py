"""Stored results that a problem may be served from: the user's own, those that ship with autotile, and a bundle's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.forks import FORK_LOCK
from autotile.core.model import Config, Problem, config_key
from autotile.cuda.function import PackedCubin
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.fast_access import (
    SERVER_TIMEOUT_S,
    file_signature,
    read_checks_fast,
    read_digested_rows_fast,
    read_model_fast,
    read_rules_fast,
    read_winner_fast,
    read_winners_fast,
)
from autotile.database.keys import TuningKey, key_differences, key_of
from autotile.database.paths import looks_like_url
from autotile.database.winners import Check, StoredRule, Winner
from autotile.errors import BundleError, DatabaseError, DataError, NotTunedError, ToolchainError
from autotile.exchange.bundle import FALLBACK, Bundle, BundledCubin, BundledKernel
from autotile.exchange.shipped import shipped_model, shipped_rules, shipped_winners
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_device, runs_on
from autotile.serving.choice import Choice, choose, choose_stored
from autotile.serving.recent_cache import RecentCache

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.families.operation_model import OperationModel
    from autotile.serving.bound import BoundKernel


Result = TypeVar("Result")

_FINALISTS: RecentCache[tuple[object, ...], Mapping[str, Winner]] = RecentCache(256)
"""Finalists of studies, by the state of the database's file."""


class Candidates:
    """Stored results of a kernel.

    A database that is missing or cannot be read counts as empty.

    Parameters
    ----------
    location
        Path or URL of the user's database.
    problem
        The problem; results of its kernel and dtype are read, whatever their sizes.

    Attributes
    ----------
    fault
        Reason why the database could not be read; empty if it was read or there is none.
    """

    def __init__(self, location: str, problem: Problem) -> None:
        self.fault = ""
        self._location = location
        self._kernel = problem.kernel
        self._dtype = problem.dtype
        self._winners: list[Winner] | None = None

    def choose(self, kernel: Kernel, problem: Problem, device: DeviceProperties, nvrtc_version: str) -> Choice:
        """Return what `autotile.serving.choice.choose` does among all stored results.

        The user's own result of exactly this problem precedes all others, and is looked up by its key, which takes as
        long in a large database as in a small one.
        """
        requested = key_of(kernel, problem, device, nvrtc_version=nvrtc_version, l2_mode="cold")
        found = choose_stored(kernel, problem, device, nvrtc_version, self._exact(requested))
        if found is not None:
            return found
        return choose(
            kernel,
            problem,
            device,
            nvrtc_version,
            self.winners(),
            rules=self.rules(),
            checks=self.checks,
            finalists=self.finalists,
        )

    def _exact(self, requested: TuningKey) -> list[Winner]:
        """Return the user's winner of the study of a key, if there is one."""
        if self._winners is not None:
            return [winner for winner in self._winners if winner.key == requested and not winner.shipped]
        own = read_winner_fast(self._location, requested.digest)
        return own if own is not None else self._read(lambda found: [*filter(None, [found.winner(requested)])])

    def winners(self) -> list[Winner]:
        """Return the user's winners, then the shipped ones."""
        if self._winners is None:
            self._winners = self._read_winners()
        return self._winners

    def _read_winners(self) -> list[Winner]:
        own = read_winners_fast(self._location, self._kernel, self._dtype)
        if own is None:
            own = self._read(lambda found: found.winners(self._kernel, self._dtype))
        return [*own, *shipped_winners(self._kernel, self._dtype)]

    def checks(self) -> list[Check]:
        """Return the user's verdicts on configurations that are not ranked, oldest first."""
        own = read_checks_fast(self._location, self._kernel, self._dtype)
        return own if own is not None else self._read(lambda found: found.checks(self._kernel, self._dtype))

    def finalists(self, winner: Winner, configs: Sequence[Config]) -> Mapping[str, Winner]:
        """Return the newest result of each finalist of the study of one of the user's winners, and of other configs.

        Parameters
        ----------
        winner
            The winner.
        configs
            Configurations whose results are read even if they are no finalists.

        Returns
        -------
        mapping
            Results by `config_key`. They are kept until the file changes, so that look-ups of new sizes share them.
        """
        digest = winner.key.digest
        keys = [config_key(config) for config in configs]
        signature = file_signature(self._location)  # none of a server's database
        known = self._location, digest, *keys, signature
        if signature is not None and (found := _FINALISTS.get(known)) is not None:
            return found
        newest: dict[str, Winner] = {}
        for key in keys:
            if key in newest:
                continue
            rows = read_digested_rows_fast(self._location, digest, key)
            with suppress(DataError):
                for row in rows if rows is not None else self.digested_rows(digest, key):
                    each = Winner.from_row(row, winner.device)
                    newest.setdefault(config_key(each.config), each)
        return newest if signature is None else _FINALISTS.keep(known, newest)

    def rules(self) -> Iterator[StoredRule]:
        """Yield the rules of the kernel's families: the user's, newest first, then the shipped ones."""
        own = read_rules_fast(self._location, self._kernel, self._dtype)
        yield from own if own is not None else self._read(self._rules_of)
        yield from shipped_rules(self._kernel, self._dtype)

    def digested_rows(self, study: str, config: str) -> list[dict[str, Any]]:
        """Return what `read_digested_rows_fast` does, of a database that it does not apply to."""
        return self._read(lambda found: found.digested_rows(study, config))

    def _rules_of(self, database: Database) -> list[StoredRule]:
        from autotile.database.learned_store import FamilyStore

        return FamilyStore(database).rules(self._kernel, self._dtype)

    def _read(self, read: Callable[[Database], list[Result]]) -> list[Result]:
        """Read a database that fast reads do not apply to; return nothing if it does not exist or cannot be read."""
        if self.fault:  # rather than wait for a server once more
            return []
        from autotile.database.database import Database

        try:
            with FORK_LOCK:
                database = Database.open_readonly(self._location, server_timeout_s=SERVER_TIMEOUT_S)
                if database is None:
                    return []
                with database:
                    return read(database)
        except DatabaseError as error:
            self.fault = str(error)
            return []


def model_of(location: str, operation: str, dtype: str, gpu_name: str) -> OperationModel | None:
    """Return the model of times of an operation on a GPU: the user's own, else the one that ships; None without one.

    A model that cannot be read counts as none, and so does one of the user's that an earlier version learned, whose
    configurations were not verified at ragged sizes.
    """
    own = read_model_fast(location, operation, dtype, gpu_name)
    if own is None and looks_like_url(location):
        own = _model_of_server(location, operation, dtype, gpu_name)
    if own is not None:
        from autotile.families.operation_model import OperationModel

        with suppress(DataError):
            if (model := OperationModel.from_json(own)).verified:
                return model
    return shipped_model(operation, dtype, gpu_name)


def _model_of_server(location: str, operation: str, dtype: str, gpu_name: str) -> Any:
    from autotile.database.database import Database
    from autotile.database.learned_store import read_models

    try:
        with FORK_LOCK:
            database = Database.open_readonly(location, server_timeout_s=SERVER_TIMEOUT_S)
            if database is None:
                return None
            with database:
                found = read_models(database, operation, dtype, gpu_name)
                return found[0].document if found else None
    except DatabaseError:
        return None


def choose_bundled(
    bundle: Bundle, bundled: BundledKernel, problem: Problem, device: DeviceProperties
) -> tuple[Choice, PackedCubin]:
    """Return the best configuration of which a bundle holds a cubin for a device, as `autotile.serving.choice` ranks.

    Raises
    ------
    BundleError
        There is none: the cubins are for another architecture, dtype or flags, or none is valid for these sizes; or the
        cubin is damaged.
    DeviceError
        The kernel does not support the device.
    """
    check_device(bundled.kernel.spec, device)
    cubins = _loadable(bundle, bundled, problem, device)
    stored = [
        replace(winner, resources=cubins[key].resources)
        for winner in bundled.winners
        if (key := config_key(winner.config)) in cubins
    ]
    rules = [rule for rule in bundled.rules if all(config_key(one.config) in cubins for one in rule.rule.configs)]
    choice = choose(
        bundled.kernel,
        problem,
        device,
        bundled.nvrtc_version,
        stored,
        rules=rules,
        estimates=False,
        compares=config_key(bundled.kernel.spec.default) in cubins,
        bundled=True,
    )
    cubin = cubins.get(config_key(choice.config))
    if cubin is None:
        raise BundleError(
            f"{bundle.path} holds no configuration of {bundled.kernel.name} that is valid for {problem} on "
            f"{device.name}; tune that problem and make the bundle again. {FALLBACK}"
        )
    bundle.read(cubin.member)  # so that damage is reported while the program can still do without the bundle
    packed = PackedCubin(cubin.resources, partial(bundle.read, cubin.member), cubin.symbols)
    origin = f"{bundle.path}, compiled for {cubin.target} with NVRTC {bundled.nvrtc_version}"
    return replace(choice, packed=origin), packed


def _loadable(
    bundle: Bundle, bundled: BundledKernel, problem: Problem, device: DeviceProperties
) -> Mapping[str, BundledCubin]:
    """Return the cubins that run on the device, by configuration; for each, the one of the nearest architecture."""
    running = [cubin for cubin in bundled.cubins if runs_on(cubin.target, device.compute_capability)]
    if not running:
        targets = ", ".join(sorted({cubin.target for cubin in bundled.cubins}))
        raise BundleError(
            f"{bundle.path} holds {bundled.kernel.name} for {targets}, which does not run on {device.name} "
            f"({device.architecture}); make the bundle with --arch {device.architecture}. {FALLBACK}"
        )
    flags = {name: problem.sizes[name] for name in bundled.kernel.spec.compiled_names}
    fitting = [cubin for cubin in running if cubin.dtype == problem.dtype and dict(cubin.flags) == flags]
    if not fitting:
        raise BundleError(
            f"{bundle.path} holds {bundled.kernel.name} compiled for {_variants(running)}, but {problem} is requested; "
            f"tune such a problem and make the bundle again. {FALLBACK}"
        )
    return {config_key(cubin.config): cubin for cubin in sorted(fitting, key=lambda cubin: _target_rank(cubin.target))}


def _target_rank(target: str) -> tuple[int, bool]:
    return int(target.strip("sm_a")), target.endswith("a")


def _variants(cubins: Sequence[BundledCubin]) -> str:
    found = {" ".join([cubin.dtype, *(f"{name}={value}" for name, value in cubin.flags.items())]) for cubin in cubins}
    return ", ".join(sorted(found))


_FALLBACK_PROFILE = "h200"
"""Device to serve for if there is no GPU and nothing is tuned: the one that the recordings are of."""


def absent_device(name: str | None, stored: list[Winner]) -> DeviceProperties:
    """Return a device to inspect: the named one, else that of the user's newest result, measured before replayed."""
    own_first = sorted(stored, key=lambda best: (best.shipped, best.key.source != "cuda"))
    tuned = [best.device for best in own_first if best.device is not None]
    if name is None:
        return tuned[0] if tuned else device_profile(_FALLBACK_PROFILE)
    by_name = {device.name.lower(): device for device in reversed(tuned)}
    if name.lower() in by_name:
        return by_name[name.lower()]
    profile = device_profile(name)
    return by_name.get(profile.name.lower(), profile)


def nvrtc_of(read_stored: Callable[[], Sequence[Winner]]) -> str:
    """Return the version of NVRTC on this machine; without NVRTC, the one that the newest result was compiled with."""
    try:
        return nvrtc_version()
    except ToolchainError:
        stored = read_stored()
        return stored[0].key.nvrtc_version if stored else ""


def refusal(served: BoundKernel, stored: Sequence[Winner], nvrtc_version: str) -> NotTunedError:
    """Return the error that strict serving raises instead of serving a fallback.

    Parameters
    ----------
    served
        The fallback.
    stored
        Winners of the kernel, including those of other versions of it.
    nvrtc_version
        Version of NVRTC on this machine.
    """
    differences = served.choice.differences
    requested = key_of(served.definition, served.problem, served.device, nvrtc_version=nvrtc_version, l2_mode="cold")
    if not differences and stored:
        differences = min((key_differences(winner.key, requested) for winner in stored), key=len)
    problem = f"{served.problem} on {served.device.name} is not tuned, and strict=True allows no fallback"
    cure = "run `autotile tune`, or call without strict"
    if not stored:
        return NotTunedError(f"{problem}: nothing is tuned for {served.kernel}; {cure}")
    if not differences:
        return NotTunedError(
            f"{problem} ({served.tier}): what was tuned for it breaks a rule or a limit here; {cure}", differences
        )
    listed = "; ".join(f"{name}: tuned {tuned}, requested {wanted}" for name, tuned, wanted in differences)
    return NotTunedError(f"{problem} ({served.tier}): the nearest result differs in {listed}; {cure}", differences)
