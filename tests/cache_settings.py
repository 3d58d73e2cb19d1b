"""What tests of compilations need: settings with a cubin cache and nothing else, and a slow kernel."""

from pathlib import Path

from feature_kernels import FOLDER

from autotile.settings import Settings

SLOW = (FOLDER / "slow.cu").read_text()
"""2 ** DEPTH types, each instantiated from another: with 16, most of a minute and more than a gigabyte."""


def cache_settings(folder: Path, limit_bytes: int = 10**8) -> Settings:
    return Settings("", folder, limit_bytes, (), ())
