"""Content of one page: the studies, families and operations of a database that a user asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from autotile.core.argument_types import check_value
from autotile.core.device import DeviceProperties
from autotile.core.model import Problem, Trial
from autotile.core.statistics import Interval, ratio_of_times
from autotile.core.text import NOTHING, plural, sizes_text, source_text, time_text
from autotile.database.database import CONTEST, Database, StudySummary, rows_of_kernel
from autotile.database.keys import TuningKey, study_columns
from autotile.database.winners import StoredRule
from autotile.errors import EmptySpaceError, InputError, ProblemError
from autotile.kernel.library import KernelName
from autotile.kernel.operation import Member, Operation
from autotile.kernel.problem import Workrate, resolve_problem, unsupported_reason
from autotile.report.notebook import PageContent
from autotile.report.study import StudyData, cost_ratio, read_study
from autotile.space.search_space import feasible_space

_MAX_STUDIES = 100
_MAX_TRIALS = 60_000
"""Limits of the studies that a page shows in detail, the newest first, so that it stays below 15 MB."""
_SHOWN = 3
"""Problems that a message names."""


@dataclass(frozen=True, slots=True)
class ContenderData:
    """A kernel or a library that computes a problem of an operation, with its best trial."""

    name: str
    is_library: bool
    trial: Trial
    study_id: int
    tried: int
    source: str
    ratio: Interval | None
    """Its time over that of the fastest; None where an interval is missing."""
    rate: str
    """Rate at which it computes the problem, such as ``781 TFLOP/s``."""

    @property
    def time_text(self) -> str:
        """Time with its unit, marked if it was replayed."""
        return time_text(self.trial.time_us, self.source)


OperationData = tuple[Problem, str, Sequence[ContenderData], Sequence[tuple[str, str]]]
"""A problem of an operation, without what may be left out; the device, marked if all times were replayed; kernels and
libraries with a time, fastest first; and kernels without one, each with the reason."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Content of a page: studies in detail, and the others, which are only listed, as there are too many."""

    title: str
    location: str
    made_at: datetime
    studies: tuple[StudyData, ...]
    others: tuple[StudySummary, ...] = ()
    families: tuple[StoredRule, ...] = ()
    operations: tuple[OperationData, ...] = ()
    path: str = ""
    """Path by which the user named the kernel or operation; empty for a name."""


def report_of_study(study: StudyData) -> ReportData:
    """Return the content of a page of one study."""
    return ReportData(study_title(study.key), study.location, datetime.now(UTC), (study,))


def study_title(key: TuningKey) -> str:
    """Return the heading of a study: its problem and its device."""
    return "{} {} on {}".format(*study_columns(key))


def read_report(
    database: Database,
    kernel: KernelName | Operation | None = None,
    sizes: Mapping[str, int] | None = None,
    *,
    dtype: str | None = None,
    gpu_name: str | None = None,
) -> ReportData:
    """Read what a page shows of a kernel or an operation; None selects all kernels, element types and GPUs.

    Sizes that are not given are not compared; without any, a page of an operation is of all problems that a library was
    raced at. It is an `InputError` if there is no such kernel, it has no such size, or
    nothing is stored of it, and a `DatabaseError` if the database cannot be read.
    """
    given = dict(sizes or {})
    if isinstance(kernel, Operation):
        check_sizes(given, ())
        return _operation_report(database, kernel, (database.location, kernel.name, given, dtype, gpu_name))
    wanted = (database.location, str(kernel or ""), given, dtype, gpu_name)
    # the times of a library are no study of a kernel; see `autotile.database.keys.library_key`
    listed = [study for study in rows_of_kernel(database.studies, kernel) if ":" not in study.key.kernel]
    check_sizes(given, listed)
    matching = [study for study in listed if _matches(study, given, dtype, gpu_name)]
    tried = [study for study in matching if study.trials]
    if not tried:
        raise _nothing(wanted, listed, matching)
    stored_name = None if kernel is None else tried[0].key.kernel  # its files may be gone
    families = () if given else tuple(database.rules(stored_name))
    families = tuple(one for one in families if dtype in (None, one.key.dtype))
    named = " ".join(filter(None, [tried[0].key.kernel, sizes_text(given)]))
    title = plural(len(tried), "tuned problem") if kernel is None else named
    return _report(database, title, tried, families=families)


