"""Settings of tests that need a cubin cache and nothing else."""

from __future__ import annotations

from pathlib import Path

from autotile.settings import Settings


def cache_settings(folder: Path, limit_bytes: int = 10**8) -> Settings:
    """Return settings whose cubin cache is a folder."""
    return Settings("", folder, limit_bytes, (), ())
