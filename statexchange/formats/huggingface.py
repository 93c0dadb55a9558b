"""Read Hugging Face checkpoints: one safetensors file, or a directory of them with or without an index.

`model_files.py` decides which files of a directory are the model. An index assigns each tensor to a file: other tensors
in its files, such as those of an earlier save, are not read, and a note names them.

Files of torch's HuggingFaceStorageWriter are shards: their metadata has the offsets of each tensor's part, but not the
tensor's global shape, which is taken from the ends of all parts.

A directory that statexchange published has a manifest with each tensor's boxes and their digests. A tensor is read as
one box, and the digests of those in the manifest are checked on the way (`ByteRange.parts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsupportedError,
    excerpt,
)
from statexchange.formats.box_digests import PLACED_SCHEMA, BoxDigests, PlacedBoxes
from statexchange.formats.model_files import (
    INDEX,
    MANIFEST,
    OF_TOTAL,
    ModelFiles,
    has_safetensors_model,
    model_files,
    only_indexed,
    preferred_file,
    unread_weights,
)
from statexchange.formats.sealed_files import DIGESTS_KEY, parse_sealed
from statexchange.formats.sealed_files import KEY as SEALED
from statexchange.formats.source import (
    ShardFile,
    Source,
    SourceTensor,
    UnreadableTensor,
    merged_metadata,
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

__all__ = [
    "RANK",
    "check_file_names",
    "check_numbers",
    "check_record",
    "matches",
    "misplaced",
    "names_by_file",
    "part_of",
    "published_tensor",
    "read",
    "read_files",
    "read_index",
    "shard_file_of",
]

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = f"{_SUFFIX}{INDEX}"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHARD_NAME = re.compile(r"shard-([0-9]{5,9})-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_COUNTED = re.compile(rf"([0-9]{{1,9}})(?={OF_TOTAL.pattern})")
_WORLD_SIZE = re.compile(r"world_size_(?P<total>[0-9]{1,9})(?![0-9])")
RANK = re.compile(r"(?<![A-Za-z])rank[_-]?([0-9]{1,9})(?![0-9])", re.IGNORECASE)
# The whole name of a rank's file: a number after "rank" elsewhere may be LoRA's rank.
_RANK_ALONE = re.compile(r"(?:pytorch_model_fsdp_(?:[0-9]+_)?)?rank[_-]?([0-9]{1,9})\.[a-z]+")


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a safetensors file, or a directory with such files, an index, a manifest or a claim.

    Rank files of a workspace do not match.
    """
    if opened.file is not None:
        return not is_rank_file(opened.file) and (opened.file.endswith((_SUFFIX, _INDEX_SUFFIX)) or _has_header(opened))
    listing = opened.store.listing
    if ".metadata" in listing or any(map(is_rank_file, listing)):  # a torch DCP directory, or a workspace's round
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
    source = read_files(opened, names, weight_map, published, placed)
    shard_files = list(source.files)
    notes = unread_weights(store, names) if opened.file is None else ()
    problems += [*source.problems, *misplaced(weight_map, shard_files, source.unreadable)]
    if weight_map and manifest is None:
        # The index lists one file for a tensor of which several have parts.
        parts = {tensor.shard.name for _, tensor in source.shards() if any(tensor.shard.boxes[0].offsets)}
        shard_files, stale = only_indexed(shard_files, weight_map, parts)
        notes += stale
    if _has_repeated_names(shard_files):
        try:
            shard_files = _whole(shard_files)
        except StateExchangeError as error:
            problems.append(error)
    return replace(source, files=shard_files, manifest=manifest, problems=problems, notes=notes)


