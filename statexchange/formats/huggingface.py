"""Read Hugging Face checkpoints: one safetensors file, or a directory of them with or without an index.

`model_files.py` decides which files of a directory are the model. An index assigns each tensor to a file: other tensors
in its files, such as those of an earlier save, are not read, and a note names them.

Files of torch's HuggingFaceStorageWriter are shards: their metadata has the offsets of each tensor's part, but not the
tensor's global shape, which is taken from the ends of all parts.

A directory that statexchange published has a manifest with each tensor's boxes and their digests. A tensor is read as
one box, and the digests of those in the manifest are checked on the way (`ByteRange.parts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    excerpt,
)
from statexchange.formats.box_digests import PLACED_SCHEMA, BoxDigests, PlacedBoxes
from statexchange.formats.model_files import (
    INDEX,
    MANIFEST,
    SHARD_NAME,
    ModelFiles,
    check_file_names,
    check_numbers,
    has_safetensors_model,
    model_files,
    only_indexed,
    preferred_file,
    read_index,
    read_listed,
)
from statexchange.formats.sealed_files import DIGESTS_KEY, parse_sealed
from statexchange.formats.sealed_files import KEY as SEALED
from statexchange.formats.source import (
    ShardFile,
    Source,
    SourceTensor,
    open_listed,
    parsing,
    unknown_dtypes,
)
from statexchange.sharding.plan import prove_cover
from statexchange.sharding.shards import (
    Box,
    Shard,
    full_box,
    is_inside,
    shape_from_json,
    sizes_from_json,
)
from statexchange.storage.location import OpenedPath, parse_json, read_json
from statexchange.storage.publish.claim import CLAIM_NAME, claim_of
from statexchange.storage.store import ByteRange, ListedDigests, Store, StoredFile
from statexchange.storage.tensorfile import TORCH_SHARDING_KEY, Header, read_header
from statexchange.storage.workspace import is_rank_file
from statexchange.tensors import itemsize_of

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = f"{_SUFFIX}{INDEX}"


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a safetensors file, or a directory with such files, an index, a manifest or a claim.

    Rank files of a workspace do not match.
    """
    if opened.file is not None:
        return not is_rank_file(opened.file) and (opened.file.endswith((_SUFFIX, _INDEX_SUFFIX)) or _has_header(opened))
    listing = opened.store.listing
    # A torch DCP may have its parts in safetensors files, as the round of a workspace has.
    if ".metadata" in listing or any(map(is_rank_file, listing)):
        return False
    return MANIFEST in listing or CLAIM_NAME in listing or has_safetensors_model(opened.store)


def _has_header(opened: OpenedPath) -> bool:
    try:
        read_header(opened.store.open(str(opened.file)))
    except CorruptError:
        return False
    return True


def read(opened: OpenedPath, *, uses_manifest: bool = True) -> Source:
    """Return the source at a path; with `uses_manifest` False, ignore its manifest."""
    store = opened.store
    problems: list[StateExchangeError] = []
    manifest, weight_map, names = _files_to_read(opened, problems, uses_manifest=uses_manifest)
    published = manifest["tensors"] if manifest is not None else {}
    placed = _placed(store, manifest, problems)
    read_one = partial(read_file, opened, published=published, placed=placed)
    source = read_listed("huggingface", opened, enumerate(names), read_one, weight_map, published)
    problems += source.problems
    # A tensor that a manifest does not list is an error, since publishing writes no other.
    if weight_map and manifest is None:
        source = only_indexed(source, weight_map)
    shard_files = source.files
    try:
        shard_files = _whole(shard_files)
    except CorruptError as error:
        problems.append(error)
    return replace(source, files=shard_files, manifest=manifest, problems=problems)


def read_file(
    opened: OpenedPath,
    number: int,
    name: str,
    *,
    published: Mapping[str, Any] = MappingProxyType({}),
    placed: Mapping[str, PlacedBoxes] = MappingProxyType({}),
) -> Source:
    """Return one safetensors file as a source; the last two arguments are those of `_shard_file`."""
    file = open_listed(opened.store, name)
    header = read_header(file)
    match = SHARD_NAME.fullmatch(name)
    rank = number if match is None else int(match[1]) - 1  # torch counts them from 1
    shard_file = _shard_file(rank, file, header, published, placed)
    unreadable = unknown_dtypes(header, file.path)
    return Source("huggingface", opened, (shard_file,), unreadable=unreadable, metadata=header.common_metadata)


