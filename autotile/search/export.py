"""A study as a file that Optuna's own tools open."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import RDBStorage
from sqlalchemy import URL, NullPool
from sqlalchemy.exc import DatabaseError

from autotile.ground.errors import InputError
from autotile.search.quiet import quiet_optuna


def study_to_storage(study: optuna.Study, path: Path) -> None:
    """Copy a study into an SQLite file, as ``optuna-dashboard`` and `optuna.load_study` read it.

    Parameters
    ----------
    study
        What to copy: its name, direction, attributes and trials.
    path
        The file; made where it is missing, else the study is added to those in it.

    Raises
    ------
    InputError
        The file is not an Optuna storage, cannot be written, or holds a study of that name.
    """
    try:
        with quiet_optuna():
            url = URL.create("sqlite", database=str(path)).render_as_string()
            # without a pool nothing stays open when Optuna refuses the file half-way through its constructor
            storage = RDBStorage(url, engine_kwargs={"poolclass": NullPool})
            try:
                _copy(study, storage)
            finally:
                storage.remove_session()
                storage.engine.dispose()
    except DuplicatedStudyError as error:
        raise InputError(f"{path} holds a study named {study.study_name!r} already; name another file") from error
    except (DatabaseError, RuntimeError) as error:
        cause = getattr(error, "orig", None) or error
        raise InputError(f"{path} cannot be written as an Optuna storage: {cause}; name another file") from error


def _copy(study: optuna.Study, storage: RDBStorage) -> None:
    copy = optuna.create_study(storage=storage, study_name=study.study_name, directions=study.directions)
    if study.metric_names is not None:
        copy.set_metric_names(study.metric_names)
    for name, value in study.user_attrs.items():
        copy.set_user_attr(name, value)
    copy.add_trials(study.get_trials(deepcopy=False))