def read_files(
    opened: OpenedPath,
    names: Iterable[str],
    weight_map: Mapping[str, str] = MappingProxyType({}),
    published: Mapping[str, Any] = MappingProxyType({}),
    placed: Mapping[str, PlacedBoxes] = MappingProxyType({}),
) -> Source:
    """Return safetensors files as a source, in this order; the other arguments are those of `shard_file_of`."""
    listed_names = names_by_file(weight_map)
    problems: list[StateExchangeError] = []
    shard_files: list[ShardFile] = []
    unreadable: list[UnreadableTensor] = []
    texts: list[Mapping[str, str]] = []
    for number, name in enumerate(names):
        try:
            file = open_listed(opened.store, name)
            header = read_header(file)
            match = _SHARD_NAME.fullmatch(name)
            rank = int(match[1]) - 1 if match is not None else number
            shard_files.append(shard_file_of(rank, file, header, published, placed))
            unreadable += unknown_dtypes(header, file.path)
            texts.append(header.common_metadata)
        except StateExchangeError as error:
            problems.append(error)
            unreadable += _listed_in(opened.store, name, listed_names.get(name, []), published)
    metadata, differing = merged_metadata(texts)
    return Source(
        "huggingface",
        opened,
        shard_files,
        problems=problems,
        unreadable=unreadable,
        metadata=metadata,
        differing=differing,
    )


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
    if opened.file is None and not weight_map:
        problems += check_numbers(names, store)
        if not names and manifest is None and not problems:
            problems.append(IncompleteError("there are no safetensors files", path=store.path))
    return manifest, weight_map, names


def check_numbers(names: Sequence[str], store: Store) -> list[StateExchangeError]:
    """Return an IncompleteError for each incomplete set of files: numbered "i-of-n", or by ranks from 0 on.

    Without an index only the numbers in the names show that a file is missing: a set is all names that differ in this
    number alone. Nothing lists the ranks, so a file that is missing after the last one goes unnoticed.
    """
    sets: dict[tuple[str, str], dict[int, str]] = {}  # digits, by the name around them
    for name in names:
        for begin, digits, end in _around_numbers(name):
            sets.setdefault((begin, end), {})[int(digits)] = digits
    problems: list[StateExchangeError] = []
    for (begin, end), numbers in sets.items():
        of, last = OF_TOTAL.match(end), max(numbers)
        first, total = (0, last + 1) if of is None else (1, int(of["total"]))
        # The number in a lone name may be LoRA's rank, unless it is all of the name.
        is_lora = of is None and len(numbers) == 1 and not _RANK_ALONE.fullmatch(begin + numbers[last] + end)
        if len(numbers) >= total or is_lora:
            continue
        absent = next(number for number in count(first) if number not in numbers)
        width = min(map(len, numbers.values()))  # the width of n may be another: model-00001-of-000004
        path = store.path_of(f"{begin}{absent:0{width}d}{end}")
        if of is None:
            text = f"there are files of ranks up to {last}: the file of this rank is missing"
            problems.append(IncompleteError(text, rank=absent, path=path))
        else:
            text = f"by their names there should be {total} files, but there are {len(numbers)}: this one is missing"
            problems.append(IncompleteError(text, path=path))
    return problems


