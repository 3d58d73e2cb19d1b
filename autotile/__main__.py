"""``python -m autotile``."""

import atexit
import os
import sys

_INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""


def main() -> None:
    """Run the command line, or say in one line what it lacks or that it was interrupted while it was loaded."""
    interrupted: list[bool] = []
    atexit.register(_exit_interrupted, interrupted)  # the first, so that it runs after all others
    try:
        _run()
    except KeyboardInterrupt:
        interrupted.append(True)
        if "--json" in sys.argv:
            print('{"error": {"kind": "CommandInterruptedError", "message": "interrupted"}}')
        print("error: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except SystemExit as left:
        if left.code == _INTERRUPTED:
            interrupted.append(True)
        raise
    finally:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to do that Ctrl-C could interrupt in order


def _run() -> None:
    try:
        from autotile.cli.application import main as run
    except ModuleNotFoundError as error:
        cure = 'pip install -e ".[cuda13]" in a checkout, pip install "autotile[cuda13]" elsewhere'
        sys.exit(f"error: autotile needs the package {error.name}, which is not installed; install them all: {cure}")
    run()


def _exit_interrupted(interrupted: list[bool]) -> None:
    """Exit with the code of Ctrl-C: Python ends itself by the signal if Ctrl-C came while a library ran `exec`."""
    if interrupted:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # closed, or the process was started without it
                continue
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
