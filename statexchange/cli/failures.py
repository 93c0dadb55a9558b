"""Report an error that ended a command, or its work on one PATH: the message, a hint and the exit code."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import click

from statexchange import __version__
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    StateExchangeError,
    StorageError,
    is_interrupt,
    without_secrets,
)

if TYPE_CHECKING:
    from statexchange.cli.output import Output

# Errors of the operating system that are not bugs of statexchange, in case one arrives here as a plain OSError.
_REFUSALS: tuple[int, ...] = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
_REFUSALS += (errno.ESTALE, errno.ENAMETOOLONG)
_REPORT = (
    f"this is a bug in statexchange {__version__}, or in the package at the end of the text above: report it, with the "
    "text, to the place where you got that package"
)


def report_failure(output: Output, error: Exception) -> int:
    """Report an error and return its exit code; one that is a bug is reported with its traceback."""
    if isinstance(error, StateExchangeError) and error.code != "INTERNAL":
        return output.fail(error, error.code, _hint(error))
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return output.fail(StorageError.of(error, "continue", path=error.filename), "IO")
    # Python before 3.12 may wrap an interrupt into another error.
    if is_interrupt(error):
        return output.fail(KeyboardInterrupt("interrupted"), "INTERRUPTED")
    import traceback

    trace = without_secrets("".join(traceback.format_exception(error)))
    return output.fail(error, "INTERNAL", _REPORT, trace=trace)


def _hint(error: StateExchangeError) -> str | None:
    context = click.get_current_context(silent=True)
    # Other commands stop at the first problem.
    if isinstance(error, CorruptError | IncompleteError) and (context is None or context.info_name != "verify"):
        return "statexchange verify lists all problems"
    return None