def _files_to_read(
    opened: OpenedPath, problems: list[StateExchangeError], *, uses_manifest: bool
) -> tuple[dict[str, Any] | None, dict[str, str], list[str]]:
    """Return the manifest, the file of each tensor by it or an index, and the files to read; add to `problems`."""
    store = opened.store
    manifest: dict[str, Any] | None = None
    weight_map: dict[str, str] = {}
    files = ModelFiles()
    try:
        if opened.file is None:
            manifest = read_manifest(store) if uses_manifest else None
            problems += _unfinished(store, manifest)
        if manifest is None:
            files = model_files(opened)
        weight_map = _weight_map(store, files, manifest)
    except InvalidArgumentError:  # several candidates, of which the caller has to name one
        raise
    except StateExchangeError as error:
        problems.append(error)
    names = sorted(set(weight_map.values())) or list(files.names)
    # Without an index only the numbers in names show that a file is missing.
    if opened.file is None and not weight_map:
        problems += check_numbers(names, store)
        if not names and manifest is None and not problems:
            problems.append(IncompleteError("there are no safetensors files", path=store.path))
    return manifest, weight_map, names


def _shard_file(
    rank: int,
    file: StoredFile,
    header: Header,
    published: Mapping[str, Any],
    placed: Mapping[str, PlacedBoxes],
) -> ShardFile:
    """Return a safetensors file with its tensors.

    The global shape of a tensor of which torch's writer wrote a part ends with this part for now; `_whole` replaces it
    when all parts are known. `published` has the records of a manifest, which must be those of the tensors,
    and `placed` the boxes of those that have a placement.
    """
    parts = _offsets_of_parts(header, file)
    tensors = {}
    for name, entry in header.entries.items():
        box, shape = full_box(entry.shape), entry.shape
        if name in parts:
            box = Box(parts[name], entry.shape)
            shape = box.ends
        try:
            shard = Shard(name, entry.dtype, shape, (box,))
        except ValueError as error:
            raise CorruptError(str(error), name=name, path=file.path) from None
        stored = ByteRange(file, entry.begin, entry.nbytes)
        if not published:
            tensors[name] = SourceTensor(shard, (stored,))
        elif name in published:
            tensors[name] = published_tensor(shard, stored, published[name], placed)
        else:
            text = "the manifest does not list this tensor: publish again"
            raise CorruptError(text, name=name, path=file.path)
    return ShardFile(rank, file, tensors)


def published_tensor(
    shard: Shard, stored: ByteRange, record: Mapping[str, Any], placed: Mapping[str, PlacedBoxes]
) -> SourceTensor:
    """Return a published tensor with the digests of the boxes in its record, which `check_record` has checked.

    Raises:
        CorruptError: the record has another dtype or shape, or its boxes overlap.
        IncompleteError: its boxes do not cover the tensor.
    """
    path = stored.file.path
    if (record["dtype"], tuple(record["shape"])) != (shard.dtype, shard.global_shape):
        listed, present = f"{record['dtype']} {record['shape']}", f"{shard.dtype} {list(shard.global_shape)}"
        text = "file and manifest disagree: publish again"
        raise CorruptError(text, name=shard.name, path=path, expected=listed, found=present)
    if "placed" in record and shard.nbytes:
        # Without the file of digests, which is a problem of the source, its bytes are not proven.
        parts = placed.get(shard.name)
        return SourceTensor(shard, (stored if parts is None else stored._replace(parts=parts),))
    records: Sequence[Any] = record.get("boxes", [])  # an empty tensor that is placed has none
    boxes = {Box(tuple(offsets), tuple(sizes)): digest for offsets, sizes, digest, _ in records}
    # A tensor without elements has no box. Of any other the plan of a reader then finds that all of it is missing.
    if not boxes:
        return SourceTensor(replace(shard, boxes=()), ())
    if boxes.keys() == {*shard.boxes}:
        return SourceTensor(shard, (stored._replace(digest=boxes[shard.boxes[0]]),))
    # Bytes between the boxes would be proven by no digest.
    try:
        prove_cover(shard.name, shard.global_shape, {box: ["the manifest"] for box in boxes if box.numel})
    except (CorruptError, IncompleteError) as error:
        raise error.located(path=path) from None
    return SourceTensor(shard, (stored._replace(parts=ListedDigests(boxes.items())),))


def _offsets_of_parts(header: Header, file: StoredFile) -> dict[str, tuple[int, ...]]:
    """Return the offsets of each tensor's part from the metadata of torch's writer."""
    text = header.metadata.get(TORCH_SHARDING_KEY)
    records = parse_json(text, file.path, file.budget) if text is not None else {}
    with parsing(f"broken {TORCH_SHARDING_KEY}", path=file.path):
        if not isinstance(records, dict):
            raise TypeError("not an object")
        parts = {name: sizes_from_json(record["saved_offsets"]) for name, record in records.items()}
        for name, entry in header.entries.items():
            if name in parts and len(parts[name]) != len(entry.shape):
                raise ValueError(f"{excerpt(name)} differs from its offsets in the number of dims")
    return parts


