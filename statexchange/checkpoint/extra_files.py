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

_LEFT_OUT = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|distcp|gguf|onnx|h5|msgpack|npz|index\.json)|statexchange\.json|\..*"
)


def extra_files(given: FilesFrom, plan: Plan) -> dict[str, bytes]:
    """Return the content of each extra file by name.

    Args:
        given: a directory, of which all files but weights and indexes are taken; paths of files; or a mapping of names
            to contents.
        plan: the checkpoint's plan.

    Raises:
        InvalidArgumentError: a name is not a plain file name, occurs twice, or is a file of the checkpoint itself.
    """
    if given is None:
        return {}
    own = {MANIFEST, index_name(plan), *(file.name for file in plan.files), single_file_name(plan)}
    found: dict[str, bytes] = {}
    for name, data in _given_files(given):
        if name in found:
            raise InvalidArgumentError(f"files_from gives the file name {name!r} twice")
        is_plain = name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name
        if name in own or not is_plain or name.startswith(".statexchange"):
            raise InvalidArgumentError(
                f"files_from: {name!r} is not a plain file name, or is one that the checkpoint itself writes"
            )
        found[name] = data
    return found


def _given_files(given: FilesFrom) -> Iterator[tuple[str, bytes]]:
    if isinstance(given, Mapping):
        for name, text in given.items():
            if not isinstance(name, str):
                raise InvalidArgumentError(f"files_from: {excerpt(name)} is not a plain file name")
            if not isinstance(text, str | bytes):
                raise InvalidArgumentError(f"files_from[{name!r}] must be str or bytes, not {type(text).__name__}")
            yield name, text.encode() if isinstance(text, str) else text
        return
    named = [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(named, Sequence) or not all(isinstance(one, str | os.PathLike) for one in named):
        raise InvalidArgumentError(
            f"files_from must be a path, a list of paths or a mapping of names to text, not {excerpt(given)}"
        )
    for one in named:
        with open_path(resolve_path(one, "a path of files_from")) as opened:
            names = [name for name in opened.names if not _LEFT_OUT.fullmatch(name)]
            for name in names if opened.file is None else [opened.file]:
                yield name, opened.store.read_small(name)
