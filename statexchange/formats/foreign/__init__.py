"""Formats of other frameworks that are shown, but not read: GGUF, npy, npz, Flax's msgpack, Orbax, zarr.

`info` and `ls` show what the headers contain. Whatever needs the tensors' bytes raises `Source.refusal`, which names
the kind and the tool that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError
from statexchange.formats.foreign.starts import is_gguf, is_map_of_text, is_npy, is_npz
from statexchange.formats.huggingface import check_numbers
from statexchange.formats.source import ShardFile, Source, SourceKind, UnreadableTensor
from statexchange.storage.opened_path import OpenedPath
from statexchange.storage.store import Store

if TYPE_CHECKING:
    from statexchange.formats.foreign.contents import Contents

__all__ = ["matches", "read"]

_START_BYTES = 512
_NUMBER = re.compile(r"[0-9]{5}-of-[0-9]{5}")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")  # a directory that has such files, too, is read as theirs


class _Format(NamedTuple):
    """A format of files, or of directories.

    Attributes:
        kind: the `kind` of its sources.
        suffix: of a file's name; "" for a directory.
        begins: tests the first bytes of a file; None for a directory.
        entries: names of files of which a directory has one.
        module: the module that shows it, whose `read` takes a StoredFile or a Store.
        title: what it is.
        tool: which tool reads it.
    """

    kind: SourceKind
    suffix: str
    begins: Callable[[bytes], bool] | None
    entries: tuple[str, ...]
    module: str
    title: str
    tool: str


_FILES = (
    _Format(
        "gguf", ".gguf", is_gguf, (), "gguf",
        "GGUF, the format of llama.cpp",
        "llama.cpp and ollama run it; transformers' from_pretrained(directory, gguf_file=NAME) loads it, and "
        "save_pretrained then writes safetensors",
    ),
    _Format(
        "npy", ".npy", is_npy, (), "numpy_files",
        "an array of numpy", "numpy.load reads it; safetensors.numpy.save_file writes what can be read here",
    ),
    _Format(
        "npz", ".npz", is_npz, (), "numpy_files",
        "a zip of numpy's arrays",
        "numpy.load reads it; safetensors.numpy.save_file(dict(numpy.load(NAME)), ...) writes what can be read here",
    ),
    _Format(
        "msgpack", ".msgpack", is_map_of_text, (), "msgpack",
        "msgpack of Flax",
        "flax.serialization.msgpack_restore reads it; transformers 4's from_pretrained(directory, from_flax=True) "
        "loads it, and save_pretrained then writes safetensors",
    ),
)  # fmt: skip
_DIRECTORIES = (
    _Format(
        "orbax", "", None, ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"), "directories",
        "a checkpoint of Orbax, for JAX",
        "orbax.checkpoint.StandardCheckpointer().restore(path) reads it; safetensors.flax.save_file writes what can be "
        "read here",
    ),
    _Format(
        "zarr", "", None, ("zarr.json", ".zarray", ".zgroup", ".zmetadata"), "directories",
        "arrays of zarr", "zarr.open(path) reads them; safetensors.numpy.save_file writes what can be read here",
    ),
)  # fmt: skip


def matches(opened: OpenedPath) -> bool:
    """Whether a path is of one of these kinds, by its listing, or by a file's suffix or first bytes."""
    return _format_of(opened) is not None


def _format_of(opened: OpenedPath) -> _Format | None:
    if opened.file is not None:
        return _format_of_file(opened.store, opened.file)
    if any(name.endswith(_TORCH_SUFFIXES) for name in opened.store.files):
        return None
    for format_ in _DIRECTORIES:
        if any(name in opened.store.listing for name in format_.entries):
            return format_
    return next((format_ for format_ in _FILES if _names_of(format_, opened.store.non_directories)), None)


def _format_of_file(store: Store, name: str) -> _Format | None:
    for format_ in _FILES:
        if name.endswith(format_.suffix):
            return format_
    file = store.open(name)
    start = bytearray(min(_START_BYTES, file.size))
    file.read_into(memoryview(start), 0)
    return next((format_ for format_ in _FILES if format_.begins is not None and format_.begins(bytes(start))), None)


def _names_of(format_: _Format, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(format_.suffix)]


def read(opened: OpenedPath, *, strict: bool = True) -> Source:
    """Return the source at a path. Its tensors are unreadable, and its `refusal` says why."""
    format_ = _format_of(opened)
    assert format_ is not None  # it matches
    refusal = UnsupportedError(f"{format_.title}: only shown here, not read. {format_.tool}", path=opened.path)
    show = import_module(f"statexchange.formats.foreign.{format_.module}").read
    if format_ in _DIRECTORIES:
        return _source(opened, format_.kind, refusal, *_read_directory(show, opened.store), strict=strict)
    names = [opened.file] if opened.file is not None else _names_of(format_, opened.store.non_directories)
    problems = check_numbers(names, opened.store) if len(names) > 1 else []
    if len(names) > 1 and not _are_one_set(names):
        text = f"this directory contains {len(names)} files of {format_.kind}, name one of them: {', '.join(names[:8])}"
        raise InvalidArgumentError(text, path=opened.path)
    contents = []
    shard_files = []
    for number, name in enumerate(names):
        try:
            file = opened.store.open(name)
            contents.append(show(file))
            shard_files.append(ShardFile(number, file, {}))
        except StateExchangeError as error:
            problems.append(error)
    return _source(opened, format_.kind, refusal, contents, problems, shard_files, strict=strict)


def _are_one_set(names: Sequence[str]) -> bool:
    """Whether names differ in the number of "i-of-n" alone."""
    return len({_NUMBER.sub("", name) for name in names}) == 1


def _read_directory(
    show: Callable[[Store], Contents], store: Store
) -> tuple[list[Contents], list[StateExchangeError], list[ShardFile]]:
    try:
        return [show(store)], [], []
    except StateExchangeError as error:
        return [], [error], []


def _source(
    opened: OpenedPath,
    kind: SourceKind,
    refusal: UnsupportedError,
    contents: Sequence[Contents],
    problems: Sequence[StateExchangeError],
    shard_files: Sequence[ShardFile],
    *,
    strict: bool,
) -> Source:
    if strict:
        raise problems[0] if problems else refusal
    unreadable: list[UnreadableTensor] = []
    others: dict[str, str] = {}
    notes: list[str] = []
    for part in contents:
        unreadable += part.tensors
        others |= part.others
        notes += part.notes
    return Source(
        kind,
        opened,
        tuple(shard_files),
        others=others,
        problems=tuple(problems),
        unreadable=tuple(unreadable),
        notes=tuple(notes),
        refusal=refusal,
    )
