"""The kernels of the ceilings hold the instructions whose rate they measure, as many as they are said to; no GPU."""

from __future__ import annotations

import struct
from collections import Counter

import pytest

from autotile.cuda.ceiling_kernels import ceiling_job
from autotile.cuda.compiler import Compilation, _elf_section, compile_cubin

FFMA, DFMA, HFMA2, HMMA, DMMA, HGMMA, LDG, STG = 0x023, 0x02B, 0x031, 0x03C, 0x03F, 0x1F0, 0x181, 0x186
"""Lowest 9 bits of the opcodes of Turing and later, without the bits that tell where operands are."""
HFMA2_MMA, QGMMA = 0x035, 0x1F3
"""The fp16 FMA of the other pipe, and wgmma of 8-bit floats."""


def instructions(compiled: Compilation, entry: str) -> Counter[int]:
    code = _elf_section(compiled.cubin, f".text.{compiled.functions[entry].symbol}".encode())
    assert code is not None
    return Counter(struct.unpack_from("<Q", code, at)[0] & 0x1FF for at in range(0, len(code), 16))


@pytest.fixture(scope="module", params=["8.0", "9.0"])
def compiled(request: pytest.FixtureRequest) -> tuple[str, Compilation]:
    return request.param, compile_cubin(ceiling_job(request.param))


def test_no_instruction_was_removed(compiled: tuple[str, Compilation]) -> None:
    capability, cubin = compiled
    is_hopper = capability == "9.0"
    assert instructions(cubin, "fma_float32")[FFMA] == 8 * 64
    assert instructions(cubin, "fma_float64")[DFMA] == 8 * 64
    half = instructions(cubin, "fma_float16")
    assert 0 <= half[HFMA2] + half[HFMA2_MMA] - 8 * 64 < 8  # some set registers to constants
    for name in ("float16", "bfloat16", "tf32"):
        assert instructions(cubin, f"mma_{name}")[HMMA] == 2 * 4 * 4  # 4 of 32 steps are unrolled
    assert instructions(cubin, "mma_float64")[DMMA] == 2 * 2 * 4
    assert instructions(cubin, "read_words")[LDG] >= 4
    copy = instructions(cubin, "copy_words")
    assert min(copy[LDG], copy[STG]) >= 4
    for name in ("float16", "bfloat16", "tf32", "float8_e4m3fn") if is_hopper else ():
        found = instructions(cubin, f"wgmma_{name}")
        assert found[HGMMA] + found[QGMMA] == 4  # and no more, which the compiler adds to synchronise


def test_nothing_is_spilled(compiled: tuple[str, Compilation]) -> None:
    spilled = {name: found.resources.spill_bytes for name, found in compiled[1].functions.items()}
    assert set(spilled.values()) == {0}


def test_each_architecture_gets_what_it_has() -> None:
    entries = {capability: ceiling_job(capability).entries for capability in ("7.5", "8.6", "8.9", "9.0", "12.0")}
    assert not any("mma" in name for name in entries["7.5"])
    assert "mma_float64" not in entries["8.6"]
    assert "mma_float8_e4m3fn" in entries["8.9"]
    assert "wgmma_float8_e4m3fn" in entries["9.0"]
    assert "wgmma_tf32" not in entries["12.0"]
    assert ceiling_job("9.0").architecture == "sm_90a"
