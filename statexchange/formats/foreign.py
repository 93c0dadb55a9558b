"""Formats of other frameworks, which are not read: a table of their marks and of the tools that read them."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from statexchange.errors import CorruptError, UnsupportedError
from statexchange.formats import torch_file
from statexchange.formats.source import abbreviated_names
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store
from statexchange.storage.wrong_kinds import wrong_kind_of_bytes

__all__ = ["is_directory_format", "matches", "read"]

_START_BYTES = 512


class _Format(NamedTuple):
    """A format of files.

    Attributes:
        suffix: the end of a file's name.
        start: the first bytes of a file.
        title: the format's name.
        tool: a sentence about the tool that reads it.
    """

    suffix: str
    start: re.Pattern[bytes]
    title: str
    tool: str


_FILES = (
    _Format(
        ".gguf", re.compile(b"GGUF"), "GGUF, the format of llama.cpp",
        "gguf-dump of llama.cpp's package gguf shows it, and transformers' from_pretrained(directory, gguf_file=NAME) "
        "loads it",
    ),
    _Format(
        ".npy", re.compile(rb"\x93NUMPY"), "an array of numpy",
        "numpy.load reads it, and safetensors.numpy.save_file writes what is read here",
    ),
    _Format(  # a zip whose first member is an array: its name ends before the first byte that is no text
        ".npz", re.compile(rb"PK\x03\x04.{26}[^\0-\x1f]+?\.npy(?![!-~])", re.DOTALL), "a zip of numpy's arrays",
        "numpy.load reads it, and safetensors.numpy.save_file(dict(numpy.load(NAME)), ...) writes what is read here",
    ),
    _Format(  # a map whose first key is printable text
        ".msgpack", re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)[ -~]", re.DOTALL),
        "msgpack of Flax", "flax.serialization.msgpack_restore reads its bytes",
    ),
    _Format(
        ".h5", re.compile(rb"\x89HDF\r\n\x1a\n"),
        "HDF5, as Keras writes it", "h5py.File reads it, and h5dump shows it",
    ),
    _Format(  # a protobuf message: its version, and then the producer's name or the graph
        ".onnx", re.compile(rb"\x08[\x01-\x1f][\x12:]"), "ONNX", "onnx.load reads it",
    ),
)  # fmt: skip
_SUFFIXES = tuple(format_.suffix for format_ in _FILES)
# By names of which a directory has one: the format's name and the tool.
_DIRECTORIES = {
    ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"): (
        "a checkpoint of Orbax, for JAX",
        "orbax.checkpoint reads it, and safetensors.flax.save_file writes what is read here",
    ),
    ("zarr.json", ".zarray", ".zgroup", ".zmetadata"): (
        "a directory of zarr",
        "zarr.open reads its arrays, and safetensors.numpy.save_file writes what is read here",
    ),
}


def matches(opened: OpenedPath) -> bool:
    """Whether a path is of one of these formats, by its listing, or by a file's suffix or first bytes."""
    if opened.file is not None:
        start = _start_of(opened.store, opened.file)
        return opened.file.endswith(_SUFFIXES) or _format_of(start) is not None
    if torch_file.matches(opened):  # a directory that has torch's files, too, is read as theirs
        return False
    return is_directory_format(opened.store) or bool(_names(opened.store))


def is_directory_format(store: Store) -> bool:
    """Whether a directory, with all that is below it, is a checkpoint of one of these formats."""
    return _directory_format(store) is not None


def read(opened: OpenedPath) -> NoReturn:
    """Raise UnsupportedError with the format and the tool; CorruptError if a file is not what its suffix says."""
    if opened.file is None:
        directory_format = _directory_format(opened.store)
        if directory_format is not None:
            title, tool = directory_format
            raise UnsupportedError(f"this is {title}, which is not read here: {tool}", path=opened.path)
    names = [opened.file] if opened.file is not None else _names(opened.store)
    start = _start_of(opened.store, names[0])
    format_ = _format_of(start)
    if format_ is None:
        text = wrong_kind_of_bytes(start) or "it is not what its suffix says, by its first bytes"
        raise CorruptError(text, path=opened.store.path_of(names[0]))
    files = ""
    if opened.file is None:
        files = abbreviated_names([name for name in names if name.endswith(format_.suffix)]) + ": "
    raise UnsupportedError(f"{files}this is {format_.title}, which is not read here: {format_.tool}", path=opened.path)


def _names(store: Store) -> list[str]:
    """Return the names of files that have a suffix of these formats."""
    return [name for name in store.non_directories if name.endswith(_SUFFIXES)]


def _format_of(start: bytes) -> _Format | None:
    """Return the format of a file with these first bytes; None if it is none of them."""
    for format_ in _FILES:
        if format_.start.match(start):
            return format_
    return None


def _directory_format(store: Store) -> tuple[str, str] | None:
    """Return the format of a directory and its tool; None for any other directory."""
    for marks, title_and_tool in _DIRECTORIES.items():
        if any(name in store.listing for name in marks):
            return title_and_tool
    return None


def _start_of(store: Store, name: str) -> bytes:
    return store.open(name).first_bytes(_START_BYTES)
