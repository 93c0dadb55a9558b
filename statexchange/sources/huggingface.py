"""Hugging Face checkpoints: one safetensors file, or a directory of them with or without an index."""

from __future__ import annotations

import os
import re
from typing import Any

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, StateExchangeError
from statexchange.layout.shards import Box, Shard, full_box, itemsize_of, sizes_from_json
from statexchange.sources.base import Extent, Holder, Source, SourceTensor
from statexchange.storage import files
from statexchange.storage.tensorfile import read_header_of
from statexchange.storage.workspace import is_rank_file

__all__ = ["INDEX_SUFFIX", "MANIFEST", "read", "recognises"]

MANIFEST = "statexchange.json"
INDEX_SUFFIX = ".safetensors.index.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")


def recognises(path: str) -> bool:
    """Whether a checkpoint directory or a file lies at `path`; a rank's file of a workspace is none."""
    if os.path.isfile(path):
        return not is_rank_file(os.path.basename(path)) and (path.endswith(".safetensors") or _has_header(path))
    if not os.path.isdir(path):
        return False
    names = files.list_directory(path)
    ours = any(is_rank_file(name) for name in names)
    return not ours and any(name == MANIFEST or name.endswith((".safetensors", INDEX_SUFFIX)) for name in names)


def _has_header(path: str) -> bool:
    try:
        read_header_of(path)
    except CorruptError:
        return False
    return True


def read(path: str, *, strict: bool = True) -> Source:
    """The source at `path`: each file is a holder of whole tensors."""
    if os.path.isfile(path):
        return Source("huggingface", path, (_holder(0, path, {}),))
    problems: list[StateExchangeError] = []
    manifest = None
    weight_map: dict[str, str] = {}
    try:
        manifest = _manifest(path)
        weight_map = _weight_map(path, manifest)
    except StateExchangeError as error:
        problems.append(error)
    names = sorted(set(weight_map.values())) or [n for n in files.list_directory(path) if n.endswith(".safetensors")]
    digests = _whole_digests(manifest)
    holders = []
    for number, name in enumerate(names):
        try:
            holders.append(_holder(number, os.path.join(path, name), digests))
        except StateExchangeError as error:
            problems.append(_missing(error, path, name))
    problems += _misplaced(weight_map, holders)
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
    if not os.path.lexists(location):
        return None
    manifest = files.parse_json(files.read_small(location, 1 << 30), location)
    try:
        assert isinstance(manifest, dict)
        assert isinstance(manifest.get("aliases", {}), dict)
        for fact in manifest["tensors"].values():
            _check_fact(fact)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"broken manifest: {error}", path=location) from None
    return manifest


def _check_fact(fact: Any) -> None:
    """One tensor's record: file, dtype, shape, and boxes as (offsets, shape, digest, rank)."""
    itemsize_of(fact["dtype"])
    shape = sizes_from_json(fact["shape"])
    for offsets, sizes, known, rank in fact["boxes"]:
        Shard("", fact["dtype"], shape, (Box.from_json([offsets, sizes]),))
        if not isinstance(known, str) or type(rank) is not int:
            raise ValueError(f"not a box: {[known, rank]!r:.100}")
    if not isinstance(fact["file"], str):
        raise ValueError("a tensor lies in no file")


def _whole_digests(manifest: dict[str, Any] | None) -> dict[str, str]:
    """Digests of tensors that one box covers, which are digests of the whole tensor."""
    tensors = manifest["tensors"] if manifest is not None else {}
    return {n: t["boxes"][0][2] for n, t in tensors.items() if [box[1] for box in t["boxes"]] == [t["shape"]]}


def _weight_map(path: str, manifest: dict[str, Any] | None) -> dict[str, str]:
    """Which file has which tensor: by the manifest, else by the indexes, else nobody says."""
    indexes = [name for name in files.list_directory(path) if name.endswith(INDEX_SUFFIX)]
    found = {name: file for index in indexes for name, file in _read_index(os.path.join(path, index)).items()}
    if manifest is not None:
        known = {name: fact["file"] for name, fact in manifest["tensors"].items()}
        if found and found != known:
            raise CorruptError("index and manifest disagree", path=os.path.join(path, indexes[0]))
        found = known
    for file in found.values():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise CorruptError(f"a tensor is said to lie in {file!r:.100}, which is no plain file name", path=path)
    return found


def _read_index(index: str) -> dict[str, str]:
    raw = files.parse_json(files.read_small(index, 1 << 30), index)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptError("the index has no weight_map", path=index)
    return weight_map


def _misplaced(weight_map: dict[str, str], holders: list[Holder]) -> list[StateExchangeError]:
    """Tensors that are said to lie in a file that does not have them."""
    has = {os.path.basename(holder.path): holder for holder in holders}
    return [
        IncompleteError("this file should have the tensor, but has not", name=name, path=has[file].path)
        for name, file in weight_map.items()
        if file in has and name not in has[file].tensors
    ]
