"""Functions of commands that have not moved to `autotile.api`."""
