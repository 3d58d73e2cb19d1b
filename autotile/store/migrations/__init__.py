"""The steps from an empty database to the present schema, run by Alembic from `autotile.store.upgrade`."""
