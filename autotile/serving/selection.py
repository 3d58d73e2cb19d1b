"""The choice for a problem of a kernel: results that may be served, and the comparison of neighbours.

All that serving reads of a database is read here. A shelf holds the results of a kernel: a database with those that
ship with autotile, a bundle, or what a program states. A database that is missing or cannot be read counts as empty.

A shelf is read no further than a request needs. Results of exactly its problem are served as they are. Otherwise rules
of families and neighbours, results of other sizes and GPUs, are compared with the base, what an empty database would
serve: a shipped rule, or the `untuned` configuration unless a shipped neighbour is expected to be faster. A rule that
is in force is served unless it is expected to be slower, by more than the doubt; a neighbour only if it is expected to
be faster, by more than the doubt (`autotile.families.preference`).

The filter `KernelRequest.allows` holds for all of them. A result of another version of the kernel is never served, as
it was not verified for this one. Neither is one that was tuned for distant sizes and that a search would not try at
these. A configuration that breaks a rule or a limit at these sizes or on this device is skipped; so is one that, with
the resources it was compiled to where it was tuned, could not run here or would violate the limits of the search-space
file; and so is one that was found to be wrong for this problem.

Two functions take a choice to another: `same_bits` to a faster configuration that computes the same, and
`autotile.serving.pinning` to the pinned one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from autotile.core.device import DeviceProperties
from autotile.core.documents import Text, attributes, convert
from autotile.core.forks import FORK_LOCK, cached_property
from autotile.core.model import OUTPUT_DIGEST, VARYING_OUTPUTS, Config, L2Mode, Measurement, Problem, config_key
from autotile.database.keys import TuningKey, key_differences, key_of
from autotile.database.winners import (
    CHECKS,
    DIGESTED,
    MODEL,
    RULES,
    SERVER_TIMEOUT_S,
    WINNER,
    WINNERS,
    Query,
    StoredRule,
    StoredVerdict,
    Winner,
    file_signature,
    read_file,
)
from autotile.errors import BundleError, DatabaseError, DataError, SpecError
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_device, runs_on, size_distance
from autotile.serving.choice import Choice, Compared, Estimated, KernelCode, RecentCache, Tier
from autotile.space.limits import check_config, meets_heuristics, resource_violation

if TYPE_CHECKING:
    from autotile.cuda.function import PackedCubin
    from autotile.database.database import Database
    from autotile.exchange.bundle import Bundle, BundledCubin, BundledKernel
    from autotile.families.operation_model import OperationModel
    from autotile.families.preference import Tuned
    from autotile.space.search_space import SearchSpace

Result = TypeVar("Result")

MAX_SERVED = 10_000
"""Maximum number of served kernels that are kept, of 3 KiB each."""

_FINALISTS: RecentCache[tuple[object, ...], Mapping[str, Winner]] = RecentCache(256)
"""Finalists of studies, by the state of the database's file."""


class Shelf(msgspec.Struct, frozen=True):
    """Results of one kernel, whatever their sizes, as a bundle or a program states them.

    The user's own winners and the rules are newest first, the verdicts of ``checks`` on configurations that are not
    ranked oldest first. Between equals, the user's own takes precedence over a shipped one; of the user's own the
    first, as dates depend on clocks, and of shipped ones the newest.

    Unless this ``compares`` results of other problems, the nearest is served. Results of a bundle, ``bundled``, come
    without times of the default, and nothing that is only estimated takes its place.
    """

    winners: Sequence[Winner] = ()
    rules: Sequence[StoredRule] = ()
    checks: Sequence[StoredVerdict] = ()
    compares: bool = True
    bundled: bool = False


