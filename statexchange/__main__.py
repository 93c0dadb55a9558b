"""``statexchange`` and ``python -m statexchange``: the command line."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. An interrupt while modules are imported ends it as one in a command does."""
    try:
        from statexchange.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
