"""``python -m autotile``."""

import sys


def main() -> None:
    """Run the command line, or say in one line what it lacks."""
    try:
        from autotile.cli.application import main as run
    except ModuleNotFoundError as error:
        cure = 'pip install -e ".[cuda13]" in a checkout, pip install "autotile[cuda13]" elsewhere'
        sys.exit(f"error: autotile needs the package {error.name}, which is not installed; install them all: {cure}")
    run()


if __name__ == "__main__":
    main()
