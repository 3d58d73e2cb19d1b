"""The command line: ``autotile`` and ``python -m autotile``.

A command is an entry of `autotile.cli.commands`; its function is imported when it runs, so that ``--help`` is instant.
"""
