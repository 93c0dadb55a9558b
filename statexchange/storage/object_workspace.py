"""A workspace whose files were copied into an object store: there it is read, and never written."""

from __future__ import annotations

import os
from typing import NoReturn

from statexchange.errors import InvalidArgumentError
from statexchange.storage import files
from statexchange.storage.workspace import RankName, Workspace

__all__ = ["ObjectWorkspace"]


class ObjectWorkspace(Workspace):
    """The workspace at a URL."""

    def __init__(self, url: str) -> None:
        self.url = self.path = url.rstrip("/")

    def _is_directory(self, name: str) -> bool:
        return files.is_directory(os.path.join(self.path, name))

    def _names_of(self, run: str, number: int) -> list[str]:
        return files.list_directory(os.path.join(self.path, run, f"{number:06d}"))

    def _file_of(self, name: RankName) -> files.Readable:
        return files.open_for_reading(os.path.join(self.path, name.relative))

    def _text_of(self, run: str, number: int, file: str) -> bytes:
        return files.read_small(os.path.join(self.path, run, f"{number:06d}", file))

    def _round_directory(self, run: str, number: int, *, make: bool = False) -> NoReturn:  # noqa: ARG002
        raise InvalidArgumentError("ranks write a workspace into a directory, which may be copied here", path=self.path)
