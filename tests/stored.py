"""Read files of a test as the package does, write tensor files that no library would write, compare tensors."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from statexchange.storage.opened_path import open_path
from statexchange.storage.store import StoredFile
from statexchange.storage.tensorfile import Header, read_header


@contextlib.contextmanager
def stored_file(path: str | Path) -> Iterator[StoredFile]:
    """Open the file at `path`."""
    with open_path(os.fspath(path)) as place:
        assert place.file is not None
        yield place.store.open(place.file)


def header_of(path: str | Path, *, whole: bool = True) -> Header:
    """Return the header of the tensor file at `path`."""
    with stored_file(path) as file:
        return read_header(file, whole=whole)


def write_raw(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]], *, align_bytes: int = 1) -> int:
    """Write a safetensors file of any dtypes and names; return where its data begins, a multiple of `align_bytes`.

    Tensors are given as (dtype, shape, bytes).
    """
    entries, begin = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % align_bytes)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return 8 + len(text)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert that names, dtypes, shapes and values of torch tensors are equal."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].equal(tensor), name