class DatabaseShelf:
    """Results of a kernel in a user's database, then those that ship with autotile; read when they are asked for.

    ``fault`` says why the database could not be read; it is empty if it was read or there is none.
    """

    compares, bundled = True, False

    def __init__(self, location: str, kernel: str, dtype: str) -> None:
        self.fault = ""
        self._location, self._of = location, {"kernel": kernel, "dtype": dtype}

    @cached_property
    def winners(self) -> list[Winner]:
        """The user's winners, then the shipped ones."""
        from autotile.exchange.shipped import shipped_winners  # not for an exact result

        return [*self._read(WINNERS, **self._of), *shipped_winners(**self._of)]

    @property
    def rules(self) -> Iterator[StoredRule]:
        """The user's rules, newest first, then the shipped ones."""
        from autotile.exchange.shipped import shipped_rules

        yield from self._read(RULES, **self._of)
        yield from shipped_rules(**self._of)

    @cached_property
    def checks(self) -> list[StoredVerdict]:
        """The user's verdicts."""
        return self._read(CHECKS, **self._of)

    def own(self, key: TuningKey) -> list[Winner]:
        """Return the user's winner of a problem; it takes as long in a large database as in a small one."""
        if "winners" in vars(self):
            return [winner for winner in self.winners if winner.key == key and not winner.shipped]
        return self._read(WINNER, digest=key.digest)

    def finalists(self, winner: Winner, configs: Sequence[Config]) -> Mapping[str, Winner]:
        """Return the newest result of each finalist of a winner's study and of some other configurations in it.

        They are kept by `config_key` until the file changes, for look-ups of new sizes.
        """
        digest = winner.key.digest
        keys = dict.fromkeys(map(config_key, configs))
        signature = file_signature(self._location)  # none of a server's database
        known = self._location, digest, *keys, signature
        if signature is not None and (found := _FINALISTS.get(known)) is not None:
            return found
        newest: dict[str, Winner] = {}
        for key in keys:
            if key not in newest:
                for each, _ in self.digested(digest, key, winner.device):
                    newest.setdefault(config_key(each.config), each)
        return newest if signature is None else _FINALISTS.keep(known, newest)

    def digested(self, study: str, config: str, device: DeviceProperties | None = None) -> Iterator[tuple[Winner, str]]:
        """Yield the finalists of a study, and the trials of one configuration, with the digests of their outputs.

        The newest come first, and ``device`` is that of the study.
        """
        for row in self._read(DIGESTED, study=study, config=config):
            with suppress(DataError):
                digest = convert(row["telemetry"], dict[str, Any]).get(OUTPUT_DIGEST, "")
                yield Winner.from_row(row, device), convert(digest, Text)

    def _read(self, query: Query[Result], **parameters: str) -> list[Result]:
        """Run a query on a file or a server's database.

        A server that could not be read is not asked again: rather than wait for it once more, it counts as empty.
        """
        found = read_file(self._location, query, **parameters)
        if found is not None or self.fault:
            return found or []
        try:
            return read_server(self._location, lambda one: one.read(query, **parameters)) or []
        except DatabaseError as error:
            self.fault = str(error)
            return []


def read_server(location: str, read: Callable[[Database], Result]) -> Result | None:
    """Read a database that fast reads do not apply to; None if it does not exist, `DatabaseError` if that fails."""
    from autotile.database.database import Database

    with FORK_LOCK:
        database = Database.open_readonly(location, server_timeout_s=SERVER_TIMEOUT_S)
        if database is None:
            return None
        with database:
            return read(database)


def model_of(location: str, operation: str, dtype: str, device: DeviceProperties) -> OperationModel | None:
    """Return the model of times of an operation on a GPU: the user's own, else the one that ships; None without one.

    One that ships for a GPU with as many of the same SMs serves it, too. On an H100, cuBLAS took 1.27 and 1.37 times as
    long as what the model of the H200 chose for 60 bfloat16 and 60 float32 products of random sizes (geometric means;
    0.97 in the worst case, in which cuBLAS was chosen; `benchmarks/any_size.py`).

    A model that cannot be read counts as none, and so does one of the user's that an earlier version learned, whose
    configurations were not verified at ragged sizes.
    """
    from autotile.exchange.shipped import shipped_model

    of = {"operation": operation, "dtype": dtype, "gpu_name": device.name}
    found = read_file(location, MODEL, **of)
    if found is None:
        with suppress(DatabaseError):
            found = read_server(location, lambda database: database.read(MODEL, **of))
    for own in found or ():
        from autotile.families.operation_model import OperationModel

        with suppress(DataError):
            if (model := OperationModel.from_json(own)).verified:
                return model
    return shipped_model(operation, dtype, device)


