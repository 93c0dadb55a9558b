"""``python -m statexchange``: the command line, straight from a checkout."""

from statexchange.cli.main import main

if __name__ == "__main__":
    main()
