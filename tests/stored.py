"""Open files of a test for reading as the package opens them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from statexchange.storage.opened_path import open_path
from statexchange.storage.store import StoredFile
from statexchange.storage.tensorfile import Header, read_header


@contextlib.contextmanager
def stored_file(path: str | Path) -> Iterator[StoredFile]:
    """Open the file at `path` and return it."""
    with open_path(os.fspath(path)) as place:
        assert place.file is not None
        yield place.store.open(place.file)


def header_of(path: str | Path, *, whole: bool = True) -> Header:
    """The header of the tensor file at `path`."""
    with stored_file(path) as file:
        return read_header(file, whole=whole)