_TIERS: tuple[Tier, ...] = ("exact", "family", "nearest", "transferred", "default")
"""Tiers of a kernel's own results, best first; ``model`` and ``library`` are those of operations."""
_NEAR_DOUBLINGS = 1.0
"""Distance up to which a tuned configuration is served even if a search would not try it for the requested sizes."""
_device_of = attrgetter("gpu_name", "compute_capability", "sm_count", "smem_per_block_optin_bytes")
"""Returns the fields of a key by which its device is told from others."""
_FREE_FIELDS = ("sizes", "nvrtc_version", "l2_mode")
"""Key fields in which a rule may differ from the request: its sizes are the family's, the others are reported."""


class KernelRequest:
    """A problem of a kernel on a device, its key, and the shelf of results that choices for it come from."""

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        device: DeviceProperties,
        nvrtc_version: str,
        shelf: Shelf | DatabaseShelf,
        *,
        l2: L2Mode = "cold",
    ) -> None:
        self.kernel, self.problem, self.device, self.shelf = kernel, problem, device, shelf
        self.key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version, l2_mode=l2)

    @cached_property
    def ranked(self) -> list[Winner]:
        """Winners of this version of the kernel, the best tier first, in each the nearest first."""
        version_of = attrgetter("dtype", "template_hash", "space_hash", "options")
        wanted = version_of(self.key)
        return sorted((one for one in self.shelf.winners if version_of(one.key) == wanted), key=self.rank)

    def stored(self, tier: Tier | None = None) -> Choice | None:
        """Return the first of the `ranked` results, or of those of a tier, that may be served; None without one."""
        of_tier = (one for one in self.ranked if tier is None or self.tier_of(one.key) == tier)
        return next(filter(self.allows, map(self.choice_of, of_tier)), None)

    @cached_property
    def wrong(self) -> set[str]:
        """The `config_key` of each configuration whose newest verdict for this problem is that it is wrong.

        A verdict holds for every compiler, and for both L2 modes.
        """
        asked = self.key
        newest = {
            config: passed
            for key, config, passed in self.shelf.checks
            if replace(key, nvrtc_version=asked.nvrtc_version, l2_mode=asked.l2_mode) == asked
        }
        return {config for config, passed in newest.items() if not passed}

    def allows(self, choice: Choice) -> bool:
        """Return True if a choice of any source may be served."""
        spec, problem, config = self.kernel.spec, self.problem, choice.config
        if choice.tier in ("nearest", "transferred") and not (
            self.is_near(choice.tuned_sizes or {}) or meets_heuristics(spec, config, problem, self.device)
        ):
            return False
        if choice.tier != "exact" and config_key(config) in self.wrong:  # an exact one is no winner if it is wrong
            return False
        if check_config(spec, config, problem, self.device):
            return False
        if choice.resources is None or not spec.has_one_launch:  # of several steps those of one are stored
            return True
        geometry = launch_geometry(spec, config, problem, self.device)
        return not resource_violation(spec, geometry, choice.resources, self.device)

    def code(self, choice: Choice) -> KernelCode:
        """Return the kernel in the configuration of a choice."""
        return KernelCode(self.kernel, self.problem, self.device, choice.config)

    def is_near(self, sizes: Mapping[str, int]) -> bool:
        """Return True if sizes differ from those of the problem by a doubling at most, and no flag does."""
        flags, doublings = size_distance(sizes, self.problem.sizes)
        return not flags and doublings <= _NEAR_DOUBLINGS

    def tier_of(self, key: TuningKey) -> Tier:
        """Return the tier of a result."""
        if _device_of(key) != _device_of(self.key) or key.source != self.key.source:
            return "transferred"
        return "exact" if key == self.key else "nearest"

    def choice_of(self, winner: Winner) -> Choice:
        """Return a result as a choice; it has aged if drivers or compilers changed on this GPU since."""
        key, aged = winner.key, tuple[str, ...]()
        if _device_of(key) == _device_of(self.key) and winner.device is not None:
            versions = (
                ("NVRTC", key.nvrtc_version, self.key.nvrtc_version),
                ("driver", winner.device.driver, self.device.driver),
            )
            aged = tuple(f"{what} {then}, now {now}" for what, then, now in versions if then and now and then != now)
        return stored_choice(winner, self.tier_of(key), key_differences(key, self.key), aged)

    def rank(self, winner: Winner) -> tuple[int, bool, int, float, int, bool, float]:
        """Return a sort key: tier, other architecture, flags, distance, other differences, shipped and its age."""
        tier = _TIERS.index(self.tier_of(winner.key))
        other = sum(1 for name, _, _ in key_differences(winner.key, self.key) if name not in ("sizes", "gpu_name"))
        foreign = winner.key.compute_capability != self.key.compute_capability
        flags, doublings = size_distance(winner.key.sizes, self.key.sizes)
        age = -winner.tuned_at.timestamp() if winner.shipped else 0.0
        return tier, foreign, flags, doublings, other, winner.shipped, age


