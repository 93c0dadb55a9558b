"""The options ``--svg FILE`` and ``--overwrite`` of commands that draw, and the file that they write."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from statexchange.errors import InvalidArgumentError, TargetExistsError, UnsafeError
from statexchange.storage.location import is_remote, resolve_path

if TYPE_CHECKING:
    from collections.abc import Callable


def picture_options(help_text: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that gives a command ``--svg`` and ``--overwrite`` as `picture`: a PictureFile or None."""

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @click.option("--svg", metavar="FILE", help=help_text)
        @click.option("--overwrite", is_flag=True, help="Replace the FILE of --svg.")
        @functools.wraps(function)
        def with_picture(*arguments: Any, svg: str | None, overwrite: bool, **options: Any) -> int:
            if svg is not None and len(options.get("paths", ())) > 1:
                raise InvalidArgumentError("--svg draws one checkpoint: name one PATH")
            # Before anything is read: a path that is refused costs no waiting.
            picture = None if svg is None else PictureFile.at(svg, overwrite)
            return function(*arguments, picture=picture, **options)

        return with_picture

    return decorate


@dataclass(frozen=True, slots=True)
class PictureFile:
    """The file that a picture is written to, checked before the work begins.

    Attributes:
        path: its absolute path.
        overwrite: whether it may replace a file.
    """

    path: str
    overwrite: bool

    @classmethod
    def at(cls, path: str, overwrite: bool = False) -> PictureFile:
        """Return the file at a path.

        Raises:
            InvalidArgumentError: it is not the path of a local file.
            TargetExistsError: it exists and is not to be replaced.
            UnsafeError: what is to be replaced is not a regular file.
        """
        resolved = resolve_path(path, "--svg")
        if path == "-" or is_remote(resolved):
            raise InvalidArgumentError("a picture is written to a local file: name one", path=path)
        exists = os.path.lexists(resolved)
        if exists and not overwrite:
            text = "a file of this name exists: choose another, or replace it, for which --svg has --overwrite"
            raise TargetExistsError(text, path=resolved)
        # Not a link either, whose target --overwrite does not mean, nor a device such as /dev/stdout.
        if exists and (os.path.islink(resolved) or not os.path.isfile(resolved)):
            raise UnsafeError("not a regular file, and therefore not replaced", path=resolved)
        return cls(resolved, overwrite)

    def write(self, svg: str) -> None:
        """Write a picture; the name appears when the file is whole."""
        from statexchange.storage import atomic, files

        folder, name = os.path.split(self.path)
        data = svg.encode()
        with files.directory(folder) as dir_fd:
            atomic.write_new(dir_fd, name, data, path=self.path, mode=0o666, overwrite=self.overwrite)
