"""Read a version of weights: a full one, or a delta with the versions that it is based on.

A trainer publishes ``weight_v000012/`` beside ``weight_v000011/``. A full version is a Hugging Face checkpoint. A delta
has of each tensor that changed the zstd frames of ``new ^ old``, as a U8 tensor of its name, and the number of the
version that it is based on. A delta is read as all tensors of the model: unchanged ones from the files of the version
that had them last, changed ones through a `PatchedFile`, which reads the same bytes of the base and applies the
frames that they need. So every reader of boxes reads a version, and nothing is held whole.

**Our own versions** have a manifest, which alone decides. It lists every tensor as changed or unchanged, the boxes with
their digests after the change, the sizes of the frames, and the base with the digest of *its* manifest, so that a base
of another run, or one that was published again, is refused::

    "schema": 3,
    "version": {"run": "5f1d...", "number": 12, "base": 11, "base_manifest": "9a3c...", "frame_nbytes": 2097152,
                "changed": {"w": {"dtype": "BF16", "shape": [8, 2], "boxes": [[[0, 0], [4, 2], "f00d...", 0], ...],
                                  "frames": [31, 18], ...}}, "unchanged": ["b"]}

If each box of a tensor is one run of it, the frames are those of the windows of each box in turn, so that each rank
compresses its own rows where they lie. Else they are those of the windows of the whole tensor.

**Versions of others** (slime, miles, sglang, vime, stitch, ModelExpress) have no manifest. Their index decides: the
five keys of its metadata, and a weight map with which the files must agree. A tensor is proven by the checksum of the
whole new tensor in its file's metadata; one in blake3 is not checked, which a note says.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError, excerpt
from statexchange.formats import huggingface
from statexchange.formats.huggingface import MANIFEST
from statexchange.formats.model_files import INDEX
from statexchange.formats.source import ShardFile, Source, SourceTensor, open_listed, parsing
from statexchange.formats.version_frames import (
    Change,
    IndexedFrames,
    Overwritten,
    PatchedFile,
    StreamedFrames,
    frame_boxes,
)
from statexchange.sharding.shards import Box, Shard, full_box, shape_from_json
from statexchange.storage.files import WINDOW_BYTES, digest
from statexchange.storage.location import MAX_MANIFEST_BYTES, OpenedPath, open_path, parse_json, read_json
from statexchange.storage.publish.claim import CLAIM_NAME, claim_of
from statexchange.storage.store import ByteRange, Store, StoredFile
from statexchange.storage.tensorfile import Header, read_header
from statexchange.storage.versions import version_name, version_number
from statexchange.tensors import ITEMSIZE, itemsize_of

__all__ = [
    "DELTA_SCHEMA",
    "MANIFEST",
    "VERSION_INDEX",
    "VERSION_KEY",
    "chain_keys",
    "delta_facts",
    "is_unfinished",
    "manifest_digest",
    "matches",
    "read",
]

DELTA_SCHEMA = 3  # of a manifest whose directory is a delta
VERSION_KEY = "version"
VERSION_INDEX = f"model.safetensors{INDEX}"
_MARK = b'{"schema":3,'  # the first bytes of a delta's manifest, whose first key is the schema
_HEX = re.compile(r"[0-9a-fA-F]{1,64}")
_KEYS = {"version", "base_version", "delta_encoding", "compression_format", "checksum_format"}
_CHECKSUMS = ("adler32", "xxh3-128", "blake3")
_MOST_DELTAS = 10_000


def manifest_digest(store: Store) -> str:
    """Return the digest of the manifest of a version of ours; "" for anything else."""
    if MANIFEST not in store.listing:
        return ""
    file = store.open(MANIFEST)
    data = file.read_all(MAX_MANIFEST_BYTES)
    record: Any = parse_json(data, file.path, file.budget)
    if not isinstance(record, dict) or VERSION_KEY not in record:
        return ""
    return digest(data)


def chain_keys(opened: OpenedPath) -> list[str]:
    """Return a key for a version and for each of its bases, newest first. No two versions share a key.

    That of one of our versions is the digest of its manifest, which covers its bases, so that the list ends there. That
    of another program's version is a digest of what its files are (`StoredFile.version`) and of the next key.
    """
    identities: list[str] = []
    with contextlib.ExitStack() as opened_bases:
        at = opened
        while True:
            key = manifest_digest(at.store)
            if not key:
                files = [at.store.open(name).version for name in at.store.files]
                identities.append(digest(json.dumps(files).encode()))
            else:
                identities.append(key)
            delta = None if key else _delta_of(at.store)
            if delta is None:
                break
            if len(identities) > _MOST_DELTAS:
                raise _too_long(opened)
            at = opened_bases.enter_context(_open_base(at, delta))
    keys = [identities.pop()]
    while identities:
        keys.append(digest((identities.pop() + keys[-1]).encode()))
    return keys[::-1]


def _too_long(opened: OpenedPath) -> CorruptError:
    return CorruptError(f"more than {_MOST_DELTAS:,} deltas follow one another", path=opened.path)


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a directory that is called as a version is, or whose manifest is that of a delta."""
    if opened.file is not None:
        return False
    store = opened.store
    if _number_of(store) is not None and (MANIFEST in store.files or _has_tensors(store)):
        return True
    return MANIFEST in store.files and store.open(MANIFEST).first_bytes(len(_MARK)) == _MARK


