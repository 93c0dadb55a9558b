"""Report an error that ended a command, or its work on one PATH: the message, a hint and the exit code."""

from __future__ import annotations

import errno
import os
import re
import shlex
from typing import TYPE_CHECKING

import click

from statexchange import __version__
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
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
_MAX_SCANNED = 100  # directories
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
    if isinstance(error, NotFoundError) and error.path is not None and os.path.isdir(error.path):
        return _checkpoints_below(error.path)
    return None


def _checkpoints_below(path: str) -> str | None:
    """Return how many checkpoints lie below a directory, and how to look at them.

    None if there are none, or if the directory is itself a checkpoint: then something in it was not found. Looks into a
    limited number of directories.
    """
    from statexchange.report.scan import scan

    directories: list[str] = []
    count = 0
    is_all = True
    try:
        for row in scan(path, on_directory=directories.append):
            if row.status == "unfinished":
                continue
            if row.path == path.rstrip("/"):
                return None
            count += 1
            if len(directories) > _MAX_SCANNED:
                is_all = False
                break
    except StateExchangeError:  # removed meanwhile, or unreadable
        return None
    if not count:
        return None
    number = "1 checkpoint" if count == 1 and is_all else f"{count:,} checkpoints"
    least = "" if is_all else "at least "
    advice = f"statexchange scan {shlex.quote(path)} lists them; give the path of one"
    return f"this directory holds {least}{number}: {advice}"


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
