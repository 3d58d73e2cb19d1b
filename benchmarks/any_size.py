"""Kernels served at sizes that nobody tuned, beside cuBLAS.

    python benchmarks/any_size.py [--seed 0] [--count 200] [--dtypes bfloat16 float16 float32] [--output FILE.json]
    python benchmarks/any_size.py --shape 64,64,131072 --shape 35,8457,2560,NT --shapes FILE.json
    python benchmarks/any_size.py --tune-count 10 --tune-seconds 30      # also tune the first ten sizes, in each class
    python benchmarks/any_size.py --read FILE.json --worst 20            # the worst rows of a record
    python benchmarks/any_size.py --operation OP.toml --python FILE.py ROWS=1..16384 N=16..1048576

Matrix products are drawn log-uniformly, M and N in 1..16384, K in 16..131072, at most 2^41 operations, in all four
layouts; in a quarter of them every size is odd, in a quarter even, in the others a multiple of 8. Each is computed by
what `autotile.get_best_kernel` serves with an empty user database, and by cuBLAS through PyTorch and through CuPy (the
faster counts; fp32 without TF32), in the same run, interleaved, with a cold L2, in CUDA graphs. The ratio is the time
of the library over the time served, also where a library is what is served. Results are compared with float64
where they differ most from those of the library, and at random positions. With ``--tune-count``
the first sizes are also tuned by themselves, into another database.

The file is rewritten as results come in; ``--resume`` measures only what it lacks. ``--limit`` is the time that all
measurements together should take; the number of rounds follows from it.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import any_size_report as report
from any_size_draw import (
    MATMUL_FLAGS,
    MATMUL_RANGES,
    Sizes,
    draw,
    matmul_fits,
    parse_ranges,
    parse_shape,
    read_shapes,
    text_of,
)

if TYPE_CHECKING:
    from any_size_race import Entry
    from any_size_subjects import Subject, UserOperation

_START_S = time.perf_counter()
_MAX_ARRAY_BYTES = 4 << 30
_WRITE_EVERY_S = 5.0
_RACE_SHARE = 0.7
"""Share of the time of a problem that its race may take; the rest is for arrays, verification and graphs."""
_KNOWN_SIZES, _KNOWN_CALLS = 20, 200
_LOOK_UP_ROUNDS = 5
"""Times that all look-ups are timed; the lowest median counts, as other programs share the processor."""


def main() -> None:
    """Draw, serve, compile, time, and print the tables; or print those of a record."""
    arguments = parsed()
    if arguments.read:
        record = report.read(arguments.read)
        current = {**record, "summary": report.summary(record["rows"])}
        report.show(current, worst=arguments.worst, every=arguments.rows)
        return
    # Registered before autotile is imported, hence called after it has written what it counted.
    folder = Path(tempfile.mkdtemp(prefix="any_size."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["AUTOTILE_DB"] = str(Path(arguments.database or folder / "empty.db").absolute())
    subject = _subject(arguments)
    _Run(arguments, subject, problems(arguments, subject), folder).run()


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranges", nargs="*", metavar="SIZE=LOW..HIGH", help="ranges that differ from the above")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sizes")
    parser.add_argument("--count", type=int, default=200, help="number of sizes")
    parser.add_argument("--dtypes", nargs="+", help="element types (default: all of the operation)")
    parser.add_argument("--shape", action="append", default=[], metavar="M,N,K[,NT]", help="a product instead")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help='JSON list of [M, N, K] or [M, N, K, "NT"] instead')
    parser.add_argument("--tune-count", type=int, default=0, help="sizes that are also tuned by themselves")
    parser.add_argument("--tune-seconds", type=float, default=30.0, help="time of the tuning of a size in a class")
    parser.add_argument("--limit", type=float, default=140.0, help="seconds that all but the tuning should take")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: benchmarks/results/GPU/any_size.json")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output file")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="print the N worst rows of each class")
    parser.add_argument("--rows", action="store_true", help="print all rows")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the tables of a record, measure nothing")
    parser.add_argument("--operation", metavar="FILE", help="operation file of your own, in place of matmul")
    parser.add_argument("--database", metavar="FILE", help="serve from this database (default: an empty one)")
    parser.add_argument("--python", type=Path, metavar="FILE", help="Python file that adds its library")
    found = parser.parse_args(words)
    if found.operation and (found.shape or found.shapes):
        parser.error("--shape and --shapes are for products; give the sizes of an operation as ranges")
    if found.operation and not found.ranges:
        parser.error("--operation needs the ranges of its sizes, like ROWS=1..16384")
    if found.count < 1 or found.tune_count < 0:
        parser.error("--count must be at least 1, --tune-count at least 0")
    return found


def problems(arguments: argparse.Namespace, subject: UserOperation | Any) -> list[Sizes]:
    """Return the problems to measure: the given shapes, else drawn ones."""
    given = [parse_shape(text) for text in arguments.shape]
    given += read_shapes(arguments.shapes) if arguments.shapes else []
    if given:
        return given
    ranges = parse_ranges(arguments.ranges)
    if arguments.operation:
        flags: Sequence[str] = subject.flags

        def fits(sizes: Sizes) -> bool:
            return bool(subject.array_bytes(sizes) <= _MAX_ARRAY_BYTES)
    else:
        ranges, flags, fits = {**MATMUL_RANGES, **ranges}, MATMUL_FLAGS, matmul_fits
        if unknown := set(ranges) - set(MATMUL_RANGES):
            raise SystemExit(f"a product has no size {min(unknown)}; expected M, N or K")
    return draw(ranges, flags, arguments.count, arguments.seed, fits=fits)


def _subject(arguments: argparse.Namespace) -> Subject:
    from any_size_subjects import Products, UserOperation

    from autotile.kernel.operation import load_operation

    if arguments.python:
        _run_python(arguments.python)
    return (
        UserOperation(arguments.operation, load_operation(arguments.operation)) if arguments.operation else Products()
    )


def _run_python(path: Path) -> None:
    """Run a Python file of the user as a module, so that what is under its ``if __name__`` is not run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