def _operation_report(database: Database, operation: Operation, wanted: PageContent) -> ReportData:
    _, _, sizes, dtype, gpu_name = wanted
    listed = [study for study in database.studies() if _matches(study, {}, dtype, gpu_name)]
    tried: dict[int, StudySummary] = {}
    found: list[OperationData] = []
    for problem in _problems(operation, sizes, dtype, listed):
        for gpu in dict.fromkeys(study.key.gpu_name for study in listed):
            here = [study for study in listed if study.key.gpu_name == gpu and study.best_config is not None]
            contenders, others, used = _operation_data(database, operation, problem, here)
            if contenders:
                replayed = all(one.source == "replayed" for one in contenders)
                device = source_text(gpu, "replayed" if replayed else "")
                found.append((operation.stated(problem), device, contenders, others))
                tried |= {study.study_id: study for study in used if study.trials}
    if not found:
        members = {member.name for member in operation.members}
        own = [study for study in listed if study.key.kernel in members and study.trials]
        if not own or sizes:
            raise _nothing(wanted, own, [])
        tried = {study.study_id: study for study in own}
    title = " ".join(filter(None, [operation.name, sizes_text(sizes)]))
    title = "{} on {}".format(*found[0]) if len(found) == 1 else title
    return _report(database, title, list(tried.values()), operations=tuple(found))


def _report(
    database: Database,
    title: str,
    tried: Sequence[StudySummary],
    *,
    families: tuple[StoredRule, ...] = (),
    operations: tuple[OperationData, ...] = (),
) -> ReportData:
    """Read the newest of some studies, as many as a page has room for."""
    room, kept = _MAX_TRIALS, set[int]()
    for study in sorted(tried, key=_age, reverse=True)[:_MAX_STUDIES]:
        if not kept or study.trials <= room:
            kept.add(study.study_id)
            room -= study.trials
    others = tuple(study for study in tried if study.study_id not in kept)
    studies = tuple(read_study(database, study) for study in tried if study.study_id in kept)
    return ReportData(
        title=study_title(studies[0].key) if len(studies) == 1 and not others and not operations else title,
        location=database.location,
        made_at=datetime.now(UTC),
        studies=studies,
        others=others,
        families=families,
        operations=operations,
    )


def _age(study: StudySummary) -> tuple[bool, datetime | None]:
    return study.last_at is not None, study.last_at


def check_sizes(sizes: Mapping[str, int], studies: Sequence[StudySummary]) -> None:
    """Raise `ProblemError` for a size that none of some studies has, and an `InputError` for one that is no number."""
    for name, size in sizes.items():
        check_value(f"size {name}", size, int)
        if studies and not any(name in study.key.sizes for study in studies):
            known = ", ".join(dict.fromkeys(size for study in studies for size in study.key.sizes))
            raise ProblemError(f"{studies[0].key.kernel} has no size {name!r}; its sizes are {known}")


def _matches(study: StudySummary, sizes: Mapping[str, int], dtype: str | None, gpu_name: str | None) -> bool:
    key = study.key
    same = all(key.sizes.get(name) == value for name, value in sizes.items())
    return same and dtype in (None, key.dtype) and gpu_name in (None, key.gpu_name)


def _nothing(wanted: PageContent, listed: Sequence[StudySummary], matching: Sequence[StudySummary]) -> InputError:
    """Return an error with the reason why a report would be empty, and the remedy."""
    location, kernel, sizes, dtype, gpu_name = wanted
    asked = " ".join(filter(None, [kernel, sizes_text(sizes)]))
    if matching:
        return InputError(
            f"{location} has a study of {asked or 'a kernel'} but no trials yet; run `autotile tune` first"
        )
    if listed:
        shown = ", ".join(dict.fromkeys(study_title(study.key) for study in listed[:_SHOWN]))
        more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
        of = " ".join(filter(None, [asked, dtype]))
        where = f"{f' of {of}' if of else ''}{f' on {gpu_name}' if gpu_name else ''}"
        return InputError(f"{location} has no trials{where}; it has {shown}{more}")
    hint = f"autotile tune {asked or 'KERNEL'}"
    of = f" of {asked}" if asked else ""
    return InputError(f"{location} has no trials{of}; run `{hint}` first, or name another with --db")


