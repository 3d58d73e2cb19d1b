"""``python -m autotile``."""

import sys


def main() -> None:
    """Run the command line, or say in one line what it lacks or that it was interrupted while it was loaded."""
    try:
        from autotile.cli.application import main as run
    except ModuleNotFoundError as error:
        cure = 'pip install -e ".[cuda13]" in a checkout, pip install "autotile[cuda13]" elsewhere'
        sys.exit(f"error: autotile needs the package {error.name}, which is not installed; install them all: {cure}")
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            print('{"error": {"kind": "CommandInterruptedError", "message": "interrupted"}}')
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
