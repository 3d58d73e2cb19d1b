"""The command line: ``autotile`` and ``python -m autotile``.

Each command is one module: its arguments, its call of a function of `autotile.api`, its table and its JSON document.
Modules that load Optuna, SQLAlchemy or CuPy are imported inside the commands that need them, so that
``autotile --help`` is instant.
"""