def stored_choice(
    winner: Winner, tier: Tier, differences: tuple[tuple[str, str, str], ...], aged: tuple[str, ...] = ()
) -> Choice:
    """Return a stored result as a choice, given its differences from the request and what has aged."""
    return Choice(
        tier,
        winner.config,
        winner.measurement,
        winner.resources,
        source=winner.key.source,
        tuned_on=winner.key.gpu_name,
        tuned_at=winner.tuned_at,
        tuned_sizes=winner.key.sizes,
        differences=differences,
        shipped=winner.shipped,
        aged=aged,
    )


def choose(request: KernelRequest) -> Choice:
    """Return the best choice for a problem."""
    shelf = request.shelf
    # The user's own result by its key, which needs no others to be read.
    own = shelf.own(request.key) if isinstance(shelf, DatabaseShelf) else ()
    found = next(filter(request.allows, map(request.choice_of, own)), None) or request.stored(tier="exact")
    if found is not None:
        return found
    known = list(shelf.rules)
    if not shelf.compares:
        return _followed(request, known, None)[0] or request.stored() or untuned(request)
    base, _ = _followed(request, (rule for rule in known if rule.shipped), None)
    if base is None:  # else the space may have to be enumerated
        base = _displaced(request, untuned(request), shipped=True, trusted=True)
    by_rule, unapplied = _followed(request, (rule for rule in known if not rule.shipped), base)
    if by_rule is not None:
        return by_rule
    return _displaced(request, replace(base, unapplied=unapplied), shipped=False, trusted=shelf.bundled)


def _followed(request: KernelRequest, stored: Iterable[StoredRule], base: Choice | None) -> tuple[Choice | None, str]:
    """Return the choice of the first rule that is not expected to be slower than a base; else why none is followed.

    It is a configuration that may be served, with its result at the nearest point where it was timed.
    """
    reason, sizes = "", request.problem.sizes
    for one in stored:
        rule = one.rule
        is_applicable = replace(one.key, **attributes(request.key, *_FREE_FIELDS)) == request.key
        if not is_applicable or sizes not in rule.family:
            continue
        if not rule.in_force:
            reason = reason or f"A rule was learned for the family {rule.family}, but is not in force: {rule.verdict}."
            continue
        lost = rule.mean_held_out
        description = (
            f"{rule.family}, learned from {len(rule.points)} of its problems"
            f"{f', which lost {100 * lost:.1f} % on average when left out' if lost is not None else ''}"
            f"{f'; {rule.verdict}' if rule.verdict else ''}"
        )
        for number in rule.order(request.kernel.spec, request.device, request.problem):
            chosen, point = rule.configs[number], rule.nearest_point(number, sizes)
            timed = point.times_us[number] if point is not None else None
            winner = Winner(
                key=replace(one.key, sizes=point.sizes if point is not None else rule.family.largest),
                device=one.device,
                config=chosen.config,
                resources=chosen.resources,
                measurement=Measurement(*timed, l2=one.key.l2_mode) if timed is not None else None,
                tuned_at=one.learned_at,
                shipped=one.shipped,
            )
            choice = replace(request.choice_of(winner), tier="family", rule=description)
            if request.allows(choice):
                break
        else:
            continue
        if base is None:
            return choice, ""
        from autotile.families.preference import Tuned

        name, point = config_key(winner.config), rule.nearest_point(number, sizes, won=True)
        times_us = point.times_by_config(rule.configs) if point is not None else {}
        tuned = Tuned(
            point.sizes if point is not None else winner.key.sizes, one.device, {name: winner.config}, times_us
        )
        compared = _compared(request, base, [(tuned, {name: winner})])
        if compared is None:
            return choice, ""
        _, verdict = compared
        if verdict.interval[0] <= 1.0:  # it is not surely slower
            return replace(choice, compared=replace(verdict, serves=True)), ""
        reason = reason or f"The rule of the family {rule.family} is not followed here: {verdict.text}."
    return None, reason


