"""The options ``--svg FILE`` and ``--overwrite`` of commands that draw, and the file that they write."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

import click

from statexchange.errors import InvalidArgumentError, StorageError, TargetExistsError, UnsafeError
from statexchange.storage.store import is_url, resolve_path

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["picture_options", "picture_path", "write_picture"]


def picture_options(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command the options ``--svg FILE`` and ``--overwrite``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        overwrite = click.option("--overwrite", is_flag=True, help="Replace the FILE of --svg.")
        return click.option("--svg", metavar="FILE", help=help_text)(overwrite(function))

    return decorate


def picture_path(path: str, *, overwrite: bool) -> str:
    """Return the absolute path of a picture that is to be written.

    Raises:
        InvalidArgumentError: it is not the path of a local file.
        TargetExistsError: it exists and is not to be replaced.
        UnsafeError: what is to be replaced is not a regular file.
    """
    resolved = resolve_path(path, "--svg")
    if path == "-" or is_url(resolved):
        raise InvalidArgumentError("a picture is written to a local file: name one", path=path)
    try:
        mode = os.lstat(resolved).st_mode
    except FileNotFoundError:
        return resolved
    except OSError as error:
        raise StorageError.of(error, "look for the picture's file", path=resolved) from error
    if not overwrite:
        raise TargetExistsError("a file of this name exists: choose another, or remove it", path=resolved)
    if not stat.S_ISREG(mode):
        raise UnsafeError("not a regular file, and therefore not replaced", path=resolved)
    return resolved


def write_picture(path: str, svg: str, *, overwrite: bool) -> None:
    """Write a picture to a path of `picture_path`; the name appears when the file is whole."""
    from statexchange.storage import atomic, files

    folder, name = os.path.split(path)
    data = svg.encode()
    with files.directory(folder) as dir_fd:
        atomic.write_new(dir_fd, name, [data], nbytes=len(data), path=path, mode=0o666, overwrite=overwrite)
