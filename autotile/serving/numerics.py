"""Configurations that compute the same bits, to be exchanged where results must not change (``numerics="same"``).

The order of a sum depends on tile sizes, splits and lanes in ways that differ between kernels, so measurements decide:
sessions store a digest of the outputs of each verified candidate. Two configurations are exchangeable for a problem if
they computed the same bits from the same inputs, and each in every launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import Text, convert
from autotile.core.model import VARYING_OUTPUTS, Problem, config_key
from autotile.database.fast_access import read_digested_rows_fast
from autotile.database.keys import TuningKey, key_of
from autotile.database.winners import Winner
from autotile.errors import DataError, InputError
from autotile.kernel.library import Kernel
from autotile.serving.candidates import Candidates
from autotile.serving.choice import Choice, choose, wrong_configs


class _Telemetry(msgspec.Struct):
    output_digest: Text = ""


class _Bits:
    """What one configuration computed: digests of the outputs by those of the inputs."""

    def __init__(self) -> None:
        self.varies = False
        self._outputs: dict[str, str] = {}

    def add(self, digest: str) -> None:
        """Take a stored digest into account."""
        inputs, _, outputs = digest.partition(":")
        if digest == VARYING_OUTPUTS or self._outputs.setdefault(inputs, outputs) != outputs:
            self.varies = True

    def equal(self, other: _Bits) -> bool:
        """Return whether both computed the same from the same inputs, and there are such inputs."""
        common = self._outputs.keys() & other._outputs.keys()
        is_equal = all(self._outputs[inputs] == other._outputs[inputs] for inputs in common)
        return bool(common) and is_equal and not (self.varies or other.varies)


class Requested(NamedTuple):
    """A problem of a kernel on a device, with the version of NVRTC and the database."""

    kernel: Kernel
    problem: Problem
    device: DeviceProperties
    nvrtc_version: str
    location: str

    @property
    def key(self) -> TuningKey:
        """The key of its results."""
        return key_of(self.kernel, self.problem, self.device, nvrtc_version=self.nvrtc_version, l2_mode="cold")


def check_numerics(numerics: object) -> None:
    """Raise `InputError` for a value of ``numerics`` that there is not."""
    if numerics not in (None, "any", "same"):
        raise InputError(f"numerics is {numerics!r:.80}, expected 'any' or 'same'")


def exchanged(base: Choice, request: Requested) -> Choice:
    """Return the fastest configuration that is known to compute the same bits as a choice; else the choice itself.

    Only finalists of this problem on this GPU, with this compiler, are compared.

    Parameters
    ----------
    base
        The choice whose results are to be kept.
    request
        The problem.
    """
    kernel, problem, device, nvrtc_version, location = request
    key = request.key
    candidates = Candidates(location, problem)
    base_key = config_key(base.config)
    rows = read_digested_rows_fast(location, key.digest, base_key)
    if rows is None:
        rows = candidates.digested_rows(key.digest, base_key)
    winners, bits = _parsed(rows)
    if base_key not in bits or base_key not in winners:
        return base
    wrong = wrong_configs(candidates.checks(), key)
    base_us = _time_us(winners[base_key])
    faster = [
        winner
        for name, winner in winners.items()
        if name not in wrong and name != base_key and bits[name].equal(bits[base_key]) and _time_us(winner) < base_us
    ]
    choice = choose(kernel, problem, device, nvrtc_version, sorted(faster, key=_time_us)) if faster else base
    return replace(choice, pinned=base.pinned) if choice.tier == "exact" else base


def _parsed(rows: Iterable[dict[str, Any]]) -> tuple[dict[str, Winner], dict[str, _Bits]]:
    """Return the newest result of each configuration, and what it computed."""
    winners: dict[str, Winner] = {}
    bits: dict[str, _Bits] = {}
    for row in rows:
        try:
            found = convert(row["telemetry"], _Telemetry)
            winner = Winner.from_row(row, None)
        except DataError:
            continue
        name = config_key(winner.config)
        if found.output_digest:
            bits.setdefault(name, _Bits()).add(found.output_digest)
        if winner.measurement is not None:
            winners.setdefault(name, winner)
    return {name: winner for name, winner in winners.items() if name in bits}, bits


def _time_us(winner: Winner) -> float:
    return winner.measurement.time_us if winner.measurement is not None else float("inf")
