"""The formats in which a checkpoint may lie: each says whether it matches what a place holds, and reads it.

A place is opened and listed once, and all formats look at this one listing. Nothing in a file is executed.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from statexchange.errors import (
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    UnsupportedError,
)
from statexchange.formats.source import OpenCheckpoint, Source
from statexchange.storage.opened_path import OpenedPath, read_with_retry
from statexchange.storage.store import resolve_path

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FORMATS", "Format", "open_checkpoint", "open_source"]


class Format(Protocol):
    """A module that reads one kind of checkpoint."""

    def matches(self, opened: OpenedPath) -> bool:
        """Whether this format lies at a place, by its listing and at most the first bytes of a file."""

    def read(self, opened: OpenedPath, *, strict: bool = True) -> Source:
        """Return the source, from headers only. With `strict`, what is missing or broken is raised, else it is in the
        source's `problems`."""


# The first that matches reads. A format is imported when it is asked: the last two read pickles, for which looking at
# other things does not wait.
FORMATS = ("huggingface", "workspace", "dcp", "torch_file")
_DESCRIPTIONS = (".index.json", "statexchange.json", "manifest.json", ".metadata")  # ends of names of files
_FREE_BYTES, _MAX_REPETITION = 64 << 20, 16  # of tensors, in bytes and in multiples of those of their files
_UNKNOWN = "neither a workspace nor a checkpoint (safetensors, torch DCP, or torch.save's .pt files)"


def open_source(path: str | os.PathLike[str], *, strict: bool = True) -> Source:
    """Return what lies at `path`: a workspace (or one run or round of it), a Hugging Face directory or file, a torch
    DCP directory, or a file of torch.save or a directory of them.

    Not collective; reads headers only. What is replaced while it is read is opened again. NotFoundError if nothing
    known lies there; with `strict`, IncompleteError or CorruptError for what is missing or broken, else such things
    become the source's `problems`. The source holds its files open until it is closed.
    """
    return opened(path, read_opened, strict=strict)


def opened(path: str | os.PathLike[str], read: Callable[..., Source], *, strict: bool) -> Source:
    """Open the source at `path` with `read`, again if it was replaced meanwhile."""
    path = resolve_path(path, "a source")

    def read_once(opened: OpenedPath) -> Source:
        source = read(opened, strict=strict)
        try:
            _check_not_repeated(source)
        except UnsupportedError:
            source.close()
            raise
        if source.problems and not opened.is_current():
            raise ReplacedError("replaced while it was read", path=path) from source.problems[0]
        return source

    return read_with_retry(path, read_once)


def _check_not_repeated(source: Source) -> None:
    """Raise UnsupportedError if reading all tensors would read a file's bytes again and again.

    A tensor whose strides are 0, or tensors that share a storage, may have any number of elements in a small file.
    """
    files = {(shard_file.path, shard_file.nbytes) for shard_file in source.files}
    limit = _FREE_BYTES + _MAX_REPETITION * sum(nbytes for _, nbytes in files)
    total = 0
    for shard_file, tensor in source.shards():
        total += sum(byte_range.nbytes for byte_range in tensor.byte_ranges)
        if total > limit:
            text = (
                f"refused: its tensors would be {total} bytes, more than {_MAX_REPETITION} times those of its files, "
                "which hold expanded or shared ones: save them with .contiguous()"
            )
            raise UnsupportedError(text, name=tensor.shard.name, path=shard_file.path)


def read_opened(opened: OpenedPath, *, strict: bool = True) -> Source:
    """Return the source at an open place."""
    for name in FORMATS:
        known: Format = import_module(f"statexchange.formats.{name}")
        if known.matches(opened):
            if name == "torch_file":
                _check_not_above(opened)
            return known.read(opened, strict=strict)
    _check_not_above(opened)
    _check_not_a_part(opened)
    raise NotFoundError(_UNKNOWN, path=opened.path)


def _check_not_above(opened: OpenedPath) -> None:
    """accelerate puts DCP directories below a directory of its own, beside files of torch.save that are no model."""
    if opened.file is not None:
        return
    below = [name for name in opened.store.directories if _is_dcp(opened, name)]
    if below:
        text = f"torch DCP directories lie here, name one of them: {', '.join(below)}"
        raise InvalidArgumentError(text, path=opened.path)


def _check_not_a_part(opened: OpenedPath) -> None:
    """An index or the metadata of a checkpoint is not read by itself."""
    if opened.file is not None and opened.file.endswith(_DESCRIPTIONS):
        text = f"this file describes a checkpoint: give the directory in which it lies, {opened.store.path}"
        raise InvalidArgumentError(text, path=opened.path)


def _is_dcp(opened: OpenedPath, name: str) -> bool:
    try:
        return ".metadata" in opened.store.below(name).listing
    except StateExchangeError:  # gone meanwhile, or not to be looked at
        return False


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Return a lazy mapping of tensor names to shape, dtype and `read()`; shards of one tensor are read as one.

    Not collective. The checkpoint's files stay open until the mapping is closed or dropped, so what is replaced later
    is read as it was. Raises what `open_source` raises.
    """
    return OpenCheckpoint(open_source(path))