def _whole(shard_files: Sequence[ShardFile]) -> list[ShardFile]:
    """Return the files with final global shapes: each tensor reaches to the end of its last part.

    Parts at (0, 0) and (2, 0) of shape (2, 3) end at (2, 3) and (4, 3), so that the tensor has shape (4, 3).
    """
    ends: dict[str, tuple[int, ...]] = {}
    for shard_file in shard_files:
        for name, tensor in shard_file.tensors.items():
            shape = tensor.shard.global_shape
            end = ends.setdefault(name, shape)
            if len(end) != len(shape):
                raise CorruptError("its parts differ in their number of dims", name=name, path=shard_file.path)
            if end != shape:  # in most checkpoints no tensor has two parts
                ends[name] = tuple(map(max, end, shape))
    whole = []
    for shard_file in shard_files:
        tensors = dict(shard_file.tensors)
        for name, tensor in shard_file.tensors.items():
            if tensor.shard.global_shape != ends[name]:
                tensors[name] = replace(tensor, shard=replace(tensor.shard, global_shape=ends[name]))
        whole.append(replace(shard_file, tensors=tensors))
    return whole


def _unfinished(store: Store, manifest: Mapping[str, Any] | None) -> list[StateExchangeError]:
    """Return an IncompleteError for a directory with a publisher's claim and without a manifest."""
    # On an object store files appear one by one under their names, and the manifest last.
    claim = claim_of(store) if manifest is None else None
    if claim is None:
        return []
    text = f"no complete checkpoint: {claim}. Wait until it finishes; if that process is dead, publish again"
    return [IncompleteError(text, path=store.path)]


def read_manifest(store: Store) -> dict[str, Any] | None:
    """Return the checked content of statexchange.json; None without one."""
    if MANIFEST not in store.listing:
        return None
    path = store.path_of(MANIFEST)
    manifest = read_json(store.open(MANIFEST))
    with parsing("broken manifest", path=path):
        if not isinstance(manifest, dict):
            raise TypeError("not an object")
        if manifest.get("schema", 1) not in (1, PLACED_SCHEMA):
            text = f"schema {excerpt(manifest['schema'], 60)}, but this version reads 1 and {PLACED_SCHEMA}"
            raise ValueError(text)
        aliases = manifest.get("aliases", {})
        if not isinstance(aliases, dict) or set(map(type, aliases.values())) - {str}:
            raise TypeError("its aliases do not map names to names")
        check_file_names({name: record["file"] for name, record in manifest["tensors"].items()}, path)
        for record in manifest["tensors"].values():
            check_record(record)
        parse_sealed(manifest.get(SEALED, {}))
        parse_sealed(manifest.get(DIGESTS_KEY, {}))
    return manifest


def _placed(
    store: Store, manifest: Mapping[str, Any] | None, problems: list[StateExchangeError]
) -> dict[str, PlacedBoxes]:
    """Return the boxes of the tensors that the manifest places, without reading their digests; add to `problems`."""
    placed: dict[str, PlacedBoxes] = {}
    if manifest is None or not any("placed" in record for record in manifest["tensors"].values()):
        return placed
    try:
        with parsing("broken manifest", path=store.path_of(MANIFEST)):
            digests = BoxDigests(store, manifest)
            for name, record in manifest["tensors"].items():
                if "placed" in record:
                    placed[name] = digests.boxes_of(record)
    except StateExchangeError as error:
        problems.append(error)
    return placed


def check_record(record: Any) -> None:
    """Raise ValueError, KeyError or TypeError unless this is a tensor's record of a manifest.

    It has dtype, shape, and boxes as (offsets, shape, digest, rank), or `placed`.
    """
    itemsize_of(record["dtype"])
    shape = shape_from_json(record["shape"])
    if "placed" in record:
        return
    for offsets, sizes, digest, rank in record["boxes"]:
        box = Box.from_json([offsets, sizes])
        if not is_inside(box, shape):
            raise ValueError(f"box {box} lies outside of shape {shape}")
        if not isinstance(digest, str) or type(rank) is not int or rank < 0:
            raise ValueError(f"not a box: {excerpt([digest, rank])}")


def _weight_map(store: Store, files: ModelFiles, manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the file of each tensor, from the manifest or else the index; {} without either."""
    if manifest is None:
        return {} if files.index is None else read_index(store, files.index)
    published = {name: record["file"] for name, record in manifest["tensors"].items()}
    files_of_manifest = set(published.values())
    # Other programs know no manifest, and read this file: it must be one of the manifest's.
    chosen = preferred_file(store)
    for name in store.files:
        if not name.endswith(_INDEX_SUFFIX):
            if name == chosen and name not in files_of_manifest:
                text = "this file is what other programs read, and the manifest does not list it: remove one of them"
                raise CorruptError(text, path=store.path_of(name))
            continue
        indexed = read_index(store, name)
        if indexed != published and (name == chosen or files_of_manifest.intersection(indexed.values())):
            text = "index and manifest disagree: remove the index or publish again"
            raise CorruptError(text, path=store.path_of(name))
    return published
