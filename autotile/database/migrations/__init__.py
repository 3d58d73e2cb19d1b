"""Migrations of the database, and the view that they leave, which needs no Alembic to be created."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Column

JSON_VALUE = JSON(none_as_null=True)


def columns(kind: Any, *names: str, nullable: bool = False) -> list[Column[Any]]:
    """Return columns of one type."""
    return [Column(name, kind, nullable=nullable) for name in names]


_NOT_REFUSED = """
    NOT EXISTS
        (SELECT 1
         FROM trials AS refused
         WHERE refused.study_id = {tried}.study_id AND refused.phase = 'final' AND refused.outcome <> 'ok'
           AND refused.config_key = {tried}.config_key AND refused.id > {tried}.id)"""


def best_view(order: str) -> str:
    """Return the view of the best results since revision 0002, with the order of the finals that one is taken of."""
    return f"""
CREATE VIEW best AS
SELECT studies.id AS study_id, trials.id AS trial_id, studies.kernel, studies.sizes, studies.dtype, studies.gpu_name,
       studies.l2_mode, studies.source, trials.config, trials.time_us, trials.low_us, trials.high_us, trials.phase,
       trials.run_id, trials.created_at
FROM studies
JOIN trials ON trials.id = COALESCE(
    (SELECT finals.id
     FROM trials AS finals
     JOIN runs ON runs.id = finals.run_id
     WHERE finals.study_id = studies.id AND finals.phase = 'final' AND finals.rank = 1
       AND finals.outcome = 'ok' AND runs.ended_at IS NOT NULL AND {_NOT_REFUSED.format(tried="finals")}
     ORDER BY {order}
     LIMIT 1),
    (SELECT tried.id
     FROM trials AS tried
     WHERE tried.study_id = studies.id AND tried.outcome = 'ok' AND tried.time_us IS NOT NULL
       AND {_NOT_REFUSED.format(tried="tried")}
     ORDER BY tried.time_us, tried.id
     LIMIT 1))
"""


BEST_VIEW = best_view("finals.id DESC")
"""View of the best results since revision 0004; a migration that changes it puts its text here, and this one there."""
