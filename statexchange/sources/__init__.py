"""Every sharded checkpoint as one thing: shards plus byte ranges, detected by content, nothing executed."""

from __future__ import annotations

import os

from statexchange.errors import InvalidArgumentError, NotFoundError, StorageError
from statexchange.sources import huggingface, workspace
from statexchange.sources.base import Extent, Holder, OpenCheckpoint, Source, SourceTensor, StoredTensor
from statexchange.storage import files
from statexchange.storage.object_store import is_url, kind_of, plain

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
    """What lies at `path`: a workspace (or one run or round of it), a Hugging Face directory or file, a torch DCP
    directory, or a file of torch.save or a directory of them.

    Not collective; reads headers only. NotFoundError if nothing known lies there; with `strict`,
    IncompleteError or CorruptError for what is missing or broken, else such things become the source's
    `problems`.
    """
    name = os.fspath(path)
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"a source is a path or a URL, not {name!r}")
    location = plain(name)
    _check_exists(location)
    if _is_dcp(location):
        from statexchange.sources import dcp  # here and below, so that looking at other things does not wait for it

        return dcp.read(location, strict=strict)
    if huggingface.recognises(location):
        return huggingface.read(location, strict=strict)
    if workspace.recognises(location):
        return workspace.read(location, strict=strict)
    _check_not_above(location)
    from statexchange.sources import torch_file

    if torch_file.recognises(location):
        return torch_file.read(location, strict=strict)
    known = "neither a workspace nor a checkpoint (safetensors, torch DCP, or torch.save's .pt files)"
    raise NotFoundError(known, path=location)


def _is_dcp(path: str) -> bool:
    return files.is_directory(path) and ".metadata" in files.list_directory(path)


def _check_not_above(path: str) -> None:
    """accelerate puts DCP directories below a directory of its own, beside files of torch.save that are no model."""
    names = files.list_directory(path) if files.is_directory(path) else []
    below = [name for name in names if _is_dcp(os.path.join(path, name))]
    if below:
        raise InvalidArgumentError(f"torch DCP directories lie here, name one of them: {', '.join(below)}", path=path)


def _check_exists(path: str) -> None:
    """Workspaces look for themselves."""
    if path.startswith("shm://"):
        return
    try:
        if not is_url(path):
            os.lstat(path)
        elif kind_of(path) is None:
            raise FileNotFoundError
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError("no such path", path=path) from None
    except OSError as error:
        raise StorageError.of(error, "look up", path=path) from error


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """A lazy mapping of tensor names to shape, dtype and `read()`, of a checkpoint that holds whole tensors.

    Not collective. Sharded state must be merged first (InvalidArgumentError).
    """
    return OpenCheckpoint(open_source(path))
