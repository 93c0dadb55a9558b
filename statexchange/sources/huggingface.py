"""Hugging Face checkpoints: one safetensors file, or a directory of them with or without an index."""

from __future__ import annotations

import os
from typing import Any

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, StateExchangeError
from statexchange.layout.shards import Shard, full_box
from statexchange.sources.base import Extent, Holder, Source, SourceTensor
from statexchange.storage import files
from statexchange.storage.tensorfile import FACTS_KEY, read_header_of

__all__ = ["INDEX_SUFFIX", "MANIFEST", "read", "recognises"]

MANIFEST = "statexchange.json"
INDEX_SUFFIX = ".safetensors.index.json"


def recognises(path: str) -> bool:
    """Whether a checkpoint directory or safetensors file lies at `path`."""
    if os.path.isfile(path):
        return not _belongs_to_workspace(path)
    if not os.path.isdir(path):
        return False
    names = os.listdir(path)
    return any(name.endswith((".safetensors", INDEX_SUFFIX)) or name == MANIFEST for name in names) and not any(
        name.startswith("rank-") for name in names
    )


def _belongs_to_workspace(path: str) -> bool:
    return os.path.basename(path).startswith("rank-") and FACTS_KEY in read_header_of(path).metadata


def read(path: str, *, strict: bool = True) -> Source:
    """The source at `path`: each file is a holder of whole tensors."""
    if os.path.isfile(path):
        return Source("huggingface", path, (_holder(0, path, {}),))
    problems: list[StateExchangeError] = []
    manifest = _manifest(path)
    names = _expected_files(path, manifest)
    digests = _whole_digests(manifest)
    holders = []
    for number, name in enumerate(names):
        try:
            holders.append(_holder(number, os.path.join(path, name), digests))
        except StateExchangeError as error:
            problems.append(_missing(error, path, name))
    problems += _index_problems(path, holders)
    if problems and strict:
        raise problems[0]
    return Source("huggingface", path, tuple(holders), manifest=manifest, problems=tuple(problems))


def _missing(error: StateExchangeError, path: str, name: str) -> StateExchangeError:
    if isinstance(error, NotFoundError):
        return IncompleteError("a file of this checkpoint is missing", path=os.path.join(path, name))
    return error


def _holder(number: int, path: str, digests: dict[str, str]) -> Holder:
    header = read_header_of(path)
    tensors = {}
    for name, entry in header.entries.items():
        shard = Shard(name, entry.dtype, entry.shape, (full_box(entry.shape),))
        tensors[name] = SourceTensor(shard, (Extent(path, entry.begin, entry.nbytes, digests.get(name)),))
    return Holder(number, path, header.nbytes, tensors)


def _manifest(path: str) -> dict[str, Any] | None:
    location = os.path.join(path, MANIFEST)
    if not os.path.exists(location):
        return None
    manifest = files.parse_json(files.read_small(location, 1 << 30), location)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("tensors"), dict):
        raise CorruptError("broken manifest", path=location)
    return manifest


def _whole_digests(manifest: dict[str, Any] | None) -> dict[str, str]:
    """Digests of tensors that one box covers, which are digests of the whole tensor."""
    tensors = manifest["tensors"] if manifest is not None else {}
    return {name: str(t["boxes"][0][2]) for name, t in tensors.items() if len(t["boxes"]) == 1}


def _indexes(path: str) -> list[str]:
    return [name for name in files.list_directory(path) if name.endswith(INDEX_SUFFIX)]


def _expected_files(path: str, manifest: dict[str, Any] | None) -> list[str]:
    """By the manifest, else by the index, else what is there."""
    if manifest is not None:
        return sorted(name for name in manifest.get("files", []) if str(name).endswith(".safetensors"))
    named = sorted({str(name) for index in _indexes(path) for name in _weight_map(os.path.join(path, index)).values()})
    for name in named:
        if os.path.basename(name) != name:
            raise CorruptError(f"the index names a file elsewhere: {name!r}", path=path)
    return named or [name for name in files.list_directory(path) if name.endswith(".safetensors")]


def _weight_map(index: str) -> dict[str, str]:
    raw = files.parse_json(files.read_small(index), index)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptError("the index has no weight_map", path=index)
    return weight_map


def _index_problems(path: str, holders: list[Holder]) -> list[StateExchangeError]:
    """Tensors that an index puts into a file that does not have them."""
    has = {os.path.basename(holder.path): holder.tensors.keys() for holder in holders}
    problems: list[StateExchangeError] = []
    for index in _indexes(path):
        location = os.path.join(path, index)
        for name, file in _weight_map(location).items():
            if file in has and name not in has[file]:
                problems.append(IncompleteError(f"the index says {file} has this tensor", name=name, path=location))
    return problems