def _around_numbers(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield each number in a file's name that counts files, between what is before and after it."""
    matches = list(RANK.finditer(name))
    if len(matches) > 1:
        matches = []
    if not _SHARD_NAME.fullmatch(name):
        matches += _COUNTED.finditer(name)
    for match in matches:
        yield name[: match.start(1)], match[1], name[match.end(1) :]


def part_of(name: str, store: Store) -> str:
    """Return in words what a file is, if its name shows that it is one of several in its directory; else "".

    The name shows that by the number of files, by being a rank's as a whole, or by files of other ranks beside it.
    """
    if _SHARD_NAME.fullmatch(name):
        return ""
    match = _COUNTED.search(name) or _WORLD_SIZE.search(name)
    if match is not None:
        total = int(match["total"])
        return f"one of {total} files, by its name" if total > 1 else ""
    for begin, digits, end in _around_numbers(name):
        for beside in store.non_directories:
            if beside != name and any(around[::2] == (begin, end) for around in _around_numbers(beside)):
                return f"one rank's, and those of others lie beside it ({excerpt(beside, 80)[1:-1]})"
        if int(digits) and _RANK_ALONE.fullmatch(name):
            return f"that of rank {int(digits)}, by its name"
    return ""


def names_by_file(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of the tensors in each file."""
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, []).append(name)
    return names


def _listed_in(store: Store, file: str, names: Sequence[str], published: Mapping[str, Any]) -> list[UnreadableTensor]:
    """Return the tensors of an unreadable file.

    dtype and shape come from the manifest, or from the header if the file is only truncated. `names` are those that the
    manifest or an index assigns to the file.
    """
    described: dict[str, tuple[str | None, tuple[int, ...] | None]] = {}
    for name in filter(published.__contains__, names):
        described[name] = published[name]["dtype"], tuple(published[name]["shape"])
    if not described:
        with suppress(StateExchangeError):
            header = read_header(store.open(file), whole=False)
            for name, entry in (*header.entries.items(), *header.unknown.items()):
                described[name] = entry.dtype, entry.shape
    path = store.path_of(file)
    return [UnreadableTensor(name, *described.get(name, (None, None)), path) for name in names or described]


def shard_file_of(
    rank: int,
    file: StoredFile,
    header: Header,
    published: Mapping[str, Any] = MappingProxyType({}),
    placed: Mapping[str, PlacedBoxes] = MappingProxyType({}),
) -> ShardFile:
    """Return a safetensors file with its tensors.

    The global shape of a tensor of which torch's writer wrote a part ends with this part for now; `_whole` replaces it
    when all parts are known. `published` has the records of a manifest, which must be those of the tensors,
    and `placed` the boxes of those that have a placement.
    """
    parts = _offsets_of_parts(header, file)
    tensors = {}
    for name, entry in header.entries.items():
        box = Box(parts[name], entry.shape) if name in parts else full_box(entry.shape)
        try:
            shard = Shard(name, entry.dtype, box.ends if name in parts else entry.shape, (box,))
        except ValueError as error:
            raise CorruptError(str(error), name=name, path=file.path) from None
        stored = ByteRange(file, entry.begin, entry.nbytes)
        if published:
            _check_published(shard, published, file)
            tensors[name] = published_tensor(shard, stored, published[name], placed)
        else:
            tensors[name] = SourceTensor(shard, (stored,))
    return ShardFile(rank, file, tensors)


def _check_published(shard: Shard, published: Mapping[str, Any], file: StoredFile) -> None:
    """Raise CorruptError unless the manifest lists a tensor with this dtype and shape."""
    record = published.get(shard.name)
    if record is None:
        text = "the manifest does not list this tensor: publish again"
        raise CorruptError(text, name=shard.name, path=file.path)
    if (record["dtype"], tuple(record["shape"])) != (shard.dtype, shard.global_shape):
        raise CorruptError(
            "file and manifest disagree: publish again",
            name=shard.name,
            path=file.path,
            expected=f"{record['dtype']} {record['shape']}",
            found=f"{shard.dtype} {list(shard.global_shape)}",
        )


def published_tensor(
    shard: Shard, stored: ByteRange, record: Mapping[str, Any], placed: Mapping[str, PlacedBoxes]
) -> SourceTensor:
    """Return a published tensor with the digests of the boxes in its manifest, which `check_record` has checked."""
    if "placed" in record and shard.nbytes:
        # Without the file of digests, which is a problem of the source, its bytes are not proven.
        parts = placed.get(shard.name)
        return SourceTensor(shard, (stored if parts is None else stored._replace(parts=parts),))
    records: Sequence[Any] = record.get("boxes", [])  # an empty tensor that is placed has none
    boxes = {Box(tuple(offsets), tuple(sizes)): digest for offsets, sizes, digest, _ in records}
    if not boxes:
        return SourceTensor(replace(shard, boxes=()), ())
    if boxes.keys() == {*shard.boxes}:
        return SourceTensor(shard, (stored._replace(digest=boxes[shard.boxes[0]]),))
    try:
        prove_cover(shard.name, shard.global_shape, {box: ["the manifest"] for box in boxes if box.numel})
    except (CorruptError, IncompleteError) as error:
        raise error.located(path=stored.file.path) from None
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


def _has_repeated_names(shard_files: Sequence[ShardFile]) -> bool:
    """Whether a name occurs in two files: where their shapes differ, a part of the larger one is missing."""
    total = sum(len(shard_file.tensors) for shard_file in shard_files)
    return len(set().union(*(shard_file.tensors for shard_file in shard_files))) < total


def _whole(shard_files: list[ShardFile]) -> list[ShardFile]:
    """Return the files with final global shapes: each tensor reaches to the end of its last part."""
    ends: dict[str, tuple[int, ...]] = {}
    for shard_file in shard_files:
        for name, tensor in shard_file.tensors.items():
            shape = tensor.shard.global_shape
            end = ends.setdefault(name, shape)
            if len(end) != len(shape):
                raise CorruptError("its parts differ in their number of dims", name=name, path=shard_file.path)
            ends[name] = tuple(map(max, end, shape))
    whole = []
    for shard_file in shard_files:
        tensors = {}
        for name, tensor in shard_file.tensors.items():
            tensors[name] = replace(tensor, shard=replace(tensor.shard, global_shape=ends[name]))
        whole.append(replace(shard_file, tensors=tensors))
    return whole


def _unfinished(store: Store, manifest: Mapping[str, Any] | None) -> list[StateExchangeError]:
    """Return an IncompleteError for a directory with a publisher's claim and without a manifest."""
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
        if not isinstance(aliases, dict) or any(not isinstance(name, str) for name in aliases.values()):
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
    records = {} if manifest is None else manifest["tensors"]
    if manifest is None or not any("placed" in record for record in records.values()):
        return placed
    try:
        with parsing("broken manifest", path=store.path_of(MANIFEST)):
            digests = BoxDigests(store, manifest)
            for name, record in records.items():
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


def check_file_names(weight_map: Mapping[str, str], path: str, suffix: str = _SUFFIX) -> None:
    """Raise CorruptError unless the values of a weight map are plain names of files."""
    for file in weight_map.values():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file) or not file.endswith(suffix):
            raise CorruptError(f"a tensor is listed in {excerpt(file)}, which is not a plain file name", path=path)


def read_index(store: Store, index: str, suffix: str = _SUFFIX) -> dict[str, str]:
    """Return the file of each tensor by an index.

    Raises:
        CorruptError: a file name is not plain, or has another suffix.
        IncompleteError: the index lists no tensors.
        UnsupportedError: it is that of a delta.
    """
    path = store.path_of(index)
    raw = read_json(store.open(index))
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        text = "the index is that of a delta of weights: give the directory weight_v... that it lay in, beside its base"
        raise UnsupportedError(text, path=path)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptError("the index has no weight_map", path=path)
    check_file_names(weight_map, path, suffix)
    if not weight_map:
        raise IncompleteError("the index lists no tensors: it was not written or copied whole", path=path)
    return weight_map


def misplaced(
    weight_map: Mapping[str, str], shard_files: Sequence[ShardFile], unreadable: Sequence[UnreadableTensor]
) -> list[StateExchangeError]:
    """Return an error for each tensor that the weight map assigns to a file that does not have it."""
    by_name = {shard_file.name: shard_file for shard_file in shard_files}
    unsupported = {(tensor.name, tensor.path) for tensor in unreadable}
    problems: list[StateExchangeError] = []
    for name, file in weight_map.items():
        if file not in by_name:  # it has a problem of its own
            continue
        path = by_name[file].path
        if name not in by_name[file].tensors and (name, path) not in unsupported:
            text = "the index assigns this tensor to the file, which does not have it"
            problems.append(IncompleteError(text, name=name, path=path))
    return problems