def _problems(
    operation: Operation, sizes: Mapping[str, int], dtype: str | None, listed: Sequence[StudySummary]
) -> list[Problem]:
    """Return the problem that is asked for, of each element type, or those of the stored studies."""
    needed = [name for name in operation.sizes if not operation.is_optional(name)]
    if sizes and all(name in sizes for name in needed):
        return [operation.resolve(sizes, each) for each in ((dtype,) if dtype else operation.dtypes)]
    if unknown := [name for name in sizes if name not in operation.sizes]:
        raise ProblemError(f"{operation.name} has no size {unknown[0]!r}; its sizes are {', '.join(operation.sizes)}")
    found: dict[str, Problem] = {}
    for study in listed:
        problem, key = None, study.key
        if not key.kernel.startswith(f"{operation.name}:"):
            problem = operation.problem_of(key.kernel, key.sizes, key.dtype)
        else:  # of a library
            with suppress(ProblemError):  # of another version of the operation
                problem = operation.resolve(key.sizes, key.dtype)
        if problem is not None and all(problem.sizes[name] == size for name, size in sizes.items()):
            found.setdefault(str(operation.stated(problem)), problem)
    return list(found.values())


def _operation_data(
    database: Database, operation: Operation, problem: Problem, studies: Sequence[StudySummary]
) -> tuple[list[ContenderData], list[tuple[str, str]], list[StudySummary]]:
    """Return the contenders for a problem on a GPU, fastest first, other kernels, and the studies of the former."""
    kernels = {member.name: member.load() for member, _ in operation.fitting(problem)}
    wanted = {member.name: {**kernels[member.name].spec.sizes, **own} for member, own in operation.fitting(problem)}
    shared = operation.without_conditions(problem)
    for study in studies:
        if study.key.kernel.startswith(f"{operation.name}:"):
            wanted[study.key.kernel] = shared
    newest = {
        (study.key.kernel, study.key.source): study
        for study in sorted(studies, key=_age)
        if study.key.dtype == problem.dtype and dict(study.key.sizes) == wanted.get(study.key.kernel)
    }
    timed = [(study, best) for study in newest.values() for best in database.best(study_id=study.study_id)]
    timed.sort(key=lambda pair: pair[1].trial.time_us or math.inf)
    work = next(((kernels[study.key.kernel], best) for study, best in timed if study.key.kernel in kernels), None)
    contenders = []
    for study, best in timed:
        rate, is_library = NOTHING, study.key.kernel not in kernels
        if work is not None and best.winner.device is not None and best.trial.time_us is not None:
            own = resolve_problem(work[0].spec, wanted[work[0].name], problem.dtype)
            rate = Workrate.of(work[0].spec, own, work[1].trial.config).text(best.trial.time_us, best.winner.device)
        fastest, ratio = timed[0][1], None  # in pairs of the race in which both took part
        first, second = fastest.trial.measurement, best.trial.measurement
        if fastest.run.sampler == best.run.sampler == CONTEST:
            ratio = cost_ratio(fastest.trial, best.trial)
        elif first is not None and second is not None and first.low_us > 0.0:
            ratio = Interval(1.0, 1.0, 1.0) if fastest is best else ratio_of_times(first, second)
        name = study.key.kernel.removeprefix(f"{operation.name}:")
        contender = ContenderData(
            name, is_library, best.trial, study.study_id, study.trials, study.key.source, ratio, rate
        )
        contenders.append(contender)
    device = next((best.winner.device for _, best in timed if best.winner.device is not None), None)
    known = {one.name for one in contenders}
    others = [(member.name, _why_not(member, problem, device)) for member in operation.members]
    left = [one for one in others if one[0] not in known]
    return contenders, left, [study for study, _ in timed if study.key.kernel in kernels]


def _why_not(member: Member, problem: Problem, device: DeviceProperties | None) -> str:
    sizes = member.sizes_for(problem, device)
    if sizes is None:
        by_type = f"it computes {', '.join(member.dtypes)}" if problem.dtype not in member.dtypes else ""
        when = f"it is used if {member.when.text}" if member.when is not None else "it does not compute the problem"
        return f"not applicable: {by_type or when}"
    spec = member.load().spec
    if device is not None:
        if reason := unsupported_reason(spec, device):
            return f"not applicable: {reason}"
        try:
            feasible_space(spec, resolve_problem(spec, sizes, problem.dtype), device)
        except EmptySpaceError as error:
            return f"not applicable: {error.cause}"
        except InputError as error:
            return f"not applicable: {error}"
    return "not tuned"
