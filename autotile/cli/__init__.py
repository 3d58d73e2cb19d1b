"""The command line: ``autotile`` and ``python -m autotile``.

Every command reads its words, calls one function of `autotile.ops` and shows the report. Modules that load Optuna,
SQLAlchemy or CuPy are imported inside the commands that need them, so that ``autotile --help`` is instant.
"""

from __future__ import annotations

from autotile.cli import bundle, comparing, database, exchange, machine, results, space, tune, verify
from autotile.cli.application import app

__all__ = ["app", "main"]

for commands in (tune, verify, results, bundle, space, machine, exchange, comparing, database):
    commands.register(app)


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with 0 for done, 1 for nothing found, 2 for bad input."""
    app(prog_name="autotile")