class _Run:
    """One run: everything is served first, then compiled, then timed."""

    def __init__(self, arguments: argparse.Namespace, subject: Subject, found: list[Sizes], folder: Path) -> None:
        from provenance import provenance

        from autotile.cuda.driver import live_device

        self.arguments, self.subject, self.problems, self.folder = arguments, subject, found, folder
        self.start = _START_S
        gpu = report.folder_name(live_device().name)
        self.output = arguments.output or Path(__file__).parent / "results" / gpu / "any_size.json"
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("output", "resume", "worst", "rows", "read", "limit")
        }
        self.head = {**provenance(), "options": options}
        self.rows = self._rows_before(options) if arguments.resume else []
        self.look_up_us: dict[str, float] = {}
        self.written = 0.0
        self.is_dead = False

    def run(self) -> None:
        """Measure what is not measured yet, write it, and print the tables."""
        dtypes = self.arguments.dtypes or list(dict.fromkeys(one.dtype for one in self.subject.classes.values()))
        if unknown := set(dtypes) - {one.dtype for one in self.subject.classes.values()}:
            raise SystemExit(f"{self.subject.name} does not support {min(unknown)}")
        served = self.serve(dtypes)
        self.say(f"{len(served)} look-ups")
        self.compile(list(served.values()))
        self.say("compiled")
        try:
            self.time(dtypes, served)
        finally:
            self.write()
        if self.is_dead:
            self.start_again()
        self.say(f"{len(self.rows)} rows in {self.output}")
        report.show(self.record(), worst=self.arguments.worst, every=self.arguments.rows)

    def start_again(self) -> NoReturn:
        """Replace this process, whose CUDA context is lost, by one that measures the other problems."""
        self.say("the CUDA context is lost; starting again with the other sizes")
        shutil.rmtree(self.folder, ignore_errors=True)
        words = sys.argv if "--resume" in sys.argv else [*sys.argv, "--resume"]
        os.execv(sys.executable, [sys.executable, *words])

    def serve(self, dtypes: Sequence[str]) -> dict[tuple[str, str], Any]:
        """Return what is served, by class and sizes, and time the look-ups."""
        names = self.names(dtypes)
        found = {(name, text_of(sizes)): self.look_up(name, sizes) for name in names for sizes in self.problems}
        rounds = [self.look_up_times(names) for _ in range(_LOOK_UP_ROUNDS)]  # nothing else runs here now
        for what in ("new", "known"):
            medians = [statistics.median(times[what]) for times in rounds if times[what]]
            if medians:
                self.look_up_us[what] = round(min(medians), 3)
        return found

    def look_up_times(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Return the times of look-ups of new and of known sizes, with a dispatcher that has only read the files."""
        import autotile

        get_best_kernel = autotile.Dispatcher().get_best_kernel
        times: dict[str, list[float]] = {"new": [], "known": []}
        for name in names:
            dtype, options = self.subject.classes[name]
            known = []
            warm_up = _warm_up_sizes(self.problems)
            for number, sizes in enumerate([*warm_up, *self.problems]):
                call = partial(get_best_kernel, self.subject.name, dtype=dtype, **sizes, **options)
                try:
                    begun = time.perf_counter()
                    call()
                    taken_us = 1e6 * (time.perf_counter() - begun)
                except autotile.AutotileError:
                    continue
                known.append({"dtype": dtype, **sizes, **options})
                if number >= len(warm_up):
                    times["new"].append(taken_us)
            for arguments in known[:_KNOWN_SIZES]:
                begun = time.perf_counter()
                for _ in range(_KNOWN_CALLS):
                    get_best_kernel(self.subject.name, **arguments)
                times["known"].append(1e6 * (time.perf_counter() - begun) / _KNOWN_CALLS)
        return times

    def names(self, dtypes: Sequence[str]) -> list[str]:
        """Return the classes of some element types."""
        return [name for name, one in self.subject.classes.items() if one.dtype in dtypes]

    def look_up(self, name: str, sizes: Sizes, database: str | None = None) -> Any:
        """Return what is served for a problem, the error in its place if nothing can be; None: the user's database."""
        import autotile

        dtype, options = self.subject.classes[name]
        try:
            return autotile.get_best_kernel(self.subject.name, dtype=dtype, database=database, **sizes, **options)
        except autotile.AutotileError as error:
            return error

    def compile(self, served: Sequence[Any]) -> None:
        """Compile all kernels in parallel; a failure is reported where the kernel is timed."""
        from any_size_race import compile_all, is_library

        kernels = [kernel for kernel in served if not isinstance(kernel, Exception) and not is_library(kernel)]
        for reason in set(compile_all(kernels).values()):
            self.say(f"not compiled: {reason}")

    def time(self, dtypes: Sequence[str], served: dict[tuple[str, str], Any]) -> None:
        """Time every problem, one element type after the other."""
        from any_size_race import Race

        race = Race()
        race.warm_up()
        done = {(row["class"], text_of(row["sizes"])) for row in self.rows}
        todo = [
            (dtype, sizes, names)
            for dtype in dtypes
            for number, sizes in enumerate(self.problems)
            if (names := [name for name in self.names([dtype]) if (name, text_of(sizes)) not in done])
        ]
        end = self.start + self.arguments.limit
        tuned = {text_of(sizes) for sizes in self.problems[: self.arguments.tune_count]}
        last = ""
        for number, (dtype, sizes, names) in enumerate(todo):
            if dtype != last:
                self.say(dtype)
                self.subject.allocate(self.problems, dtype)
                last = dtype
            begun = time.perf_counter()
            found = {name: self.tune(name, sizes) if text_of(sizes) in tuned else None for name in names}
            end += time.perf_counter() - begun
            share_s = _RACE_SHARE * (end - time.perf_counter()) / (len(todo) - number)
            self.rows += self.race(
                race, sizes, dtype, {name: (served[name, text_of(sizes)], found[name]) for name in names}, share_s
            )
            if self.is_dead:
                return
            if time.perf_counter() - self.written > _WRITE_EVERY_S:
                self.write()

    def race(
        self, race: Any, sizes: Sizes, dtype: str, chosen: dict[str, tuple[Any, Any]], share_s: float
    ) -> list[report.Row]:
        """Return the rows of a problem; a problem that fails has rows with the reason."""
        from any_size_race import Entry, empty_row, is_usable, race_problem

        entries: list[Entry] = []
        rows = []
        for name, (kernel, tuned) in chosen.items():
            if isinstance(kernel, Exception):
                rows.append(empty_row(name, sizes, dtype, fault=f"{kernel}"))
            else:
                entries.append(Entry(name, kernel, tuned))
        if not entries:
            return rows
        try:
            return rows + race_problem(
                self.subject, race, sizes, dtype, entries, share_s=max(share_s, 0.0), seed=self.arguments.seed
            )
        except Exception as error:
            self.say(f"{dtype} {text_of(sizes)}: {type(error).__name__}: {error}")
            self.is_dead = not is_usable()
            return rows + [empty_row(entry.name, sizes, dtype, f"{type(error).__name__}: {error}") for entry in entries]

    def tune(self, name: str, sizes: Sizes) -> Any:
        """Tune a problem by itself, and return what is served then; None if it cannot be tuned."""
        import autotile

        dtype, options = self.subject.classes[name]
        database = str(self.folder / f"{name}.db")
        tuned = autotile.TuneOptions(budget_s=self.arguments.tune_seconds)
        given = {**sizes, **{key: value for key, value in options.items() if key != "library"}}
        try:
            autotile.tune(self.subject.name, given, dtype=dtype, database=database, options=tuned, progress=False)
        except autotile.AutotileError as error:
            self.say(f"{name} {text_of(sizes)} was not tuned: {error}")
            return None
        found = self.look_up(name, sizes, database)
        return None if isinstance(found, Exception) else found

    def record(self) -> dict[str, Any]:
        """Return everything measured so far; classes in the order of the subject."""
        order = list(self.subject.classes)
        rows = sorted(self.rows, key=lambda row: order.index(row["class"]))
        return report.document(self.head, rows, self.look_up_us)

    def write(self) -> None:
        """Write everything measured so far."""
        report.write(self.output, self.record())
        self.written = time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        print(f"{time.perf_counter() - self.start:6.1f} s  {text}", flush=True)

    def _rows_before(self, options: dict[str, Any]) -> list[report.Row]:
        if not self.output.exists():
            return []
        record = report.read(self.output)
        if record.get("options") != options or record.get("device") != self.head["device"]:
            raise SystemExit(f"{self.output} is of other options or another GPU; run without --resume")
        rows: list[report.Row] = record["rows"]
        return rows


def _warm_up_sizes(known: Sequence[Sizes]) -> list[Sizes]:
    """Return a few problems like the known ones that are not among them."""
    near = [{name: size - 1 if size > 32 else size for name, size in sizes.items()} for sizes in known[:5]]
    return [sizes for sizes in near if sizes not in known]


if __name__ == "__main__":
    main()