def _displaced(request: KernelRequest, base: Choice, *, shipped: bool, trusted: bool) -> Choice:
    """Return the neighbour that displaces a base, of the first tier with one that is surely faster; else the base.

    The results that ship are compared, or the others. With ``trusted``, one that may be faster displaces it, too: of
    near sizes if it is not surely slower, of distant ones if that is more likely than not. The default's time, which
    would make it sure, comes with none of them.
    """
    # loads what an exact result does without
    from autotile.families.preference import FINALISTS, MAX_STUDIES, WITH_FINALISTS, Tuned

    default = dict(request.kernel.spec.default)
    among = [one for one in request.ranked if one.shipped == shipped and request.tier_of(one.key) != "exact"]
    for _, tier in groupby(among, key=lambda one: request.rank(one)[:2]):
        near = list(islice((one for one in tier if request.allows(request.choice_of(one))), MAX_STUDIES))
        if near and near[0].key.sizes == request.key.sizes and _device_of(near[0].key) == _device_of(request.key):
            return replace(request.choice_of(near[0]), unapplied=base.unapplied)  # other compiler or L2, or replayed
        studies = []
        for place, one in enumerate(near):
            found: Mapping[str, Winner] = {}
            if not shipped and place < WITH_FINALISTS and isinstance(request.shelf, DatabaseShelf):
                own = request.shelf.finalists(one, [default, base.config])
                found = {name: each for name, each in own.items() if request.kernel.spec.declares(each.config)}
            key = config_key(one.config)
            known = {**found, key: one}
            times_us = {name: each.measurement.time_us for name, each in known.items() if each.measurement is not None}
            others = sorted((name for name in found if name != key), key=lambda name: times_us.get(name, math.inf))
            served = {name: known[name] for name in [key, *others[: FINALISTS - 1]]}
            configs = {name: each.config for name, each in served.items()}
            studies.append((Tuned(one.key.sizes, one.device, configs, times_us), served))
        compared = _compared(request, base, studies)
        if compared is not None:
            winner, verdict = compared
            likely = verdict.interval[0] <= 1.0 if request.is_near(winner.key.sizes) else verdict.ratio < 1.0
            if verdict.serves or (trusted and likely):
                served_for = replace(verdict, serves=True, is_nearest=winner is near[0])
                return replace(request.choice_of(winner), compared=served_for, unapplied=base.unapplied)
            base = replace(base, compared=base.compared or verdict)
        same = next((each for each in near if each.config == base.config), None)
        if base.tier == "default" and same is not None:  # tuning found nothing faster there
            return replace(request.choice_of(same), unapplied=base.unapplied)
    return base


def _compared(
    request: KernelRequest, base: Choice, studies: Sequence[tuple[Tuned, Mapping[str, Winner]]]
) -> tuple[Winner, Compared] | None:
    """Return the most promising result and its comparison with a choice; None if all are that choice.

    ``studies`` are tuned problems, each with the results that may be served from it.
    """
    from autotile.families.preference import prefer

    found = prefer(
        request.kernel.spec,
        request.problem,
        request.device,
        base.config,
        [tuned for tuned, _ in studies],
        may_serve=lambda study, key: request.allows(request.choice_of(studies[study][1][key])),
    )
    if found is None:
        return None
    winner = studies[found.study][1][found.key]
    expected, tuned = (found.ratio, found.interval), (winner.key.sizes, winner.key.gpu_name)
    return winner, Compared(winner.config, base.config, base.tier, *expected, *tuned, serves=found.is_faster)


