"""``statexchange`` and ``python -m statexchange``: the command line."""

import contextlib
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. An interrupt while modules are imported ends it as one in a command does."""
    try:
        from statexchange.cli.main import main as run

        run()
    except KeyboardInterrupt:
        code: object = 130
        with contextlib.suppress(OSError, AttributeError):  # stderr may be closed
            sys.stderr.write("error: interrupted\n")
    except SystemExit as ended:
        code = ended.code
    # All output is flushed: an interrupt from here on would only add a traceback of the interpreter's own end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
