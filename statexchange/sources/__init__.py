"""Every sharded checkpoint as one thing: shards plus byte ranges, detected by content, nothing executed."""

from __future__ import annotations

import os

from statexchange.errors import InvalidArgumentError, NotFoundError, StorageError
from statexchange.sources import huggingface, workspace
from statexchange.sources.base import Extent, Holder, OpenCheckpoint, Source, SourceTensor, StoredTensor

__all__ = [
    "Extent",
    "Holder",
    "OpenCheckpoint",
    "Source",
    "SourceTensor",
    "StoredTensor",
    "open_checkpoint",
    "open_source",
]


def open_source(path: str | os.PathLike[str], *, strict: bool = True) -> Source:
    """What lies at `path`: a workspace (or one run or round of it), or a Hugging Face directory or file.

    Not collective; reads headers only. NotFoundError if nothing known lies there; with `strict`,
    IncompleteError or CorruptError for what is missing or broken, else such things become the source's
    `problems`.
    """
    location = os.fspath(path)
    if "://" not in location:
        _check_exists(location)
    if huggingface.recognises(location):
        return huggingface.read(location, strict=strict)
    if workspace.recognises(location):
        return workspace.read(location, strict=strict)
    known = "neither a workspace nor a checkpoint directory nor a safetensors file"
    raise NotFoundError(f"{known} (.pt files and torch DCP directories are not read yet)", path=location)


def _check_exists(path: str) -> None:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError("no such path", path=path) from None
    except OSError as error:
        raise StorageError.of(error, "look up", path=path) from error


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """A lazy mapping of tensor names to shape, dtype and `read()`, of a checkpoint that holds whole tensors.

    Not collective. For sharded state in a workspace, merge it first (InvalidArgumentError).
    """
    source = open_source(path)
    if source.kind != "huggingface":
        raise InvalidArgumentError("this holds shards of tensors: merge it first (statexchange merge)", path=path)
    return OpenCheckpoint(source)
