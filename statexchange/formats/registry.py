"""The registry of checkpoint formats, and the functions that open a checkpoint of any of them.

A format is a module with the functions of `Format`. To add one, write the module and put its name into `FORMATS`. A
path is opened and listed once, and all formats match against this one listing. Nothing in a file is executed.
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
        """Whether a path has this format, by its listing and at most the first bytes of a file."""

    def read(self, opened: OpenedPath, *, strict: bool = True) -> Source:
        """Return the source, reading headers only.

        With `strict` the first missing or broken part is raised, else all are in the source's `problems`.
        """


# In order: the first format that matches reads. A format is imported when it is tried; the last two import the pickle
# reader, which the others do not need.
FORMATS = ("huggingface", "workspace", "dcp", "torch_file")
_DESCRIPTIONS = (".index.json", "statexchange.json", "manifest.json", ".metadata")  # endings of file names
# All tensors together may have _BASE_BYTES more than _MAX_REPETITION times the bytes of their files.
_BASE_BYTES, _MAX_REPETITION = 64 << 20, 16
_UNKNOWN = "neither a workspace nor a checkpoint (safetensors, torch DCP, or torch.save's .pt files)"


def open_source(path: str | os.PathLike[str], *, strict: bool = True) -> Source:
    """Open a checkpoint of any format.

    Not collective. Reads headers only. A checkpoint that is replaced meanwhile is opened again.

    Args:
        path: a workspace (or one run or round of it), a Hugging Face directory or file, a torch DCP directory, a file
            of torch.save or a directory of such files.
        strict: raise the first missing or broken part; otherwise all become the source's `problems`.

    Returns:
        The source, which holds its files open until it is closed.

    Raises:
        NotFoundError: there is no checkpoint of a known format at the path.
        IncompleteError, CorruptError: with `strict`, something is missing or broken.
    """
    return open_with(path, read_opened, strict=strict)


def open_with(path: str | os.PathLike[str], read: Callable[..., Source], *, strict: bool) -> Source:
    """Open a path and read its source with `read`; retry if the path was replaced meanwhile."""
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
    """Raise UnsupportedError if the tensors together are far larger than their files.

    A tensor with strides of 0, or tensors that share a storage, may have any number of elements in a small file.
    """
    files = {(shard_file.path, shard_file.nbytes) for shard_file in source.files}
    limit = _BASE_BYTES + _MAX_REPETITION * sum(nbytes for _, nbytes in files)
    total = 0
    for shard_file, tensor in source.shards():
        total += sum(byte_range.nbytes for byte_range in tensor.byte_ranges)
        if total > limit:
            text = (
                f"refused: its tensors would be {total} bytes, more than {_MAX_REPETITION} times its files' bytes, "
                "because they are expanded or share a storage: save them with .contiguous()"
            )
            raise UnsupportedError(text, name=tensor.shard.name, path=shard_file.path)


def read_opened(opened: OpenedPath, *, strict: bool = True) -> Source:
    """Return the source at an opened path, by the first format that matches."""
    for name in FORMATS:
        module: Format = import_module(f"statexchange.formats.{name}")
        if module.matches(opened):
            if name == "torch_file":
                _check_no_dcp_below(opened)
            return module.read(opened, strict=strict)
    _check_no_dcp_below(opened)
    _check_no_description(opened)
    raise NotFoundError(_UNKNOWN, path=opened.path)


def _check_no_dcp_below(opened: OpenedPath) -> None:
    """Raise InvalidArgumentError if there are DCP directories one level below.

    accelerate writes DCP directories into a directory of its own, beside files of torch.save that have no model.
    """
    if opened.file is not None:
        return
    dcp_names = [name for name in opened.store.directories if _is_dcp(opened, name)]
    if dcp_names:
        text = f"this directory contains torch DCP directories, name one of them: {', '.join(dcp_names)}"
        raise InvalidArgumentError(text, path=opened.path)


def _check_no_description(opened: OpenedPath) -> None:
    """Raise InvalidArgumentError for a file that only describes a checkpoint, such as an index."""
    if opened.file is not None and opened.file.endswith(_DESCRIPTIONS):
        text = f"this file only describes a checkpoint: give its directory, {opened.store.path}"
        raise InvalidArgumentError(text, path=opened.path)


def _is_dcp(opened: OpenedPath, name: str) -> bool:
    try:
        return ".metadata" in opened.store.below(name).listing
    except StateExchangeError:  # removed meanwhile, or unreadable
        return False


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Open a checkpoint of any format as a lazy mapping of tensor names to tensors.

    Not collective. Reads headers only; a tensor's bytes are read by its `read`. A tensor that is stored as shards, even
    in several files, is read as one. The files stay open until the mapping is closed, so that the old
    content stays readable if the checkpoint is replaced later.

    Args:
        path: a Hugging Face directory or file, a workspace, a torch DCP directory, or files of torch.save; a local path
            or an fsspec URL.

    Returns:
        A mapping of names to `StoredTensor`, which has `shape`, `dtype`, `nbytes` and `read()`. It is a context
        manager.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        IncompleteError: a file or a rank is missing.
        CorruptError: a file is broken.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.arange(6, dtype="float32").reshape(2, 3)}, "model.safetensors")
        >>> with open_checkpoint("model.safetensors") as checkpoint:
        ...     w = checkpoint["w"]
        ...     w.dtype, w.shape, w.read().tolist()
        ('F32', (2, 3), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    """
    return OpenCheckpoint(open_source(path))
