"""Files and directories of tests: read them as the package does, write what no library would write."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from statexchange.storage.location import open_path
from statexchange.storage.store import StoredFile
from statexchange.storage.tensorfile import Header, read_header

DATA = Path(__file__).parents[1] / "data"
"""The samples that are kept in the repository."""


@contextlib.contextmanager
def stored_file(path: str | Path) -> Iterator[StoredFile]:
    """Open the file at `path`."""
    with open_path(os.fspath(path)) as place:
        assert place.file is not None
        yield place.store.open(place.file)


def header_of(path: str | Path, *, whole: bool = True) -> Header:
    """Return the header of the tensor file at `path`, as the package reads it."""
    with stored_file(path) as file:
        return read_header(file, whole=whole)


def json_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, as the JSON object that it is."""
    data = path.read_bytes()
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def write_with_header(path: Path, header: bytes, data: bytes = b"") -> None:
    """Write a safetensors file of a header, which need not be valid, and data."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def write_raw(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    *,
    metadata: Mapping[str, str] | None = None,
    align_bytes: int = 1,
) -> int:
    """Write a safetensors file of any dtypes and names; return where its data begins, a multiple of `align_bytes`.

    Tensors are given as (dtype, shape, bytes).
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % align_bytes)
    write_with_header(path, text, b"".join(data for _, _, data in tensors.values()))
    return 8 + len(text)


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of the byte at an index, which may count from the end of the file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def contents_of(root: Path) -> dict[str, bytes | None]:
    """Return by path the bytes of each file below a directory, the target of each link, and None for a directory."""
    found: dict[str, bytes | None] = {}
    for path in root.rglob("*"):
        name = os.fspath(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.fsencode(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def entries(path: Path) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(entry.name for entry in path.iterdir())


def copied(sample: str, tmp_path: Path) -> Path:
    """Return a copy of a sample of `DATA`, which a test may change."""
    return Path(shutil.copytree(DATA / sample, tmp_path / "copy"))
