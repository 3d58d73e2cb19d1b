"""``python -m autotile``."""

import atexit
import os
import sys
from pathlib import Path

_INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""
_WITHOUT_GPU = {"--help", "-h", "--replay", "--scheduler"}
"""Options with which `autotile tune` starts no worker on this machine's GPU."""
_GPUS = {"--device", "--devices"}
"""Options that name the GPUs, which may be others than the first."""
_GPU_DRIVER = Path("/dev/nvidiactl")


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
        workers = sys.modules.get("autotile.workers.child")
        if workers is not None:
            workers.EARLY.kill_idle()


def _run() -> None:
    try:
        from autotile.settings import let_blas_sleep

        let_blas_sleep()
        options = {word.partition("=")[0] for word in sys.argv}
        if sys.argv[1:2] == ["tune"] and not options & _WITHOUT_GPU and _GPU_DRIVER.exists():
            # The workers that a session waits for first, whose imports take as long as those of the command line. More
            # would take turns with them at the memory; the session starts the others as it opens.
            from autotile.workers.child import COMPILE_WORKER, GPU_WORKER, start_early

            if not options & _GPUS:
                start_early(GPU_WORKER, "0")
            start_early(COMPILE_WORKER)
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
