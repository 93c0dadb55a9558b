"""Hugging Face checkpoints: one safetensors file, or a directory of them with or without an index.

Files in which torch's HuggingFaceStorageWriter says where each tensor's part begins are shards. They do not say how
large a tensor is: it ends where the last part that is there ends.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, StateExchangeError
from statexchange.layout.shards import Box, Shard, itemsize_of, sizes_from_json
from statexchange.sources.base import Extent, Holder, Source, SourceTensor
from statexchange.storage import files
from statexchange.storage.tensorfile import TORCH_SHARDING_KEY, Header, read_header_of
from statexchange.storage.workspace import is_rank_file

__all__ = ["INDEX_SUFFIX", "MANIFEST", "read", "read_index", "recognises"]

MANIFEST = "statexchange.json"
INDEX_SUFFIX = ".safetensors.index.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHARD_NAME = re.compile(r"shard-([0-9]{5,9})-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")


def recognises(path: str) -> bool:
    """Whether a checkpoint directory or a file lies at `path`; a rank's file of a workspace is none."""
    if files.is_file(path):
        return not is_rank_file(os.path.basename(path)) and (path.endswith(".safetensors") or _has_header(path))
    if not files.is_directory(path):
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
    if files.is_file(path):
        return Source("huggingface", path, tuple(_whole([_holder(0, path, {})])))
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
    try:
        holders = _whole(holders)
    except StateExchangeError as error:
        problems.append(error)
    if problems and strict:
        raise problems[0]
    return Source("huggingface", path, tuple(holders), manifest=manifest, problems=tuple(problems))


def _missing(error: StateExchangeError, path: str, name: str) -> StateExchangeError:
    if isinstance(error, NotFoundError):
        return IncompleteError("a file of this checkpoint is missing", path=os.path.join(path, name))
    return error


def _holder(number: int, path: str, digests: dict[str, str]) -> Holder:
    """A file; a tensor of which it has a part is taken to end with that part."""
    header = read_header_of(path)
    parts = _parts(header, path)
    tensors = {}
    for name, entry in header.entries.items():
        box = Box(parts.get(name, (0,) * len(entry.shape)), entry.shape)
        shard = Shard(name, entry.dtype, box.ends, (box,))
        tensors[name] = SourceTensor(shard, (Extent(path, entry.begin, entry.nbytes, digests.get(name)),))
    match = _SHARD_NAME.fullmatch(os.path.basename(path))
    return Holder(int(match[1]) - 1 if match else number, path, header.nbytes, tensors)


def _parts(header: Header, path: str) -> dict[str, tuple[int, ...]]:
    """The offsets that torch's writer keeps of each tensor."""
    text = header.metadata.get(TORCH_SHARDING_KEY)
    found = files.parse_json(text, path) if text is not None else {}
    try:
        assert isinstance(found, dict)
        parts = {name: sizes_from_json(fact["saved_offsets"]) for name, fact in found.items()}
        assert all(len(parts[name]) == len(entry.shape) for name, entry in header.entries.items() if name in parts)
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"broken {TORCH_SHARDING_KEY}: {error}", path=path) from None
    return parts


def _whole(holders: list[Holder]) -> list[Holder]:
    """The holders with the global shapes of tensors that lie in several files as parts."""
    ends: dict[str, tuple[int, ...]] = {}
    for holder in holders:
        for name, tensor in holder.tensors.items():
            shape = tensor.shard.global_shape
            known = ends.setdefault(name, shape)
            if len(known) != len(shape):
                raise CorruptError("its parts differ in their number of dims", name=name, path=holder.path)
            ends[name] = tuple(map(max, known, shape))
    return [
        replace(holder, tensors={name: _ending(tensor, ends[name]) for name, tensor in holder.tensors.items()})
        for holder in holders
    ]


def _ending(tensor: SourceTensor, shape: tuple[int, ...]) -> SourceTensor:
    return (
        tensor
        if tensor.shard.global_shape == shape
        else replace(tensor, shard=replace(tensor.shard, global_shape=shape))
    )


def _manifest(path: str) -> dict[str, Any] | None:
    location = os.path.join(path, MANIFEST)
    if not files.is_file(location) and not os.path.islink(location):
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
    found = {name: file for index in indexes for name, file in read_index(os.path.join(path, index)).items()}
    if manifest is not None:
        known = {name: fact["file"] for name, fact in manifest["tensors"].items()}
        if found and found != known:
            raise CorruptError("index and manifest disagree", path=os.path.join(path, indexes[0]))
        found = known
        _check_names(found, ".safetensors", path)
    return found


def _check_names(weight_map: dict[str, str], suffix: str, path: str) -> None:
    for file in weight_map.values():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file) or not file.endswith(suffix):
            raise CorruptError(f"a tensor is said to lie in {file!r:.100}, which is no plain file name", path=path)


def read_index(index: str, suffix: str = ".safetensors") -> dict[str, str]:
    """The file of each tensor by an index; a name that is not plain and ends otherwise is a CorruptError."""
    raw = files.parse_json(files.read_small(index, 1 << 30), index)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptError("the index has no weight_map", path=index)
    _check_names(weight_map, suffix, index)
    return weight_map


def _misplaced(weight_map: dict[str, str], holders: list[Holder]) -> list[StateExchangeError]:
    """Tensors that are said to lie in a file that does not have them."""
    has = {os.path.basename(holder.path): holder for holder in holders}
    return [
        IncompleteError("this file should have the tensor, but has not", name=name, path=has[file].path)
        for name, file in weight_map.items()
        if file in has and name not in has[file].tensors
    ]