_MAX_ROWS = 4096
"""Maximum number of configurations that are estimated for a look-up; of a larger space, a sample."""
_MAX_COMBINATIONS = 10**9
"""Combinations of the largest space that is enumerated for a look-up, which takes some 0.1 s."""


def untuned(request: KernelRequest) -> Choice:
    """Return the choice where nothing is tuned.

    The default is served unless its estimated time is at least twice the estimated least one, and the file states
    enough for such an estimate. Where the default cannot run, or is not worth a trial, the one with the least estimate
    is served, or the first one if there are no estimates, or a bundle has no cubin of what they might choose.
    """
    spec, problem, device = request.kernel.spec, request.problem, request.device
    default, estimates = Choice("default", dict(spec.default)), not request.shelf.bundled
    is_valid = not check_config(spec, default.config, problem, device)
    is_served = is_valid and meets_heuristics(spec, default.config, problem, device)
    if is_served:
        may_enumerate = prod(len(each.values) for each in spec.parameters) <= _MAX_COMBINATIONS
        if not estimates or spec.work.flops is None or not may_enumerate:
            return default
        from autotile.space.time_estimate import CONFIDENT_FACTOR, estimate_configs

        found = estimate_configs(spec, problem, device, [default.config])
        if found is None or not found.is_declared or found.time_us[0] < CONFIDENT_FACTOR * found.bound_us[0]:
            return default  # by the device's peaks, nothing can be far faster
    from autotile.space.search_space import feasible_space

    try:
        space = feasible_space(spec, problem, device)
    except SpecError:
        if is_valid:  # the space is too large to enumerate
            return default
        raise
    if estimates and (fastest := _fastest(request, space, beside_default=is_served)) is not None:
        return fastest
    return default if is_served else Choice("default", space.config(0))


def _fastest(request: KernelRequest, space: SearchSpace, *, beside_default: bool) -> Choice | None:
    """Return the configuration of the least estimate; None without any, or if the default beside it may be as fast."""
    import numpy as np

    from autotile.core.text import plural
    from autotile.space.search_space import SearchSpace
    from autotile.space.time_estimate import CONFIDENT_FACTOR, estimate_times

    spec, problem, device, codes = request.kernel.spec, request.problem, request.device, space.codes
    if len(codes) > _MAX_ROWS:
        codes = codes[random.Random(0).sample(range(len(codes)), _MAX_ROWS)]  # numpy.random takes long to import
    if beside_default:
        codes = np.concatenate([SearchSpace.of(spec, [spec.default]).codes.astype(codes.dtype), codes])
    tried = replace(space, codes=np.asfortranarray(codes))
    found = estimate_times(spec, problem, device, tried)
    if found is None:
        return None

    def launch(row: int) -> str:
        blocks, threads = int(found.blocks[row]), int(found.threads[row])
        busy = f"{min(blocks, device.sm_count)} of {device.sm_count} SMs"
        return f"{plural(blocks, 'block')} of {threads} threads on {busy}"

    least = float(found.time_us[0]) / CONFIDENT_FACTOR if beside_default else np.inf
    for row in np.argsort(found.time_us, kind="stable").tolist():
        time_us = float(found.time_us[row])
        if time_us > least:
            return None
        if config_key(config := tried.config(row)) not in request.wrong:
            default_us, reason = None, ""
            if beside_default:
                default_us, reason = float(found.time_us[0]), f"{launch(row)}, the default's {launch(0)}"
            return Choice("default", config, estimated=Estimated(time_us, default_us, reason))
    return None


