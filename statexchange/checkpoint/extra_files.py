"""Read the extra files of a published checkpoint, such as its config and tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from statexchange.checkpoint.index import index_name, single_file_name
from statexchange.errors import InvalidArgumentError, excerpt
from statexchange.formats.huggingface import MANIFEST
from statexchange.storage.opened_path import open_path
from statexchange.storage.store import resolve_path

if TYPE_CHECKING:
    from statexchange.sharding.plan import Plan

__all__ = ["FilesFrom", "extra_files"]

FilesFrom = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | bytes] | None

# Files of a directory that are not taken: weights, indexes, manifests and hidden files.
_NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|distcp|gguf|onnx|h5|msgpack|npz|index\.json)|statexchange\.json|\..*"
)


def extra_files(files_from: FilesFrom, plan: Plan) -> dict[str, bytes]:
    """Return the content of each extra file by name.

    Args:
        files_from: a directory, of which all files but weights and indexes are taken; paths of files; or a mapping of
            names to contents.
        plan: the checkpoint's plan.

    Raises:
        InvalidArgumentError: a name is not a plain file name, occurs twice, or is a file of the checkpoint itself.
    """
    if files_from is None:
        return {}
    reserved = {MANIFEST, index_name(plan), *(file.name for file in plan.files), single_file_name(plan)}
    contents: dict[str, bytes] = {}
    for name, data in _read_files(files_from):
        if name in contents:
            raise InvalidArgumentError(f"files_from gives the file name {name!r} twice")
        is_plain = name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name
        if name in reserved or not is_plain or name.startswith(".statexchange"):
            raise InvalidArgumentError(
                f"files_from: {name!r} is not a plain file name, or is one that the checkpoint itself writes"
            )
        contents[name] = data
    return contents


def _read_files(files_from: FilesFrom) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of each extra file."""
    if isinstance(files_from, Mapping):
        for name, text in files_from.items():
            if not isinstance(name, str):
                raise InvalidArgumentError(f"files_from: {excerpt(name)} is not a plain file name")
            if not isinstance(text, str | bytes):
                raise InvalidArgumentError(f"files_from[{name!r}] must be str or bytes, not {type(text).__name__}")
            yield name, text.encode() if isinstance(text, str) else text
        return
    paths = [files_from] if isinstance(files_from, str | os.PathLike) else files_from
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise InvalidArgumentError(
            f"files_from must be a path, a list of paths or a mapping of names to text, not {excerpt(files_from)}"
        )
    for path in paths:
        with open_path(resolve_path(path, "a path of files_from")) as opened:
            names = opened.names
            if opened.file is None:
                names = [name for name in names if not _NOT_COPIED.fullmatch(name)]
            for name in names:
                yield name, opened.store.read_small(name)