def _number_of(store: Store) -> int | None:
    return version_number(store.path.rstrip("/").rpartition("/")[2])


def _has_tensors(store: Store) -> bool:
    return any(name.endswith((".safetensors", INDEX)) for name in store.files)


def is_unfinished(store: Store) -> bool:
    """Whether a version has a claim and no manifest, or no file at all: it is being published or removed.

    A store that has directories, as HDFS, keeps that of a removed version.
    """
    return not store.listing or (MANIFEST not in store.listing and CLAIM_NAME in store.listing)


def delta_facts(opened: OpenedPath) -> tuple[int, int] | None:
    """Return the base of a delta and the number of tensors that it changes; None for a full version.

    Raises:
        IncompleteError, CorruptError, UnsupportedError: as `read`.
    """
    delta = _delta_of(opened.store)
    return None if delta is None else (delta.base, len(delta.changes))


def read(opened: OpenedPath, *, copies: Mapping[str, str] = MappingProxyType({})) -> Source:
    """Return a version with all tensors of the model, each as its newest change has it.

    `copies` are paths of checkpoints with the tensors of versions, by the first of the `chain_keys` of each: a base is
    read there, if it has a copy.
    """
    keys: list[str] = []
    deltas: list[tuple[OpenedPath, _Delta]] = []
    at = opened
    try:
        while True:
            delta = _delta_of(at.store)
            if delta is None:
                source = huggingface.read(at)
                break
            if len(deltas) == _MOST_DELTAS:
                raise _too_long(opened)
            deltas.append((at, delta))
            key = delta.base_manifest
            if copies and not key:  # another program's: only the whole chain says what its base is
                keys = keys or chain_keys(opened)
                key = keys[len(deltas)]
            if key in copies:
                at = open_path(copies[key])
                source = huggingface.read(at)
                break
            at = _open_base(at, delta)
        if deltas and source.problems:
            raise source.problems[0]
        while deltas:
            newer, delta = deltas.pop()
            newer.store.adopted = (at.store,)
            at = newer
            source = _resolved(at, delta, source)
    except BaseException:
        for path in (at, *(newer for newer, _ in deltas)):
            if path is not opened:  # which the caller closes
                path.close()
        raise
    return source


class _Changed(NamedTuple):
    """A tensor that changed.

    Attributes:
        dtype, shape: those of the tensor; None if only the base has them.
        boxes: its boxes with the digests of the new bytes; () if these are not known.
        frames: the sizes of its frames; () if it has to be read from its beginning.
        checksum: that of all new bytes, as (kind, hex digits).
        record: its record in our manifest.
    """

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    boxes: tuple[tuple[Box, str], ...] = ()
    frames: tuple[int, ...] = ()
    checksum: tuple[str, str] | None = None
    record: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Delta:
    """A delta: its files, its base and its changes.

    Attributes:
        files: the opened files with their headers.
        number: its own number, and
        base: that of the version that it is based on.
        base_manifest: the digest of the base's manifest; "" if it is not known.
        changes: the changed tensors by name.
        unchanged: the names of the others; None if they are not listed.
        encoding: "xor" or "overwrite".
        aliases: names of tied tensors.
        frame_nbytes: the size of windows of which each is a frame.
    """

    files: Mapping[str, tuple[StoredFile, Header]]
    number: int
    base: int
    base_manifest: str
    changes: Mapping[str, _Changed]
    unchanged: frozenset[str] | None
    encoding: str = "xor"
    aliases: Mapping[str, str] | None = None
    frame_nbytes: int = WINDOW_BYTES


def _delta_of(store: Store) -> _Delta | None:
    """Return the delta in a directory; None if it is a full version."""
    if MANIFEST in store.files:
        file = store.open(MANIFEST)
        record: Any = read_json(file)
        if not isinstance(record, dict) or record.get("schema") != DELTA_SCHEMA:
            return None
        with parsing("broken manifest", path=file.path):
            return _published(store, record)
    if is_unfinished(store):
        text = f"{claim_of(store) or 'it has no file'}: this version is not complete, or is being removed"
        raise IncompleteError(text, path=store.path)
    if VERSION_INDEX in store.files:
        index: Any = read_json(store.open(VERSION_INDEX))
        metadata = index.get("metadata") if isinstance(index, dict) else None
        if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
            return None
        with parsing("broken index of a version", path=store.path_of(VERSION_INDEX)):
            return _foreign(store, metadata, index["weight_map"])
    # Others publish the index last. Without it a delta and a full version look alike: absence decides nothing.
    if "model.safetensors" not in store.files or _is_delta_file(store):
        text = f"no {VERSION_INDEX} can be seen here: this version is not complete, or not yet visible on this host"
        raise IncompleteError(text, path=store.path)
    return None


