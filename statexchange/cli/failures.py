"""Report an error that ended a command, or its work on one PATH: the message, a hint and the exit code."""

from __future__ import annotations

import errno
import re
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
    from collections.abc import Iterable

    from statexchange.cli.output import Output

__all__ = ["report_failure"]

# Errors of the operating system that are not bugs of statexchange, in case one arrives here as a plain OSError.
_REFUSALS = {
    getattr(errno, name, None)
    for name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EIO", "ESTALE", "ENAMETOOLONG")
}
_REPORT = f"report this, with the text above, to the place where you got statexchange {__version__}"
_FRAME = re.compile(r'^ *File "(.+)", line \d+', re.MULTILINE)  # of a traceback
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")


def report_failure(output: Output, error: Exception) -> int:
    """Report an error and return its exit code; one that is a bug is reported with its traceback."""
    if isinstance(error, StateExchangeError) and error.code != "INTERNAL":
        return output.fail(error, error.code, _hint(error))
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return output.fail(StorageError.of(error, "continue", path=error.filename), "IO")
    if is_interrupt(error):
        return output.fail(KeyboardInterrupt("interrupted"), "INTERRUPTED")
    return _report_internal_error(output, error)


def _hint(error: StateExchangeError) -> str | None:
    context = click.get_current_context(silent=True)
    if isinstance(error, CorruptError | IncompleteError) and (context is None or context.info_name != "verify"):
        return "statexchange verify lists all problems"
    return None


def _report_internal_error(output: Output, error: Exception) -> int:
    import traceback

    text = "".join(traceback.format_exception(error))
    trace = without_secrets(text)
    other = _other_package(getattr(error, "tracebacks", {}).values() or [text])  # of failed ranks, if there are any
    if other is None:
        return output.fail(error, "INTERNAL", f"this is a bug in statexchange: {_REPORT}", trace=trace)
    return output.fail(
        error, "INTERNAL", f"{other} raised this: try another version of it, else {_REPORT}", trace=trace
    )


def _other_package(tracebacks: Iterable[str]) -> str | None:
    """Return the other installed package, with its version, in which the first of these errors arose.

    None if all errors arose in this package.
    """
    from importlib import metadata

    for text in tracebacks:
        files = _FRAME.findall(text)
        match = _PACKAGE.search(files[-1]) if files else None
        if match is not None and match[1] != __package__.partition(".")[0]:
            try:
                return f"{match[1]} {metadata.version(match[1])}"
            except metadata.PackageNotFoundError:  # the distribution has another name than the package
                return match[1]
    return None
