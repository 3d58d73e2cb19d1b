"""Recorded spaces of a checkout of the FAIR Benchmark Hub for Auto-Tuning, as `search.py` reads them.

    python benchmarks/hub_spaces.py CHECKOUT FOLDER

Writes two folders of ``.npz`` files of kernels and GPUs that the default sampler was not developed on: FOLDER/choosing,
by which changes of it are judged, and FOLDER/final, which is looked at when everything is chosen. The checkout is of
https://github.com/AutoTuningAssociation/benchmark_hub (MIT licence); of its files, those are used that are stored in
the repository itself. Both formats are read: caches of Kernel Tuner, and outputs of KTT, whose durations are in us.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_UNUSED = "currently_unused/cachefiles"
_KERNEL_TUNER = f"{_UNUSED}/KernelTuner data"
SPACES = {
    "choosing": {
        "conv_MI250X": "cachefiles/convolution_milo/MI250X.json.gz",
        "conv_W6600": "cachefiles/convolution_milo/W6600.json.gz",
        "dedisp_A6000": "cachefiles/dedispersion_milo/A6000.json.gz",
        "dedisp_W6600": "cachefiles/dedispersion_milo/W6600.json.gz",
        "gemm_3060": f"{_KERNEL_TUNER}/gemm/RTX_3060_laptop.json.gz",
        "oconv_3060": f"{_KERNEL_TUNER}/convolution/RTX_3060_laptop.json.gz",
        "pnpoly_3060": f"{_KERNEL_TUNER}/pnpoly/RTX_3060_laptop.json.gz",
        "kttconv_2080Ti": f"{_UNUSED}/KTT data/KTConvolutionOutput_2080Ti.json.gz",
    },
    "final": {
        "conv_MI50": f"{_KERNEL_TUNER}/convolution_milo/mi50.json.gz",
        "conv_W7800": "cachefiles/convolution_milo/W7800.json.gz",
        "dedisp_A100": "cachefiles/dedispersion_milo/A100.json.gz",
        "dedisp_W7800": "cachefiles/dedispersion_milo/W7800.json.gz",
        "gemm_3090": f"{_KERNEL_TUNER}/gemm/RTX_3090.json.gz",
        "oconv_Titan": f"{_KERNEL_TUNER}/convolution/RTX_Titan.json.gz",
        "pnpoly_Titan": f"{_KERNEL_TUNER}/pnpoly/RTX_Titan.json.gz",
        "kttconv_3090": f"{_UNUSED}/KTT data/KTConvolutionOutput_3090.json.gz",
    },
}


def main() -> None:
    """Convert the spaces of both folders."""
    parser = argparse.ArgumentParser(description="Convert recorded spaces of the Benchmark Hub for Auto-Tuning.")
    parser.add_argument("checkout", type=Path, help="checkout of the hub")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    for half, files in SPACES.items():
        (arguments.folder / half).mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            if not (arguments.checkout / file).is_file():
                raise SystemExit(f"{arguments.checkout} has no {file}: expected a checkout of the Benchmark Hub")
            document = json.loads(gzip.decompress((arguments.checkout / file).read_bytes()))
            rows = _of_ktt(document) if "Results" in document else _of_kernel_tuner(document)
            ran, total = write_space(arguments.folder / half / f"{name}.npz", dict(rows))
            print(f"{half:<9} {name:<15} {total:>7,} rows, {ran:,} ran")


Row = tuple[tuple[tuple[str, int | str], ...], float]
"""Values of the parameters, and the time in ms; NaN for a failure."""


def _of_kernel_tuner(document: Mapping[str, Any]) -> Iterator[Row]:
    for entry in document["cache"].values():
        time = entry["time"]
        yield (
            tuple((name, entry[name]) for name in document["tune_params_keys"]),
            float(time) if isinstance(time, int | float) and 0 < time < 1e20 else np.nan,
        )


def _of_ktt(document: Mapping[str, Any]) -> Iterator[Row]:
    for result in document["Results"]:
        time_us = result["TotalDuration"] if result["Status"] == "Ok" else np.nan
        yield tuple((each["Name"], each["Value"]) for each in result["Configuration"]), time_us / 1e3


def write_space(path: Path, times_ms: Mapping[tuple[tuple[str, int | str], ...], float]) -> tuple[int, int]:
    """Write a space, without the parameters that have a single value; return how many rows ran, and how many it has."""
    configs = [dict(row) for row in times_ms]
    values = {name: sorted({config[name] for config in configs}) for name in configs[0]}
    names = [name for name, found in values.items() if len(found) > 1]
    codes = np.array([[values[name].index(config[name]) for name in names] for config in configs], np.int16)
    times = np.array([*times_ms.values()])
    texts = np.array([json.dumps(values[name]) for name in names])
    np.savez_compressed(path, names=np.array(names), values=texts, codes=codes, time_ms=times)
    return int(np.isfinite(times).sum()), len(times)


if __name__ == "__main__":
    main()