def _is_delta_file(store: Store) -> bool:
    header = read_header(store.open("model.safetensors"))
    return bool(header.entries) and all(name in header.metadata for name in header.entries)


def _published(store: Store, record: Mapping[str, Any]) -> _Delta:
    """Return the delta that our manifest describes."""
    version = record[VERSION_KEY]
    changes = {}
    for name, change in version["changed"].items():
        shape = shape_from_json(change["shape"])
        itemsize_of(change["dtype"])
        boxes = tuple((Box.from_json([offsets, sizes]), str(known)) for offsets, sizes, known, _ in change["boxes"])
        frames = tuple(map(int, change["frames"]))
        changes[name] = _Changed(change["dtype"], shape, boxes, frames, None, change)
    weight_map = {name: tensor["file"] for name, tensor in record["tensors"].items()}
    if weight_map.keys() != changes.keys():
        raise ValueError("its tensors are not those that changed")
    return _Delta(
        _opened_files(store, weight_map),
        int(version["number"]),
        int(version["base"]),
        str(version["base_manifest"]),
        changes,
        frozenset(version["unchanged"]),
        "xor",
        record.get("aliases", {}),
        int(version["frame_nbytes"]),
    )


def _foreign(store: Store, metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> _Delta:
    """Return the delta of another program, which its index describes."""
    path = store.path_of(VERSION_INDEX)
    if not metadata.keys() >= _KEYS:
        raise ValueError(f"it lacks {', '.join(sorted(_KEYS - metadata.keys()))}")
    encoding, compression, kind = (metadata[key] for key in ("delta_encoding", "compression_format", "checksum_format"))
    if encoding not in ("xor", "overwrite") or compression != "zstd" or kind not in _CHECKSUMS:
        text = f"a delta in {excerpt(encoding)}, {excerpt(compression)} and {excerpt(kind)} is not supported"
        raise UnsupportedError(text, path=path)
    number, base = int(metadata["version"]), int(metadata["base_version"])
    if _number_of(store) != number:
        raise ValueError(f"it is that of version {number}")
    files = _opened_files(store, weight_map)
    changes = {}
    for name, file in weight_map.items():
        checksum = files[file][1].metadata.get(name)
        if checksum is None or not _HEX.fullmatch(checksum):
            raise CorruptError("a changed tensor has no checksum", name=name, path=store.path_of(file))
        changes[name] = _Changed(checksum=(kind, checksum))
    return _Delta(files, number, base, "", changes, None, encoding)


def _opened_files(store: Store, weight_map: Mapping[str, str]) -> dict[str, tuple[StoredFile, Header]]:
    """Open all files of a weight map, and check that they have exactly its tensors."""
    huggingface.check_file_names(weight_map, store.path)
    files = {}
    for name in sorted(set(weight_map.values())):
        file = open_listed(store, name, "a file of this version is missing, or not yet visible on this host")
        header = read_header(file)
        expected = {tensor for tensor, of_file in weight_map.items() if of_file == name}
        differing = sorted(header.entries.keys() ^ expected)
        if differing:
            raise IncompleteError("the file and the list of its tensors disagree", name=differing[0], path=file.path)
        for tensor, entry in header.entries.items():
            if entry.dtype != "U8" or len(entry.shape) != 1:
                raise CorruptError("the entry of a delta is one row of bytes", name=tensor, path=file.path)
        files[name] = file, header
    return files


def _open_base(opened: OpenedPath, delta: _Delta) -> OpenedPath:
    """Open the version that a delta is based on, which lies beside it."""
    if not 0 <= delta.base < delta.number:
        raise CorruptError(f"version {delta.number} cannot be based on version {delta.base}", path=opened.path)
    path = f"{opened.store.address.rstrip('/').rpartition('/')[0]}/{version_name(delta.base)}"
    try:
        base = open_path(path)
    except NotFoundError:
        text = f"version {delta.number} is based on version {delta.base}, which is not beside it"
        raise IncompleteError(text, path=path) from None
    if delta.base_manifest:
        found = manifest_digest(base.store)
        if found != delta.base_manifest:
            base.close()
            text = f"this is not the version {delta.base} on which version {delta.number} is based"
            raise CorruptError(text, path=path, expected=delta.base_manifest, found=found)
    return base


def _resolved(opened: OpenedPath, delta: _Delta, base: Source) -> Source:
    """Return the source of a delta: the tensors of the base, of which some are patched."""
    tensors: dict[str, tuple[ShardFile, SourceTensor]] = {}
    for shard_file, tensor in base.shards():
        tensors[tensor.shard.name] = shard_file, tensor
    if delta.unchanged is not None and delta.unchanged | delta.changes.keys() != tensors.keys():
        name = min((delta.unchanged | delta.changes.keys()) ^ tensors.keys())
        raise CorruptError("this version and its base do not have the same tensors", name=name, path=opened.path)
    files = []
    for number, (file, header) in enumerate(delta.files.values()):
        patched = {}
        for name, entry in header.entries.items():
            if name not in tensors:
                raise CorruptError("a changed tensor is not in the base", name=name, path=file.path)
            stored = ByteRange(file, entry.begin, entry.nbytes)
            patched[name] = _patched(delta, delta.changes[name], stored, tensors.pop(name)[1])
        files.append(ShardFile(number, file, patched))
    # Files of the base stay listed without a tensor, so that their names and identities are still looked at.
    for shard_file in base.files:
        kept = {name: tensor for name, tensor in shard_file.tensors.items() if name in tensors}
        files.append(replace(shard_file, rank=len(files), tensors=kept))
    manifest: Mapping[str, Any] | None = None
    if base.manifest is not None and delta.aliases is not None:
        records = dict(base.manifest["tensors"])
        for name, change in delta.changes.items():
            records[name] = {**records[name], **change.record}
        manifest = {"source": base.manifest.get("source"), "aliases": delta.aliases, "tensors": records}
    notes = list(base.notes)
    if any(change.checksum is not None and change.checksum[0] == "blake3" for change in delta.changes.values()):
        notes.append(f"version {delta.number} has checksums in blake3, which are not checked")
    return Source(
        "version",
        opened,
        tuple(files),
        manifest=manifest,
        metadata=base.metadata,
        notes=tuple(notes),
        small_files=base.config_store,
    )


def _patched(delta: _Delta, change: _Changed, stored: ByteRange, base: SourceTensor) -> SourceTensor:
    """Return a changed tensor, whose bytes are those of the base with the change applied."""
    shard = base.shard
    found = (change.dtype or shard.dtype, shard.global_shape if change.shape is None else change.shape)
    if found != (shard.dtype, shard.global_shape):
        text = "the dtype or shape differs from the base"
        raise CorruptError(text, name=shard.name, path=stored.path, expected=base.shard, found=found)
    from statexchange.formats.converted import with_one_box  # late: most commands read no deltas

    whole = with_one_box(base)
    if len(whole.byte_ranges) != 1 or whole.byte_ranges[0].strides is not None:
        raise UnsupportedError("the base is no checkpoint of whole tensors", name=shard.name, path=stored.path)
    nbytes, name = whole.byte_ranges[0].nbytes, shard.name
    applied: Change
    # A frame of a whole tensor is read as a stream, and not held.
    if len(change.frames) > 1 or (change.frames and nbytes <= delta.frame_nbytes):
        ends = _frame_ends([box for box, _ in change.boxes], shard, delta.frame_nbytes, len(change.frames))
        applied = IndexedFrames(stored, nbytes, name, change.frames, ends)
    elif delta.encoding == "xor":
        applied = StreamedFrames(stored, nbytes, name)
    else:
        applied = Overwritten(stored, nbytes, name, ITEMSIZE[shard.dtype])
    kind, checksum = change.checksum or ("", "")
    file = PatchedFile(whole.byte_ranges[0], applied, checksum if kind == "adler32" else "")
    all_of_it = Shard(name, shard.dtype, shard.global_shape, (full_box(shard.global_shape),))
    found_at = ByteRange(file, 0, nbytes, checksum if kind == "xxh3-128" else None)
    if change.boxes:
        return huggingface.published_tensor(all_of_it, found_at, change.record, {})
    return SourceTensor(all_of_it, (found_at,))


def _frame_ends(boxes: Sequence[Box], shard: Shard, frame_nbytes: int, count: int) -> list[int]:
    """Return the offset in the tensor at which each frame ends, in bytes."""
    nbytes = shard.nbytes
    if count == 1:
        return [nbytes]
    from statexchange.storage.regions import windows  # imports numpy, which reading headers does not need

    ends, at = [], 0
    for box in frame_boxes(boxes, shard.global_shape):
        for window in windows(box.shape, ITEMSIZE[shard.dtype], frame_nbytes):
            at += window.numel * ITEMSIZE[shard.dtype]
            ends.append(at)
            if len(ends) > count:  # at once: a broken manifest could give windows of one byte
                break
    if len(ends) != count or at != nbytes:
        raise CorruptError("its frames are not those of its boxes", name=shard.name)
    return ends