def same_bits(base: Choice, request: KernelRequest) -> Choice:
    """Return the fastest configuration that is known to compute the same bits as a choice; else the choice itself.

    The order of a sum depends on tile sizes, splits and lanes in ways that differ between kernels, so measurements
    decide: sessions store a digest of the outputs of each verified candidate. Two configurations are exchangeable for a
    problem if they computed the same bits from the same inputs, and each in every launch. Only finalists of this
    problem on this GPU, with this compiler, are compared.
    """
    base_key, shelf = config_key(base.config), request.shelf
    found = shelf.digested(request.key.digest, base_key) if isinstance(shelf, DatabaseShelf) else ()
    timed: dict[str, tuple[float, Winner]] = {}
    bits: dict[str, dict[str, str]] = {}
    """Digests of the outputs by those of the inputs, of each configuration."""
    varying: set[str] = set()
    for winner, digest in found:  # the newest first
        name = config_key(winner.config)
        if digest:
            inputs, _, outputs = digest.partition(":")
            known = bits.setdefault(name, {})
            if digest == VARYING_OUTPUTS or known.setdefault(inputs, outputs) != outputs:
                varying.add(name)
        if winner.measurement is not None:
            timed.setdefault(name, (winner.measurement.time_us, winner))
    if base_key not in bits or base_key not in timed or base_key in varying:
        return base
    ours = bits[base_key]
    faster = [
        (time_us, winner)
        for name, (time_us, winner) in timed.items()
        if time_us < timed[base_key][0]
        and name not in varying
        and name not in request.wrong
        and (common := ours.keys() & bits.get(name, {}).keys())
        and all(ours[inputs] == bits[name][inputs] for inputs in common)
    ]
    choices = (request.choice_of(winner) for _, winner in sorted(faster, key=lambda one: one[0]))
    best = next((one for one in choices if one.tier == "exact" and request.allows(one)), None)
    return base if best is None else replace(best, pinned=base.pinned)


def choose_bundled(
    bundle: Bundle, bundled: BundledKernel, problem: Problem, device: DeviceProperties, l2: L2Mode = "cold"
) -> tuple[Choice, PackedCubin]:
    """Return the best configuration of which a bundle holds a cubin for a device.

    Raise `BundleError` if there is none: the cubins are for another architecture, dtype or flags, or none is valid for
    these sizes; or the cubin is damaged; `DeviceError` if the kernel does not support the device.
    """
    from autotile.exchange.bundle import FALLBACK

    spec, name = bundled.kernel.spec, bundled.kernel.name
    check_device(spec, device)
    cubins = bundled.cubins_for(problem, device.compute_capability)
    if not cubins:
        running = [cubin for cubin in bundled.cubins if runs_on(cubin.target, device.compute_capability)]
        if not running:
            targets = ", ".join(sorted({cubin.target for cubin in bundled.cubins}))
            raise BundleError(
                f"{bundle.path} holds {name} for {targets}, which does not run on {device.name} "
                f"({device.architecture}); make the bundle with --arch {device.architecture}. {FALLBACK}"
            )
        held = {" ".join([one.dtype, *(f"{flag}={value}" for flag, value in one.flags.items())]) for one in running}
        raise BundleError(
            f"{bundle.path} holds {name} compiled for {', '.join(sorted(held))}, but {problem} is requested; tune such "
            f"a problem and make the bundle again. {FALLBACK}"
        )
    shelf = Shelf(
        [
            replace(winner, resources=cubins[key].resources)
            for winner in bundled.winners
            if (key := config_key(winner.config)) in cubins
        ],
        rules=[one for one in bundled.rules if all(config_key(each.config) in cubins for each in one.rule.configs)],
        compares=config_key(spec.default) in cubins,
        bundled=True,
    )
    choice = choose(KernelRequest(bundled.kernel, problem, device, bundled.nvrtc_version, shelf, l2=l2))
    cubin = cubins.get(config_key(choice.config))
    if cubin is None:
        raise BundleError(
            f"{bundle.path} holds no configuration of {name} that is valid for {problem} on {device.name}; tune that "
            f"problem and make the bundle again. {FALLBACK}"
        )
    bundle.read(cubin.member)  # so that damage is reported while the program can still do without the bundle
    return replace(choice, packed=packed_origin(bundle, bundled, cubin)), bundle.packed(cubin)


def packed_origin(bundle: Bundle, bundled: BundledKernel, cubin: BundledCubin) -> str:
    """Return where a cubin of a bundle comes from, for explanations."""
    return f"{bundle.path}, compiled for {cubin.target} with NVRTC {bundled.nvrtc_version}"
