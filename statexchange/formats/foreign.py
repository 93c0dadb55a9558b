"""Formats of other frameworks, which are not read: a table of their names and of the tools that read them."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from statexchange.errors import UnsupportedError
from statexchange.formats import torch_file
from statexchange.formats.source import abbreviated_names
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store


class _Format(NamedTuple):
    """A format of files or of directories.

    Attributes:
        names: the end of a file's name; or names, of which a directory has one.
        title: the format's name.
        tool: a sentence about the tool that reads it.
    """

    names: tuple[str, ...]
    title: str
    tool: str


# The sentences follow "this is ..., which is not read here: ".
_FILES = (
    _Format(
        (".gguf",), "GGUF, the format of llama.cpp",
        "gguf-dump of llama.cpp's package gguf shows it, and transformers' from_pretrained(directory, gguf_file=NAME) "
        "loads it",
    ),
    _Format(
        (".npy",), "an array of numpy",
        "numpy.load reads it, and safetensors.numpy.save_file writes what is read here",
    ),
    _Format(
        (".npz",), "a zip of numpy's arrays",
        "numpy.load reads it, and safetensors.numpy.save_file(dict(numpy.load(NAME)), ...) writes what is read here",
    ),
    _Format((".msgpack",), "msgpack of Flax", "flax.serialization.msgpack_restore reads its bytes"),
    _Format((".h5",), "HDF5, as Keras writes it", "h5py.File reads it, and h5dump shows it"),
    _Format((".onnx",), "ONNX", "onnx.load reads it"),
)  # fmt: skip
_DIRECTORIES = (
    _Format(
        ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"), "a checkpoint of Orbax, for JAX",
        "orbax.checkpoint reads it, and safetensors.flax.save_file writes what is read here",
    ),
    _Format(
        ("zarr.json", ".zarray", ".zgroup", ".zmetadata"), "a directory of zarr",
        "zarr.open reads its arrays, and safetensors.numpy.save_file writes what is read here",
    ),
)  # fmt: skip


def matches(opened: OpenedPath) -> bool:
    """Whether a path is of one of these formats, by its name or its listing."""
    # A directory that has torch's files is read as theirs: a model beside its exports, say.
    if opened.file is None and torch_file.matches(opened):
        return False
    return _format_of(opened) is not None


def is_directory_format(store: Store) -> bool:
    """Whether a directory, with all that is below it, is a checkpoint of one of these formats."""
    return _directory_format(store) is not None


def read(opened: OpenedPath) -> NoReturn:
    """Raise UnsupportedError with the format and the tool."""
    format_ = _format_of(opened)
    assert format_ is not None  # matches
    text = f"this is {format_.title}, which is not read here: {format_.tool}"
    if opened.file is None and format_ in _FILES:
        files = [name for name in opened.store.non_directories if name.endswith(format_.names)]
        text = f"{abbreviated_names(files)}: {text}"
    raise UnsupportedError(text, path=opened.path)


def _format_of(opened: OpenedPath) -> _Format | None:
    """Return the format of a path; None for any other path."""
    names, directory_format = [str(opened.file)], None
    if opened.file is None:
        names, directory_format = opened.store.non_directories, _directory_format(opened.store)
    if directory_format is not None:
        return directory_format
    for name in names:
        for format_ in _FILES:
            if name.endswith(format_.names):
                return format_
    return None


def _directory_format(store: Store) -> _Format | None:
    """Return the format of a directory by the names in it; None for any other directory."""
    for format_ in _DIRECTORIES:
        if not store.listing.keys().isdisjoint(format_.names):
            return format_
    return None
